"""Import rules between the packages of jaxkv, as in docs/architecture.md."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxkv

ROOT = Path(jaxkv.__file__).parent
REPOSITORY = Path(__file__).parents[2]
ACCELERATOR = {"jax", "jaxlib", "flax", "optax", "orbax"}
HOST_ROOMS = ("manager", "studies", "planning")

NEVER = [
    ("manager", ("cache", "engine", "observe", "studies", "models", "pallas_kernels")),
    ("cache", ("engine", "models", "studies", "observe")),
    ("sampling", ("engine", "models", "studies", "observe", "manager")),
    ("engine", ("models", "studies", "observe")),
    ("observe", ("cache", "engine", "models")),
    ("studies", ("models",)),
    ("planning", ("cache", "engine", "models")),
    ("models", ("engine", "manager", "studies", "observe")),
    ("pallas_kernels", ("*",)),
]


def imports(path: Path, *, static: bool = False) -> Iterator[str]:
    """Dotted names that a file imports, in functions too; with type-checking ones if `static`."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not static:
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found, room
    return found


def room_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "jaxkv" and len(parts) > 1 else None


@pytest.mark.parametrize(("room", "forbidden"), NEVER, ids=[room for room, _ in NEVER])
def test_rooms_import_only_what_they_may(room, forbidden):
    for path in files(room):
        for name in imports(path):
            other = room_of(name)
            allowed = other is None or other == room
            if not allowed and forbidden != ("*",):
                allowed = other not in forbidden
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_nothing_imports_the_command_line():
    for path in sorted(ROOT.glob("*")):
        if path.name in ("cli", "__main__.py", "__pycache__"):
            continue
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            if file.suffix == ".py":
                assert not any(name.startswith("jaxkv.cli") for name in imports(file)), file


def test_no_import_of_top_level_models_or_pallas_kernels():
    """An installed jaxkv has one top-level name: `models` may be another package there."""
    python = [p for p in REPOSITORY.rglob("*.py") if ".venv" not in p.parts]
    assert len(python) > 100
    for path in python:
        for name in imports(path, static=True):
            assert name.split(".")[0] not in ("models", "pallas_kernels"), f"{path}: {name}"


def test_host_rooms_load_no_accelerator():
    """Imports all modules of the host rooms in a separate process."""
    modules = [
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for room in HOST_ROOMS
        for path in files(room)
    ]
    assert "jaxkv.manager.block_manager" in modules
    code = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"assert not {ACCELERATOR} & set(sys.modules), {ACCELERATOR} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
