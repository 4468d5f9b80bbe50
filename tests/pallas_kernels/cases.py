"""Random ragged batches over a shuffled pool, for the kernel tests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.pallas_kernels.paged_attention import paged_attention
from jaxkv.pallas_kernels.paged_attention.mosaic_gpu import attend_gpu


@dataclasses.dataclass
class Case:
    q: jax.Array  # [T, Hq, D]
    pages: jax.Array  # [N, L, 2, H, B, D]
    scales: jax.Array | None  # [N, L, 2, H, B], with int8 pages
    tables: jax.Array  # i32[S, M]
    lens: jax.Array  # i32[S]
    query_start: jax.Array  # i32[S + 1]
    max_query_len: int
    layer: int
    dense: list[tuple[np.ndarray, np.ndarray]]  # K and V f32[len, H, D] of each sequence

    def kwargs(self) -> dict[str, Any]:
        return dict(layer=self.layer, max_query_len=self.max_query_len, kv_scales=self.scales)

    def args(self):
        return self.q, self.pages, self.tables, self.lens, self.query_start


def quantise(kv: np.ndarray, scale_dtype) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes and scales over the last axis, on the host, independent of the library."""
    scales = (np.maximum(np.abs(kv).max(-1), 1e-30) / 127).astype(scale_dtype)
    codes = np.rint(kv / scales.astype(np.float32)[..., None])
    return np.clip(codes, -127, 127).astype(np.int8), scales


