"""Matrix products with weights stored [out, in], as in checkpoints."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

_FEW_ROWS = range(2, 17)


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] @ weight [out, in]^T -> [..., out]."""
    rows = x.size // x.shape[-1]
    if x.ndim == 2 and rows in _FEW_ROWS:
        return lax.platform_dependent(x, weight, cpu=_few_rows_on_cpu, default=_dot)
    if rows == 1 and x.dtype == jnp.bfloat16:
        return lax.platform_dependent(x, weight, cpu=_one_row_on_cpu, default=_dot)
    return _dot(x, weight)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def _few_rows_on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same product with the weight as left operand, which XLA's CPU library reads in place.

    The library repacks a right operand in full at every step. On two cores 30 layers of SmolLM2's
    MLP took 24 ms this way against 29 ms (8 rows) and 19 against 31 ms (2 rows); at 32 rows there
    is no gain. Without the barrier XLA swaps the operands back.
    """
    out = lax.dot_general(weight, x, (((1,), (1,)), ((), ())))
    return lax.optimization_barrier(out).T


def _one_row_on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same product as one of two equal rows, which XLA's CPU library multiplies in bfloat16.

    It has no such product of a vector and converts all of the weight to float32 first: 57 ms and a
    copy of 67 MB for [2048, 8192], against 7 ms (`benchmarks/cpu_linear.py`). Without the barrier
    XLA drops the second row before it multiplies.
    """
    rows = x.reshape(1, -1)
    out = lax.optimization_barrier(_dot(jnp.concatenate([rows, rows]), weight))
    return out[:1].reshape(*x.shape[:-1], -1)


class Linear(nnx.Module):
    """x @ weight^T + bias.

    Args:
      width_in: size of x's last axis.
      width_out: size of the result's last axis.
      bias: whether to add a bias.
      dtype: element type of the parameters.
      rngs: random streams of the initial weight.
    """

    def __init__(self, width_in: int, width_out: int, *, bias: bool, dtype: Any, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.weight = nnx.Param(init(rngs.params(), (width_out, width_in), dtype))
        self.bias = nnx.Param(jnp.zeros(width_out, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        out = project(x, self.weight[...])
        return out if self.bias is None else out + self.bias[...]
