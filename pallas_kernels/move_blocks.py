"""Gathers, writes and clears whole blocks of the pool, for swapping and transfers.

Data movement: C blocks, once each, all layers of a block together; the writes are in place when
the surrounding jit donates the pool. Callers pad the ids to a few sizes (any id outside the pool
is padding), so that each function compiles a few times and not for every count. All of them take
pages or scales.

On a GPU these are XLA's gather and scatter. Compiled for an H200 and Llama-3-8B's pool, each is one
kernel that moves 8 bytes per load and store (4 for int8 pages), with no copy of the pool and no
temporaries; `gather_blocks` has a second kernel, of C threads, that marks the padding ids. A custom
kernel could not do better. `scatter_kv` explains `unique_indices`, `layout` the view of the blocks.
"""

from __future__ import annotations

import jax

from jaxkv.pallas_kernels.layout import blocks_shape, or_past_pool, whole_blocks


def gather_blocks(kv_pages: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the blocks `ids`, side by side.

    Args:
      kv_pages: [num_blocks, ...].
      ids: i32[C]; ids outside [0, num_blocks) give zeros.

    Returns:
      [C, ...].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.move_blocks import gather_blocks
      >>> gather_blocks(jnp.array([[1], [2], [3]]), jnp.array([2, -1, 0])).tolist()
      [[3], [0], [1]]
    """
    ids = or_past_pool(ids, kv_pages)
    gathered = whole_blocks(kv_pages).at[ids].get(mode="fill", fill_value=0)
    return gathered.reshape(blocks_shape(kv_pages, len(ids)))


def put_blocks(kv_pages: jax.Array, staged: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns kv_pages with `staged[i]` in block `ids[i]`: the inverse of `gather_blocks`.

    Args:
      kv_pages: [num_blocks, ...], donated by the surrounding jit.
      staged: [C, ...], in the pages' dtype.
      ids: i32[C], without repeated blocks; ids outside [0, num_blocks) are dropped.

    Raises:
      ValueError: the staged blocks differ from this pool's blocks in shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.move_blocks import put_blocks
      >>> put_blocks(jnp.zeros((3, 1)), jnp.array([[7.0], [8.0]]), jnp.array([1, -1])).tolist()
      [[0.0], [7.0], [0.0]]
    """
    expected = blocks_shape(kv_pages, len(ids))
    if staged.shape != expected or staged.dtype != kv_pages.dtype:
        raise ValueError(
            f"staged must hold {len(ids)} blocks of {expected[1:]} {kv_pages.dtype}, got "
            f"{staged.shape=} {staged.dtype}"
        )
    return _set(kv_pages, ids, whole_blocks(staged))


def zero_blocks(kv_pages: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns kv_pages with zeros in the blocks `ids`.

    Args:
      kv_pages: [num_blocks, ...], donated by the surrounding jit.
      ids: i32[C], without repeated blocks; ids outside [0, num_blocks) are dropped.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.move_blocks import zero_blocks
      >>> zero_blocks(jnp.ones((3, 1)), jnp.array([1, -1])).tolist()
      [[1.0], [0.0], [1.0]]
    """
    return _set(kv_pages, ids, 0)


def _set(kv_pages: jax.Array, ids: jax.Array, values: jax.Array | int) -> jax.Array:
    ids = or_past_pool(ids, kv_pages)
    written = whole_blocks(kv_pages).at[ids].set(values, mode="drop", unique_indices=True)
    return written.reshape(kv_pages.shape)
