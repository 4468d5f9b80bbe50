import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.pallas_kernels.copy_blocks import copy_blocks
from jaxkv.pallas_kernels.scatter_kv import scatter_kv, scatter_kv_reference

SHAPE = (4, 2, 2, 3, 4, 8)  # N, L, 2, H, B, D
step = jax.jit(scatter_kv, donate_argnums=0, static_argnames="layer")


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_equals_the_reference(rng, tokens, traced_for):
    pages = rng.normal(size=SHAPE).astype(np.float32)
    k, v = rng.normal(size=(2, tokens, 3, 8)).astype(np.float32)
    slots = rng.permutation(16)[:tokens]
    args = (k, v, slots // 4, slots % 4)
    want = scatter_kv_reference(pages, *args, layer=1)
    np.testing.assert_array_equal(step(jnp.asarray(pages), *map(jnp.asarray, args), layer=1), want)


@pytest.mark.parametrize("padding", [-1, 4, 10**6, np.iinfo(np.int32).min])
def test_padding_is_dropped_for_any_id_outside_the_pool(padding, traced_for):
    pages = jnp.full(SHAPE, 5.0)
    kv = jnp.full((3, 3, 8), jnp.nan).at[0].set(1.0)
    blocks, offsets = jnp.array([0, padding, padding]), jnp.array([2, 3, 0])
    out = np.array(step(pages, kv, kv, blocks, offsets, layer=0))
    assert (out[0, 0, :, :, 2] == 1).all()
    out[0, 0, :, :, 2] = 5
    assert (out == 5).all()


@pytest.mark.parametrize(("tokens", "heads"), [(1, 3), (8, 3), (8, 1)])
def test_in_place(tokens, heads):
    shape = (64, 2, 2, heads, 4, 8)
    spec = jax.ShapeDtypeStruct
    args = (spec((tokens, heads, 8), jnp.float32),) * 2 + (spec((tokens,), jnp.int32),) * 2
    analysis = step.lower(spec(shape, jnp.float32), *args, layer=1).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == np.prod(shape) * 4
    assert analysis.temp_size_in_bytes < np.prod(shape)
    pages = jnp.zeros(shape)
    pointer = pages.unsafe_buffer_pointer()
    kv = jnp.ones((tokens, heads, 8))
    zeros = jnp.zeros(tokens, jnp.int32)
    out = step(pages, kv, kv, zeros, zeros, layer=1)
    assert out.unsafe_buffer_pointer() == pointer
    assert pages.is_deleted()


def test_pages_keep_their_dtype():
    out = step(jnp.zeros(SHAPE, jnp.bfloat16), *[jnp.ones((1, 3, 8))] * 2,
               *[jnp.zeros(1, jnp.int32)] * 2, layer=0)  # fmt: skip
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
def test_int8_equals_the_reference(rng, scale_dtype, traced_for):
    pages = rng.integers(-127, 128, SHAPE).astype(np.int8)
    scales = rng.random(SHAPE[:-1]).astype(scale_dtype)
    k, v = rng.normal(size=(2, 4, 3, 8)).astype(np.float32)
    slots = np.array([5, 0, -1, 14])
    args = (k, v, slots // 4, slots % 4)
    want = scatter_kv_reference(pages, *args, layer=1, kv_scales=scales)
    got = step(jnp.asarray(pages), *map(jnp.asarray, args), layer=1, kv_scales=jnp.asarray(scales))
    # A quotient next to a half may be rounded to either side: one code, one step of a scale.
    step_of_scale = float(jnp.finfo(scale_dtype).eps)
    assert np.abs(np.asarray(got[0], np.int32) - np.asarray(want[0], np.int32)).max() <= 1
    np.testing.assert_allclose(
        np.asarray(got[1], np.float32), np.asarray(want[1], np.float32), rtol=step_of_scale
    )
    others = np.ones(SHAPE[0] * SHAPE[4], bool)
    others[slots[slots >= 0]] = False
    others = others.reshape(SHAPE[0], SHAPE[4])
    for x, y in zip(got, (pages, scales), strict=True):  # what was not written keeps its bits
        x, y = (np.moveaxis(np.asarray(a), 4, 1)[others] for a in (x, y))
        np.testing.assert_array_equal(x, y)
    held = (
        np.asarray(got[0][1, 1, 0, :, 1]) * np.asarray(got[1][1, 1, 0, :, 1], np.float32)[:, None]
    )
    np.testing.assert_allclose(held, k[0], atol=np.abs(k[0]).max() / 127)


def test_int8_in_place():
    spec = jax.ShapeDtypeStruct
    args = (spec((3, 3, 8), jnp.float32),) * 2 + (spec((3,), jnp.int32),) * 2
    both = jax.jit(lambda pages, scales, *a: scatter_kv(pages, *a, layer=1, kv_scales=scales),
                   donate_argnums=(0, 1))  # fmt: skip
    analysis = both.lower(
        spec(SHAPE, jnp.int8), spec(SHAPE[:-1], jnp.float32), *args
    ).compile().memory_analysis()  # fmt: skip
    assert analysis.alias_size_in_bytes == np.prod(SHAPE) + np.prod(SHAPE[:-1]) * 4  # pyright: ignore[reportOptionalMemberAccess]


def test_scales_are_required_exactly_with_int8():
    args = (*[jnp.ones((1, 3, 8))] * 2, *[jnp.zeros(1, jnp.int32)] * 2)
    with pytest.raises(ValueError, match="int8 pages need kv_scales of shape"):
        scatter_kv(jnp.zeros(SHAPE, jnp.int8), *args, layer=0)
    with pytest.raises(ValueError, match="float32 pages have no scales"):
        scatter_kv(jnp.zeros(SHAPE), *args, layer=0, kv_scales=jnp.zeros(SHAPE[:-1]))


@pytest.mark.parametrize("layer", [-1, 2])
def test_rejects_a_layer_outside_the_pool(layer):
    args = (*[jnp.ones((1, 3, 8))] * 2, *[jnp.zeros(1, jnp.int32)] * 2)
    with pytest.raises(ValueError, match=rf"layer must be in \[0, 2\), got {layer}"):
        scatter_kv(jnp.zeros(SHAPE), *args, layer=layer)


def test_copy_blocks_reads_before_it_writes_and_drops_padding():
    pages = jnp.arange(4.0)[:, None] * jnp.ones((4, 3))
    out = copy_blocks(pages, jnp.array([1, 2, 0]), jnp.array([2, 3, 99]))
    assert out[:, 0].tolist() == [0, 1, 1, 2]
