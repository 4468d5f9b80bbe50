"""Writes K and V of a step's tokens into their slots of the pool, in place.

Data movement: T rows of head_dim elements per head, K and V (for int8 pages, codes and one scale
each); nothing else of the pool is read or written when the surrounding jit donates it.

On a GPU this is XLA's scatter. Compiled for an H200 and Llama-3-8B's pool, it is one kernel, in
place and without temporaries: one element per thread for the 64 tokens of a decode step, which do
not fill the GPU, and 8 bytes per store for the 512 of a prefill step. With int8 pages there are
three kernels, for the rows' largest elements, the codes and the scales. A custom kernel could not
do better. Two details make this possible:

- `unique_indices`. Where tokens may share a slot, XLA writes each element of 8 or 16 bits by a
  separate compare-and-swap.
- The view of `token_slots`. Through the six axes of the pool, XLA cannot prove that a token's row
  is aligned, and stores its elements one by one.
"""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.pallas_kernels.formats import check_scales, quantise
from jaxkv.pallas_kernels.layout import PoolShape, or_past_pool, slot_index, token_slots


@overload
def scatter_kv(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array,
    *, layer: int, kv_scales: None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def scatter_kv(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array,
    *, layer: int, kv_scales: jax.Array,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


def scatter_kv(kv_pages, k, v, blocks, offsets, *, layer, kv_scales=None):
    """Returns kv_pages with the tokens' K and V in slots (blocks, offsets) of `layer`.

    Args:
      kv_pages: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
      k: [T, num_kv_heads, head_dim].
      v: [T, num_kv_heads, head_dim].
      blocks: i32[T], block of each token; tokens with an id outside [0, num_blocks) are dropped.
      offsets: i32[T], slot inside the block. Tokens that are not dropped must not share a slot.
      layer: layer of the pool.
      kv_scales: [num_blocks, num_layers, 2, num_kv_heads, block_size], exactly if the pages are
        int8; k and v are then quantised.

    Returns:
      The pages; with `kv_scales`, (pages, scales).

    Raises:
      ValueError: `layer` is not in the pool; scales are missing, unexpected, or of another shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.scatter_kv import scatter_kv
      >>> pages, k = jnp.zeros((2, 1, 2, 1, 4, 1)), jnp.array([[[5.0]], [[6.0]]])
      >>> blocks, offsets = jnp.array([1, -1]), jnp.array([2, 3])  # the second is padding
      >>> pages = scatter_kv(pages, k, -k, blocks, offsets, layer=0)
      >>> pages[1, 0, :, 0, :, 0].tolist()
      [[0.0, 0.0, 5.0, 0.0], [0.0, 0.0, -5.0, 0.0]]
    """
    num_layers = PoolShape.of(kv_pages).num_layers
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}), got {layer}")
    check_scales(kv_pages, kv_scales)
    kv = jnp.stack([k, v], axis=1)  # [T, 2, H, D]
    blocks = or_past_pool(blocks, kv_pages)

    def put(pool: jax.Array, tokens: jax.Array) -> jax.Array:
        view, index = token_slots(pool, blocks, layer, offsets)
        tokens = tokens.astype(pool.dtype)
        return view.at[index].set(tokens, mode="drop", unique_indices=True).reshape(pool.shape)

    if kv_scales is None:
        return put(kv_pages, kv)
    codes, scales = quantise(kv, kv_scales.dtype)
    return put(kv_pages, codes), put(kv_scales, scales)


def scatter_kv_reference(
    kv_pages: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    blocks: np.ndarray,
    offsets: np.ndarray,
    *,
    layer: int,
    kv_scales: np.ndarray | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`scatter_kv`, one token at a time on the host; for tests."""
    pages = np.array(kv_pages)
    scales = None if kv_scales is None else np.array(kv_scales)
    for t, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        if not 0 <= block < len(pages):
            continue
        for i, x in enumerate((k[t], v[t])):
            slot = slot_index(block, layer, i, offset)
            if scales is None:
                pages[slot] = x
            else:
                codes, row = quantise(jnp.asarray(x), scales.dtype)
                pages[slot] = codes
                scales[slot] = row
    return pages if scales is None else (pages, scales)
