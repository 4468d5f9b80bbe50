"""Writes K and V of a step's tokens into their slots of the pool, in place.

Data movement: T pieces of head_dim elements per head, K and V; nothing else of the pool is read
or written when the surrounding jit donates it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def scatter_kv(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    offsets: jax.Array,
    *,
    layer: int,
) -> jax.Array:
    """kv_pages with the tokens' K and V in slots (blocks, offsets) of `layer`.

    Args:
      kv_pages: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
      k: [T, num_kv_heads, head_dim].
      v: [T, num_kv_heads, head_dim].
      blocks: i32[T]; outside [0, num_blocks) means dropped. (XLA alone would wrap a -1 to the
        last block before it drops.)
      offsets: i32[T], slot inside the block.
    """
    num_blocks = kv_pages.shape[0]
    kv = jnp.stack([k, v], axis=1).astype(kv_pages.dtype)  # [T, 2, H, D]
    blocks = jnp.where((blocks >= 0) & (blocks < num_blocks), blocks, num_blocks)
    return kv_pages.at[blocks, layer, :, :, offsets].set(kv, mode="drop")


def scatter_kv_reference(
    kv_pages: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    blocks: np.ndarray,
    offsets: np.ndarray,
    *,
    layer: int,
) -> np.ndarray:
    """The same, a token at a time on the host. Tests only."""
    out = np.array(kv_pages)
    for t, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        if 0 <= block < len(out):
            out[block, layer, 0, :, offset] = k[t]
            out[block, layer, 1, :, offset] = v[t]
    return out
