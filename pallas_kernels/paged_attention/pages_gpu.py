"""How pages come to the GPU kernels: the memory warpgroup that both of them share.

Data movement: page ids come from the block table as scalars, before the wait that hides their
latency; each page's tokens of one (layer, K or V, head) are one TMA copy into a stage of a
shared-memory ring, several copies to a stage of small blocks. No page outside the part of the
sequence that is seen is touched. Slots of V that hold no token are set to zero, since a weight of 0
does not undo a NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv.pallas_kernels.layout import PoolShape, page_row, page_rows, scale_rows

TILE = 64  # tokens of a stage
# What is copied into tiled shared memory is cut into tiles of so many rows. A copy that begins
# inside a tile brings zeros, and not the next tile's rows, in the place of those that lie there.
TILE_ROWS = 8
LOG2E = math.log2(math.e)
# Layouts are named where they matter; inferring them takes minutes for kernels of this size.
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def binary_logits(products, scale: float, soft_cap: float | None):
    """Logits for a softmax in powers of 2, from the products of queries and keys."""
    if soft_cap is None:
        return products * (scale * LOG2E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2E)


def swizzle_of(row_bytes: int) -> int:
    """Bytes of the widest shared-memory swizzle that fits rows of so many bytes."""
    return next(s for s in (128, 64, 32) if row_bytes % s == 0)


def tiled(shape, dtype, swizzle):
    """Shared memory in the form that TMA writes and products read."""
    tiling: Any = plgpu.TilingTransform  # abstract by its types alone
    swizzling: Any = plgpu.SwizzleTransform
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiling((TILE_ROWS, columns)), swizzling(swizzle)))


def whole_tiles(x: jax.Array, least: int) -> jax.Array:
    """Padded with rows of zeros to a multiple of `TILE_ROWS`, and at least so many."""
    rows = max(least, -(-len(x) // TILE_ROWS) * TILE_ROWS)
    return jnp.pad(x, ((0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)))


def rows_to_copy(count: int, columns: int, dtype) -> tuple[int, int]:
    """The shape of shared memory whose rows can be copied out one by one: TMA wants each to begin
    at a multiple of 128 bytes."""
    width = 128 // jnp.dtype(dtype).itemsize
    return count, -(-columns // width) * width


def store(ref, value) -> None:
    """A store whose bank conflicts do not matter: JAX from 0.12 on wants to be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


class Ring(NamedTuple):
    """Shared memory and barriers of the stages through which pages come.

    Attributes:
      k: [stages, TILE, head_dim] of the pages' dtype.
      v: likewise.
      k_scales: [stages, TILE]; unused unless the pages are quantised.
      v_scales: likewise.
      k_ready: one barrier a stage, a copy each that fills it.
      v_ready: likewise.
      edge_ready: of the first and the last tile's V, if these have slots to be cleared.
      k_free: one barrier a stage, an arrival from each warpgroup that reads it.
      v_free: likewise.
    """

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    k_ready: Any
    v_ready: Any
    edge_ready: Any
    k_free: Any
    v_free: Any


class Pages(NamedTuple):
    """References to `PageReader.operands`, and to the block table."""

    rows: Any
    scales: Any
    layer: Any
    tables: Any


class Span(NamedTuple):
    """The part of a sequence that a thread block sees.

    Attributes:
      sequence: row of the block table.
      head: of K and V.
      first: first token that any of its queries sees.
      end: end of the tokens that they see.
      length: tokens of the sequence: behind them slots hold nothing.
      from_tile: its tiles, of TILE tokens from the sequence's start on.
      to_tile: their end.
    """

    sequence: Any
    head: Any
    first: Any
    end: Any
    length: Any
    from_tile: Any
    to_tile: Any


def share_of_tiles(first, end, split, splits: int):
    """(from_tile, to_tile) of one of `splits` thread blocks that divide tokens first to end."""
    size = jnp.int32(TILE)
    first_tile, end_tile = lax.div(first, size), lax.div(end + (TILE - 1), size)
    share = lax.div(end_tile - first_tile + (splits - 1), jnp.int32(splits))
    from_tile = jnp.minimum(first_tile + split * share, end_tile)
    return from_tile, jnp.minimum(from_tile + share, end_tile)


