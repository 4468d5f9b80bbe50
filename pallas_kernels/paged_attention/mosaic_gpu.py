"""The GPU form of paged attention: the decode or the prefill kernel, and what joins their outputs.

Data movement: none of its own beyond the outputs of splits, which are read once and merged, and a
sink, which scales the output.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.decode_ampere import decode_ampere
from pallas_kernels.paged_attention.decode_gpu import decode_gpu
from pallas_kernels.paged_attention.decode_steps_gpu import num_splits
from pallas_kernels.paged_attention.merge import merge_attention, with_sinks
from pallas_kernels.paged_attention.prefill_ampere import prefill_ampere
from pallas_kernels.paged_attention.prefill_gpu import prefill_gpu
from pallas_kernels.paged_attention.products_gpu import product_of


@functools.partial(
    jax.jit,
    static_argnames=(
        "scale", "window", "soft_cap", "max_query_len", "compute_capability", "interpret"
    ),
)  # fmt: skip
def attend_gpu(
    q, kv_pages, kv_scales, tables, lens, query_start, sinks,
    *, layer, scale, window, soft_cap, max_query_len, compute_capability, interpret,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(out [T, Hq, D], lse f32[T, Hq]); arguments checked, table entries in the pool.

    A jitted function of its own, so that it is traced and compiled once for all layers.
    """
    width = tables.shape[1] * kv_pages.shape[4]  # tokens of the longest sequence
    lens = jnp.minimum(lens, width)
    options: dict[str, Any] = dict(
        layer=layer, scale=scale, window=window, soft_cap=soft_cap, interpret=interpret,
        product=product_of(compute_capability, interpret),
    )  # fmt: skip
    if max_query_len == 1:
        lens = jnp.where(query_start[1:] > query_start[:-1], lens, 0)
        seen = width if window is None else min(width, window)
        splits = num_splits(len(q), kv_pages.shape[3], seen)
        decode = decode_ampere if compute_capability[0] == 8 else decode_gpu
        outs, lses = decode(
            q, kv_pages, tables, lens, kv_scales=kv_scales, splits=splits, **options
        )
        if splits == 1:
            out, lse = outs[0, 0], lses[0]
        else:
            out, lse = merge_attention(outs.astype(jnp.float32).sum(axis=1), lses)
    else:
        prefill = prefill_ampere if compute_capability[0] == 8 else prefill_gpu
        out, lse = prefill(q, kv_pages, tables, lens, query_start, **options)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
