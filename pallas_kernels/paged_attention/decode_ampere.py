"""Decode attention on Ampere: the products of `decode_gpu`, with pages loaded through registers.

Data movement: one thread block, of one warpgroup, per (sequence, KV head, split of the context). It
loads a tile of K and V into registers, each byte once, while it computes on the previous tile in
shared memory. The output is written as float32 [D, heads], since Ampere cannot store registers
transposed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv.pallas_kernels import target
from jaxkv.pallas_kernels.layout import PoolShape
from jaxkv.pallas_kernels.paged_attention.decode_steps_gpu import (
    finish,
    per_column,
    per_row,
    seen_tokens,
    split_span,
    start,
    weigh,
)
from jaxkv.pallas_kernels.paged_attention.launch_gpu import block_index, launch
from jaxkv.pallas_kernels.paged_attention.pages_ampere import TileLoader, copy_swizzle, load_rows
from jaxkv.pallas_kernels.paged_attention.pages_gpu import (
    TILE,
    PageReader,
    Pages,
    store,
    tiled,
)


def decode_ampere(
    q, kv_pages, tables, lens,
    *, layer, scale, window, soft_cap, kv_scales, splits, product, interpret,
):  # fmt: skip
    """Partial attentions of the splits: out f32[splits, 1, S, Hq, D], lse f32[splits, S, Hq].

    q [S, Hq, D]; kv_pages [N, L, 2, H, B, D], D a multiple of 64; tables i32[S, M], ids in the
    pool; lens i32[S]; layer i32[].
    """
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads = PoolShape.of(kv_pages).num_kv_heads
    group = num_q_heads // num_kv_heads
    heads = -(-group // 8) * 8
    reader = PageReader.of(kv_pages, kv_scales, layer, stages=1)
    loader = TileLoader(reader, q.dtype)
    target.declare(target.Pipeline("decode", 1, 2 * TILE * head_dim * kv_pages.dtype.itemsize))
    q_swizzle = copy_swizzle(heads, head_dim * q.dtype.itemsize)
    # A thread block takes `heads` rows from its first head on; the rows behind its group fill
    # columns that are never read.
    q = jnp.pad(q.reshape(-1, head_dim), ((0, heads - group), (0, 0)))

    def kernel(q_ref, rows_ref, scales_ref, layer_ref, tables_ref, lens_ref, out_ref, lse_ref,
               q_smem, p_smem, k_smem, v_smem):  # fmt: skip
        split, s, h = block_index("split", "sequence", "head")
        span = split_span(lens_ref[s], s, h, split, splits, window)
        pages = Pages(rows_ref, scales_ref, layer_ref, tables_ref)
        last = jnp.maximum(span.to_tile - 1, span.from_tile)

        def sources(tile):
            return reader.sources(jnp.minimum(tile, last), pages, span)

        def fetch(sources):
            return [loader.fetch(k_or_v, sources, pages, span) for k_or_v in (0, 1)]

        def tile(i, carry):
            (sums,), maxima, totals, held, following = carry
            k, v = held
            loader.put(k, k_smem)
            loader.put_values(v, i, v_smem, span)
            held, following = fetch(following), sources(i + 2)
            products = product(k_smem, q_smem.transpose((1, 0)))
            if k.scales is not None:
                products *= per_row(k.scales, products)
            seen = seen_tokens(i, span, heads)
            p, factor, maxima, totals = weigh(products, seen, maxima, totals, scale, soft_cap)
            if v.scales is not None:
                p = jnp.where(seen, p * per_row(v.scales, p), 0.0)
            store(p_smem, p.astype(q.dtype))
            sums = product(v_smem.transpose((1, 0)), p_smem, sums * per_column(factor, sums))
            return (sums,), maxima, totals, held, following

        heads_rows = q_ref.at[pl.ds(s * num_q_heads + h * group, heads)]
        store(q_smem, load_rows(heads_rows, q_swizzle, q.dtype))
        held, following = fetch(sources(span.from_tile)), sources(span.from_tile + 1)
        carry = *start(heads, ((0, head_dim),)), held, following
        *carry, _, _ = lax.fori_loop(span.from_tile, span.to_tile, tile, carry)
        (out,), lse = finish(*carry)
        store(out_ref.at[split, s, h], out)
        store(lse_ref.at[split, s, h], lse)

    out, lse = launch(
        kernel, q, *reader.operands, tables, lens,
        out_type=(
            jax.ShapeDtypeStruct((splits, num_seqs, num_kv_heads, head_dim, heads), jnp.float32),
            jax.ShapeDtypeStruct((splits, num_seqs, num_kv_heads, heads), jnp.float32),
        ),
        grid=dict(split=splits, sequence=num_seqs, head=num_kv_heads),
        scratch_types=[
            tiled((heads, head_dim), q.dtype, q_swizzle),
            plgpu.SMEM((TILE, heads), q.dtype),
            loader.smem, loader.smem,
        ],
        interpret=interpret,
    )  # fmt: skip
    out, lse = out[..., :group].swapaxes(-1, -2), lse[..., :group]
    out = out.reshape(splits, 1, num_seqs, num_q_heads, head_dim)
    return out, lse.reshape(splits, num_seqs, num_q_heads)
