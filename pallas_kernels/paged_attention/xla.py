"""Paged attention in plain XLA, for any device: an online softmax over tiles of pages.

Data movement: each pass of the key loop gathers a few pages of K and V (for decode, a tile of
every sequence; for prefill, a tile of one sequence for some of its queries) and folds them into a
running maximum, sum and output, so a whole sequence is never gathered. With a window the loop
starts at the first page inside it: the cost depends on the window and not on the sequence.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from jaxkv.pallas_kernels.integers import count_up_to
from jaxkv.pallas_kernels.layout import PoolShape
from jaxkv.pallas_kernels.paged_attention.operands import MASKED, Tile, read_pages

# Tokens of every sequence that one pass of the decode loop reads. With few sequences a pass reads
# more, so that it outweighs its launches: one sequence of 2048 tokens took 1.4 times dense
# attention's time in tiles of 256, 1.1 in 512; a tile of 1024 would read too much for short ones.
_DECODE_TILE, _DECODE_TOKENS = 64, 512
# Queries of one sequence per pass of the prefill loop, and per last pass if that many suffice:
# nine sequences of 28 queries behind 1,488 tokens took 32 ms in tiles of 64 alone, 19 with both.
_QUERY_TILES = 64, 32
_KEY_TILE = 256  # tokens that the prefill loop reads at a time


def _start(shape, sinks):
    """Initial online-softmax carry of queries [..., D]: running maximum, sum and output.

    A sink, broadcasting to [..., 1], counts as a key already seen, with value 0.
    """
    column = (*shape[:-1], 1)
    if sinks is None:
        m, total = jnp.full(column, MASKED, jnp.float32), jnp.zeros(column, jnp.float32)
    else:
        m, total = jnp.broadcast_to(sinks, column), jnp.ones(column, jnp.float32)
    return m, total, jnp.zeros(shape, jnp.float32)


def _accumulate(carry, q, tile: Tile, visible, needed, soft_cap):
    """One online-softmax step of `...hqd` queries over a tile.

    visible broadcasts to [..., h, q, t], needed (seen by any query) to [..., h, t]. A row that has
    seen no key yet may sum weights of 1; its first visible key scales them to 0.
    """
    m, total, acc = carry
    s = tile.logits(q)
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    s = jnp.where(visible, s, MASKED)
    m_new = jnp.maximum(m, s.max(axis=-1, keepdims=True))
    alpha = jnp.exp(m - m_new)
    p = jnp.exp(s - m_new)
    total = total * alpha + p.sum(axis=-1, keepdims=True)
    return m_new, total, acc * alpha + tile.weighted(p, needed)


_FILLS = (0.0, -jnp.inf)  # output and log-sum-exp of a row without a query


def _finish(carry, live, return_lse):
    """Returns (output [..., D],) of a carry, or (output, log-sum-exp [..., 1])."""
    m, total, acc = carry
    total = jnp.where(live, total, 1)
    results = (acc / total, m + jnp.log(total)) if return_lse else (acc / total,)
    return tuple(jnp.where(live, x, fill) for x, fill in zip(results, _FILLS, strict=False))


def _pad_columns(tables, pages_per_tile):
    """Pads tables with null blocks, since a slice past the end would be moved back to fit."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages_per_tile)))


