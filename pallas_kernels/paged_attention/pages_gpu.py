"""Page loads of the decode and prefill kernels by TMA: the memory warpgroup that both use.

Data movement: page ids are read from the block table as scalars, before the wait that hides their
latency; each page's tokens of one (layer, K or V, head) are one TMA copy into a stage of a
shared-memory ring, with several copies per stage for small blocks. Pages outside the visible part
of the sequence are not read. Slots of V without a token are set to zero, since 0 x NaN is NaN.
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

TILE = 64  # tokens per stage
# Rows of a tile of shared memory; copies into it are cut into such tiles. A copy that begins inside
# a tile gets zeros in place of the rows that belong to the next tile.
TILE_ROWS = 8
LOG2E = math.log2(math.e)


def binary_logits(products, scale: float, soft_cap: float | None):
    """Base-2 logits of a softmax, from the products of queries and keys."""
    if soft_cap is None:
        return products * (scale * LOG2E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2E)


def swizzle_of(row_bytes: int) -> int:
    """Bytes of the widest shared-memory swizzle that divides `row_bytes`."""
    return next(s for s in (128, 64, 32) if row_bytes % s == 0)


def tiled(shape, dtype, swizzle):
    """Shared memory in the tiled, swizzled form that TMA writes and products read."""
    tiling: Any = plgpu.TilingTransform  # pyright takes it for an abstract class
    swizzling: Any = plgpu.SwizzleTransform
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiling((TILE_ROWS, columns)), swizzling(swizzle)))


def whole_tiles(x: jax.Array, least: int) -> jax.Array:
    """Pads x with zero rows to a multiple of `TILE_ROWS`, and to `least` rows or more."""
    rows = max(least, -(-len(x) // TILE_ROWS) * TILE_ROWS)
    return jnp.pad(x, ((0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)))


def rows_to_copy(count: int, columns: int, dtype) -> tuple[int, int]:
    """Shape of shared memory whose rows can be copied out one by one: TMA requires each row to
    begin at a multiple of 128 bytes."""
    width = 128 // jnp.dtype(dtype).itemsize
    return count, -(-columns // width) * width


def store(ref, value) -> None:
    """Stores with bank conflicts allowed; from JAX 0.12 on, this must be requested explicitly."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


