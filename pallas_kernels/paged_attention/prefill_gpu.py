"""Prefill attention on Hopper and Blackwell: chunks of queries per sequence, K and V in pages.

Queries are the M side, 64 of one head per compute warpgroup:

    scores [64, TILE] = q [64, D] @ K^T [D, TILE]        out [64, D] += p [64, TILE] @ V [TILE, D]

Data movement: one thread block per (tile of a sequence's queries, query head, split of their keys).
A memory warpgroup copies the pages that the tile sees, from the first page of its window to the
page of its last query, or all pages for non-causal queries, by TMA into a ring of shared-memory
stages that two compute warpgroups read; tiles that the causal mask hides are never fetched, and a
cached prefix is read in place. Whole tiles of output are written in one copy, the ragged end of a
sequence row by row, so that a tile never writes rows of its neighbours in the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv.pallas_kernels import target
from jaxkv.pallas_kernels.layout import PoolShape
from jaxkv.pallas_kernels.paged_attention.launch_gpu import block_index, launch, warpgroup_index
from jaxkv.pallas_kernels.paged_attention.pages_gpu import (
    TILE,
    TILE_ROWS,
    PageReader,
    Pages,
    Ring,
    rows_to_copy,
    store,
    swizzle_of,
    tiled,
    whole_tiles,
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

RING_BYTES = 96 * 1024


def prefill_gpu(
    q, kv_pages, tables, lens, query_start,
    *, layer, scale, window, soft_cap, causal, splits, product, interpret,
):  # fmt: skip
    """Partial attentions of the splits: out [splits, T, Hq, D], lse f32[splits, T, Hq].

    q [T, Hq, D]; kv_pages [N, L, 2, H, B, D]; tables i32[S, M], ids in the pool; lens i32[S];
    query_start i32[S + 1]; layer i32[]. Several splits require non-causal queries, whose rows see
    keys of every tile.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_seqs, num_kv_heads = len(lens), PoolShape.of(kv_pages).num_kv_heads
    group = num_q_heads // num_kv_heads
    # Two warpgroups take 64 queries each or, where the accumulator would not fit the registers, one
    # half of the output's columns each.
    halves = 2 if head_dim > 128 else 1
    warpgroups = 2 if num_tokens >= 2 * ROWS or halves == 2 else 1
    row_groups, part = warpgroups // halves, head_dim // halves
    tile_rows = row_groups * ROWS
    _, out_row = rows_to_copy(ROWS, part, q.dtype)
    q = whole_tiles(q, ROWS)
    last_start = len(q) - tile_rows
    stage_bytes = 2 * TILE * head_dim * q.dtype.itemsize
    reader = PageReader.of(kv_pages, None, layer, max(2, min(4, RING_BYTES // stage_bytes)))
    target.declare(target.Pipeline("prefill", reader.stages, stage_bytes))
    tile_seq, tile_first, tile_end = query_tiles(
        query_start, num_tokens, num_seqs, tile_rows, TILE_ROWS
    )
    num_tiles = len(tile_seq)
    lens = jnp.concatenate([lens, jnp.zeros(1, jnp.int32)])  # the padding has length 0

    def kernel(q_ref, rows_ref, scales_ref, layer_ref, tables_ref, lens_ref, seq_ref, first_ref,
               end_ref, out_ref, lse_ref, q_smem, p_smem, out_smem, lse_smem, q_ready,
               *ring):  # fmt: skip
        ring = Ring(*ring)
        tile, head, split = block_index("tile", "head", "split")
        role = warpgroup_index()
        s = seq_ref[tile]
        queries = QueryTile.of(
            first_ref[tile], end_ref[tile], lens_ref[s], tile_rows, last_start, TILE_ROWS
        )
        kv_head = lax.div(head, jnp.int32(group))
        span = queries.span(s, kv_head, split, splits, window, causal=causal)

        def compute(rows, half):
            if warpgroups > 1:
                plgpu.set_max_registers(216, action="increase")
            at = queries.start + rows * ROWS
            plgpu.barrier_wait(q_ready.at[rows])
            position = positions(at, queries.shift)

            def step(i, carry):
                acc, m, total = carry
                slot = reader.slot(i, span)
                plgpu.barrier_wait(ring.k_ready.at[slot])
                products = product(q_smem.at[rows], ring.k.at[slot].transpose((1, 0)))
                plgpu.barrier_arrive(ring.k_free.at[slot])
                p, factor, m, total = weigh(
                    products, position, i, span.length, m, total,
                    scale=scale, soft_cap=soft_cap, window=window, causal=causal,
                )  # fmt: skip
                # A warp stores the 16 rows of p that its part of the product reads, so that p needs
                # no barrier between warps. The reductions of `weigh` stay inside a warp too, and
                # use none of the scratch that the warpgroups would share.
                p_smem[role] = p.astype(q.dtype)
                plgpu.commit_smem()
                plgpu.barrier_wait(ring.v_ready.at[slot])
                v = ring.v.at[slot, :, pl.ds(half * part, part)]
                acc = product(p_smem.at[role], v, acc * per_row(factor, acc))
                plgpu.barrier_arrive(ring.v_free.at[slot])
                return acc, m, total

            carry = lax.fori_loop(span.from_tile, span.to_tile, step, start(part))
            out, lse = finish(*carry)
            store(out_smem.at[role, :, pl.ds(0, part)], out.astype(q.dtype))
            store(lse_smem.at[role], lse)
            plgpu.commit_smem()
            own = jnp.maximum(queries.first - at, 0)
            own_end = jnp.minimum(queries.end - at, ROWS)
            columns = pl.ds(half * part, part)
            if half == 0:
                plgpu.copy_smem_to_gmem(lse_smem.at[role], lse_ref.at[split, head, tile, rows])

            whole = own_end - own == ROWS

            def copy_tile():
                to = out_ref.at[split, pl.ds(at, ROWS), head, columns]
                plgpu.copy_smem_to_gmem(out_smem.at[role], to)

            def copy_rows():
                def row(r, _):
                    source = out_smem.at[role, r, pl.ds(0, part)]
                    plgpu.copy_smem_to_gmem(source, out_ref.at[split, at + r, head, columns])

                lax.fori_loop(own, own_end, row, None)

            if out_row == part:
                pl.when(whole)(copy_tile)
                pl.when(~whole)(copy_rows)
            else:
                copy_rows()
            plgpu.wait_smem_to_gmem(0)

        some_query = queries.first < queries.end
        if halves == 1:
            pl.when((role < warpgroups) & some_query)(lambda: compute(role, 0))
        else:  # the half must be known when the kernel is compiled
            for half in range(halves):
                pl.when((role == half) & some_query)(lambda half=half: compute(0, half))

        @pl.when((role == warpgroups) & some_query)
        def memory():
            if warpgroups > 1:
                plgpu.set_max_registers(72, action="decrease")
            for rows in range(row_groups):
                own = pl.ds(queries.start + rows * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[own, head], q_smem.at[rows], q_ready.at[rows])
            reader.run(Pages(rows_ref, scales_ref, layer_ref, tables_ref), ring, span)

    operand = swizzle_of(head_dim * q.dtype.itemsize)
    out, lse = launch(
        kernel, q, *reader.operands, tables, lens, tile_seq, tile_first, tile_end,
        out_type=(
            jax.ShapeDtypeStruct((splits, *q.shape), q.dtype),
            jax.ShapeDtypeStruct((splits, num_q_heads, num_tiles, row_groups, ROWS), jnp.float32),
        ),
        grid=dict(tile=num_tiles, head=num_q_heads, split=splits), warpgroups=warpgroups + 1,
        scratch_types=[
            tiled((row_groups, ROWS, head_dim), q.dtype, operand),
            tiled((warpgroups, ROWS, TILE), q.dtype, operand),
            plgpu.SMEM((warpgroups, ROWS, out_row), q.dtype),
            plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=row_groups),
            *reader.scratch(operand, readers=warpgroups),
        ],
        interpret=interpret,
    )  # fmt: skip
    tile, row = rows_of_tokens(tile_first, num_tokens, last_start, TILE_ROWS)
    lse = lse.reshape(splits, num_q_heads, num_tiles, tile_rows)[:, :, tile, row]
    return out[:, :num_tokens], lse.swapaxes(1, 2)
