"""Merges partial attentions over disjoint keys into the attention over all of them.

    lse = log(sum_i exp(lse_i)),    out = sum_i exp(lse_i - lse) * out_i

Each part is normalised over its own keys; its log-sum-exp gives its share of the whole denominator.
Data movement: each partial output is read once, keys and values are not read. The merge allows keys
to be split: over the blocks of a long sequence (FlashDecoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), into a prefix that many sequences share
and the rest of each (cascade attention,
https://flashinfer.ai/2024/02/02/cascade-inference.html), or over devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge_attention(outs: jax.Array, lses: jax.Array, axis: int = 0) -> tuple[jax.Array, jax.Array]:
    """Merges attentions over parts of the keys into the attention over all of them.

    The parts must not share keys. A sink counts as a key: pass it to one part only.

    Args:
      outs: [..., parts, ..., head_dim], the output of each part.
      lses: [..., parts, ...], the natural log of each part's softmax denominator. A part with -inf
        has no keys and adds nothing, whatever its output.
      axis: axis of the parts in `lses` and `outs`; a negative axis counts from the end of `lses`.

    Returns:
      (out, lse) in float32, without the axis; 0 and -inf where no part has keys.

    Raises:
      ValueError: the shapes do not fit each other.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.paged_attention import merge_attention
      >>> outs = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]])  # two parts, one row, head_dim 2
      >>> out, lse = merge_attention(outs, jnp.log(jnp.array([[3.0], [1.0]])))
      >>> out.round(4).tolist(), jnp.exp(lse).round(4).tolist()
      ([[0.75, 0.25]], [4.0])
    """
    if outs.shape[:-1] != lses.shape or outs.ndim < 2 or not -lses.ndim <= axis < lses.ndim:
        raise ValueError(
            f"lses must hold one log-sum-exp per row of outs, with the parts along {axis=}, got "
            f"{outs.shape=} and {lses.shape=}"
        )
    axis %= lses.ndim
    outs, lses = outs.astype(jnp.float32), lses.astype(jnp.float32)
    top = lses.max(axis, keepdims=True)
    weights = jnp.exp(lses - jnp.where(top > -jnp.inf, top, 0))  # no inf - inf, which is NaN
    total = weights.sum(axis, keepdims=True)
    lse = (top + jnp.log(total)).squeeze(axis)
    shares = (weights / jnp.where(total > 0, total, 1))[..., None]
    return jnp.where(shares > 0, shares * outs, 0).sum(axis), lse


def with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds exp(sink) of each row's head to the denominator of an attention, in float32.

    Args:
      out: [T, num_q_heads, head_dim].
      lse: f32[T, num_q_heads]; rows of -inf have no query and do not change.
      sinks: f32[num_q_heads].

    Example:
      >>> import jax.numpy as jnp
      >>> out, lse = with_sinks(jnp.ones((1, 1, 2)), jnp.zeros((1, 1)), jnp.zeros(1))
      >>> out.tolist(), jnp.exp(lse).round(4).tolist()
      ([[[0.5, 0.5]]], [[2.0]])
    """
    seen = lse > -jnp.inf
    finite = jnp.where(seen, lse, 0)
    share = jax.nn.sigmoid(finite - sinks)[..., None]
    return out.astype(jnp.float32) * share, jnp.where(seen, jnp.logaddexp(finite, sinks), lse)
