"""The pool's axes by name. Only this module depends on their order.

    kv_pages  [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]   K at 0, V at 1
    kv_scales [num_blocks, num_layers, 2, num_kv_heads, block_size]             of quantised pages

Other modules read the pool through `PoolShape` and the functions below; a test checks that none of
them indexes its axes by number.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxkv.pallas_kernels import target


class _Sizes(Protocol):
    """The pool sizes in a cache configuration."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """Sizes of a pool of pages.

    Attributes:
      num_blocks: blocks, the null block included.
      num_layers: layers; a block holds all of them.
      num_kv_heads: KV heads of a layer.
      block_size: tokens per block.
      head_dim: elements of one head.

    Example:
      >>> shape = PoolShape.of(jnp.zeros((9, 2, 2, 4, 16, 64)))
      >>> shape.num_blocks, shape.num_kv_heads, shape.array_shape()
      (9, 4, (9, 2, 2, 4, 16, 64))
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @classmethod
    def of(cls, kv_pages: Any) -> Self:
        """Returns the shape of a pool of pages.

        Raises:
          ValueError: the array is not a pool of pages.
        """
        shape = kv_pages.shape
        if len(shape) != 6 or shape[2] != 2:
            raise ValueError(
                "expected kv_pages [num_blocks, num_layers, 2, num_kv_heads, block_size, "
                f"head_dim], got {kv_pages.shape=}"
            )
        return cls(shape[0], shape[1], shape[3], shape[4], shape[5])

    @classmethod
    def for_config(cls, config: _Sizes) -> Self:
        """Returns the shape of the pool that a configuration describes."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: getattr(config, name) for name in names})

    def array_shape(self) -> tuple[int, ...]:
        """Shape of the pages."""
        return (*self.scales_shape(), self.head_dim)

    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the scales beside quantised pages."""
        return (self.num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size)

    def staging_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the pages of `num_blocks` blocks outside the pool, as from `gather_blocks`."""
        return dataclasses.replace(self, num_blocks=num_blocks).array_shape()


def split_by_heads(mesh_axis: str) -> PartitionSpec:
    """Partition spec of the pool, or of its scales: KV heads divided over a mesh axis."""
    return PartitionSpec(None, None, None, mesh_axis)


def page_rows(kv_pages: jax.Array) -> jax.Array:
    """Pool as [rows, block_size, head_dim]; one row per (block, layer, K or V, head)."""
    return kv_pages.reshape(-1, *kv_pages.shape[-2:])


def scale_rows(kv_scales: jax.Array) -> jax.Array:
    """Scales as [rows, block_size], with rows as in `page_rows`."""
    return kv_scales.reshape(-1, kv_scales.shape[-1])


def page_row(shape: PoolShape, block, layer, k_or_v, head):
    """Row of a page in `page_rows`; arguments broadcast. Row numbers fit an int32."""
    return _heads_row(shape.num_layers, block, layer, k_or_v) * shape.num_kv_heads + head


def _heads_row(num_layers: int, block, layer, k_or_v):
    """Row that holds all heads' pages of a block's K or V in a layer; arguments broadcast."""
    return (block * num_layers + layer) * 2 + k_or_v


def layer_pages(pool: jax.Array, blocks, layer: int) -> jax.Array:
    """Pages or scales of blocks [...] in a layer: [..., 2, num_kv_heads, block_size, ...]."""
    return pool[blocks, layer]


def slot_index(block, layer, k_or_v, offset) -> tuple[Any, ...]:
    """Index of one token's elements, all heads, in the pool or its scales."""
    return block, layer, k_or_v, slice(None), offset


def token_slots(pool: jax.Array, blocks, layer: int, offsets) -> tuple[jax.Array, tuple[Any, ...]]:
    """A view of the pool or its scales, and the index of the tokens' K and V in it.

    The view merges axes but keeps one for the heads, which may be divided over devices: on a GPU,
    XLA writes several elements at once only where it can prove their alignment, and through six
    axes it cannot. On a CPU the view gains nothing, and with one head it costs a copy of the pool.

    Args:
      pool: pages or scales of the pool.
      blocks: i32[T], block of each token.
      layer: layer of the pool.
      offsets: i32[T], slot of each token in its block.

    Returns:
      (view, index); `view[index]` is [T, 2, num_kv_heads, ...].
    """
    if target.current()[0] == "cpu":
        return pool, slot_index(blocks, layer, slice(None), offsets)
    k_or_v = jnp.arange(2, dtype=jnp.int32)
    rows = _heads_row(pool.shape[1], blocks[:, None], layer, k_or_v)
    return pool.reshape(-1, *pool.shape[3:]), (rows, slice(None), offsets[:, None])


def whole_blocks(blocks: jax.Array) -> jax.Array:
    """A view of blocks [C, ...] of pages or scales that keeps the first axis.

    As in `token_slots`: [C, num_layers * 2, num_kv_heads, the rest]; on a CPU, the array itself.
    """
    if target.current()[0] == "cpu":
        return blocks
    shape = blocks.shape
    parts = shape[1:3], shape[3:4], shape[4:]
    return blocks.reshape(shape[0], *map(math.prod, parts))


def blocks_shape(pool: jax.Array, num_blocks: int) -> tuple[int, ...]:
    """Shape of `num_blocks` blocks of pages or scales outside the pool."""
    return (num_blocks, *pool.shape[1:])


def or_past_pool(blocks: jax.Array, kv_pages: jax.Array) -> jax.Array:
    """Block ids i32; ids outside the pool move past its end, where gathers and scatters drop them.

    XLA alone would wrap -1 to the last block.
    """
    num_blocks = kv_pages.shape[0]
    return jnp.where((blocks >= 0) & (blocks < num_blocks), blocks, num_blocks).astype(jnp.int32)


def or_null(name: str, blocks: ArrayLike, kv_pages: jax.Array) -> jax.Array:
    """Block ids i32; ids outside the pool are padding and become the null block.

    Ids on the host are compared on the host, since JAX keeps only the lower half of 64 bits.

    Raises:
      ValueError: the ids are not integers.
    """
    if not isinstance(blocks, jax.Array):
        blocks = np.asarray(blocks)
    if not jnp.issubdtype(blocks.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {blocks.dtype}")
    num_blocks = kv_pages.shape[0]
    return jnp.where((blocks >= 0) & (blocks < num_blocks), blocks, 0).astype(jnp.int32)