def _from_window(tables, lens, window, block_size):
    """Tables and lengths as if each sequence began with the first block that its last token sees.

    Rows of very different lengths then walk their windows in the same passes.
    """
    columns = min(tables.shape[1], (window - 2) // block_size + 2)  # a window's blocks, at most
    first = jnp.maximum(lens - window, 0) // block_size
    at = first[:, None] + jnp.arange(columns, dtype=jnp.int32)
    tables = jnp.take_along_axis(tables, at, axis=1, mode="fill", fill_value=0)
    return tables, lens - first * block_size


def decode_xla(
    q, kv_pages, kv_scales, tables, seq_lens, query_start, sinks,
    *, layer, scale, window, soft_cap, return_lse,
):  # fmt: skip
    """Decode attention; each pass of the loop takes the next tile of every sequence.

    Arguments as in `paged_attention`, checked, with table entries inside the pool.

    Returns:
      (f32[S, num_q_heads, head_dim],); with `return_lse`, followed by f32[S, num_q_heads, 1].
    """
    num_seqs, num_q_heads, head_dim = q.shape
    shape = PoolShape.of(kv_pages)
    num_kv_heads, block_size = shape.num_kv_heads, shape.block_size
    lens = jnp.where(query_start[1:] > query_start[:-1], seq_lens, 0)
    if window is not None:
        tables, lens = _from_window(tables, lens, window, block_size)
    tile = max(_DECODE_TILE, _DECODE_TOKENS // num_seqs)
    pages_per_tile = max(1, min(tables.shape[1], tile // block_size))
    tile = pages_per_tile * block_size
    tables = _pad_columns(tables, pages_per_tile)
    q = q.reshape(num_seqs, num_kv_heads, -1, head_dim)
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1, 1)

    def body(i, carry):
        blocks = lax.dynamic_slice_in_dim(tables, i * pages_per_tile, pages_per_tile, 1)
        operands = read_pages(kv_pages, kv_scales, blocks, layer, scale, q.dtype)
        token = i * tile + jnp.arange(tile, dtype=jnp.int32)
        visible = token < lens[:, None]
        if window is not None:
            visible &= token >= lens[:, None] - window
        visible = visible[:, None]
        return _accumulate(carry, q, operands, visible[:, None], visible, soft_cap)

    num_tiles = lax.div(lens.max() + (tile - 1), jnp.int32(tile))
    carry = lax.fori_loop(0, num_tiles, body, _start(q.shape, sinks))
    results = _finish(carry, (lens > 0)[:, None, None, None], return_lse)
    return tuple(x.reshape(num_seqs, num_q_heads, -1) for x in results)


def prefill_xla(
    q, kv_pages, kv_scales, tables, seq_lens, query_start, sinks,
    *, layer, scale, window, soft_cap, causal, return_lse, max_query_len,
):  # fmt: skip
    """Prefill attention; each pass takes a tile of one sequence's queries over the pages it sees.

    A tile's rows past its sequence's end hold the next sequence's queries and are not written.

    Arguments as in `paged_attention`, checked, with table entries inside the pool.

    Returns:
      (f32[T, num_q_heads, head_dim],); with `return_lse`, followed by f32[T, num_q_heads, 1].
    """
    num_tokens, num_q_heads, head_dim = q.shape
    shape = PoolShape.of(kv_pages)
    num_kv_heads, block_size = shape.num_kv_heads, shape.block_size
    sizes = sorted({min(size, max_query_len, num_tokens) for size in _QUERY_TILES}, reverse=True)
    pages_per_tile = max(1, min(tables.shape[1], _KEY_TILE // block_size))
    tile = pages_per_tile * block_size
    tables = _pad_columns(tables, pages_per_tile)
    q = jnp.pad(q, ((0, sizes[0]), (0, 0), (0, 0)))
    counts = query_start[1:] - query_start[:-1]
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1)

    def query_tile_of(query_tile, tiles_before, skipped, i, outs):
        s = count_up_to(tiles_before, i)
        first = jnp.where(s > 0, tiles_before[s - 1], 0)
        offset = skipped[s] + (i - first) * query_tile  # offset of the tile in its sequence
        at = query_start[s] + offset
        length = seq_lens[s]
        if causal:
            positions = length - counts[s] + offset + jnp.arange(query_tile, dtype=jnp.int32)
        else:
            positions = jnp.full(query_tile, length - 1)  # as if each were the last token
        last_seen = jnp.minimum(positions[-1] + 1, length)
        qt = lax.dynamic_slice_in_dim(q, at, query_tile, 0)
        # [tile, H, G, D] -> [H, G * tile, D]: the heads of a group share their keys.
        qt = qt.reshape(query_tile, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
        group = qt.shape[1]
        qt = qt.reshape(num_kv_heads, group * query_tile, head_dim)
        row_positions = jnp.tile(positions, group)[:, None]

        def key_tile(j, carry):
            blocks = lax.dynamic_slice(tables, (s, j * pages_per_tile), (1, pages_per_tile))[0]
            operands = read_pages(kv_pages, kv_scales, blocks, layer, scale, q.dtype)
            token = j * tile + jnp.arange(tile, dtype=jnp.int32)
            needed = token < length
            visible = (token <= row_positions) & needed
            if window is not None:
                needed &= token > positions[0] - window
                visible &= token > row_positions - window
            return _accumulate(carry, qt, operands, visible, needed, soft_cap)

        first_tile = jnp.int32(0)
        if window is not None:
            first_tile = lax.div(jnp.maximum(positions[0] - (window - 1), 0), jnp.int32(tile))
        num_tiles = lax.div(last_seen + (tile - 1), jnp.int32(tile))
        repeated = None if sinks is None else jnp.repeat(sinks, query_tile, axis=1)[..., None]
        carry = lax.fori_loop(first_tile, num_tiles, key_tile, _start(qt.shape, repeated))
        own = (offset + jnp.arange(query_tile) < counts[s])[:, None, None]

        def put(out, x):
            x = x.reshape(num_kv_heads, group, query_tile, -1).transpose(2, 0, 1, 3)
            x = x.reshape(query_tile, num_q_heads, -1)
            others = lax.dynamic_slice_in_dim(out, at, query_tile, 0)
            return lax.dynamic_update_slice_in_dim(out, jnp.where(own, x, others), at, 0)

        return tuple(map(put, outs, _finish(carry, row_positions >= 0, return_lse)))

    widths = (head_dim, 1) if return_lse else (head_dim,)
    outs = tuple(jnp.zeros((*q.shape[:2], width), jnp.float32) for width in widths)
    for size, tiles, skipped in _shares(counts, sizes):
        before = jnp.cumsum(tiles)
        body = functools.partial(query_tile_of, size, before, skipped)
        outs = lax.fori_loop(0, before[-1], body, outs)
    live = jnp.arange(num_tokens)[:, None, None] < query_start[-1]
    return tuple(
        jnp.where(live, x[:num_tokens], fill) for x, fill in zip(outs, _FILLS, strict=False)
    )


def _shares(counts, sizes):
    """For each tile size: (size, tiles per sequence, queries per sequence before its tiles)."""
    large, small = sizes[0], sizes[-1]
    none = jnp.zeros_like(counts)
    if large == small:
        return [(large, -(-counts // large), none)]
    rest = counts % large
    is_small = (rest > 0) & (rest <= small)
    up_to_large = jnp.where(is_small, counts - rest, counts)
    return [
        (large, -(-up_to_large // large), none),
        (small, is_small.astype(jnp.int32), counts - rest),
    ]
