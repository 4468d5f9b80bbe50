"""Type checkers see the public names, `jaxkv.models` and `jaxkv.pallas_kernels`."""

import re
import subprocess
import sys

import pytest

CODE = """\
import jaxkv
from jaxkv.models import Llama, load
from jaxkv.pallas_kernels.paged_attention import supports

config = jaxkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=3)
reveal_type(config.bytes_per_token)
reveal_type(jaxkv.generate)
reveal_type(Llama)
reveal_type(load)
reveal_type(supports)
wrong: str = config.bytes_per_token
"""
SHOWN = {  # line of the code: part of the revealed type
    6: "int", 7: r"Generation", 8: "Llama", 9: "Checkpoint", 10: r"tuple\[bool, str\]",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("checker", [
    ("mypy",), ("pyright", "--pythonpath", sys.executable),
])  # fmt: skip
def test_a_type_checker_sees_the_packages(checker, tmp_path):
    (tmp_path / "use.py").write_text(CODE)
    done = subprocess.run(
        [sys.executable, "-m", *checker, "use.py"], cwd=tmp_path, capture_output=True, text=True
    )
    lines = {int(m[1]): m[0] for m in re.finditer(r"use\.py:(\d+).*", done.stdout)}
    assert sorted(lines) == [*SHOWN, 11], done.stdout + done.stderr
    for line, shown in SHOWN.items():
        assert re.search(shown, lines[line]), lines[line]
    assert done.returncode == 1  # line 11 is an error, and the only one
    assert "str" in lines[11]
