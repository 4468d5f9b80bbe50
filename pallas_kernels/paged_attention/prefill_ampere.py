"""Prefill attention on Ampere: the products of `prefill_gpu`, with pages loaded through registers.

Data movement: one thread block, of one warpgroup, per (64 queries of a sequence, query head, split
of their keys). It loads a tile of K and V through registers into shared memory, then computes on
it, while other thread blocks of the SM compute. Each tile writes its output to a separate buffer,
which is gathered afterwards, so that no thread block writes its neighbours' rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels import target
from jaxkv.pallas_kernels.layout import PoolShape
from jaxkv.pallas_kernels.paged_attention.launch_gpu import block_index, launch
from jaxkv.pallas_kernels.paged_attention.pages_ampere import TileLoader, copy_swizzle, load_rows
from jaxkv.pallas_kernels.paged_attention.pages_gpu import (
    TILE,
    PageReader,
    Pages,
    store,
    tiled,
)
from jaxkv.pallas_kernels.paged_attention.prefill_steps_gpu import (
    ROWS,
    QueryTile,
    finish,
    per_row,
    positions,
    query_tiles,
    rows_of_tokens,
    start,
    weigh,
)


def prefill_ampere(
    q, kv_pages, tables, lens, query_start,
    *, layer, scale, window, soft_cap, causal, splits, product, interpret,
):  # fmt: skip
    """Partial attentions of the splits: out [splits, T, Hq, D], lse f32[splits, T, Hq].

    q [T, Hq, D]; kv_pages [N, L, 2, H, B, D], D a multiple of 64; tables i32[S, M], ids in the
    pool; lens i32[S]; query_start i32[S + 1]; layer i32[]. Splits as in `prefill_gpu`.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_seqs, num_kv_heads = len(lens), PoolShape.of(kv_pages).num_kv_heads
    group = num_q_heads // num_kv_heads
    if num_tokens < ROWS:
        q = jnp.pad(q, ((0, ROWS - num_tokens), (0, 0), (0, 0)))
    last_start = len(q) - ROWS
    reader = PageReader.of(kv_pages, None, layer, stages=1)
    loader = TileLoader(reader, q.dtype)
    row_bytes = head_dim * q.dtype.itemsize
    target.declare(target.Pipeline("prefill", 1, TILE * row_bytes))
    tile_seq, tile_first, tile_end = query_tiles(query_start, num_tokens, num_seqs, ROWS, align=1)
    num_tiles = len(tile_seq)
    lens = jnp.concatenate([lens, jnp.zeros(1, jnp.int32)])  # the padding has length 0

    def kernel(q_ref, rows_ref, scales_ref, layer_ref, tables_ref, lens_ref, seq_ref, first_ref,
               end_ref, out_ref, lse_ref, q_smem, p_smem, k_smem, v_smem):  # fmt: skip
        tile, head, split = block_index("tile", "head", "split")
        pages = Pages(rows_ref, scales_ref, layer_ref, tables_ref)
        s = seq_ref[tile]
        queries = QueryTile.of(
            first_ref[tile], end_ref[tile], lens_ref[s], ROWS, last_start, align=1
        )
        kv_head = lax.div(head, jnp.int32(group))
        span = queries.span(s, kv_head, split, splits, window, causal=causal)

        @pl.when(queries.first < queries.end)
        def compute():
            own = q_ref.at[pl.ds(queries.start, ROWS), head]
            store(q_smem, load_rows(own, copy_swizzle(ROWS, row_bytes), q.dtype))
            position = positions(queries.start, queries.shift)

            def step(i, carry):
                sums, maxima, totals = carry
                sources = reader.sources(i, pages, span)
                loader.put(loader.fetch(0, sources, pages, span), k_smem)
                products = product(q_smem, k_smem.transpose((1, 0)))
                p, factor, maxima, totals = weigh(
                    products, position, i, span.length, maxima, totals,
                    scale=scale, soft_cap=soft_cap, window=window, causal=causal,
                )  # fmt: skip
                store(p_smem, p.astype(q.dtype))
                loader.put_values(loader.fetch(1, sources, pages, span), i, v_smem, span)
                sums = product(p_smem, v_smem, sums * per_row(factor, sums))
                return sums, maxima, totals

            carry = lax.fori_loop(span.from_tile, span.to_tile, step, start(head_dim))
            out, lse = finish(*carry)
            store(out_ref.at[split, tile, head], out.astype(q.dtype))
            store(lse_ref.at[split, tile, head], lse)

    out, lse = launch(
        kernel, q, *reader.operands, tables, lens, tile_seq, tile_first, tile_end,
        out_type=(
            jax.ShapeDtypeStruct((splits, num_tiles, num_q_heads, ROWS, head_dim), q.dtype),
            jax.ShapeDtypeStruct((splits, num_tiles, num_q_heads, ROWS), jnp.float32),
        ),
        grid=dict(tile=num_tiles, head=num_q_heads, split=splits),
        scratch_types=[
            tiled((ROWS, head_dim), q.dtype, copy_swizzle(ROWS, row_bytes)),
            tiled((ROWS, TILE), q.dtype, copy_swizzle(ROWS, TILE * q.dtype.itemsize)),
            loader.smem, loader.smem,
        ],
        interpret=interpret,
    )  # fmt: skip
    tile, row = rows_of_tokens(tile_first, num_tokens, last_start, align=1)
    return out[:, tile, :, row].swapaxes(0, 1), lse[:, tile, :, row].swapaxes(0, 1)
