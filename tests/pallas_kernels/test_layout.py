"""The pool's axes: named in `layout`, never indexed by number elsewhere."""

import ast
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.pallas_kernels import layout
from jaxkv.pallas_kernels.layout import PoolShape

ROOT = Path(jaxkv.__file__).parent
POOLS = {"kv_pages", "kv_scales", "pool", "pool_shape"}


def _is_pool(node: ast.expr) -> bool:
    """Whether a node is `kv_pages`, `state.kv_pages`, `self.pool_shape` or similar."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in POOLS


def _is_shape(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return _is_pool(node.value)
    return _is_pool(node) and getattr(node, "attr", getattr(node, "id", "")) == "pool_shape"


def numbered_axes(source: str) -> list[int]:
    """Lines that index a pool's axes, or its shape, by number."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript):
            several = _is_pool(node.value) and isinstance(node.slice, ast.Tuple)
            if _is_shape(node.value) or several:
                lines.append(node.lineno)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if _is_shape(node.value):
                lines.append(node.lineno)
        elif isinstance(node, ast.Starred) and _is_shape(node.value):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(("source", "found"), [
    ("kv_pages.shape[3]", True), ("a, *b = state.kv_pages.shape", True),
    ("kv_pages[blocks, layer]", True), ("x.reshape(1, *pool.shape)", True),
    ("self.pool_shape[4]", True), ("kv_scales.shape[:-1]", True),
    ("q.shape[1]", False), ("PoolShape.of(kv_pages).num_layers", False), ("pages[0]", False),
    ("x.reshape(kv_pages.shape)", False),
])  # fmt: skip
def test_the_search_finds_numbered_axes(source, found):
    assert bool(numbered_axes(source)) == found


def test_only_the_layout_indexes_the_pool_by_number():
    # formats relies on one fact that holds for any order: scales lack the pages' last axis.
    exempt = {"pallas_kernels/layout.py", "pallas_kernels/formats.py"}
    checked = 0
    for room in ("pallas_kernels", "cache", "engine", "compile_check", "observe"):
        for path in (ROOT / room).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name not in exempt:
                assert not numbered_axes(path.read_text()), name
                checked += 1
    assert checked > 40


def test_pool_shape_of_an_array_and_of_a_config():
    shape = PoolShape(5, 3, 2, 16, 8)
    pages = jnp.zeros(shape.array_shape())
    assert PoolShape.of(pages) == shape
    assert shape.scales_shape() == pages.shape[:-1]
    assert layout.blocks_shape(pages, 7) == shape.staging_shape(7)
    config = jaxkv.CacheConfig(num_layers=3, num_kv_heads=2, head_dim=8, num_blocks=5)
    assert PoolShape.for_config(config) == shape


@pytest.mark.parametrize("shape", [(5, 3, 2, 16, 8), (5, 3, 3, 2, 16, 8), (1, 5, 3, 2, 2, 16, 8)])
def test_rejects_arrays_that_are_not_a_pool(shape):
    with pytest.raises(ValueError, match="expected kv_pages"):
        PoolShape.of(np.zeros(shape))


def test_page_rows_index_the_pages_of_the_pool(rng):
    pages = rng.normal(size=PoolShape(4, 3, 2, 5, 8).array_shape())
    rows = layout.page_rows(jnp.asarray(pages))
    for block, layer, k_or_v, head in np.ndindex(4, 3, 2, 2):
        row = layout.page_row(PoolShape.of(pages), block, layer, k_or_v, head)
        np.testing.assert_array_equal(rows[row], pages[block, layer, k_or_v, head].astype("f4"))
