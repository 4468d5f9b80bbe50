"""Rotary position embedding: one table of frequencies, phases in float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.config import Llama3Scaling


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: Llama3Scaling | None = None,
    divisors: tuple[float, ...] | None = None,
) -> np.ndarray:
    """f32[head_dim // 2]; radians per position of each pair of elements.

    Args:
      divisors: head_dim // 2 explicit factors to divide by, as GGUF files carry them; they
        replace `scaling`.
    """
    inv = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if divisors is not None:
        inv = inv / np.asarray(divisors, np.float64)
    elif scaling is not None:
        wavelength = 2 * math.pi / inv
        original = scaling.original_max_position_embeddings
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        inv = (1 - smooth) * inv / scaling.factor + smooth * inv
    return inv.astype(np.float32)


def rope_phases(positions: jax.Array, inv_freq: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[..., 1, head_dim // 2] with an axis for heads, of integer positions [...].

    Raises:
      ValueError: positions that are not integers (bf16 rounds positions above 256).
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be integers, got {positions.dtype}")
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(inv_freq)
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, phases: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates pairs (i, i + head_dim // 2) of x [..., heads, head_dim] in float32."""
    cos, sin = phases
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
