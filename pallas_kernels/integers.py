"""Lengths, positions and the like as 32-bit integers: what they are not is refused.

JAX itself keeps the lower half of a 64-bit NumPy array without a word, and a length of 2**32 + 5
would be one of 5.
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
    """x in int32, on the host if it came from there.

    Args:
      name: for the error.
      x: integers of any type. Values are looked at where they are on the host; those of a JAX array
        are not, and inside a jitted function they are not known.

    Raises:
      ValueError: other numbers than integers, or integers that do not fit.

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
