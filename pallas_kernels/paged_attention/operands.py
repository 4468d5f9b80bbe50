"""How a page's bytes become the operands of attention: the one place that knows formats.

    float pages   K and V are what lies there, in the dtype of the queries.
    int8 pages    symmetric, one scale per token and KV head: k = code * scale.

A scale is the same along head_dim, so it is never multiplied into the codes: it comes out of the
dot product on the K side and goes into the weights on the V side,

    logit_t = (q . code_t) * scale_t,    out = sum_t (weight_t * scale_t) * code_t

which is one multiplication per key and not one per element. Data movement: the pages named by a
slice of the block table are gathered in their own dtype and converted on the way; with scales, one
number more per token and head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.pallas_kernels.layout import page_row, page_rows

MASKED = -1e30  # logit of a key that is not seen: finite, so that a fully masked tile makes no NaN
_SMALLEST = 1e-30  # keeps the scale of a row of zeros from being 0


class Tile(NamedTuple):
    """Keys and values of some pages, ready for the two products of attention.

    Attributes:
      k: [..., num_kv_heads, tokens, head_dim]; times the scale of the logits if unquantised.
      v: [..., num_kv_heads, tokens, head_dim]; twice as large as it is if float32.
      k_scale: f32[..., num_kv_heads, tokens], of the logits; None if k carries it.
      v_scale: f32[..., num_kv_heads, tokens], of the weights; None if unquantised.
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
        """The values' sum f32[..., h, rows, head_dim] under weights f32[..., h, rows, tokens].

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
    """The pages `blocks` i32[..., P] of a layer, tokens in order: P * block_size of them.

    Unquantised, the logits' scale is K's and not q's, and V is doubled (exactly, where it cannot
    overflow), since XLA's CPU code vectorises a gather that computes something: with K alone 33
    against 44 ms a step to read 32 sequences of 281 tokens of a 30-layer model; with V too, one
    sequence of 1024 in 1.2 times what dense attention takes, against 1.4.
    """
    num_kv_heads, _, head_dim = kv_pages.shape[3:]
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    k_row = page_row(kv_pages.shape, blocks[..., None, :], layer, 0, heads)  # [..., H, P]
    v_row = k_row + num_kv_heads
    tokens = (*k_row.shape[:-1], -1)

    def take(rows: jax.Array, at: jax.Array, dtype: DTypeLike) -> jax.Array:
        return rows.at[at].get(mode="promise_in_bounds").astype(dtype)

    pages = page_rows(kv_pages)
    k, v = take(pages, k_row, dtype), take(pages, v_row, dtype)
    if kv_scales is None:
        k, k_scale, v_scale = k * scale, None, None
        v = v * 2 if v.dtype == jnp.float32 else v
    else:
        scales = kv_scales.reshape(-1, kv_scales.shape[-1])
        k_scale = take(scales, k_row, jnp.float32).reshape(tokens) * scale
        v_scale = take(scales, v_row, jnp.float32).reshape(tokens)
    return Tile(k.reshape(*tokens, head_dim), v.reshape(*tokens, head_dim), k_scale, v_scale)


def dequantise(codes: jax.Array, scales: jax.Array | None) -> jax.Array:
    """float32 numbers [..., head_dim] from what pages hold, element by element: for references."""
    numbers = codes.astype(jnp.float32)
    return numbers if scales is None else numbers * scales.astype(jnp.float32)[..., None]


def quantise_int8(
    x: jax.Array, scale_dtype: DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """int8 codes of x and one scale for each row along the last axis: x is about code * scale.

    The scale is rounded to its dtype before the codes are made, so that they fit the scale that
    will be read: each element is off by half a scale at most (and, with a bfloat16 scale that was
    rounded down, the largest by three quarters).

    Args:
      x: [..., head_dim].
      scale_dtype: float32 or bfloat16.

    Returns:
      (codes int8[..., head_dim], scales [...]).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.paged_attention.operands import quantise_int8
      >>> codes, scales = quantise_int8(jnp.array([[-2.54, 0.02, 1.0]]))
      >>> codes.tolist(), [round(float(s), 6) for s in scales]
      ([[-127, 1, 50]], [0.02])
    """
    x = x.astype(jnp.float32)
    scales = (jnp.maximum(jnp.abs(x).max(axis=-1), _SMALLEST) / 127).astype(scale_dtype)
    codes = jnp.round(x / scales.astype(jnp.float32)[..., None])
    return jnp.clip(codes, -127, 127).astype(jnp.int8), scales


def check_scales(kv_pages: jax.Array, kv_scales: jax.Array | None) -> None:
    """Raises ValueError unless the pages have scales exactly if their format wants them."""
    if kv_pages.dtype != jnp.int8:
        if kv_scales is not None:
            raise ValueError(
                f"kv_scales belong to int8 pages, and these are {kv_pages.dtype}: leave them out"
            )
        return
    if kv_scales is None:
        raise ValueError(
            "int8 pages mean nothing without kv_scales: pass those that scatter_kv returned with "
            f"them, of shape {kv_pages.shape[:-1]}"
        )
    if kv_scales.shape != kv_pages.shape[:-1]:
        raise ValueError(
            f"one scale per token and head: {kv_scales.shape=}, but {kv_pages.shape[:-1]} fits "
            f"{kv_pages.shape=}"
        )
    if kv_scales.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"kv_scales are float32 or bfloat16, got {kv_scales.dtype}")
