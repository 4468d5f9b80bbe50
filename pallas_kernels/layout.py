"""Where a page lies in the pool: the one place that knows the order of the pool's axes."""

from __future__ import annotations

import jax


def page_rows(kv_pages: jax.Array) -> jax.Array:
    """The pool as [rows, block_size, head_dim]: one row is one page of one layer, K or V, head."""
    return kv_pages.reshape(-1, *kv_pages.shape[-2:])


def page_row(kv_pages: jax.Array, block, layer, k_or_v, head):
    """Row in `page_rows` of a page; arguments broadcast. Rows, not elements: they fit an int32."""
    _, num_layers, _, num_kv_heads, _, _ = kv_pages.shape
    return ((block * num_layers + layer) * 2 + k_or_v) * num_kv_heads + head
