"""Page formats: what the element type of a pool's pages means.

    float pages   K and V as they are, in the dtype of the queries or another float type.
    int8 pages    symmetric, one scale per token and KV head: k = code * scale.

The facts need no JAX (host code reads them); the functions on arrays import it when called. A new
format is an entry in `FORMATS`, and what `quantise` and `dequantise` do with it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike

_SMALLEST = 1e-30  # keeps the scale of a row of zeros from being 0


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """One element type of pages.

    Attributes:
      name: name of the dtype.
      dtype: element type of the pages.
      scale_dtypes: element types that the scales may have, by name; empty: no scales.
    """

    name: str
    dtype: np.dtype
    scale_dtypes: tuple[str, ...] = ()

    @property
    def quantised(self) -> bool:
        """Whether scales lie beside the pages."""
        return bool(self.scale_dtypes)

    def row_bytes(self, head_dim: int, scale_dtype: str) -> int:
        """Bytes of one token's K, or V, of one head; its scale included."""
        scale = np.dtype(scale_dtype).itemsize if self.quantised else 0
        return head_dim * self.dtype.itemsize + scale


FORMATS = {
    page_format.name: page_format
    for page_format in (
        PageFormat("float32", np.dtype(np.float32)),
        PageFormat("bfloat16", np.dtype(ml_dtypes.bfloat16)),
        PageFormat("float16", np.dtype(np.float16)),
        PageFormat("int8", np.dtype(np.int8), scale_dtypes=("float32", "bfloat16")),
    )
}


def format_of(dtype: Any) -> PageFormat:
    """The format of pages of this dtype.

    Args:
      dtype: a dtype, or the name of one.

    Raises:
      ValueError: pages cannot have it.

    Example:
      >>> format_of("int8").quantised, format_of(np.float32).row_bytes(64, "float32")
      (True, 256)
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in FORMATS:
        raise ValueError(f"pages cannot be {name}: dtype must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def quantise(x: jax.Array, scale_dtype: DTypeLike = np.float32) -> tuple[jax.Array, jax.Array]:
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
      >>> from jaxkv.pallas_kernels.formats import quantise
      >>> codes, scales = quantise(jnp.array([[-2.54, 0.02, 1.0]]))
      >>> codes.tolist(), [round(float(s), 6) for s in scales]
      ([[-127, 1, 50]], [0.02])
    """
    import jax.numpy as jnp

    x = x.astype(jnp.float32)
    scales = (jnp.maximum(jnp.abs(x).max(axis=-1), _SMALLEST) / 127).astype(scale_dtype)
    codes = jnp.round(x / scales.astype(jnp.float32)[..., None])
    return jnp.clip(codes, -127, 127).astype(jnp.int8), scales


def dequantise(codes: jax.Array, scales: jax.Array | None) -> jax.Array:
    """float32 numbers [..., head_dim] from what pages hold, element by element: for references."""
    numbers = codes.astype(np.float32)
    return numbers if scales is None else numbers * scales.astype(np.float32)[..., None]


def check_scales(kv_pages: jax.Array, kv_scales: jax.Array | None) -> None:
    """Raises ValueError unless the pages have scales exactly if their format wants them."""
    page_format = format_of(kv_pages.dtype)
    if not page_format.quantised:
        if kv_scales is not None:
            raise ValueError(
                f"kv_scales belong to int8 pages, and these are {kv_pages.dtype}: leave them out"
            )
        return
    expected = kv_pages.shape[:-1]
    if kv_scales is None:
        raise ValueError(
            f"{page_format.name} pages mean nothing without kv_scales: pass those that scatter_kv "
            f"returned with them, of shape {expected}"
        )
    if kv_scales.shape != expected:
        raise ValueError(
            f"one scale per token and head: {kv_scales.shape=}, but {expected} fits "
            f"{kv_pages.shape=}"
        )
    if kv_scales.dtype.name not in page_format.scale_dtypes:
        allowed = " or ".join(page_format.scale_dtypes)
        raise ValueError(f"kv_scales must be {allowed}, got {kv_scales.dtype}")
