"""Prefill attention on Hopper: chunks of queries of many sequences over keys and values in pages.

Queries are the M side, 64 of one head to a compute warpgroup:

    scores [64, TILE] = q [64, D] @ K^T [D, TILE]        out [64, D] += p [64, TILE] @ V [TILE, D]

Data movement: one thread block per (tile of a sequence's queries, query head). A memory warpgroup
copies the pages that the tile sees, from its window's first to its last query's own, by TMA into a
ring of shared-memory stages that two compute warpgroups read; tiles that causality hides are never
fetched, and a cached prefix is read where it lies. Whole tiles of output go out as one copy, the
ragged end of a sequence row by row, so that neighbours in the batch never touch each other's rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import target
from pallas_kernels.paged_attention.operands import MASKED
from pallas_kernels.paged_attention.pages_gpu import (
    LOG2E,
    PARAMS,
    TILE,
    TILE_ROWS,
    PageReader,
    Pages,
    Ring,
    Span,
    accumulator,
    binary_logits,
    rows_to_copy,
    store,
    swizzle_of,
    tiled,
    whole_tiles,
)

ROWS = 64  # queries of one compute warpgroup
RING_BYTES = 96 * 1024


def query_tiles(query_start, num_tokens, num_seqs, tile_rows):
    """Tiles of queries: (sequence, first query, end of its queries) i32[G] each.

    A tile takes `tile_rows` rows from a multiple of TILE_ROWS on: the first of a sequence begins
    with rows of the one before, which are not its own. Behind the sequences comes the padding, as
    one of number `num_seqs`: its output is zeros. Tiles that are not needed have first = end.

    Example:
      >>> starts = jnp.array([0, 100, 130], jnp.int32)  # the second begins 4 rows into its tile
      >>> [x.tolist() for x in query_tiles(starts, 130, 2, 128)]
      [[0, 1, 2, 2, 2], [0, 100, 130, 130, 130], [100, 130, 130, 130, 130]]
    """
    starts = jnp.concatenate([query_start, jnp.full(1, num_tokens, jnp.int32)])
    rows = starts[:-1] // TILE_ROWS * TILE_ROWS  # where the first tiles begin
    counts = jnp.where(starts[1:] > starts[:-1], starts[1:] - rows, 0)
    tiles_before = jnp.cumsum(-(-counts // tile_rows))
    most = -(-(num_tokens + (TILE_ROWS - 1) * (num_seqs + 1)) // tile_rows) + num_seqs + 1
    i = jnp.arange(most, dtype=jnp.int32)
    s = jnp.minimum(jnp.searchsorted(tiles_before, i, side="right"), num_seqs).astype(jnp.int32)
    first = rows[s] + (i - jnp.where(s > 0, tiles_before[s - 1], 0)) * tile_rows
    return s, jnp.clip(first, starts[s], starts[s + 1]), starts[s + 1]


def prefill_gpu(
    q, kv_pages, tables, lens, query_start, *, layer, scale, window, soft_cap, interpret,
):  # fmt: skip
    """out [T, Hq, D] in q's dtype and lse f32[T, Hq].

    q [T, Hq, D]; kv_pages [N, L, 2, H, B, D]; tables i32[S, M], ids in the pool; lens i32[S];
    query_start i32[S + 1]; layer i32[].
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_seqs, num_kv_heads = len(lens), kv_pages.shape[3]
    group = num_q_heads // num_kv_heads
    # Two warpgroups take 64 queries each, or, where an accumulator would not fit the registers, one
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
    tile_seq, tile_first, tile_end = query_tiles(query_start, num_tokens, num_seqs, tile_rows)
    num_tiles = len(tile_seq)
    lens = jnp.concatenate([lens, jnp.zeros(1, jnp.int32)])  # of the padding
    int32 = jnp.int32

    def kernel(q_ref, rows_ref, scales_ref, layer_ref, tables_ref, lens_ref, seq_ref, first_ref,
               end_ref, out_ref, lse_ref, q_smem, p_smem, out_smem, lse_smem, q_ready,
               *ring):  # fmt: skip
        ring = Ring(*ring)
        tile, head = lax.axis_index("tile"), lax.axis_index("head")
        role = lax.axis_index("role")
        s, first_query, end_query = seq_ref[tile], first_ref[tile], end_ref[tile]
        length = lens_ref[s]
        tile_start = lax.div(first_query, int32(TILE_ROWS)) * TILE_ROWS
        start = jnp.minimum(tile_start, last_start)  # the last tile begins a little earlier
        # Position of query t: length - (end_query - t).
        shift = length - end_query
        end_query = jnp.minimum(end_query, tile_start + tile_rows)
        end = jnp.minimum(jnp.maximum(end_query + shift, 0), length)
        first = int32(0)
        if window is not None:
            first = jnp.maximum(first_query + shift - (window - 1), 0)
        from_tile, to_tile = lax.div(first, int32(TILE)), lax.div(end + (TILE - 1), int32(TILE))
        kv_head = lax.div(head, int32(group))
        span = Span(s, kv_head, first, end, length, from_tile, to_tile)

        def compute(rows, half):
            if warpgroups > 1:
                plgpu.set_max_registers(216, action="increase")
            wgmma, per_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
            at = start + rows * ROWS
            plgpu.barrier_wait(q_ready.at[rows])
            position = at + shift + plgpu.broadcasted_iota(int32, (ROWS, TILE), 0, layout=wgmma)

            def step(i, carry):
                acc, m, total = carry
                slot = reader.slot(i, span)
                plgpu.barrier_wait(ring.k_ready.at[slot])

                def scores(acc_ref):
                    plgpu.wgmma(acc_ref, q_smem.at[rows], ring.k.at[slot].transpose((1, 0)))
                    return acc_ref[...]

                sc = pl.run_scoped(scores, accumulator((ROWS, TILE)))
                plgpu.barrier_arrive(ring.k_free.at[slot])
                sc = binary_logits(sc, scale, soft_cap)
                token = i * TILE + plgpu.broadcasted_iota(int32, (ROWS, TILE), 1, layout=wgmma)
                seen = (token <= position) & (token < length)
                if window is not None:
                    seen &= token > position - window
                sc = jnp.where(seen, sc, MASKED)
                m_new = jnp.maximum(m, sc.max(axis=1))
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(sc - lax.broadcast_in_dim(m_new, sc.shape, [0]))
                if window is not None:  # a row may see nothing of its first tiles
                    p = jnp.where(seen, p, 0.0)
                total = total * alpha + p.sum(axis=1)
                p_smem[role] = p.astype(q.dtype)
                plgpu.commit_smem()
                plgpu.barrier_wait(ring.v_ready.at[slot])

                def values(acc_ref):
                    v = ring.v.at[slot, :, pl.ds(half * part, part)]
                    plgpu.wgmma(acc_ref, p_smem.at[role], v)
                    return acc_ref[...]

                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                acc += pl.run_scoped(values, accumulator((ROWS, part)))
                plgpu.barrier_arrive(ring.v_free.at[slot])
                return acc, m_new, total

            m = plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), per_row)
            total = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), per_row)
            acc = plgpu.layout_cast(jnp.full((ROWS, part), 0, jnp.float32), wgmma)
            acc, m, total = lax.fori_loop(span.from_tile, span.to_tile, step, (acc, m, total))
            some = jnp.where(total > 0, total, 1.0)
            out = (acc / lax.broadcast_in_dim(some, acc.shape, [0])).astype(q.dtype)
            store(out_smem.at[role, :, pl.ds(0, part)], out)
            store(lse_smem.at[role], jnp.where(total > 0, (m + jnp.log2(some)) / LOG2E, -jnp.inf))
            plgpu.commit_smem()
            own, own_end = jnp.maximum(first_query - at, 0), jnp.minimum(end_query - at, ROWS)
            columns = pl.ds(half * part, part)
            if half == 0:
                plgpu.copy_smem_to_gmem(lse_smem.at[role], lse_ref.at[head, tile, rows])

            whole = own_end - own == ROWS

            def copy_tile():
                to = out_ref.at[pl.ds(at, ROWS), head, columns]
                plgpu.copy_smem_to_gmem(out_smem.at[role], to)

            def copy_rows():
                def row(r, _):
                    source = out_smem.at[role, r, pl.ds(0, part)]
                    plgpu.copy_smem_to_gmem(source, out_ref.at[at + r, head, columns])

                lax.fori_loop(own, own_end, row, None)

            if out_row == part:
                pl.when(whole)(copy_tile)
                pl.when(~whole)(copy_rows)
            else:
                copy_rows()
            plgpu.wait_smem_to_gmem(0)

        some_query = first_query < end_query
        if halves == 1:
            pl.when((role < warpgroups) & some_query)(lambda: compute(role, 0))
        else:  # which half must be known when the kernel is compiled
            for half in range(halves):
                pl.when((role == half) & some_query)(lambda half=half: compute(0, half))

        @pl.when((role == warpgroups) & some_query)
        def memory():
            if warpgroups > 1:
                plgpu.set_max_registers(72, action="decrease")
            for rows in range(row_groups):
                queries = pl.ds(start + rows * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[queries, head], q_smem.at[rows], q_ready.at[rows])
            reader.run(Pages(rows_ref, scales_ref, layer_ref, tables_ref), ring, span)

    operand = swizzle_of(head_dim * q.dtype.itemsize)
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((num_q_heads, num_tiles, row_groups, ROWS), jnp.float32),
        ),
        grid=(num_tiles, num_q_heads), grid_names=("tile", "head"),
        num_threads=warpgroups + 1, thread_name="role",
        scratch_types=[
            tiled((row_groups, ROWS, head_dim), q.dtype, operand),
            tiled((warpgroups, ROWS, TILE), q.dtype, operand),
            plgpu.SMEM((warpgroups, ROWS, out_row), q.dtype),
            plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=row_groups),
            *reader.scratch(operand, readers=warpgroups),
        ],
        compiler_params=PARAMS,
        interpret=interpret,
    )(q, *reader.operands, tables, lens, tile_seq, tile_first, tile_end)  # fmt: skip
    # Row of each token: its tile in the order of the tiles, its place in the tile.
    t = jnp.arange(num_tokens, dtype=int32)
    tile = jnp.searchsorted(tile_first, t, side="right") - 1
    row = t - jnp.minimum(tile_first[tile] // TILE_ROWS * TILE_ROWS, last_start)
    lse = lse.reshape(num_q_heads, num_tiles, tile_rows)[:, tile, row]
    return out[:num_tokens], lse.T