@dataclasses.dataclass(frozen=True)
class PageReader:
    """A pool's pages, and how a ring of stages is filled from those of one layer.

    The layer is a number in device memory, so that all layers of a model share one compiled kernel:
    30 of them took 90 s.

    Attributes:
      rows: the pool as [rows, block_size, head_dim], see `layout`.
      scales: of quantised pages [rows, block_size]; a stand-in otherwise.
      quantised: whether there are scales.
      layer: i32[1].
      pool_shape: sizes of the pool.
      stages: of the ring.
    """

    rows: jax.Array
    scales: jax.Array
    quantised: bool
    layer: jax.Array
    pool_shape: PoolShape
    stages: int

    @classmethod
    def of(cls, kv_pages, kv_scales, layer: jax.Array, stages: int) -> PageReader:
        """Of a pool."""
        quantised = kv_scales is not None
        scales = scale_rows(kv_scales) if quantised else jnp.zeros((1, 32))
        shape = PoolShape.of(kv_pages)
        return cls(page_rows(kv_pages), scales, quantised, layer[None], shape, stages)

    @property
    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of the kernel; their references are `Pages`."""
        return self.rows, self.scales, self.layer

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.pool_shape.block_size

    @property
    def page_tokens(self) -> int:
        """Tokens that one copy brings."""
        return min(self.block_size, TILE)

    @property
    def copies(self) -> int:
        """Copies that fill a stage, each of K and V."""
        return TILE // self.page_tokens

    def scratch(self, swizzle: int, readers: int) -> Ring:
        """The types of a ring that `readers` warpgroups read."""
        dtype, stages = self.rows.dtype, self.stages
        ring = tiled((stages, TILE, self.pool_shape.head_dim), dtype, swizzle)
        nothing = (1, 32)
        scales = plgpu.SMEM((stages, TILE) if self.quantised else nothing, self.scales.dtype)
        arriving = self.copies * (2 if self.quantised else 1)
        ready = plgpu.Barrier(num_arrivals=arriving, num_barriers=stages)
        edges = plgpu.Barrier(num_arrivals=self.copies, num_barriers=2)
        free = plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
        return Ring(ring, ring, scales, scales, ready, ready, edges, free, free)

    def slot(self, tile, span: Span):
        """Stage of a tile."""
        return lax.rem(tile - span.from_tile, jnp.int32(self.stages))

    def run(self, pages: Pages, ring: Ring, span: Span) -> None:
        """The memory warpgroup's work: brings all tiles of the span, in order."""
        for i in range(self.stages):
            at = span.from_tile + i
            pl.when(at < span.to_tile)(
                lambda at=at: self._fetch(at, self.sources(at, pages, span), pages, ring, span)
            )
        if not self.quantised:  # codes are no NaN, and scales are masked
            some = span.from_tile < span.to_tile
            pl.when(some & self.is_edge(span.from_tile, span))(
                lambda: self._clear(span.from_tile, ring, span)
            )

        def refill(i, _):
            at, slot = i + self.stages, self.slot(i, span)
            sources = self.sources(at, pages, span)  # the wait hides the table's latency
            plgpu.barrier_wait(ring.k_free.at[slot])
            plgpu.barrier_wait(ring.v_free.at[slot])
            self._fetch(at, sources, pages, ring, span)

        refills = jnp.maximum(span.to_tile - self.stages, span.from_tile)
        lax.fori_loop(span.from_tile, refills, refill, None)
        last = span.to_tile - 1
        if not self.quantised:
            pl.when((last > span.from_tile) & self.is_edge(last, span))(
                lambda: self._clear(last, ring, span)
            )

    def sources(self, tile, pages: Pages, span: Span):
        """(block, first token in it) of a stage's copies; a block that is needed anyway in the
        place of one that is not."""
        size = jnp.int32(self.block_size)
        first_page, last_page = lax.div(span.first, size), lax.div(span.end - 1, size)
        found = []
        for c in range(self.copies):
            at = tile * TILE + c * self.page_tokens
            block = pages.tables[span.sequence, jnp.clip(lax.div(at, size), first_page, last_page)]
            found.append((block, lax.rem(at, size)))
        return found

    def page(self, source, k_or_v: int, pages: Pages, span: Span):
        """References to one copy's tokens [page_tokens, head_dim], and to their scales."""
        block, offset = source
        row = page_row(self.pool_shape, block, pages.layer[0], k_or_v, span.head)
        tokens, scales = pages.rows.at[row], pages.scales.at[row]
        if self.block_size > TILE:
            part = pl.ds(offset, TILE)
            tokens, scales = tokens.at[part], scales.at[part]
        return tokens, scales

    def _fetch(self, tile, sources, pages: Pages, ring: Ring, span: Span) -> None:
        slot = self.slot(tile, span)

        def copy(k_or_v, smem, smem_scales, ready):
            for c, source in enumerate(sources):
                tokens, scales = self.page(source, k_or_v, pages, span)
                to = pl.ds(c * self.page_tokens, self.page_tokens)
                plgpu.copy_gmem_to_smem(tokens, smem.at[slot, to], ready)
                if self.quantised:
                    plgpu.copy_gmem_to_smem(scales, smem_scales.at[slot, to], ready)

        copy(0, ring.k, ring.k_scales, ring.k_ready.at[slot])
        if self.quantised:
            copy(1, ring.v, ring.v_scales, ring.v_ready.at[slot])
        else:
            edge = self.is_edge(tile, span)
            cleared = ring.edge_ready.at[self._edge(tile, span)]
            pl.when(edge)(lambda: copy(1, ring.v, None, cleared))
            pl.when(~edge)(lambda: copy(1, ring.v, None, ring.v_ready.at[slot]))

    def is_edge(self, tile, span: Span):
        """Whether slots of the tile may hold no token: only of the first and the last."""
        return (tile * TILE < span.first) | ((tile + 1) * TILE > span.length)

    def _edge(self, tile, span: Span):
        return jnp.where(tile == span.from_tile, jnp.int32(0), jnp.int32(1))

    def _clear(self, tile, ring: Ring, span: Span) -> None:
        """`clear` once the tile's V is there. This warpgroup does it, since the registers of those
        that compute are full."""
        slot = self.slot(tile, span)
        plgpu.barrier_wait(ring.edge_ready.at[self._edge(tile, span)])
        self.clear(tile, ring.v.at[slot], span)
        plgpu.commit_smem()
        for _ in range(self.copies):
            plgpu.barrier_arrive(ring.v_ready.at[slot])

    def clear(self, tile, smem, span: Span) -> None:
        """Zeros in a tile of V [TILE, head_dim] where no token is: a weight of 0 does not undo a
        NaN."""
        itemsize = self.rows.dtype.itemsize
        columns = swizzle_of(self.pool_shape.head_dim * itemsize) // itemsize
        for c in range(0, self.pool_shape.head_dim, columns):
            part = smem.at[:, pl.ds(c, columns)]
            held = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            iota = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
            token = tile * TILE + iota
            some = (token >= span.first) & (token < span.length)
            part[...] = jnp.where(some, held, jnp.zeros_like(held))
