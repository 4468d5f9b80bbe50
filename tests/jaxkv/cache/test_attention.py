"""Options and int8 scales that `jaxkv.attention` passes to the kernel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK

import jaxkv
from jaxkv.cache.attention import attention
from jaxkv.cache.batch import Batch, advance
from jaxkv.cache.plan import apply_plan
from jaxkv.cache.state import init_state
from jaxkv.manager.records import Plan

CONFIG = jaxkv.CacheConfig(
    num_layers=1, num_kv_heads=2, head_dim=8, num_blocks=6, block_size=4, max_seqs=2,
    max_blocks_per_seq=3, dtype="float32",
)  # fmt: skip
OPTIONS: dict[str, Any] = dict(
    window=3, soft_cap=1.5, sinks=jnp.array([0.5, -1.0, 2.0, 0.0]), scale=0.3
)


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
        out, state = attention(*padded, state, 0, batch, **OPTIONS)  # pyright: ignore[reportCallIssue]
        outs.append(out[: end - start])
    want = dense(q, k, v, **OPTIONS)
    # An element is off by half a scale of about 2 / 127, a logit by a few times that.
    np.testing.assert_allclose(np.concatenate(outs), want, atol=0.03 if int8 else 1e-5)
    assert (state.kv_scales is None) != int8


def test_copies_take_the_scales_along():
    state = cache(int8=True)
    state = dataclasses.replace(state, kv_scales=state.kv_scales.at[4].set(0.5))  # pyright: ignore[reportOptionalMemberAccess]
    empty = np.zeros((0, 3), np.int32)
    plan = Plan(copies=np.array([[4, 1]], np.int32), cells=empty, lengths=empty[:, :2])
    state = apply_plan(state, plan)
    assert (state.kv_scales[1] == 0.5).all()  # pyright: ignore[reportOptionalSubscript]


jitted = jax.jit(attention, static_argnums=4, compiler_options=QUICK)


@pytest.mark.parametrize("padding_row", [8, -1])
@pytest.mark.parametrize("after", [0, 8])
def test_padding_rows_write_and_change_nothing(rng, padding_row, after):
    """Not of a batch of 3 padded to 8, whatever K and V they bring, whatever was there before."""
    config = dataclasses.replace(CONFIG, num_blocks=25, max_seqs=8)
    state = init_state(config)
    tables = 1 + rng.permutation(24).reshape(8, 3)
    pages = jnp.asarray(rng.normal(size=state.kv_pages.shape), jnp.float32)
    state = dataclasses.replace(state, kv_pages=pages, block_tables=jnp.asarray(tables, jnp.int32))

    def step(state, rows, positions, num_seqs):
        batch = Batch.decode(rows, positions, num_seqs=num_seqs, padding_row=padding_row)
        q, k, v = (np.full((num_seqs, h, 8), np.nan, np.float32) for h in (4, 2, 2))
        for i, x in enumerate((q, k, v)):
            x[: len(rows)] = np.random.default_rng(i).normal(size=x.shape)[: len(rows)]
        out, new = jitted(q, k, v, state, 0, batch)
        return out, advance(new, batch)

    if after:  # a step of live rows alone
        _, state = step(state, np.arange(after), np.full(after, 6), after)
    rows, positions = np.array([2, 0, 1]), np.array([7, 4, 11])
    padded, padded_state = step(state, rows, positions, 8)
    want, want_state = step(state, rows, positions, 3)
    np.testing.assert_array_equal(padded_state.kv_pages, want_state.kv_pages)
    np.testing.assert_array_equal(padded_state.seq_lens, want_state.seq_lens)
    np.testing.assert_allclose(padded[:3], want, atol=1e-6)
    assert (padded[3:] == 0).all()
    written = np.argwhere((want_state.kv_pages != state.kv_pages).any((1, 2, 3, 5)))
    assert set(map(tuple, written)) == {
        (tables[row, at // 4], at % 4) for row, at in zip(rows, positions, strict=True)
    }


@pytest.mark.parametrize("kind", [np.int64, np.uint32, np.int16, list, np.float32])
def test_positions_of_other_types(rng, kind):
    """The same, or refused."""
    of_kind = list if kind is list else lambda x: np.asarray(x, kind)
    state = cache(int8=False)
    k = jnp.asarray(rng.normal(size=(2, 2, 8)), jnp.float32)
    q = jnp.concatenate([k, k], axis=1)

    def step(rows, positions):
        batch = Batch(rows, positions, np.array([0, 2], np.int32), max_query_len=2)
        out, new = attention(q, k, k, state, 0, batch)
        return out, new.kv_pages, advance(new, batch).seq_lens

    rows, positions = np.array([1, 1], np.int32), np.array([6, 7], np.int32)
    if kind is np.float32:
        with pytest.raises(ValueError, match="positions must be integers, got float32"):
            step(rows, of_kind(positions))
        with pytest.raises(ValueError, match="positions must be integers, got float32"):
            Batch.decode(rows, of_kind(positions), num_seqs=2, padding_row=2)  # pyright: ignore[reportArgumentType]
        return
    got = step(of_kind(rows), of_kind(positions))
    for x, y in zip(got, step(rows, positions), strict=True):
        np.testing.assert_array_equal(x, y)
    batch = Batch.decode(of_kind(rows), of_kind(positions), num_seqs=2, padding_row=2)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(batch.positions, positions)


def test_positions_that_do_not_fit_32_bits():
    far = np.array([2**32 + 6])
    with pytest.raises(ValueError, match="positions holds 4294967302, which does not fit 32 bits"):
        Batch.decode(np.array([1]), far, num_seqs=1, padding_row=2)
    with pytest.raises(ValueError, match="starts holds 4294967302"):
        Batch.ragged([1], far, [1], num_tokens=1, num_seqs=1, padding_row=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="positions holds 4294967302"):
        attention(*[jnp.zeros((1, 2, 8))] * 3, cache(False), 0,  # pyright: ignore[reportCallIssue]
                  Batch(np.array([1]), far, np.array([0, 1]), 1))  # fmt: skip  # pyright: ignore[reportCallIssue]
