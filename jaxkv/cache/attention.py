"""The call that a model makes per layer: write K and V into their slots, then attend."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache.batch import Batch
from jaxkv.cache.state import PagedState
from jaxkv.pallas_kernels.layout import PoolShape
from jaxkv.pallas_kernels.paged_attention import paged_attention
from jaxkv.pallas_kernels.scatter_kv import scatter_kv

# Calls of `attention` up to now. An engine reads it before and after it calls a model: one that
# made calls and returns the pages that it was given has dropped their results.
trace_counts: Counter[str] = Counter()


def slots(state: PagedState, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(block, offset) i32[T] of each token; for padding a block past the pool, dropped."""
    max_seqs, width = state.block_tables.shape
    pool = PoolShape.of(state.kv_pages)
    num_blocks, block_size = pool.num_blocks, pool.block_size
    rows, positions = jnp.asarray(batch.rows), jnp.asarray(batch.positions)
    column = positions // block_size
    live = (rows >= 0) & (rows < max_seqs) & (column >= 0) & (column < width)
    block = state.block_tables[jnp.where(live, rows, 0), jnp.where(live, column, 0)]
    return jnp.where(live & (block > 0), block, num_blocks), positions % block_size


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: PagedState,
    layer: int,
    batch: Batch,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, PagedState]:
    """Writes K and V of the batch's tokens into the cache and attends over what is cached.

    Each token attends over the positions of its sequence up to its own.

    Args:
      q: [T, num_q_heads, head_dim], RoPE applied.
      k: [T, num_kv_heads, head_dim], RoPE applied.
      v: [T, num_kv_heads, head_dim].
      state: the cache; inside a jitted step that donates it, the write is in place.
      layer: layer of the cache.
      batch: rows and positions of the tokens.
      scale: scale of the logits; 1 / sqrt(head_dim) by default.
      window: number of positions that a token sees, its own included; None: all.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      sinks: [num_q_heads]; logits of a key with value 0 that every token sees.
      implementation: implementation of `jaxkv.pallas_kernels.paged_attention`; None: the first that
        runs on this device.

    Returns:
      [T, num_q_heads, head_dim] in q's dtype (zeros for padding tokens), and the new state.

    Raises:
      ValueError: shapes that do not fit the cache or each other; rows or positions that are not
        integers or, on the host, do not fit 32 bits.
    """
    trace_counts["attention"] += 1
    batch = batch.in_int32()
    pool = PoolShape.of(state.kv_pages)
    num_kv_heads, head_dim = pool.num_kv_heads, pool.head_dim
    if not 0 <= layer < pool.num_layers:
        raise ValueError(f"{layer=} must be in [0, {pool.num_layers}), the layers of the cache")
    for name, x in (("k", k), ("v", v)):
        if x.shape != (q.shape[0], num_kv_heads, head_dim):
            raise ValueError(
                f"{name}.shape={x.shape} must be {(len(q), num_kv_heads, head_dim)}: tokens of q, "
                "KV heads and head_dim of the cache"
            )
    with jax.named_scope("kv_cache_update"):
        blocks, offsets = slots(state, batch)
        pages, scales = state.kv_pages, state.kv_scales
        if scales is None:
            pages = scatter_kv(pages, k, v, blocks, offsets, layer=layer)
        else:
            pages, scales = scatter_kv(pages, k, v, blocks, offsets, layer=layer, kv_scales=scales)
    options: dict[str, Any] = dict(
        layer=layer, kv_scales=scales, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        implementation=implementation,
    )  # fmt: skip
    with jax.named_scope("paged_attention"):
        rows = jnp.asarray(batch.rows)[batch.last_tokens]  # i32[S], arbitrary for padding
        starts = jnp.asarray(batch.query_start)
        lens = jnp.asarray(batch.positions)[batch.last_tokens] + 1
        live = (starts[1:] > starts[:-1]) & (rows >= 0) & (rows < len(state.block_tables))
        lens = jnp.where(live, lens, 0)
        tables = state.block_tables[jnp.where(live, rows, 0)]
        cut, outs = batch.num_decodes, []
        if cut:  # their tokens are the first ones, one each
            outs.append(paged_attention(q[:cut], pages, tables[:cut], lens[:cut], **options))
        rest = q[cut:], pages, tables[cut:], lens[cut:], starts[cut:] - cut
        outs.append(paged_attention(*rest, max_query_len=batch.max_query_len, **options))
        out = jnp.concatenate(outs) if cut else outs[0]
    return out, dataclasses.replace(state, kv_pages=pages, kv_scales=scales)
