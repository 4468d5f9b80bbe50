"""Shared steps of the decode kernels: splits of a context, and the online softmax over its tiles.

Rows are tokens and columns the query heads of one KV head; products are float32 in registers, in
layout `Layout.WGMMA`. Nothing moves here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv.pallas_kernels.paged_attention.operands import MASKED
from jaxkv.pallas_kernels.paged_attention.pages_gpu import (
    LOG2E,
    TILE,
    Span,
    binary_logits,
    share_of_tiles,
)

SLOTS = 2 * 132  # thread blocks resident on an H100 or H200, two per SM; other GPUs are close
WAVES = 4  # thread blocks per slot that splitting aims at, to even out different lengths


def num_splits(num_sequences: int, num_kv_heads: int, max_tokens: int) -> int:
    """Thread blocks over which a sequence's context is split, to keep all SMs busy.

    Example:
      >>> num_splits(64, 8, 4096), num_splits(1, 8, 131072), num_splits(1, 8, 100)
      (3, 132, 2)
    """
    wanted = -(-WAVES * SLOTS // (num_sequences * num_kv_heads))
    return max(1, min(wanted, -(-max_tokens // TILE)))


def split_span(length, sequence, head, split, splits: int, window: int | None) -> Span:
    """Span of one split: its share of the tiles that the sequence's query sees. length, sequence,
    head and split are scalars of the kernel."""
    first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    tiles = share_of_tiles(first, length, split, splits)
    return Span(sequence, head, first, length, length, *tiles)


def seen_tokens(tile, span: Span, heads: int) -> jax.Array:
    """Mask bool[TILE, heads] of the products of a tile whose token the query sees."""
    iota = plgpu.broadcasted_iota(jnp.int32, (TILE, heads), 0, layout=plgpu.Layout.WGMMA)
    token = tile * TILE + iota
    return (token >= span.first) & (token < span.end)


def start(heads: int, pieces) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Initial (sums [size, heads] of each piece of head_dim, maxima [heads], totals [heads])."""
    wgmma, per_head = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
    sums = tuple(
        plgpu.layout_cast(jnp.full((size, heads), 0, jnp.float32), wgmma) for _, size in pieces
    )
    maxima = plgpu.layout_cast(jnp.full((heads,), MASKED, jnp.float32), per_head)
    return sums, maxima, plgpu.layout_cast(jnp.full((heads,), 0, jnp.float32), per_head)


def weigh(products, seen, maxima, totals, scale: float, soft_cap: float | None):
    """(weights [TILE, heads], factor [heads] of the earlier sums, maxima, totals)."""
    logits = jnp.where(seen, binary_logits(products, scale, soft_cap), MASKED)
    new = jnp.maximum(maxima, logits.max(axis=0))
    factor = jnp.exp2(maxima - new)
    weights = jnp.exp2(logits - per_column(new, logits))
    return weights, factor, new, totals * factor + weights.sum(axis=0)


def per_column(x, like) -> jax.Array:
    """Broadcasts [heads] to [rows, heads]."""
    return lax.broadcast_in_dim(x, like.shape, [1])


def per_row(x, like) -> jax.Array:
    """Broadcasts [rows], of any floating type, to f32[rows, heads]."""
    return lax.broadcast_in_dim(x.astype(jnp.float32), like.shape, [0])


def finish(sums, maxima, totals) -> tuple[list[jax.Array], jax.Array]:
    """(outputs of the pieces, log-sum-exp [heads]); zeros and -inf if no token was seen."""
    some = jnp.where(totals > 0, totals, 1.0)
    outputs = [x / per_column(some, x) for x in sums]
    return outputs, jnp.where(totals > 0, (maxima + jnp.log2(some)) / LOG2E, -jnp.inf)
