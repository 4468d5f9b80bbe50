"""Lengths, positions and other metadata as 32-bit integers: conversion with checks, and a search.

JAX itself silently keeps the lower half of a 64-bit NumPy array: a length of 2**32 + 5 would become
a length of 5.
"""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

_INT32 = np.iinfo(np.int32)


@overload
def int32(name: str, x: np.ndarray) -> np.ndarray: ...
@overload
def int32(name: str, x: ArrayLike) -> jax.Array | np.ndarray: ...


def int32(name: str, x: ArrayLike) -> jax.Array | np.ndarray:
    """Returns x as int32; a host array stays on the host.

    Args:
      name: name of the argument in error messages.
      x: integers of any type. The values of a host array are checked; those of a JAX array are not,
        since inside a jitted function they are unknown.

    Raises:
      ValueError: x does not hold integers, or they do not fit 32 bits.

    Example:
      >>> import numpy as np
      >>> from jaxkv.pallas_kernels.integers import int32
      >>> int32("seq_lens", np.array([5, 3], np.uint64))
      array([5, 3], dtype=int32)
    """
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        if not x.size:  # an empty list has no type of its own
            x = x.astype(np.int32)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {x.dtype}")
    if x.dtype == np.int32:
        return x
    if isinstance(x, np.ndarray):
        for value in (x.min(), x.max()):
            if not _INT32.min <= value <= _INT32.max:
                raise ValueError(f"{name} holds {value}, which does not fit 32 bits")
    return x.astype(np.int32)


def count_up_to(ordered: jax.Array, x: ArrayLike) -> jax.Array:
    """Number i32 of entries of `ordered` that are at most x, for each x.

    JAX's default search is a loop, and on a GPU each loop ends the CUDA graph and waits for the
    host once per round. Here all entries are compared at once.

    Args:
      ordered: [n], not decreasing.
      x: any shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.integers import count_up_to
      >>> count_up_to(jnp.array([0, 3, 3]), jnp.array([-1, 0, 3])).tolist()
      [0, 1, 3]
    """
    return jnp.searchsorted(ordered, x, side="right", method="compare_all").astype(jnp.int32)
