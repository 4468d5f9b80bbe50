"""The built distributions: their files, and the wheel installed beside other `models` packages."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from pathlib import Path

import jaxkv

REPOSITORY = Path(__file__).parents[1]
NAME = f"jaxkv-{jaxkv.__version__}"

SCRIPT = """
    import sys
    from pathlib import Path

    import models
    import pallas_kernels

    import jaxkv
    import jaxkv.models
    import jaxkv.pallas_kernels
    from flax import nnx

    here = Path(__file__).parent
    for package in (models, pallas_kernels):
        assert Path(package.__file__).parent.parent == here, package
        assert package.OWNER == "user"
    for package in (jaxkv, jaxkv.models, jaxkv.pallas_kernels):
        assert Path(package.__file__).is_relative_to(sys.prefix), package
    assert sys.modules["models"] is models is not jaxkv.models

    config = jaxkv.models.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8,
    )
    engine = jaxkv.Engine(
        jaxkv.models.Llama(config, rngs=nnx.Rngs(0)),
        jaxkv.CacheConfig.for_model(config, max_len=16, max_seqs=1, block_size=4),
        jaxkv.SchedulerConfig(
            max_tokens_per_step=4, prefill_buckets=(4,), decode_buckets=(1,)
        ),
    )
    engine.submit([1, 2, 3], jaxkv.SamplingParams(max_tokens=4))
    print(*(token for output in engine.stream() for token in output.new_token_ids))
"""


def run(*command, cwd: Path) -> str:
    """Standard output of a command that must succeed, without this process's import path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, out: Path, kind: str) -> Path:
    """Builds a distribution with the hatchling of this environment: no network, no isolation."""
    run(
        sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", out, cwd=folder
    )
    (archive,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return archive


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package(folder: Path, name: str, owner: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"OWNER = {owner!r}\n")


def test_wheel_and_sdist_hold_the_package_and_nothing_else(tmp_path):
    wheel = contents(build(REPOSITORY, tmp_path / "wheel", "wheel"))
    assert {name.split("/")[0] for name in wheel} == {"jaxkv", f"{NAME}.dist-info"}
    expected = {
        (Path(folder) / name).relative_to(REPOSITORY).as_posix()
        for folder, _, names in os.walk(REPOSITORY / "jaxkv", followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }
    assert expected >= {
        "jaxkv/__init__.pyi",
        "jaxkv/py.typed",
        "jaxkv/models/__init__.pyi",
        "jaxkv/models/llama.py",
        "jaxkv/pallas_kernels/paged_attention/xla.py",
        "jaxkv/compile_check/targets/h200.txtpb",
        "jaxkv/studies/data/AzureLLMInferenceTrace_conv.csv",
    }
    assert {name for name in wheel if name.startswith("jaxkv/")} == expected

    sdist = build(REPOSITORY, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert not [member.name for member in members if member.issym() or member.islnk()]
    files = {member.name.removeprefix(f"{NAME}/") for member in members if member.isfile()}
    assert {name for name in files if name.startswith("jaxkv/")} == expected
    assert files - expected == {".gitignore", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert contents(build(tmp_path / "unpacked" / NAME, tmp_path / "again", "wheel")) == wheel


def test_installed_wheel_leaves_other_models_packages_alone(tmp_path):
    other = tmp_path / "other"
    package(other, "models", "distribution")
    (other / "pyproject.toml").write_text(
        textwrap.dedent("""
            [build-system]
            requires = ["hatchling"]
            build-backend = "hatchling.build"
            [project]
            name = "other-models"
            version = "1.0"
            [tool.hatch.build.targets.wheel]
            packages = ["models"]
        """)
    )
    wheels = [
        build(REPOSITORY, tmp_path / "wheel", "wheel"),
        build(other, tmp_path / "other_wheel", "wheel"),
    ]
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv)}))
    # The dependencies are those of this environment. Its .pth files are not read, so that an
    # editable jaxkv in it is not found.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    before = {path.name for path in site.iterdir()}
    run(*pip, "install", "--no-index", "--no-deps", *wheels, cwd=tmp_path)
    installed = {path.name for path in site.iterdir()} - before
    assert installed == {
        "jaxkv", f"{NAME}.dist-info", "models", "other_models-1.0.dist-info"
    }  # fmt: skip

    user = tmp_path / "user"
    package(user, "models", "user")
    package(user, "pallas_kernels", "user")
    (user / "script.py").write_text(textwrap.dedent(SCRIPT))
    tokens = run(python, "script.py", cwd=user)
    assert len(tokens.split()) == 4
    owner = "import jaxkv.models, models; print(models.OWNER)"
    assert run(python, "-c", owner, cwd=tmp_path) == "distribution\n"

    run(*pip, "uninstall", "--yes", "other-models", cwd=tmp_path)
    assert run(python, "script.py", cwd=user) == tokens
    spec = "import jaxkv.models, importlib.util; print(importlib.util.find_spec('models'))"
    assert run(python, "-c", spec, cwd=tmp_path) == "None\n"
    assert run(python, "-m", "jaxkv", "--version", cwd=tmp_path) == f"jaxkv {jaxkv.__version__}\n"
    assert run(venv / "bin" / "jaxkv", "--version", cwd=user) == f"jaxkv {jaxkv.__version__}\n"
