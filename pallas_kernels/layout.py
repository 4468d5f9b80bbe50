"""Where a page lies in the pool: the one place that knows the order of the pool's axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def page_rows(kv_pages: jax.Array) -> jax.Array:
    """The pool as [rows, block_size, head_dim]: one row is one page of one layer, K or V, head."""
    return kv_pages.reshape(-1, *kv_pages.shape[-2:])


def page_row(pool_shape: tuple[int, ...], block, layer, k_or_v, head):
    """Row in `page_rows` of a page; arguments broadcast. Rows, not elements: they fit an int32."""
    _, num_layers, _, num_kv_heads, _, _ = pool_shape
    return ((block * num_layers + layer) * 2 + k_or_v) * num_kv_heads + head


def or_past_pool(blocks: jax.Array, kv_pages: jax.Array) -> jax.Array:
    """Block ids i32, those outside the pool moved past its end, where gathers and scatters see it.

    XLA alone would wrap a -1 to the last block.
    """
    num_blocks = kv_pages.shape[0]
    return jnp.where((blocks >= 0) & (blocks < num_blocks), blocks, num_blocks).astype(jnp.int32)
