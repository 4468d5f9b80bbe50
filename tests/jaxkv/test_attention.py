"""What `jaxkv.attention` hands on: the options, and the scales of int8 pages."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.attention import attention
from jaxkv.reports import Plan
from jaxkv.state import Batch, apply_plan, init_state

CONFIG = jaxkv.CacheConfig(
    num_layers=1, num_kv_heads=2, head_dim=8, num_blocks=6, block_size=4, max_seqs=2,
    max_blocks_per_seq=3, dtype="float32",
)  # fmt: skip
OPTIONS = dict(window=3, soft_cap=1.5, sinks=jnp.array([0.5, -1.0, 2.0, 0.0]), scale=0.3)


def cache(int8: bool):
    state = init_state(CONFIG)
    tables = state.block_tables.at[1].set(jnp.array([4, 2, 5]))
    state = dataclasses.replace(state, block_tables=tables)
    if not int8:
        return state
    shape = state.kv_pages.shape
    return dataclasses.replace(
        state, kv_pages=jnp.zeros(shape, jnp.int8), kv_scales=jnp.full(shape[:-1], jnp.nan)
    )


def dense(q, k, v, *, window, soft_cap, sinks, scale):
    out = np.zeros_like(q)
    for t in range(len(q)):
        seen = slice(max(0, t + 1 - window), t + 1)
        for h in range(q.shape[1]):
            logits = soft_cap * np.tanh(k[seen, h // 2] @ q[t, h] * scale / soft_cap)
            weights = np.exp(logits)
            out[t, h] = weights @ v[seen, h // 2] / (weights.sum() + np.exp(sinks[h]))
    return out


@pytest.mark.parametrize("int8", [False, True])
def test_options_and_scales_reach_the_kernel(rng, int8):
    q = rng.normal(size=(9, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 9, 2, 8)).astype(np.float32)
    state, outs = cache(int8), []
    for start, end in ((0, 5), (5, 8), (8, 9)):
        batch = Batch.ragged([1], [start], [end - start], num_tokens=5, num_seqs=2, padding_row=2)
        padded = [jnp.asarray(np.resize(x[start:end], (5, *x.shape[1:]))) for x in (q, k, v)]
        out, state = attention(*padded, state, 0, batch, **OPTIONS)
        outs.append(out[: end - start])
    want = dense(q, k, v, **OPTIONS)
    # An element is off by half a scale of about 2 / 127, a logit by a few times that.
    np.testing.assert_allclose(np.concatenate(outs), want, atol=0.03 if int8 else 1e-5)
    assert (state.kv_scales is None) != int8


def test_copies_take_the_scales_along():
    state = cache(int8=True)
    state = dataclasses.replace(state, kv_scales=state.kv_scales.at[4].set(0.5))
    empty = np.zeros((0, 3), np.int32)
    plan = Plan(copies=np.array([[4, 1]], np.int32), cells=empty, lengths=empty[:, :2])
    state = apply_plan(state, plan)
    assert (state.kv_scales[1] == 0.5).all()
