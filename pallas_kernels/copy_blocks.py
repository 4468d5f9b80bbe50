"""Copies whole blocks inside the pool (copy-on-write).

Data movement: C blocks are read and then written; XLA's scatter does it in place when the
surrounding jit donates the pool.
"""

from __future__ import annotations

import jax

from pallas_kernels.layout import or_past_pool


def copy_blocks(kv_pages: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """kv_pages with `kv_pages[destinations] = kv_pages[sources]`; reads come before writes.

    Args:
      kv_pages: [num_blocks, ...], donated by the surrounding jit.
      sources: i32[C], each a block of the pool.
      destinations: i32[C]; outside [0, num_blocks): dropped (padding).
    """
    if sources.shape[0] == 0:
        return kv_pages
    destinations = or_past_pool(destinations, kv_pages)
    return kv_pages.at[destinations].set(kv_pages[sources], mode="drop")
