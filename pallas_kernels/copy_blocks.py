"""Copies whole blocks inside the pool (copy-on-write).

Data movement: C blocks are read into a buffer and written from there, in place when the surrounding
jit donates the pool: twice the bytes that a copy takes, of the few blocks that a step may copy.

On a GPU that is XLA's gather and scatter, one kernel each. Compiled for an H200 and Llama-3-8B's
pool they move 8 bytes a load and a store, and the buffer is all their temporary memory. The barrier
between them is needed: fused into one they would write what they read, and XLA then copied the pool
before and after. On `unique_indices` see `scatter_kv`, on the view of the blocks `layout`.
"""

from __future__ import annotations

import jax
from jax import lax

from jaxkv.pallas_kernels.layout import or_past_pool, whole_blocks


def copy_blocks(kv_pages: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """kv_pages with `kv_pages[destinations] = kv_pages[sources]`; reads come before writes.

    Args:
      kv_pages: [num_blocks, ...], donated by the surrounding jit.
      sources: i32[C], each a block of the pool.
      destinations: i32[C], no block twice; outside [0, num_blocks): dropped (padding).

    Returns:
      The pages, of the same shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.copy_blocks import copy_blocks
      >>> pages = jnp.array([[1], [2], [3]])
      >>> copy_blocks(pages, jnp.array([0, 1]), jnp.array([1, -1])).tolist()
      [[1], [1], [3]]
    """
    if sources.shape[0] == 0:
        return kv_pages
    blocks = whole_blocks(kv_pages)
    copied = lax.optimization_barrier(blocks[sources])
    destinations = or_past_pool(destinations, kv_pages)
    written = blocks.at[destinations].set(copied, mode="drop", unique_indices=True)
    return written.reshape(kv_pages.shape)
