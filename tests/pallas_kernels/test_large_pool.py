"""A pool with more elements than an int32 can count, on the CPU, against a small one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.pallas_kernels.copy_blocks import copy_blocks
from jaxkv.pallas_kernels.move_blocks import gather_blocks
from jaxkv.pallas_kernels.paged_attention import paged_attention
from jaxkv.pallas_kernels.scatter_kv import scatter_kv

LAYERS, HEADS, BLOCK, DIM = 2, 2, 16, 64
TOKENS, LAYER = 40, 1  # three blocks


@functools.partial(jax.jit, donate_argnums=0)
def write_and_attend(pool, q, k, v, blocks):
    at = np.arange(TOKENS)
    pages, scales = scatter_kv(
        pool[0], k, v, blocks[at // BLOCK], jnp.asarray(at % BLOCK), layer=LAYER, kv_scales=pool[1]
    )
    out, lse = paged_attention(
        q, pages, blocks[None], jnp.array([TOKENS]),
        layer=LAYER, kv_scales=scales, return_lse=True, implementation="xla",
    )  # fmt: skip
    return (pages, scales), out, lse


@functools.partial(jax.jit, donate_argnums=0)
def copy_and_read(pool, source, destination, blocks):
    pool = tuple(copy_blocks(x, source, destination) for x in pool)
    return pool, [gather_blocks(x, blocks) for x in pool]


def run(num_blocks, blocks, copy):
    """Writes TOKENS into `blocks`, attends, copies the last of them to `copy`, and reads all.

    Returns:
      The attention outputs and the gathered blocks; and the same blocks as read by the host.
    """
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(n, HEADS, DIM)), jnp.float32) for n in (1, TOKENS, TOKENS)
    )
    shape = (num_blocks, LAYERS, 2, HEADS, BLOCK, DIM)
    pool = jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32)
    pointers = [x.unsafe_buffer_pointer() for x in pool]
    pool, *attended = write_and_attend(pool, q, k, v, jnp.array(blocks))
    every = [*blocks, copy]
    pool, read = copy_and_read(pool, *map(jnp.array, ([blocks[-1]], [copy], every)))
    assert [x.unsafe_buffer_pointer() for x in pool] == pointers
    return [np.asarray(x) for x in (*attended, *read)], [np.asarray(x)[every] for x in pool]


@pytest.mark.slow
def test_the_last_block_of_a_large_pool():
    last = 2_200_000_000 // (LAYERS * 2 * HEADS * BLOCK * DIM)
    results, seen = run(last + 1, [last - 1, 5, last], copy=last - 2)
    for large, small in zip(results, run(10, [8, 5, 9], copy=7)[0], strict=True):
        # Two programs: floats up to rounding, and so codes up to one step.
        codes = large.dtype == np.int8
        np.testing.assert_allclose(
            large.astype(np.float64), small, rtol=0 if codes else 1e-5, atol=1 if codes else 1e-6
        )
    for host, device in zip(seen, results[-2:], strict=True):
        np.testing.assert_array_equal(host, device)
        assert host[2, LAYER].any()
