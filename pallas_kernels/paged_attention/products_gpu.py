"""Matrix products of the GPU kernels: operands in shared memory, float32 sums in registers.

Hopper multiplies by `wgmma`, which reads both operands from shared memory. Ampere and Blackwell
multiply by `mma.sync`, which all GPUs from Ampere on have; its operands pass through registers. The
sums have the same layout, `Layout.WGMMA`, so the rest of a kernel is the same. Blackwell's
`tcgen05` would multiply faster, but decode is bound by memory and would gain nothing.

When a product returns, its operands may be overwritten, also by TMA. `wgmma` reads through the
async proxy, as TMA writes, and the product waits for it. `mma.sync` needs loads, which go through
the generic proxy, so a fence follows them: without it, a copy into the stage could overtake them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Product(Protocol):
    """Multiplication of two operands in shared memory."""

    def __call__(self, a: Any, b: Any, sums: jax.Array | None = None) -> jax.Array:
        """Returns sums + a @ b, f32[M, N] in `Layout.WGMMA`; a [M, K], b [K, N] of 16 bits,
        M % 64 = 0."""
        ...


def product_of(compute_capability: tuple[int, int], interpret: Any) -> Product:
    """Returns the product for GPUs of this compute capability.

    Interpreted kernels use a dot product in place of `mma.sync`, which Pallas's interpreter does
    not support: it only transforms registers, and interpretation checks the copies and barriers
    around it.
    """
    if compute_capability[0] == 9:
        return _wgmma
    multiply = _interpreted_mma if interpret else plgpu.mma
    copies_by_tma = compute_capability[0] > 8
    return functools.partial(_mma, multiply=multiply, fence=copies_by_tma)


def _wgmma(a, b, sums=None):
    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    product = pl.run_scoped(
        multiply,
        plgpu.ACC(  # pyright: ignore[reportPrivateImportUsage]
            (a.shape[0], b.shape[1]), jnp.float32
        ),
    )
    return product if sums is None else sums + product


def _mma(a, b, sums=None, *, multiply, fence):
    lhs, rhs = plgpu.Layout.MMA_LHS(a.dtype), plgpu.Layout.MMA_RHS(b.dtype)
    if sums is None:
        zeros = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
        sums = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    depth = a.shape[1]
    piece = math.gcd(depth, 64)  # whole tiles of shared memory, and few registers at a time
    for k in range(0, depth, piece):
        at = pl.ds(k, piece)
        left = plgpu.load(a.at[:, at], layout=lhs, optimized=False)
        sums = multiply(sums, left, plgpu.load(b.at[at], layout=rhs, optimized=False))
    if fence:
        plgpu.commit_smem()
    return sums


def _interpreted_mma(sums, a, b):
    return sums + jnp.dot(a, b, preferred_element_type=jnp.float32)
