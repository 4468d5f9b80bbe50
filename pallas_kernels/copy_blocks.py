"""Copies whole blocks inside the pool (copy-on-write). XLA's scatter does it in place."""

from __future__ import annotations

import jax


def copy_blocks(kv_pages: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """kv_pages with `kv_pages[destinations] = kv_pages[sources]`; reads come before writes.

    Args:
      kv_pages: [num_blocks, ...], donated by the surrounding jit.
      sources: i32[C], each a block of the pool.
      destinations: i32[C]; at or above num_blocks: dropped (padding).
    """
    if sources.shape[0] == 0:
        return kv_pages
    return kv_pages.at[destinations].set(kv_pages[sources], mode="drop")
