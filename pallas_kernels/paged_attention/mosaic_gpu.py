"""Paged attention on GPUs: runs the decode or the prefill kernel and merges partial outputs.

Data movement, beyond that of the kernels: the outputs of splits are read once and merged, and a
sink scales the output. Non-causal queries of a group of heads all see the same keys: they become
rows of one product, so that a K or V byte is read once per 128 rows (64 on Ampere) and not once per
head. Such queries are usually few, so their keys are split over thread blocks instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.pallas_kernels.layout import PoolShape
from jaxkv.pallas_kernels.paged_attention.decode_ampere import decode_ampere
from jaxkv.pallas_kernels.paged_attention.decode_gpu import decode_gpu
from jaxkv.pallas_kernels.paged_attention.decode_steps_gpu import num_splits
from jaxkv.pallas_kernels.paged_attention.merge import merge_attention, with_sinks
from jaxkv.pallas_kernels.paged_attention.prefill_ampere import prefill_ampere
from jaxkv.pallas_kernels.paged_attention.prefill_gpu import prefill_gpu
from jaxkv.pallas_kernels.paged_attention.prefill_steps_gpu import ROWS
from jaxkv.pallas_kernels.paged_attention.products_gpu import product_of

SMS = 132  # SMs of an H100 or H200 (others are close), one thread block of prefill each
MIN_SPLIT = 256  # tokens of a split; its output is then a small part of the bytes it moves


def shared_splits(num_rows: int, num_kv_heads: int, max_tokens: int) -> int:
    """Thread blocks over which the keys of non-causal queries are split, to keep all SMs busy.

    Example:
      >>> shared_splits(256, 8, 4096), shared_splits(256, 8, 600), shared_splits(4096, 8, 4096)
      (8, 2, 1)
    """
    tiles = -(-num_rows // (2 * ROWS))
    return max(1, min(SMS // (tiles * num_kv_heads), max_tokens // MIN_SPLIT))


@functools.partial(
    jax.jit,
    static_argnames=(
        "scale", "window", "soft_cap", "causal", "max_query_len", "compute_capability", "interpret"
    ),
)  # fmt: skip
def attend_gpu(
    q, kv_pages, kv_scales, tables, lens, query_start, sinks,
    *, layer, scale, window, soft_cap, causal, max_query_len, compute_capability, interpret,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns (out [T, Hq, D], lse f32[T, Hq]); arguments are checked, table entries in the pool.

    Jitted separately, so that it is traced and compiled once for all layers.
    """
    shape = PoolShape.of(kv_pages)
    width = tables.shape[1] * shape.block_size  # tokens of the longest sequence
    lens = jnp.minimum(lens, width)
    options: dict[str, Any] = dict(
        layer=layer, scale=scale, window=window, soft_cap=soft_cap, interpret=interpret,
        product=product_of(compute_capability, interpret),
    )  # fmt: skip
    ampere = compute_capability[0] == 8
    prefill = prefill_ampere if ampere else prefill_gpu
    if max_query_len == 1:
        lens = jnp.where(query_start[1:] > query_start[:-1], lens, 0)
        seen = width if window is None else min(width, window)
        splits = num_splits(len(q), shape.num_kv_heads, seen)
        decode = decode_ampere if ampere else decode_gpu
        outs, lses = decode(
            q, kv_pages, tables, lens, kv_scales=kv_scales, splits=splits, **options
        )
        if splits == 1:
            out, lse = outs[0, 0], lses[0]
        else:
            out, lse = merge_attention(outs.astype(jnp.float32).sum(axis=1), lses)
    elif causal:
        outs, lses = prefill(
            q, kv_pages, tables, lens, query_start, causal=True, splits=1, **options
        )
        out, lse = outs[0], lses[0]
    else:
        out, lse = _not_causal(prefill, q, kv_pages, tables, lens, query_start, **options)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def _not_causal(prefill, q, kv_pages, tables, lens, query_start, **options):
    """Non-causal `prefill` with the heads of a group as rows, and its splits merged."""
    num_tokens, num_q_heads, head_dim = q.shape
    shape = PoolShape.of(kv_pages)
    num_kv_heads = shape.num_kv_heads
    group = num_q_heads // num_kv_heads
    rows = q.reshape(num_tokens, num_kv_heads, group, head_dim).swapaxes(1, 2)
    rows = rows.reshape(-1, num_kv_heads, head_dim)
    splits = shared_splits(len(rows), num_kv_heads, tables.shape[1] * shape.block_size)
    outs, lses = prefill(
        rows, kv_pages, tables, lens, query_start * group, causal=False, splits=splits, **options
    )
    out, lse = (outs[0], lses[0]) if splits == 1 else merge_attention(outs, lses)
    out = out.reshape(num_tokens, group, num_kv_heads, head_dim).swapaxes(1, 2).reshape(q.shape)
    return out, lse.reshape(num_tokens, group, num_kv_heads).swapaxes(1, 2).reshape(q.shape[:2])