class Ring(NamedTuple):
    """Shared memory and barriers of the stages that pages are loaded into.

    Attributes:
      k: stages of K, [stages, TILE, head_dim] in the pages' dtype.
      v: stages of V, as `k`.
      k_scales: scales of K, [stages, TILE]; unused unless the pages are quantised.
      v_scales: scales of V, as `k_scales`.
      k_ready: one barrier per stage; each copy that fills the stage arrives at it.
      v_ready: barriers of V, as `k_ready`.
      edge_ready: barriers of V of the first and the last tile, if these have slots to clear.
      k_free: one barrier per stage; each warpgroup that reads the stage arrives at it when its
        reads are done and, if they were loads, fenced from the copies that follow.
      v_free: barriers of V, as `k_free`.
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
    """References to `PageReader.operands` and to the block table."""

    rows: Any
    scales: Any
    layer: Any
    tables: Any


class Span(NamedTuple):
    """The part of a sequence that a thread block sees.

    Attributes:
      sequence: row of the block table.
      head: KV head.
      first: first token that any query of the thread block sees.
      end: end of the tokens that its queries see.
      length: tokens of the sequence; later slots hold no token.
      from_tile: first tile of the thread block, in tiles of TILE tokens from the sequence's start.
      to_tile: end of the tiles.
    """

    sequence: Any
    head: Any
    first: Any
    end: Any
    length: Any
    from_tile: Any
    to_tile: Any


def share_of_tiles(first, end, split, splits: int):
    """(from_tile, to_tile) of one of `splits` thread blocks that share tokens first to end."""
    size = jnp.int32(TILE)
    first_tile, end_tile = lax.div(first, size), lax.div(end + (TILE - 1), size)
    share = lax.div(end_tile - first_tile + (splits - 1), jnp.int32(splits))
    from_tile = jnp.minimum(first_tile + split * share, end_tile)
    return from_tile, jnp.minimum(from_tile + share, end_tile)


@dataclasses.dataclass(frozen=True)
class PageReader:
    """Loads pages of one layer of a pool into a ring of stages.

    The layer is a number in device memory, so that all layers of a model share one compiled kernel:
    compiling one for each of 30 layers took 90 s.

    Attributes:
      rows: the pool as [rows, block_size, head_dim], see `layout`.
      scales: scales of quantised pages, [rows, block_size]; otherwise `rows`, unread, since another
        array would cost a kernel that fills it.
      quantised: whether the pages have scales.
      layer: i32[1], the layer.
      pool_shape: sizes of the pool.
      stages: stages of the ring.
    """

    rows: jax.Array
    scales: jax.Array
    quantised: bool
    layer: jax.Array
    pool_shape: PoolShape
    stages: int

    @classmethod
    def of(cls, kv_pages, kv_scales, layer: jax.Array, stages: int) -> PageReader:
        """Returns a reader of a pool."""
        quantised = kv_scales is not None
        rows = page_rows(kv_pages)
        scales = scale_rows(kv_scales) if quantised else rows
        return cls(rows, scales, quantised, layer[None], PoolShape.of(kv_pages), stages)

    @property
    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Operands of the kernel; their references are `Pages`."""
        return self.rows, self.scales, self.layer

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.pool_shape.block_size

    @property
    def page_tokens(self) -> int:
        """Tokens per copy."""
        return min(self.block_size, TILE)

    @property
    def copies(self) -> int:
        """Copies that fill a stage of K, and as many of V."""
        return TILE // self.page_tokens

    def scratch(self, swizzle: int, readers: int) -> Ring:
        """Scratch types of a ring that `readers` warpgroups read."""
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
        """Loads all tiles of the span in order; the memory warpgroup's work."""
        for i in range(self.stages):
            at = span.from_tile + i

            @pl.when(at < span.to_tile)
            def fill(at=at):
                sources = self.sources(at, pages, span)
                self._fetch_k(at, sources, pages, ring, span)
                self._fetch_v(at, sources, pages, ring, span)

        if not self.quantised:  # codes are never NaN, and scales are masked
            some = span.from_tile < span.to_tile
            pl.when(some & self.is_edge(span.from_tile, span))(
                lambda: self._clear(span.from_tile, ring, span)
            )

        def refill(i, _):
            at, slot = i + self.stages, self.slot(i, span)
            sources = self.sources(at, pages, span)  # the wait hides the table's latency
            plgpu.barrier_wait(ring.k_free.at[slot])
            self._fetch_k(at, sources, pages, ring, span)
            plgpu.barrier_wait(ring.v_free.at[slot])
            self._fetch_v(at, sources, pages, ring, span)

        refills = jnp.maximum(span.to_tile - self.stages, span.from_tile)
        lax.fori_loop(span.from_tile, refills, refill, None)
        last = span.to_tile - 1
        if not self.quantised:
            pl.when((last > span.from_tile) & self.is_edge(last, span))(
                lambda: self._clear(last, ring, span)
            )

    def sources(self, tile, pages: Pages, span: Span):
        """(block, first token in it) of each copy of a stage; blocks outside the span are replaced
        by blocks inside it."""
        size = jnp.int32(self.block_size)
        first_page, last_page = lax.div(span.first, size), lax.div(span.end - 1, size)
        found = []
        for c in range(self.copies):
            at = tile * TILE + c * self.page_tokens
            block = pages.tables[span.sequence, jnp.clip(lax.div(at, size), first_page, last_page)]
            found.append((block, lax.rem(at, size)))
        return found

    def page(self, source, k_or_v: int, pages: Pages, span: Span):
        """References to the tokens [page_tokens, head_dim] of one copy, and to their scales."""
        block, offset = source
        row = page_row(self.pool_shape, block, pages.layer[0], k_or_v, span.head)
        tokens, scales = pages.rows.at[row], pages.scales.at[row]
        if self.block_size > TILE:
            part = pl.ds(offset, TILE)
            tokens, scales = tokens.at[part], scales.at[part]
        return tokens, scales

    def _fetch_k(self, tile, sources, pages: Pages, ring: Ring, span: Span) -> None:
        slot = self.slot(tile, span)
        stage = ring.k.at[slot], ring.k_scales.at[slot]
        self._copy(0, sources, *stage, ring.k_ready.at[slot], pages, span)

    def _fetch_v(self, tile, sources, pages: Pages, ring: Ring, span: Span) -> None:
        slot = self.slot(tile, span)

        def copy(ready):
            stage = ring.v.at[slot], ring.v_scales.at[slot]
            self._copy(1, sources, *stage, ready, pages, span)

        ready = ring.v_ready.at[slot]
        if self.quantised:
            copy(ready)
        else:
            edge = self.is_edge(tile, span)
            cleared = ring.edge_ready.at[self._edge(tile, span)]
            pl.when(edge)(lambda: copy(cleared))
            pl.when(~edge)(lambda: copy(ready))

    def _copy(
        self, k_or_v: int, sources, smem, smem_scales, ready, pages: Pages, span: Span
    ) -> None:  # fmt: skip
        """Starts the copies that fill a stage of K or V; each arrives at `ready`."""
        for c, source in enumerate(sources):
            tokens, scales = self.page(source, k_or_v, pages, span)
            to = pl.ds(c * self.page_tokens, self.page_tokens)
            plgpu.copy_gmem_to_smem(tokens, smem.at[to], ready)
            if self.quantised:
                plgpu.copy_gmem_to_smem(scales, smem_scales.at[to], ready)

    def is_edge(self, tile, span: Span):
        """Whether the tile may have slots without a token, as only the first and the last can."""
        return (tile * TILE < span.first) | ((tile + 1) * TILE > span.length)

    def _edge(self, tile, span: Span):
        return jnp.where(tile == span.from_tile, jnp.int32(0), jnp.int32(1))

    def _clear(self, tile, ring: Ring, span: Span) -> None:
        """Runs `clear` when the tile's V has arrived. The memory warpgroup does this, since the
        registers of the compute warpgroups are full."""
        slot = self.slot(tile, span)
        plgpu.barrier_wait(ring.edge_ready.at[self._edge(tile, span)])
        self.clear(tile, ring.v.at[slot], span)
        plgpu.commit_smem()
        for _ in range(self.copies):
            plgpu.barrier_arrive(ring.v_ready.at[slot])

    def clear(self, tile, smem, span: Span) -> None:
        """Zeros the slots of a tile of V [TILE, head_dim] without a token, since 0 x NaN is NaN."""
        itemsize = self.rows.dtype.itemsize
        columns = swizzle_of(self.pool_shape.head_dim * itemsize) // itemsize
        for c in range(0, self.pool_shape.head_dim, columns):
            part = smem.at[:, pl.ds(c, columns)]
            held = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            iota = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
            token = tile * TILE + iota
            some = (token >= span.first) & (token < span.length)
            part[...] = jnp.where(some, held, jnp.zeros_like(held))