def make(
    lens, counts, *, block=4, heads=4, kv_heads=2, dim=8, layers=2, layer=1, seed=0,
    dtype=jnp.float32, fill=0.0, spare_columns=2, padding_tokens=0, max_query_len=None,
    window=None, scale_dtype=None, room=None,
):  # fmt: skip
    """Sequences of `lens` cached tokens whose last `counts` are this step's queries.

    Every slot without a token is `fill`, and unused table entries point anywhere, also outside the
    pool. With a `window`, tokens that no query sees are unused too, and every second table entry of
    theirs is the null block. With a `scale_dtype` the pages are int8, `dense` holds the dequantised
    values, and the scales of unused slots are `fill`. With `room`, the shapes are those of
    sequences of `room` tokens each.
    """
    rng = np.random.default_rng(seed)
    need = [-(-n // block) for n in lens]
    sizes = need if room is None else [-(-room // block)] * len(lens)
    width = max([*sizes, 1]) + spare_columns
    num_blocks = sum(sizes) + 5
    order = rng.permutation(np.arange(1, num_blocks))
    pages = np.full((num_blocks, layers, 2, kv_heads, block, dim), fill, np.float32)
    scales = None
    if scale_dtype is not None:
        scales = np.full(pages.shape[:-1], fill, scale_dtype)
        pages = np.full(pages.shape, 127, np.int8)
    tables = rng.integers(-2, num_blocks + 2, (len(lens), width))
    dense, at = [], 0
    for s, n in enumerate(lens):
        first = 0 if window is None else max(0, n - counts[s] + 1 - window)  # first visible token
        tables[s, : first // block : 2] = 0
        tables[s, first // block : need[s]] = order[at + first // block : at + need[s]]
        at += need[s]
        kv = rng.normal(0, 1, (2, n, kv_heads, dim)).astype(dtype).astype(np.float32)
        held = kv
        if scales is not None:
            held, row = quantise(kv, scale_dtype)
            kv = held * row.astype(np.float32)[..., None]
        for t in range(first, n):
            slot = (tables[s, t // block], layer, slice(None), slice(None), t % block)
            pages[slot] = held[:, t]
            if scales is not None:
                scales[slot] = row[:, t]  # pyright: ignore[reportPossiblyUnboundVariable]
        dense.append((kv[0], kv[1]))
    total = int(sum(counts))
    q = rng.normal(0, 1, (total + padding_tokens, heads, dim))
    return Case(
        jnp.asarray(q, dtype),
        jnp.asarray(pages, dtype if scales is None else jnp.int8),
        None if scales is None else jnp.asarray(scales),
        jnp.asarray(tables, jnp.int32),
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32),
        max_query_len or max([*counts, 2]),
        layer,
        dense,
    )


def queries(case: Case, order) -> np.ndarray:
    """Indices in the batch of the queries of these sequences."""
    starts = np.asarray(case.query_start)
    return np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])  # pyright: ignore[reportArgumentType, reportCallIssue]


def pick(case: Case, order) -> Case:
    """Some of the case's sequences, in this order and in the case's shapes, padding at the end."""
    at, more = queries(case, order), len(case.lens) - len(order)
    q, tables, lens = (
        np.zeros_like(case.q), np.full_like(case.tables, -1), np.zeros_like(case.lens)
    )  # fmt: skip
    q[: len(at)] = np.asarray(case.q)[at]
    tables[: len(order)], lens[: len(order)] = (
        np.asarray(x)[order] for x in (case.tables, case.lens)
    )
    starts = case.query_start  # a decode step has one query per row, padding included
    if case.max_query_len > 1:
        counts = np.pad(np.diff(starts)[order], (0, more))
        starts = jnp.asarray(np.pad(np.cumsum(counts), (1, 0)))
    dense = [case.dense[s] for s in order] + [tuple(x[:0] for x in case.dense[0])] * more
    arrays: dict[str, Any] = dict(
        q=jnp.asarray(q), tables=jnp.asarray(tables), lens=jnp.asarray(lens)
    )
    return dataclasses.replace(case, **arrays, query_start=starts, dense=dense)


def move_blocks(case: Case) -> Case:
    """The same sequences in other blocks; the null block does not move."""
    new = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(len(case.pages) - 1)])
    pages, tables = np.empty_like(case.pages), np.array(case.tables)
    pages[new] = case.pages
    inside = (tables >= 0) & (tables < len(pages))
    tables[inside] = new[tables[inside]]
    return dataclasses.replace(case, pages=jnp.asarray(pages), tables=jnp.asarray(tables))


def name_heads(case: Case) -> tuple[Case, np.ndarray]:
    """Sets V of each KV head to its number; returns the expected output of each query head."""
    heads, kv_heads = case.q.shape[1], case.pages.shape[3]
    pages = np.array(case.pages)
    pages[:, :, 1] = np.arange(kv_heads)[:, None, None]
    names = np.repeat(np.arange(kv_heads), heads // kv_heads)
    return dataclasses.replace(case, pages=jnp.asarray(pages)), names


def means_of_positions(chunks, call, *, cached=0, room=10, **kind) -> np.ndarray:
    """Outputs of at most 10 positions after `cached` ones, computed in chunks.

    V holds its position and q is 0, so an output is the mean of the positions that its query sees.
    """
    outs, length = [], cached
    for count in chunks:
        length += count
        more: dict[str, Any] = dict(max_query_len=1)
        if count > 1:
            more: dict[str, Any] = dict(max_query_len=10, padding_tokens=10 - count)
        case = make([length], [count], fill=np.nan, room=room, **more, **kind)
        pages, position = np.array(case.pages), np.arange(length)
        block = pages.shape[4]
        for t, page in zip(position, np.asarray(case.tables)[0, position // block], strict=True):
            pages[page, case.layer, 1, :, t % block] = t
        case.pages, case.q = jnp.asarray(pages), jnp.zeros_like(case.q)
        outs.append(call(case)[:count, 0, 0])
    return np.concatenate(outs)


QUICK = {"xla_backend_optimization_level": 0}  # compiling takes most of the tests' time


@functools.cache
def _compiled(**static):
    """A program for all cases of a shape."""

    def call(args, kv_scales, sinks):
        return paged_attention(*args, kv_scales=kv_scales, sinks=sinks, **static)

    return jax.jit(call, compiler_options=QUICK)


def forget_programs() -> None:
    """Drops compiled programs, which also depend on the device and on patches of a test."""
    _compiled.cache_clear()
    attend_gpu.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def run(case, implementation="xla", *, sinks=None, **options):
    static: dict[str, Any] = dict(
        layer=case.layer, max_query_len=case.max_query_len, implementation=implementation
    )
    out = _compiled(**static, **options)(case.args(), case.scales, sinks)
    return jax.tree.map(np.asarray, out)


def assert_equal_up_to_rounding(got, want, case: Case) -> None:
    """Equality of float32 outputs of two programs, or of rows at other places of a batch.

    The order of a sum is the processor's to choose. A logit is a sum of head_dim products, which
    moves a weight by as much, and an output is a mean of at most `longest` values.
    """
    eps = float(np.finfo(np.float32).eps)
    norms = [np.linalg.norm(np.asarray(x, np.float64), axis=-1).max(initial=0)
             for x in (case.q, *(k for k, _ in case.dense))]  # fmt: skip
    dim, longest = case.q.shape[2], max(len(k) for k, _ in case.dense)
    largest = max(float(np.abs(v).max(initial=0)) for _, v in case.dense)
    logit = dim * eps * norms[0] * max(norms[1:]) / np.sqrt(dim)
    bound = 2 * (2 * logit + (longest + 8) * eps)
    np.testing.assert_allclose(got, want, rtol=bound, atol=bound * max(largest, 1))


def oracle(case: Case, **options) -> np.ndarray:
    """Dense attention in float64, one query at a time."""
    return oracle_with_lse(case, **options)[0]


def oracle_with_lse(case: Case, *, window=None, causal=True, soft_cap=None, sinks=None):
    """`oracle` and the log of each softmax denominator, -inf for rows without a query."""
    q = np.asarray(case.q, np.float64)
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    start = np.asarray(case.query_start)
    for s, (k, v) in enumerate(case.dense):
        count = start[s + 1] - start[s]
        group = q.shape[1] // max(k.shape[1], 1)
        for i in range(count):
            seen = len(k) - count + i + 1 if causal else len(k)
            if seen < 1:
                continue
            first = 0 if window is None else max(0, seen - window)
            for h in range(q.shape[1]):
                kh, vh = k[first:seen, h // group], v[first:seen, h // group]
                logits = kh @ q[start[s] + i, h] / np.sqrt(q.shape[2])
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                top = logits.max()
                weights = np.exp(logits - top)
                sink = 0 if sinks is None else np.exp(np.float64(sinks[h]) - top)
                total = weights.sum() + sink
                out[start[s] + i, h] = weights @ vh / total
                lse[start[s] + i, h] = top + np.log(total)
    return out, lse
