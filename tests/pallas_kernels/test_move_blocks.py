import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv.pallas_kernels import target
from jaxkv.pallas_kernels.copy_blocks import copy_blocks
from jaxkv.pallas_kernels.move_blocks import gather_blocks, put_blocks, zero_blocks
from jaxkv.pallas_kernels.scatter_kv import scatter_kv

SHAPE = (6, 2, 2, 3, 4, 8)  # N, L, 2, H, B, D
OUTSIDE = [-1, -6, 6, 10**6, np.iinfo(np.int32).min, np.iinfo(np.int32).max]


@pytest.fixture(params=[(SHAPE, jnp.float32), (SHAPE, jnp.int8), (SHAPE[:-1], jnp.bfloat16)])
def pool(request, rng):
    """Pages, int8 pages, and scales."""
    shape, dtype = request.param
    return jnp.asarray(rng.integers(-99, 99, shape), dtype)


def test_gather_zero_and_put_round_trip(pool, traced_for):
    ids = jnp.array([4, 0, 3])
    staged = gather_blocks(pool, ids)
    np.testing.assert_array_equal(staged, np.asarray(pool)[[4, 0, 3]])
    emptied = zero_blocks(pool, ids)
    assert not np.asarray(emptied[ids], np.float32).any()
    others = jnp.array([1, 2, 5])
    np.testing.assert_array_equal(emptied[others], pool[others])
    np.testing.assert_array_equal(put_blocks(emptied, staged, ids), pool)


@pytest.mark.parametrize("outside", OUTSIDE)
def test_ids_outside_the_pool_are_padding(pool, outside):
    ids = jnp.array([outside, 2, outside], jnp.int32)
    staged = gather_blocks(pool, ids)
    assert not np.asarray(staged[::2], np.float32).any()
    np.testing.assert_array_equal(staged[1], pool[2])
    want = np.array(pool)
    want[2] = 1
    np.testing.assert_array_equal(put_blocks(pool, jnp.ones_like(staged), ids), want)
    want[2] = 0
    np.testing.assert_array_equal(zero_blocks(pool, ids), want)
    want[2] = pool[1]
    np.testing.assert_array_equal(copy_blocks(pool, jnp.array([3, 1, 4]), ids), want)


def test_ids_outside_the_pool_are_padding_on_a_gpu(pool):
    with target.compile_for("gpu"):
        test_ids_outside_the_pool_are_padding(pool, -1)


def test_no_blocks(pool, traced_for):
    none = jnp.zeros(0, jnp.int32)
    assert gather_blocks(pool, none).shape == (0, *pool.shape[1:])
    np.testing.assert_array_equal(put_blocks(pool, pool[:0], none), pool)
    np.testing.assert_array_equal(zero_blocks(pool, none), pool)


@pytest.mark.parametrize("heads", [3, 1])
@pytest.mark.parametrize("count", [1, 4])
def test_writes_are_in_place(count, heads):
    """The pool is aliased, and temporary memory does not grow with it."""
    block = (2, 2, heads, 4, 8)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)

    def memory(f, num_blocks, *rest):
        pool = jax.ShapeDtypeStruct((num_blocks, *block), jnp.float32)
        compiled = jax.jit(f, donate_argnums=0).lower(pool, *rest).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        assert analysis.alias_size_in_bytes == np.prod(pool.shape) * 4
        return analysis.temp_size_in_bytes

    staged = jax.ShapeDtypeStruct((count, *block), jnp.float32)
    for f, rest in ((put_blocks, (staged, ids)), (zero_blocks, (ids,)), (copy_blocks, (ids, ids))):
        assert memory(f, 512, *rest) <= memory(f, 64, *rest)


@pytest.mark.parametrize("heads", [4, 8])
def test_heads_divided_over_devices_stay_on_their_device(heads, traced_for):
    """No communication: each device moves its own heads' part of the blocks."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,))
    whole, divided = (NamedSharding(mesh, spec) for spec in (P(), P(None, None, None, "heads")))

    def spec(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    block = (2, 2, heads, 4, 8)
    pool, staged = (spec((n, *block), jnp.float32, divided) for n in (64, 3))
    ids = spec((3,), jnp.int32, whole)
    kv = spec((3, heads, 8), jnp.float32, NamedSharding(mesh, P(None, "heads")))

    def write(*args):
        return scatter_kv(*args, layer=1)

    for f, *args in (
        (gather_blocks, pool, ids), (put_blocks, pool, staged, ids), (zero_blocks, pool, ids),
        (copy_blocks, pool, ids, ids), (write, pool, kv, kv, ids, ids),
    ):  # fmt: skip
        compiled = jax.jit(f).lower(*args).compile()
        assert not re.search(r"all-|collective-|reduce-scatter", compiled.as_text())  # pyright: ignore[reportArgumentType, reportCallIssue]
        assert compiled.output_shardings.is_equivalent_to(divided, 6)


@pytest.mark.parametrize("staged", [jnp.zeros((2, 3)), jnp.zeros((1, 2)), jnp.zeros((2, 2), int)])
def test_put_blocks_rejects_blocks_of_another_pool(staged):
    with pytest.raises(ValueError, match=r"staged must hold 2 blocks of \(2,\) float32"):
        put_blocks(jnp.zeros((4, 2)), staged, jnp.array([1, 2]))
