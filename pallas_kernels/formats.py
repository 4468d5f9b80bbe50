"""Page formats: the meaning of the element type of a pool's pages.

    float pages   unquantised K and V, in the dtype of the queries or another float type.
    int8 pages    symmetric, one scale per token and KV head: k = code * scale.

The table needs no JAX, since host code reads it; the functions on arrays import JAX when called. A
new format is an entry in `FORMATS` and a case in `quantise` and `dequantise`.
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
    """An element type of pages.

    Attributes:
      name: name of the dtype.
      dtype: element type of the pages.
      scale_dtypes: names of the element types that the scales may have; empty without scales.
    """

    name: str
    dtype: np.dtype
    scale_dtypes: tuple[str, ...] = ()

    @property
    def quantised(self) -> bool:
        """Whether the pages have scales."""
        return bool(self.scale_dtypes)

    def row_bytes(self, head_dim: int, scale_dtype: str) -> int:
        """Bytes of one token's K or V in one head, scale included."""
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
    """Returns the format of pages of a dtype.

    Args:
      dtype: a dtype, or the name of one.

    Raises:
      ValueError: the dtype is not a page format.

    Example:
      >>> format_of("int8").quantised, format_of(np.float32).row_bytes(64, "float32")
      (True, 256)
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in FORMATS:
        raise ValueError(f"dtype of pages must be one of {', '.join(FORMATS)}, got {name}")
    return FORMATS[name]


def quantise(x: jax.Array, scale_dtype: DTypeLike = np.float32) -> tuple[jax.Array, jax.Array]:
    """Quantises x to int8 codes with one scale per row of the last axis: x is about code * scale.

    The scale is rounded to its dtype before the codes are computed, so that the codes fit the scale
    that will be read: the error of an element is at most half a scale (three quarters for the
    largest elements, if a bfloat16 scale was rounded down).

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
    """Returns float32 values [..., head_dim] of page elements; for reference implementations."""
    numbers = codes.astype(np.float32)
    return numbers if scales is None else numbers * scales.astype(np.float32)[..., None]


def check_scales(kv_pages: jax.Array, kv_scales: jax.Array | None) -> None:
    """Raises ValueError unless scales are given exactly if the page format requires them."""
    page_format = format_of(kv_pages.dtype)
    if not page_format.quantised:
        if kv_scales is not None:
            raise ValueError(
                f"kv_scales must be None: {kv_pages.dtype} pages have no scales, only int8 pages do"
            )
        return
    expected = kv_pages.shape[:-1]
    if kv_scales is None:
        raise ValueError(
            f"{page_format.name} pages need kv_scales of shape {expected}: pass the scales that "
            "scatter_kv returned with the pages"
        )
    if kv_scales.shape != expected:
        raise ValueError(
            f"kv_scales.shape must be {expected} (one scale per token and head of "
            f"{kv_pages.shape=}), got {kv_scales.shape}"
        )
    if kv_scales.dtype.name not in page_format.scale_dtypes:
        allowed = " or ".join(page_format.scale_dtypes)
        raise ValueError(f"kv_scales must be {allowed}, got {kv_scales.dtype}")
