"""Page loads of the Ampere kernels: through registers, by the warpgroup that computes.

Data movement: 16 bytes per load, one page after the other, from the pool into registers; from
there, converted to the operands' dtype, into a tile of shared memory. Ampere has no TMA and no
barriers that count its bytes. `cp.async` would save registers, but Pallas's interpreter does not
support it, so no test could detect a missing wait.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxkv.pallas_kernels.paged_attention.pages_gpu import PageReader, Pages, Span, store, tiled


def copy_swizzle(rows: int, row_bytes: int) -> int:
    """Bytes of the widest swizzle of shared memory that four warps fill with [rows, row_bytes].

    Example:
      >>> copy_swizzle(64, 256), copy_swizzle(16, 128), copy_swizzle(8, 128)
      (128, 64, 32)
    """

    def fits(swizzle: int) -> bool:
        down, across = rows // 8, row_bytes // swizzle  # tiles
        return down % 4 == 0 or (down % 2 == 0 and across % 2 == 0) or across % 4 == 0

    return next(s for s in (128, 64, 32) if row_bytes % s == 0 and fits(s))


def load_rows(ref, swizzle: int, dtype: DTypeLike) -> jax.Array:
    """Loads rows of device memory; each thread gets the elements that it will store as `dtype`."""
    layout = plgpu.Layout.SMEM_GMEM_COPY(ref.shape, dtype, swizzle)
    return plgpu.load(ref, layout=layout, optimized=False)


class Held(NamedTuple):
    """A tile of K or V in registers: its copies and, for quantised pages, the scales [TILE]."""

    copies: list[jax.Array]
    scales: jax.Array | None


@dataclasses.dataclass(frozen=True)
class TileLoader:
    """Loads tiles of a reader's pages.

    Attributes:
      reader: reader of the pages.
      dtype: dtype of the operands.
    """

    reader: PageReader
    dtype: DTypeLike

    @property
    def smem(self) -> Any:
        """Scratch type of a tile of K or V in shared memory, [TILE, head_dim]."""
        return tiled((self._tokens * self.reader.copies, self._dim), self.dtype, self._swizzle)

    @property
    def _tokens(self) -> int:
        return self.reader.page_tokens

    @property
    def _dim(self) -> int:
        return self.reader.pool_shape.head_dim

    @property
    def _swizzle(self) -> int:
        return copy_swizzle(self._tokens, self._dim * jnp.dtype(self.dtype).itemsize)

    def fetch(self, k_or_v: int, sources, pages: Pages, span: Span) -> Held:
        """Loads a tile of K (0) or V (1), from `PageReader.sources`."""
        copies, scales = [], None
        for source in sources:
            tokens, scale = self.reader.page(source, k_or_v, pages, span)
            copies.append(load_rows(tokens, self._swizzle, self.dtype))
            if self.reader.quantised:  # a page is a tile or more
                per_token = plgpu.Layout.WGMMA.reduce(1)
                scales = plgpu.load(scale, layout=per_token, optimized=False)
        return Held(copies, scales)

    def put(self, held: Held, smem) -> None:
        """Stores a tile to shared memory."""
        for c, copy in enumerate(held.copies):
            if self.reader.quantised:  # int8 to bfloat16 in one step needs Hopper
                copy = copy.astype(jnp.float32)
            store(smem.at[pl.ds(c * self._tokens, self._tokens)], copy.astype(self.dtype))

    def put_values(self, held: Held, tile, smem, span: Span) -> None:
        """Stores a tile of V, with zeros in slots without a token."""
        self.put(held, smem)
        if not self.reader.quantised:  # codes are never NaN, and scales are masked
            edge = self.reader.is_edge(tile, span)
            pl.when(edge)(lambda: self.reader.clear(tile, smem, span))
