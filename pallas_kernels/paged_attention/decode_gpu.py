"""Decode attention on Hopper: one query of each sequence over keys and values that lie in pages.

The tokens of a tile are the M side of both products and the query heads of one KV head the N side,
so that a group of 1 to 16 heads costs 8 or 16 columns and not 64 rows:

    scores^T [TILE, heads] = K [TILE, D] @ q^T [D, heads]
    out^T [D, heads] += V^T [D, TILE] @ p [TILE, heads]

Data movement: one thread block per (sequence, KV head, split of the context). A memory warpgroup
reads page ids from the block table and copies pages by TMA, each K and V byte once, into a ring of
shared-memory stages; a compute warpgroup follows with an online softmax. The output goes out, and q
comes in, without a padded copy (unless `row_stride` pads); splits leave partial outputs that
`merge_attention` joins.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
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

RING_BYTES = 96 * 1024  # of K and V stages: two thread blocks of it fit an SM
MAX_STAGES = 8
SLOTS = 2 * 132  # thread blocks that an H100 or H200 holds at once, two on each SM
WAVES = 4  # thread blocks for each slot that splitting aims at, against uneven lengths


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """What the kernel allocates for a kind of page.

    Attributes:
      heads: columns of the products: the query heads of a KV head, rounded up to 8.
      pieces: (first element of head_dim, elements) that one wgmma of the output makes, 64 or a
        multiple; two overlap where head_dim is none.
      swizzle: bytes of the shared-memory swizzle of K and V.
      stages: depth of the ring.
      stage_bytes: K and V of one stage.
    """

    heads: int
    pieces: tuple[tuple[int, int], ...]
    swizzle: int
    stages: int
    stage_bytes: int

    @classmethod
    def of(cls, head_dim: int, group: int, itemsize: int) -> DecodeShape:
        """The shape for pages of this kind."""
        stage_bytes = 2 * TILE * head_dim * itemsize
        ring = RING_BYTES if itemsize == 2 else RING_BYTES - 2 * TILE * head_dim * 2  # operands
        return cls(
            heads=-(-group // 8) * 8,
            pieces=((0, head_dim),) if head_dim % 64 == 0 else ((0, 64), (head_dim - 64, 64)),
            swizzle=min(swizzle_of(head_dim * itemsize), 64 * itemsize),
            stages=max(2, min(MAX_STAGES, ring // stage_bytes)),
            stage_bytes=stage_bytes,
        )


def num_splits(num_sequences: int, num_kv_heads: int, max_tokens: int) -> int:
    """Thread blocks among which a sequence's context is divided, so that all SMs are busy.

    Example:
      >>> num_splits(64, 8, 4096), num_splits(1, 8, 131072), num_splits(1, 8, 100)
      (3, 132, 2)
    """
    wanted = -(-WAVES * SLOTS // (num_sequences * num_kv_heads))
    return max(1, min(wanted, -(-max_tokens // TILE)))


def row_stride(group: int) -> int:
    """From one group's rows in the kernel's queries to the next, so that each group that begins
    inside a tile of rows ends inside it.

    Example:
      >>> row_stride(4), row_stride(16), row_stride(3), row_stride(12)
      (4, 16, 8, 16)
    """
    fits = TILE_ROWS % group == 0 or group % TILE_ROWS == 0
    return group if fits else -(-group // TILE_ROWS) * TILE_ROWS


def decode_gpu(
    q, kv_pages, tables, lens,
    *, layer, scale, window, soft_cap, kv_scales, splits, interpret,
):  # fmt: skip
    """Partial attentions of the splits: out [splits, parts, S, Hq, D], lse f32[splits, S, Hq].

    q [S, Hq, D]; kv_pages [N, L, 2, H, B, D]; tables i32[S, M], ids in the pool; lens i32[S];
    layer i32[].
    Of several splits each output is the sum of two parts in q's dtype, whose rounding the merge
    therefore does not see: the transposed store to shared memory exists for 16 bits only.
    """
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_pages.shape[3]
    group = num_q_heads // num_kv_heads
    shape = DecodeShape.of(head_dim, group, kv_pages.dtype.itemsize)
    heads = shape.heads
    reader = PageReader.of(kv_pages, kv_scales, layer, shape.stages)
    target.declare(target.Pipeline("decode", shape.stages, shape.stage_bytes))
    quantised = kv_scales is not None
    operand_swizzle = swizzle_of(head_dim * q.dtype.itemsize)
    parts = 1 if splits == 1 else 2
    # A thread block fetches `heads` rows of q from its group on: what lies behind it fills columns
    # that nobody reads. The last ones start a little earlier instead.
    stride = row_stride(group)
    if stride > group:
        q = q.reshape(-1, group, head_dim)
        q = jnp.pad(q, ((0, 0), (0, stride - group), (0, 0)))
    q = whole_tiles(q.reshape(-1, head_dim), heads)
    last_start = len(q) - heads
    int32 = jnp.int32

    def span_of(lens_ref, s, h, split) -> Span:
        """The split's share of the tiles that the sequence's query sees."""
        end = lens_ref[s]
        first = int32(0) if window is None else jnp.maximum(end - window, 0)
        first_tile, end_tile = lax.div(first, int32(TILE)), lax.div(end + (TILE - 1), int32(TILE))
        share = lax.div(end_tile - first_tile + (splits - 1), int32(splits))
        from_tile = jnp.minimum(first_tile + split * share, end_tile)
        to_tile = jnp.minimum(from_tile + share, end_tile)
        return Span(s, h, first, end, end, from_tile, to_tile)

    def kernel(q_ref, rows_ref, scales_ref, layer_ref, tables_ref, lens_ref, out_ref, lse_ref,
               q_smem, p_smem, k_operand, v_operand, out_smem, lse_smem, q_ready,
               *ring):  # fmt: skip
        split, s, h = lax.axis_index("split"), lax.axis_index("s"), lax.axis_index("h")
        role = lax.axis_index("role")
        ring, span = Ring(*ring), span_of(lens_ref, s, h, split)
        first_row = (s * num_kv_heads + h) * stride
        q_start = jnp.minimum(first_row, last_start)

        @pl.when(role == 0)
        def compute():
            wgmma, per_head = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(q_start, heads)], q_smem, q_ready)
            plgpu.barrier_wait(q_ready)

            def operand(smem, slot, converted):
                """A stage as the products take it: as it is, or codes as numbers of q's type."""
                if not quantised:
                    return smem.at[slot]
                for c in range(0, head_dim, 64):
                    part = smem.at[slot, :, pl.ds(c, 64)]
                    codes = plgpu.load(part, layout=wgmma, optimized=False)
                    converted[:, pl.ds(c, 64)] = codes.astype(q.dtype)
                plgpu.commit_smem()
                return converted

            def of_tokens(scales, slot):
                """A stage's scales as a factor of [TILE, heads]."""
                factor = plgpu.load(scales.at[slot], layout=wgmma.reduce(1), optimized=False)
                return lax.broadcast_in_dim(factor.astype(jnp.float32), (TILE, heads), [0])

            def tile(i, carry):
                acc, m, total = carry
                slot = reader.slot(i, span)
                token = i * TILE + plgpu.broadcasted_iota(int32, (TILE, heads), 0, layout=wgmma)
                plgpu.barrier_wait(ring.k_ready.at[slot])
                k = operand(ring.k, slot, k_operand)

                def scores(acc_ref):
                    plgpu.wgmma(acc_ref, k, q_smem.transpose((1, 0)))
                    return acc_ref[...]

                sc = pl.run_scoped(scores, accumulator((TILE, heads)))
                if quantised:
                    sc *= of_tokens(ring.k_scales, slot)
                plgpu.barrier_arrive(ring.k_free.at[slot])
                sc = binary_logits(sc, scale, soft_cap)
                seen = (token >= span.first) & (token < span.end)
                sc = jnp.where(seen, sc, MASKED)
                m_new = jnp.maximum(m, sc.max(axis=0))
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(sc - lax.broadcast_in_dim(m_new, sc.shape, [1]))
                total = total * alpha + p.sum(axis=0)
                plgpu.barrier_wait(ring.v_ready.at[slot])
                if quantised:
                    p = jnp.where(seen, p * of_tokens(ring.v_scales, slot), 0.0)
                p_smem.transpose((1, 0))[...] = p.astype(q.dtype)
                plgpu.commit_smem()
                v = operand(ring.v, slot, v_operand)

                def values(acc_ref, piece):
                    v_t = v.at[:, pl.ds(*piece)].transpose((1, 0))
                    plgpu.wgmma(acc_ref, v_t, p_smem.transpose((1, 0)))
                    return acc_ref[...]

                acc = tuple(
                    a * lax.broadcast_in_dim(alpha, a.shape, [1])
                    + pl.run_scoped(functools.partial(values, piece=piece), accumulator(a.shape))
                    for a, piece in zip(acc, shape.pieces, strict=True)
                )
                plgpu.barrier_arrive(ring.v_free.at[slot])
                return acc, m_new, total

            m = plgpu.layout_cast(jnp.full((heads,), MASKED, jnp.float32), per_head)
            total = plgpu.layout_cast(jnp.full((heads,), 0, jnp.float32), per_head)
            acc = tuple(
                plgpu.layout_cast(jnp.full((size, heads), 0, jnp.float32), wgmma)
                for _, size in shape.pieces
            )
            acc, m, total = lax.fori_loop(span.from_tile, span.to_tile, tile, (acc, m, total))
            some = jnp.where(total > 0, total, 1.0)
            for a, piece in zip(acc, shape.pieces, strict=True):
                out = a / lax.broadcast_in_dim(some, a.shape, [1])
                for part in range(parts):
                    rounded = out.astype(q.dtype)
                    out -= rounded.astype(jnp.float32)
                    store(out_smem.at[part, :, pl.ds(*piece)].transpose((1, 0)), rounded)
            lse_smem[...] = jnp.where(total > 0, (m + jnp.log2(some)) / LOG2E, -jnp.inf)
            plgpu.commit_smem()
            for part in range(parts):
                for g in range(group):
                    source = out_smem.at[part, first_row - q_start + g, pl.ds(0, head_dim)]
                    plgpu.copy_smem_to_gmem(source, out_ref.at[split, part, s, h * group + g])
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[split, s, h])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(role == 1)
        def memory():
            reader.run(Pages(rows_ref, scales_ref, layer_ref, tables_ref), ring, span)

    converted = tiled((TILE, head_dim), q.dtype, operand_swizzle)
    if not quantised:
        converted = plgpu.SMEM((1, 32), q.dtype)  # not used
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((splits, parts, num_seqs, num_q_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((splits, num_seqs, num_kv_heads, heads), jnp.float32),
        ),
        grid=(splits, num_seqs, num_kv_heads), grid_names=("split", "s", "h"),
        num_threads=2, thread_name="role",
        scratch_types=[
            tiled((heads, head_dim), q.dtype, operand_swizzle),
            tiled((heads, TILE), q.dtype, operand_swizzle),
            converted, converted,
            plgpu.SMEM((parts, *rows_to_copy(heads, head_dim, q.dtype)), q.dtype),
            plgpu.SMEM((heads,), jnp.float32),
            plgpu.Barrier(),
            *reader.scratch(shape.swizzle, readers=1),
        ],
        compiler_params=PARAMS,
        interpret=interpret,
    )(q, *reader.operands, tables, lens)  # fmt: skip
    first = stride * np.arange(num_seqs * num_kv_heads)
    column = (first - np.minimum(first, last_start))[:, None] + np.arange(group)
    lse = jnp.take_along_axis(lse.reshape(splits, -1, heads), jnp.asarray(column)[None], axis=2)
    return out, lse.reshape(splits, num_seqs, num_q_heads)
