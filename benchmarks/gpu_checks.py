"""Checks of the GPU benchmark: each kernel and operation against its reference, on random data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gpu_rows
import jax
import jax.numpy as jnp
import numpy as np
from gpu_rows import AttentionCheck, OperationCheck

from jaxkv.pallas_kernels.copy_blocks import copy_blocks
from jaxkv.pallas_kernels.formats import quantise
from jaxkv.pallas_kernels.move_blocks import gather_blocks, put_blocks, zero_blocks
from jaxkv.pallas_kernels.paged_attention import (
    merge_attention,
    paged_attention,
    paged_attention_reference,
)
from jaxkv.pallas_kernels.scatter_kv import scatter_kv, scatter_kv_reference

TOLERANCES = {"bfloat16": 2e-2, "float16": 5e-3}  # outputs, absolute and relative
LSE_TOLERANCE = 5e-3  # float32 products, approximate exponentials and tanh


def check(task: AttentionCheck | OperationCheck, rng: np.random.Generator, implementation: str):
    """Runs a check and returns its row."""
    if isinstance(task, AttentionCheck):
        return _attention(task, rng, implementation)
    return OPERATIONS[task.operation](rng)


def poisoned(function: Any, *args: Any) -> tuple[Any, bool]:
    """Runs a jitted function with outputs in memory that held NaN; also returns if this is known.

    Output buffers cannot be passed in. Therefore the function runs once; arrays of the sizes of its
    outputs and temporaries, filled with bytes that are NaN in every float type, then take that
    memory and release it before the function runs again.
    """
    function = function.lower(*args).compile()
    sizes = [x.nbytes for x in jax.tree.leaves(jax.block_until_ready(function(*args)))]
    temporary = getattr(function.memory_analysis(), "temp_size_in_bytes", 0)
    sizes = [
        max(1, n) for n in [*sizes * 4, temporary]
    ]  # several, to cover the allocator's choices
    nan = [jax.device_put(np.full(n, 0xFF, np.uint8)) for n in sizes]
    jax.block_until_ready(nan)
    held = [(x.unsafe_buffer_pointer(), x.nbytes) for x in nan]
    del nan
    out = jax.block_until_ready(function(*args))
    at = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(out)]
    return out, all(any(begin <= p < begin + n for begin, n in held) for p in at)


# -- attention -------------------------------------------------------------------------------


def _attention(task: AttentionCheck, rng: np.random.Generator, implementation: str) -> dict:
    counts = task.counts or (1,) * len(task.lens)
    pages, scales, tables = _pool(task, counts, rng)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = rng.normal(size=(starts[-1] + task.padding, task.heads, task.dim))
    sinks = rng.normal(size=task.heads).astype(np.float32) if task.sinks else None
    lens = np.asarray(task.lens, np.int32)
    q, lens, starts, sinks = jax.device_put((q.astype(jnp.dtype(task.dtype)), lens, starts, sinks))
    options: dict[str, Any] = dict(layer=1, window=task.window, soft_cap=task.soft_cap)

    @jax.jit
    def kernel(q, pages, tables, lens, starts, scales, sinks):
        return paged_attention(
            q, pages, tables, lens, starts, kv_scales=scales, sinks=sinks, **options,
            max_query_len=max(counts), return_lse=True, implementation=implementation,
        )  # fmt: skip

    @jax.jit
    def reference(q, pages, tables, lens, starts, scales, sinks):
        tables = jnp.clip(tables, 0, len(pages) - 1)
        return paged_attention_reference(
            q, pages, tables, lens, starts,
            kv_scales=scales, sinks=sinks, scale=task.dim**-0.5, **options,
        )  # fmt: skip

    if task.parts:
        halves = [
            poisoned(kernel, q, pages, *half, starts, scales, sinks)
            for half in _halves(task, tables, lens)
        ]
        outs, lses = (jnp.stack(x) for x in zip(*(out for out, _ in halves), strict=True))
        (out, lse), known = jax.jit(merge_attention)(outs, lses), all(known for _, known in halves)
    else:
        (out, lse), known = poisoned(kernel, q, pages, tables, lens, starts, scales, sinks)
    with jax.default_matmul_precision("highest"):
        want, want_lse = reference(q, pages, tables, lens, starts, scales, sinks)
    tolerance = TOLERANCES[task.dtype]
    out, want = np.asarray(out, np.float32), np.asarray(want)
    error = np.abs(out - want).max() if np.isfinite(out).all() else np.inf
    excess = (np.abs(out - want) - tolerance * np.abs(want)).max()
    lse, want_lse = np.asarray(lse), np.asarray(want_lse)
    same = (lse == want_lse) | (np.abs(lse - want_lse) <= LSE_TOLERANCE * (1 + np.abs(want_lse)))
    row = gpu_rows.verdict(float(error), tolerance, bool(excess <= tolerance and same.all()))
    finite = np.isfinite(want_lse) & np.isfinite(lse)
    return row | {
        "lse_error": float(np.abs(lse - want_lse)[finite].max(initial=0)),
        "poisoned": known,
    }


def _halves(task: AttentionCheck, tables: np.ndarray, lens: np.ndarray):
    """(tables, lens) of the first half of each sequence's blocks and of the rest."""
    tables, lens = np.asarray(tables), np.asarray(lens)
    blocks = lens // (2 * task.block)
    columns = np.arange(tables.shape[1]) + blocks[:, None]
    rest = np.take_along_axis(tables, columns % tables.shape[1], axis=1)
    return (tables, blocks * task.block), (rest, lens - blocks * task.block)


