import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import make, run
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.pallas_kernels.paged_attention import merge_attention


def attention(logits, v, part):
    """Output and log-sum-exp over some of the keys, in float64."""
    weights = np.exp(logits[part])
    total = weights.sum()
    with np.errstate(divide="ignore"):
        return weights @ v[part] / max(total, 1e-300), np.log(total)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 9))
def test_parts_merge_to_the_whole_for_any_split_of_the_keys(keys, cuts, seed):
    rng = np.random.default_rng(seed)
    logits, v = rng.normal(0, 5, keys), rng.normal(size=(keys, 3))
    edges = [0, *sorted(min(c, keys) for c in cuts), keys]
    parts = [attention(logits, v, slice(a, b)) for a, b in itertools.pairwise(edges)]
    outs, lses = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*parts, strict=True))
    out, lse = merge_attention(outs, lses)
    want, want_lse = attention(logits, v, slice(None))
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_merges_paged_attention_over_a_prefix_and_the_rest():
    case = make([37], [1], max_query_len=1)
    want = run(case, return_lse=True)
    parts = []
    for first, end in ((0, 5), (5, 10)):
        part = make([37], [1], max_query_len=1)
        part.tables = part.tables[:, first:end]
        part.lens = jnp.array([min(37, end * 4) - first * 4])
        parts.append(run(part, return_lse=True))
    outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
    for got, x in zip(merge_attention(outs, lses), want, strict=True):
        np.testing.assert_allclose(got, x, atol=1e-6)


@pytest.mark.parametrize("rubbish", [0.0, 7.0, np.nan])
def test_parts_without_keys_add_nothing(rubbish):
    out = jnp.array([[1.5, -2.0]], jnp.bfloat16)
    outs = jnp.stack([jnp.full_like(out, rubbish), out])
    merged, lse = merge_attention(outs, jnp.array([[-jnp.inf], [80.0]]))
    assert merged.dtype == lse.dtype == jnp.float32
    few = 4 * float(jnp.finfo(jnp.float32).eps)  # exp(0), log(1), a product and a quotient
    np.testing.assert_allclose(merged, out.astype(jnp.float32), rtol=few)
    np.testing.assert_allclose(lse, [80.0], rtol=few)
    merged, lse = merge_attention(outs, jnp.full((2, 1), -jnp.inf))
    assert (merged == 0).all()
    assert np.isneginf(lse).all()


def test_merges_along_any_axis(rng):
    outs = jnp.asarray(rng.normal(size=(3, 4, 5, 2)), jnp.float32)
    lses = jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32)
    want = merge_attention(jnp.moveaxis(outs, 2, 0), jnp.moveaxis(lses, 2, 0))
    for axis in (2, -1):
        for got, x in zip(merge_attention(outs, lses, axis), want, strict=True):
            np.testing.assert_allclose(got, x, rtol=1e-6)


@pytest.mark.parametrize(("lses", "axis"), [((2, 3), 0), ((2,), 1), ((2, 1), 0)])
def test_rejects_shapes_that_do_not_fit(lses, axis):
    with pytest.raises(ValueError, match=r"outs.shape=\(2, 4\)"):
        merge_attention(jnp.zeros((2, 4)), jnp.zeros(lses), axis)
