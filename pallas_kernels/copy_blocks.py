"""Copies whole blocks inside the pool (copy-on-write).

Data movement: C blocks are read into a buffer and written from there, in place when the surrounding
jit donates the pool: twice the bytes of a direct copy, for the few blocks that a step may copy.

On a GPU these are XLA's gather and scatter, one kernel each. Compiled for an H200 and Llama-3-8B's
pool, they move 8 bytes per load and store, and the buffer is their only temporary memory. The
barrier between them is needed: fused, they would write the array that they read, and XLA then
copied the pool before and after. `scatter_kv` explains `unique_indices`, `layout` the view of the
blocks.
"""

from __future__ import annotations

import jax
from jax import lax

from jaxkv.pallas_kernels.layout import or_past_pool, whole_blocks


def copy_blocks(kv_pages: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """Returns kv_pages after `kv_pages[destinations] = kv_pages[sources]`; reads precede writes.

    Args:
      kv_pages: [num_blocks, ...], donated by the surrounding jit.
      sources: i32[C], blocks of the pool.
      destinations: i32[C], without repeated blocks; ids outside [0, num_blocks) are padding and
        dropped.

    Returns:
      The pages, in the same shape.

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
