"""A model that does not fit the memory is refused before its weights are read."""

import jax.numpy as jnp
import pytest
from gguf_cases import write

from jaxkv.models import CheckpointError, load, memory
from jaxkv.models.gguf_file import GGUFFile


def test_weights_that_do_not_fit_are_refused_with_what_would(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * 2**30)
    memory.check_fits(10**9, jnp.bfloat16, "m")
    with pytest.raises(CheckpointError, match=r"m: its 1 billion parameters in float32 take "
                       r"3\.73 GiB, and 3 GiB of memory are available; in bfloat16 they would "
                       r"take 1\.86 GiB and fit"):  # fmt: skip
        memory.check_fits(10**9, jnp.float32, "m")
    for dtype in (jnp.float32, jnp.bfloat16):
        with pytest.raises(CheckpointError, match=r"at most 1\.61 billion parameters, in bfloat16"):
            memory.check_fits(8 * 10**9, dtype, "m")


def test_no_weight_is_read_before_the_check(monkeypatch, tmp_path):
    path = write(tmp_path / "m.gguf")
    parameters = sum(tensor.data.size for tensor in GGUFFile(path).tensors.values()) // 4
    reads = []
    monkeypatch.setattr("jaxkv.models.gguf_loader.read_tensor", reads.append)
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * parameters - 1)
    with pytest.raises(CheckpointError, match=r"m\.gguf: its .* float32 take"):
        load(path)
    assert not reads


def test_available_memory_is_what_machine_and_container_leave(monkeypatch, tmp_path):
    info, limit, used = (tmp_path / name for name in ("meminfo", "max", "current"))
    monkeypatch.setattr(memory, "_MEMINFO", info)
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", ((limit, used),))
    assert memory.available_bytes() is None  # another system: loading is tried
    memory.check_fits(10**15, jnp.float32, "m")
    info.write_text("MemTotal: 9 kB\nMemAvailable:    4000 kB\n")
    assert memory.available_bytes() == 4000 * 1024
    limit.write_text("max\n")
    used.write_text("1000\n")
    assert memory.available_bytes() == 4000 * 1024
    limit.write_text("1000000\n")
    assert memory.available_bytes() == 999_000


def test_the_machine_says_how_much_is_available():
    assert (memory.available_bytes() or 2**30) > 2**20
