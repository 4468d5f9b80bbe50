"""Pages as operands of attention, gathered and converted (see `formats` for the page formats).

A scale is constant along head_dim, so it is never multiplied into the codes: it is factored out of
the dot product on the K side and into the weights on the V side,

    logit_t = (q . code_t) * scale_t,    out = sum_t (weight_t * scale_t) * code_t

which is one multiplication per key and not one per element. Data movement: the pages in a slice of
the block table are gathered in their own dtype and converted on the way; with scales, one more
number per token and head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.pallas_kernels.layout import PoolShape, page_row, page_rows, scale_rows

MASKED = -1e30  # logit of a masked key: finite, so that a fully masked tile gives no NaN


class Tile(NamedTuple):
    """Keys and values of some pages, as operands of the two products of attention.

    Attributes:
      k: [..., num_kv_heads, tokens, head_dim]; if unquantised, multiplied by the logits' scale.
      v: [..., num_kv_heads, tokens, head_dim]; if float32, doubled.
      k_scale: f32[..., num_kv_heads, tokens], factors of the logits; None if unquantised.
      v_scale: f32[..., num_kv_heads, tokens], factors of the weights; None if unquantised.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    def logits(self, q: jax.Array) -> jax.Array:
        """Scaled logits f32[..., h, rows, tokens] of queries [..., h, rows, head_dim]."""
        s = jnp.einsum("...hqd,...htd->...hqt", q, self.k, preferred_element_type=jnp.float32)
        return s if self.k_scale is None else s * self.k_scale[..., None, :]

    def weighted(self, weights: jax.Array, needed: jax.Array) -> jax.Array:
        """Sum f32[..., h, rows, head_dim] of the values with weights f32[..., h, rows, tokens].

        needed broadcasts to [..., h, tokens]. A slot that is not needed must not even be
        multiplied by 0: it may be recycled, and 0 x NaN is NaN.
        """
        if self.v_scale is None:
            v = jnp.where(needed[..., None], self.v, jnp.zeros_like(self.v))
        else:
            v = self.v  # codes are finite
            weights = weights * jnp.where(needed, self.v_scale, 0)[..., None, :]
        weights = weights.astype(v.dtype)
        out = jnp.einsum("...hqt,...htd->...hqd", weights, v, preferred_element_type=jnp.float32)
        return out / 2 if v.dtype == jnp.float32 and self.v_scale is None else out


def read_pages(
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    blocks: jax.Array,
    layer: int,
    scale: float,
    dtype: DTypeLike,
) -> Tile:
    """Reads the pages `blocks` i32[..., P] of a layer: P * block_size tokens, in order.

    Unquantised K is multiplied by the logits' scale, and float32 V is doubled (exactly, and without
    overflow), since XLA's CPU code vectorises a gather that computes something: with K alone 33
    against 44 ms a step to read 32 sequences of 281 tokens of a 30-layer model; with V too, one
    sequence of 1024 tokens takes 1.2 times dense attention's time, against 1.4.
    """
    shape = PoolShape.of(kv_pages)
    heads = jnp.arange(shape.num_kv_heads, dtype=jnp.int32)[:, None]
    k_row, v_row = (  # [..., H, P]
        page_row(shape, blocks[..., None, :], layer, k_or_v, heads) for k_or_v in range(2)
    )
    tokens = (*k_row.shape[:-1], -1)

    def take(rows: jax.Array, at: jax.Array, dtype: DTypeLike) -> jax.Array:
        return rows.at[at].get(mode="promise_in_bounds").astype(dtype)

    pages = page_rows(kv_pages)
    k, v = take(pages, k_row, dtype), take(pages, v_row, dtype)
    if kv_scales is None:
        k, k_scale, v_scale = k * scale, None, None
        v = v * 2 if v.dtype == jnp.float32 else v
    else:
        scales = scale_rows(kv_scales)
        k_scale = take(scales, k_row, jnp.float32).reshape(tokens) * scale
        v_scale = take(scales, v_row, jnp.float32).reshape(tokens)
    wide = (*tokens, shape.head_dim)
    return Tile(k.reshape(wide), v.reshape(wide), k_scale, v_scale)
