"""Where a page lies in the pool: the one place that knows the order of the pool's axes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv.pallas_kernels import target


def page_rows(kv_pages: jax.Array) -> jax.Array:
    """The pool as [rows, block_size, head_dim]: one row is one page of one layer, K or V, head."""
    return kv_pages.reshape(-1, *kv_pages.shape[-2:])


def page_row(pool_shape: tuple[int, ...], block, layer, k_or_v, head):
    """Row in `page_rows` of a page; arguments broadcast. Rows, not elements: they fit an int32."""
    return heads_row(pool_shape, block, layer, k_or_v) * pool_shape[3] + head


def heads_row(pool_shape: tuple[int, ...], block, layer, k_or_v):
    """Row of all heads' pages of a block's K or V in a layer; arguments broadcast."""
    return (block * pool_shape[1] + layer) * 2 + k_or_v


def token_slots(pool: jax.Array, blocks, layer: int, offsets) -> tuple[jax.Array, tuple[Any, ...]]:
    """The pool or its scales in a view, and where tokens' K and V are in it.

    The view has few axes, but one for the heads, which may be divided over devices: on a GPU, XLA
    writes several elements at once only where it sees that they are aligned, and through six axes
    it does not. On a CPU there is no such gain, and where there is one head, a copy of the pool.

    Args:
      blocks: i32[T].
      layer: of the pool.
      offsets: i32[T].

    Returns:
      (view, index); `view[index]` is [T, 2, num_kv_heads, ...].
    """
    if target.current()[0] == "cpu":
        return pool, (blocks, layer, slice(None), slice(None), offsets)
    rows = heads_row(pool.shape, blocks[:, None], layer, jnp.arange(2, dtype=jnp.int32))
    return pool.reshape(-1, *pool.shape[3:]), (rows, slice(None), offsets[:, None])


def whole_blocks(blocks: jax.Array) -> jax.Array:
    """Blocks [C, ...] of pages or scales in a view whose first axis is still theirs.

    As in `token_slots`: [C, num_layers * 2, num_kv_heads, the rest], and on a CPU as they are.
    """
    if target.current()[0] == "cpu":
        return blocks
    shape = blocks.shape
    parts = shape[1:3], shape[3:4], shape[4:]
    return blocks.reshape(shape[0], *map(math.prod, parts))


def or_past_pool(blocks: jax.Array, kv_pages: jax.Array) -> jax.Array:
    """Block ids i32, those outside the pool moved past its end, where gathers and scatters see it.

    XLA alone would wrap a -1 to the last block.
    """
    num_blocks = kv_pages.shape[0]
    return jnp.where((blocks >= 0) & (blocks < num_blocks), blocks, num_blocks).astype(jnp.int32)


def or_null(name: str, blocks: ArrayLike, kv_pages: jax.Array) -> jax.Array:
    """Block ids i32, those outside the pool replaced by the null block: they can only be padding.

    Ids that come from the host are compared there: JAX keeps the lower half of 64 bits.

    Raises:
      ValueError: ids that are no integers.
    """
    if not isinstance(blocks, jax.Array):
        blocks = np.asarray(blocks)
    if not jnp.issubdtype(blocks.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {blocks.dtype}")
    num_blocks = kv_pages.shape[0]
    return jnp.where((blocks >= 0) & (blocks < num_blocks), blocks, 0).astype(jnp.int32)
