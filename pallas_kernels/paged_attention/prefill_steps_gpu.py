"""Shared steps of the prefill kernels: tiles of queries, and the online softmax over tiles of keys.

Rows are queries and columns tokens; products are float32 in registers, in layout `Layout.WGMMA`.
Nothing moves here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv.pallas_kernels.integers import count_up_to
from jaxkv.pallas_kernels.paged_attention.operands import MASKED
from jaxkv.pallas_kernels.paged_attention.pages_gpu import (
    LOG2E,
    TILE,
    Span,
    binary_logits,
    share_of_tiles,
)

ROWS = 64  # queries per warpgroup


def query_tiles(query_start, num_tokens, num_seqs, tile_rows, align):
    """Tiles of queries: (sequence, first query, end of the sequence's queries), i32[G] each.

    A tile takes `tile_rows` rows from a multiple of `align` on, so the first tile of a sequence may
    begin with rows of the previous one, which it does not own. The padding after the sequences
    counts as sequence `num_seqs`, with zero output. Unneeded tiles have first = end.

    Example:
      >>> starts = jnp.array([0, 100, 130], jnp.int32)  # the second begins 4 rows into its tile
      >>> [x.tolist() for x in query_tiles(starts, 130, 2, 128, 8)]
      [[0, 1, 2, 2, 2], [0, 100, 130, 130, 130], [100, 130, 130, 130, 130]]
    """
    starts = jnp.concatenate([query_start, jnp.full(1, num_tokens, jnp.int32)])
    rows = starts[:-1] // align * align  # where the first tiles begin
    counts = jnp.where(starts[1:] > starts[:-1], starts[1:] - rows, 0)
    tiles_before = jnp.cumsum(-(-counts // tile_rows))
    most = -(-(num_tokens + (align - 1) * (num_seqs + 1)) // tile_rows) + num_seqs + 1
    i = jnp.arange(most, dtype=jnp.int32)
    s = jnp.minimum(count_up_to(tiles_before, i), num_seqs)
    first = rows[s] + (i - jnp.where(s > 0, tiles_before[s - 1], 0)) * tile_rows
    return s, jnp.clip(first, starts[s], starts[s + 1]), starts[s + 1]


def tile_start(first, last_start, align: int):
    """Row of the batch at which the tile with first query `first` begins: at most `last_start`, so
    that the last tile stays inside the batch."""
    return jnp.minimum(lax.div(first, jnp.int32(align)) * align, last_start)


def rows_of_tokens(tile_first, num_tokens, last_start, align):
    """(tile, row in the tile) of every token, i32[T] each."""
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    tile = count_up_to(tile_first, t) - 1
    return tile, t - tile_start(tile_first[tile], last_start, align)


class QueryTile(NamedTuple):
    """A tile of one sequence's queries.

    Attributes:
      start: row of the batch at which the tile begins, see `tile_start`.
      first: first query that the tile owns.
      end: end of the queries that the tile owns.
      length: tokens of the sequence.
      shift: position of a query minus its row of the batch.
    """

    start: Any
    first: Any
    end: Any
    length: Any
    shift: Any

    @classmethod
    def of(cls, first, end, length, rows: int, last_start, align: int) -> QueryTile:
        """Returns the tile of an entry of `query_tiles`, with `rows` rows, see `tile_start`."""
        start = tile_start(first, last_start, align)
        return cls(start, first, jnp.minimum(end, start + rows), length, length - end)

    def span(
        self, sequence, kv_head, split, splits: int, window: int | None, *, causal: bool
    ) -> Span:  # fmt: skip
        """Span of one split: its share of the tokens that the queries see."""
        end = self.length
        if causal:
            end = jnp.minimum(jnp.maximum(self.end + self.shift, 0), end)
        first = jnp.int32(0)
        if window is not None:
            first = jnp.maximum(self.first + self.shift - (window - 1), 0)
        tiles = share_of_tiles(first, end, split, splits)
        return Span(sequence, kv_head, first, end, self.length, *tiles)


def positions(at, shift) -> jax.Array:
    """Positions i32[ROWS, TILE] of the queries from row `at` on."""
    layout = plgpu.Layout.WGMMA
    return at + shift + plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 0, layout=layout)


def start(columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Initial (sums [ROWS, columns], maxima [ROWS], totals [ROWS])."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    sums = plgpu.layout_cast(jnp.full((ROWS, columns), 0, jnp.float32), plgpu.Layout.WGMMA)
    maxima = plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), per_row)
    return sums, maxima, plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), per_row)


def weigh(products, position, tile, length, maxima, totals, *, scale, soft_cap, window, causal):
    """(weights [ROWS, TILE], factor [ROWS] of the earlier sums, maxima, totals)."""
    iota = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=plgpu.Layout.WGMMA)
    token = tile * TILE + iota
    seen = token < length
    if causal:
        seen &= token <= position
    if window is not None:
        seen &= token > position - window
    logits = jnp.where(seen, binary_logits(products, scale, soft_cap), MASKED)
    new = jnp.maximum(maxima, logits.max(axis=1))
    factor = jnp.exp2(maxima - new)
    weights = jnp.exp2(logits - per_row(new, logits))
    if window is not None:  # a row may see no token of its first tiles
        weights = jnp.where(seen, weights, 0.0)
    return weights, factor, new, totals * factor + weights.sum(axis=1)


def per_row(x, like) -> jax.Array:
    """Broadcasts [ROWS] to [ROWS, columns]."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def finish(sums, maxima, totals) -> tuple[jax.Array, jax.Array]:
    """(output, log-sum-exp [ROWS]); zeros and -inf for rows that saw no token."""
    some = jnp.where(totals > 0, totals, 1.0)
    lse = jnp.where(totals > 0, (maxima + jnp.log2(some)) / LOG2E, -jnp.inf)
    return sums / per_row(some, sums), lse
