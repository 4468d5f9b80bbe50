"""Imports: host names load no JAX, public names resolve, and a module has one name."""

import ast
import importlib
import importlib.metadata
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import jaxkv
import jaxkv.models
from jaxkv.models import LlamaConfig

REPOSITORY = Path(__file__).parents[2]
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "matplotlib"}
COMMANDS = ("generate", "bench", "simulate", "size", "snapshot", "replay", "compile-check")


def python(*args, check=True) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, in the repository's root."""
    done = subprocess.run(
        [sys.executable, *map(str, args)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0 or not check, done.stderr
    return done


def loaded(code: str) -> set[str]:
    """Top-level names in sys.modules after the code."""
    report = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    return set(python("-c", f"{code}\n{report}").stdout.splitlines()[-1].split())


def loaded_by_command(*args) -> set[str]:
    """Top-level names in sys.modules after a successful command."""
    return loaded(
        "from jaxkv.cli import main\n"
        f"try: status = main({[*map(str, args)]})\n"
        "except SystemExit as stop: status = stop.code\n"
        "assert not status, status"
    )


def public_names(package) -> dict[str, str]:
    """Names of a package's stub, and the module that each comes from."""
    tree = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    return {
        str(alias.asname): f"{package.__name__}.{node.module}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.fixture
def files(tmp_path):
    """Inputs of the commands that need no device."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=24, intermediate_size=16, num_layers=2, num_heads=6,
        num_kv_heads=3, head_dim=8,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(24)
    writer.add_block_count(2)
    writer.add_feed_forward_length(16)
    writer.add_head_count(6)
    writer.add_head_count_kv(3)
    writer.add_key_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((32, 24), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    manager = jaxkv.BlockManager(8, 4, max_seqs=2, max_blocks_per_seq=4)
    with (tmp_path / "log.jsonl").open("w") as log:
        jaxkv.record(manager, log)
        manager.allocate("a", [1, 2, 3, 4, 5])
    request = {"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}
    (tmp_path / "trace.jsonl").write_text(f"{json.dumps(request)}\n" * 3)
    jaxkv.take_snapshot(manager).write_csv(tmp_path / "pool.csv")
    return tmp_path


@pytest.mark.parametrize(
    "code",
    [
        "from jaxkv import BlockManager, simulate, cache_size",
        "from jaxkv import CacheConfig, SamplingParams, Metrics, record, load_trace",
        "import jaxkv.models",
        "from jaxkv.models import LlamaConfig, Llama3Scaling, CheckpointError, read_config",
        "from jaxkv.models import Tokenizer, default_model",
    ],
)
def test_host_names_load_no_jax(code):
    assert not loaded(code) & HEAVY


@pytest.mark.parametrize("args", [(), *((command,) for command in COMMANDS), ("snapshot", "diff")])
def test_help_loads_no_jax(args):
    assert not loaded_by_command(*args, "--help") & (HEAVY | {"rich"})


def test_help_of_all_commands_loads_no_module_of_a_command():
    """Often the first command of a user, so that it must be quick: imports no command's module."""
    assert not loaded_by_command("--help") & {"numpy", "ml_dtypes"}


@pytest.mark.parametrize("model", [".", "model.gguf"])
def test_size_of_a_model_loads_no_jax(files, model):
    assert not loaded_by_command("size", files / model, "--memory", "1GiB") & HEAVY


@pytest.mark.parametrize(
    "args",
    [
        ("size", "--layers", 2, "--kv-heads", 2, "--head-dim", 8, "--memory", "1GiB"),
        ("size", "--layers", 2, "--kv-heads", 2, "--head-dim", 8, "--memory", "1GiB",
         "--trace", "trace.jsonl"),
        ("simulate", "trace.jsonl", "--blocks", 8),
        ("simulate", "trace.jsonl", "--blocks", 8, "--json"),
        ("snapshot", "diff", "pool.csv", "pool.csv"),
        ("replay", "log.jsonl"),
    ],
    ids=lambda args: " ".join(map(str, args)),
)  # fmt: skip
def test_host_commands_load_no_jax(files, args):
    inputs = [files / arg if str(arg).endswith((".csv", ".jsonl")) else arg for arg in args]
    assert not loaded_by_command(*inputs) & HEAVY


def test_matplotlib_loads_where_a_plot_is_drawn(files):
    options = ("--blocks", 8, "--plot", files / "out.png")
    assert loaded_by_command("simulate", files / "trace.jsonl", *options) & HEAVY == {"matplotlib"}


@pytest.mark.parametrize("package", [jaxkv, jaxkv.models], ids=lambda p: p.__name__)
def test_every_public_name_resolves(package):
    names = public_names(package)
    assert len(names) > 5
    assert set(package.__all__) == set(names)
    for name, module in names.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("package", [jaxkv, jaxkv.models], ids=lambda p: p.__name__)
def test_no_public_name_shadows_a_module(package):
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert len(modules) > 5
    assert not modules & set(public_names(package))


def test_version_is_that_of_the_distribution():
    assert jaxkv.__version__ == importlib.metadata.version("jaxkv")
    assert python("-m", "jaxkv", "--version").stdout == f"jaxkv {jaxkv.__version__}\n"


def test_module_and_script_return_the_exit_status():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="jaxkv")
    assert script.load() is importlib.import_module("jaxkv.cli").main
    done = python("-m", "jaxkv", "size", "--memory", "lots", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxkv size: error: ")


def test_a_module_has_one_identity():
    """A file behind a symlink could be imported as two modules with different classes."""
    python(
        "-c",
        "import importlib, os, sys\n"
        "import jaxkv.models.llama\n"
        "from jaxkv.models import Llama\n"
        "from jaxkv.models.llama import Llama as direct\n"
        "import jaxkv.compile_check.programs\n"
        "assert Llama is direct is jaxkv.models.llama.Llama\n"
        "assert importlib.import_module('jaxkv.models.llama') is jaxkv.models.llama\n"
        "assert Llama.__module__ == 'jaxkv.models.llama'\n"
        "for name in ('models', 'models.llama', 'pallas_kernels', 'pallas_kernels.layout'):\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error: assert f'import jaxkv.{name.split(\".\")[0]}' in "
        "str(error), error\n"
        "    else: raise AssertionError(name)\n"
        f"root = {str(REPOSITORY)!r} + os.sep\n"
        "found = {}\n"
        "for name, module in sys.modules.items():\n"
        "    file = os.path.realpath(getattr(module, '__file__', None) or '')\n"
        "    if file.startswith(root) and '.venv' not in file:\n"
        "        found.setdefault(file, []).append(name)\n"
        "assert len(found) > 20, found\n"
        "assert all(len(names) == 1 for names in found.values()), found\n"
        "assert all(names[0].split('.')[0] == 'jaxkv' for names in found.values()), found\n",
    )


def test_the_trainer_runs_under_its_package_only():
    assert python("-m", "jaxkv.models.train", "--help").stdout.startswith("usage: python -m jaxkv")
    done = python("-m", "models.train", "--help", check=False)
    assert done.returncode == 1
    assert "import jaxkv.models, not models" in done.stderr
