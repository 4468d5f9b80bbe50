"""Alignment of query copies to the tiles of shared memory, which interpreted kernels do not check.

A copy into tiled shared memory is cut into tiles of 8 rows, in the source too. Its number of rows
must be a multiple of 8, and a copy that begins inside a tile gets zeros where it would run into the
next tile.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

from jaxkv.pallas_kernels.paged_attention import paged_attention
from jaxkv.pallas_kernels.paged_attention.decode_gpu import row_stride
from jaxkv.pallas_kernels.paged_attention.pages_gpu import TILE_ROWS
from jaxkv.pallas_kernels.paged_attention.prefill_steps_gpu import query_tiles, tile_start
from jaxkv.pallas_kernels.target import compile_for

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)


@pytest.mark.parametrize(("tokens", "count"), [(5, 1), (67, 67)])
def test_any_number_of_queries_lowers(tokens, count):
    """Lowers decode and prefill with 3 query heads per KV head."""
    seqs = tokens // count

    def step(q, pages, tables, lens, starts):
        return paged_attention(
            q, pages, tables, lens, starts, layer=0, max_query_len=count,
            implementation="mosaic_gpu",
        )  # fmt: skip

    shapes = [((tokens, 3, 64), jnp.bfloat16), ((9, 1, 2, 1, 16, 64), jnp.bfloat16)]
    shapes += [(shape, jnp.int32) for shape in ((seqs, 5), (seqs,), (seqs + 1,))]
    args = [jax.ShapeDtypeStruct(*x) for x in shapes]
    mesh = AbstractMesh((), (), abstract_device=H100)
    with compile_for("gpu", (9, 0)), jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("group", range(1, 17))
def test_a_group_of_heads_never_crosses_into_the_next_tile_of_rows(group):
    start = np.arange(1000) * row_stride(group)
    assert ((start % TILE_ROWS == 0) | (start % TILE_ROWS + group <= TILE_ROWS)).all()


@pytest.mark.parametrize(("tile_rows", "align"), [(64, TILE_ROWS), (128, TILE_ROWS), (64, 1)])
def test_query_tiles_are_aligned_and_hold_each_query_once(rng, tile_rows, align):
    num_seqs, num_tokens = 5, 1300
    last_start = -(-num_tokens // TILE_ROWS) * TILE_ROWS - tile_rows
    some = [rng.integers(0, most + 1, num_seqs) for most in (5, 80, 260) * 5]
    # Counts near a tile's rows, from any offset inside one, with and without a further tile.
    some += [tile_rows + rng.integers(-9, 10, num_seqs) for _ in range(10)]
    for counts in some:
        counts *= rng.integers(0, 4, num_seqs) > 0
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tiles = query_tiles(jnp.asarray(starts), num_tokens, num_seqs, tile_rows, align)
        owners = np.full(num_tokens, -1)
        for s, first, end in zip(*map(np.asarray, tiles), strict=True):
            begin = int(tile_start(first, last_start, align))
            assert begin % align == 0
            own = slice(first, min(end, begin + tile_rows))
            assert (owners[own] == -1).all()
            owners[own] = s
        np.testing.assert_array_equal(owners[: starts[-1]], np.repeat(np.arange(num_seqs), counts))
        assert (owners[starts[-1] :] == num_seqs).all()