def _pool(task: AttentionCheck, counts: tuple[int, ...], rng: np.random.Generator):
    """(pages of two layers, scales or None, tables).

    Only slots that a query sees hold numbers: other slots, the other layer and unused blocks are
    NaN (for int8, their scales are), and unused table entries point anywhere.
    """
    need = [-(-n // task.block) for n in task.lens]
    num_blocks, width = sum(need) + 5, max(need) + 2
    ids = iter(rng.permutation(np.arange(1, num_blocks)))
    tables = rng.integers(-1, num_blocks, (len(need), width)).astype(np.int32)
    seen = np.zeros((num_blocks, task.block), bool)
    for s, (length, count) in enumerate(zip(task.lens, counts, strict=True)):
        first = 0 if task.window is None else max(0, length - count + 1 - task.window)
        for page in range(first // task.block, need[s]):
            tables[s, page] = next(ids)
            token = page * task.block + np.arange(task.block)
            seen[tables[s, page]] = (token >= first) & (token < length)
    held = np.zeros((num_blocks, 2, 1, 1, task.block), bool)
    held[:, 1, 0, 0] = seen
    shape = (num_blocks, 2, 2, task.kv_heads, task.block, task.dim)
    numbers = rng.standard_normal(shape, np.float32)
    if task.scale_dtype is None:
        numbers = np.where(held[..., None], numbers, np.float32(np.nan))
        return jax.device_put(numbers.astype(jnp.dtype(task.dtype))), None, tables
    pages, scales = _quantise(numbers, held, task.scale_dtype)
    return pages, scales, tables


@functools.partial(jax.jit, static_argnums=2)
def _quantise(numbers: jax.Array, held: jax.Array, scale_dtype: str):
    """int8 pages and their scales, which are NaN for slots without a token."""
    pages, scales = quantise(numbers, scale_dtype)
    return pages, jnp.where(held, scales, jnp.asarray(jnp.nan, scales.dtype))


# -- operations ------------------------------------------------------------------------------

_SHAPE = (50, 3, 2, 4, 16, 64)


def _pages(rng: np.random.Generator, num_blocks: int = _SHAPE[0]) -> np.ndarray:
    return rng.normal(size=(num_blocks, *_SHAPE[1:])).astype(jnp.bfloat16)


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """Distinct block ids; the last two are outside the pool, as padding."""
    ids = rng.permutation(_SHAPE[0])[:count].astype(np.int32)
    ids[-2:] = -1, _SHAPE[0]
    return ids


def _equal(got: jax.Array, want: np.ndarray) -> dict:
    """Verdict of an exact comparison, with differences as floats."""
    difference = np.abs(np.asarray(got, np.float32) - np.asarray(want, np.float32))
    return gpu_rows.verdict(float(difference.max()), 0.0)


def _scatter(rng: np.random.Generator, quantised: bool) -> dict:
    tokens = 200
    places = rng.permutation(_SHAPE[0] * _SHAPE[4])[:tokens].astype(np.int32)
    blocks, offsets = np.divmod(places, np.int32(_SHAPE[4]))
    blocks[:3] = -1, _SHAPE[0], _SHAPE[0] + 7
    k, v = rng.normal(size=(2, tokens, *_SHAPE[3::2])).astype(jnp.bfloat16)
    pages, scales = _pages(rng), None
    if quantised:
        pages, scales = map(np.asarray, quantise(jnp.asarray(pages)))
    want = scatter_kv_reference(pages, k, v, blocks, offsets, layer=1, kv_scales=scales)
    donated = ("kv_pages", "kv_scales")
    step = jax.jit(functools.partial(scatter_kv, layer=1), donate_argnames=donated)
    got = step(*map(jnp.asarray, (pages, k, v, blocks, offsets)),
               kv_scales=None if scales is None else jnp.asarray(scales))  # fmt: skip
    if not quantised:
        return _equal(got, np.asarray(want))
    codes = _equal(got[0], want[0])["max_error"]
    scales = np.abs(np.asarray(got[1]) / want[1] - 1).max()
    # A quotient halfway between two codes may be rounded either way.
    return gpu_rows.verdict(codes, 1.0, bool(codes <= 1 and scales < 1e-6))


def _move(rng: np.random.Generator, operation: Callable[..., jax.Array]) -> dict:
    pages, ids = _pages(rng), _ids(rng, 40)
    inside = (ids >= 0) & (ids < len(pages))
    on_device, want = jax.jit(operation, donate_argnums=0), pages.copy()
    if operation is copy_blocks:
        sources = rng.integers(0, len(pages), len(ids)).astype(np.int32)
        want[ids[inside]] = pages[sources[inside]]
        return _equal(on_device(jnp.asarray(pages), sources, ids), want)
    if operation is put_blocks:
        staged = _pages(rng, len(ids))
        want[ids[inside]] = staged[inside]
        return _equal(on_device(jnp.asarray(pages), jnp.asarray(staged), ids), want)
    want[ids[inside]] = 0
    return _equal(on_device(jnp.asarray(pages), ids), want)


def _gather(rng: np.random.Generator) -> dict:
    pages, ids = _pages(rng), _ids(rng, 40)
    inside = (ids >= 0) & (ids < len(pages))
    want = np.where(inside.reshape(-1, 1, 1, 1, 1, 1), pages[np.where(inside, ids, 0)], 0)
    got, known = poisoned(jax.jit(gather_blocks), jnp.asarray(pages), jnp.asarray(ids))
    return _equal(got, want) | {"poisoned": known}


def _merge(rng: np.random.Generator) -> dict:
    """Merge against float64; some parts have no keys, and some rows none in any part."""
    outs, lses = rng.normal(size=(7, 33, 8, 64)), 3 * rng.normal(size=(7, 33, 8))
    outs[2, 5], lses[2, 5] = np.nan, -np.inf
    outs[:, 7], lses[:, 7] = np.nan, -np.inf
    outs, lses = outs.astype(np.float32), lses.astype(np.float32)
    weights = np.exp(lses.astype(np.float64))
    total = weights.sum(0)
    summed = (weights[..., None] * np.where(weights[..., None] > 0, outs, 0)).sum(0)
    want = summed / np.where(total > 0, total, 1)[..., None]
    (out, lse), known = poisoned(jax.jit(merge_attention), jnp.asarray(outs), jnp.asarray(lses))
    with np.errstate(divide="ignore"):
        close = np.allclose(lse, np.log(total), atol=1e-5)
    error = float(np.abs(np.asarray(out) - want).max())
    return gpu_rows.verdict(error, 1e-5, close and error <= 1e-5) | {"poisoned": known}


OPERATIONS: dict[str, Callable[[np.random.Generator], dict]] = {
    "scatter_kv": functools.partial(_scatter, quantised=False),
    "scatter_kv int8": functools.partial(_scatter, quantised=True),
    "copy_blocks": functools.partial(_move, operation=copy_blocks),
    "gather_blocks": _gather,
    "put_blocks": functools.partial(_move, operation=put_blocks),
    "zero_blocks": functools.partial(_move, operation=zero_blocks),
    "merge_attention": _merge,
}
