"""Decode attention on Hopper and Blackwell: one query per sequence, K and V in pages.

The tokens of a tile are the M side of both products and the query heads of one KV head the N side,
so that a group of 1 to 16 heads costs 8 or 16 columns and not 64 rows:

    scores^T [TILE, heads] = K [TILE, D] @ q^T [D, heads]
    out^T [D, heads] += V^T [D, TILE] @ p [TILE, heads]

Data movement: one thread block per (sequence, KV head, split of the context). A memory warpgroup
reads page ids from the block table and copies pages by TMA, each K and V byte once, into a ring of
shared-memory stages; a compute warpgroup follows with an online softmax. q is read and the output
written without a padded copy (unless `row_stride` pads); `merge_attention` merges the partial
outputs of splits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
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

RING_BYTES = 96 * 1024  # bytes of K and V stages; two such thread blocks fit an SM
MAX_STAGES = 8


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Sizes of the kernel for a page format and a group of heads.

    Attributes:
      heads: columns of the products: query heads per KV head, rounded up to a multiple of 8.
      pieces: (first element of head_dim, elements) of each product of the output. Sizes are
        multiples of 64; two pieces overlap if head_dim is not a multiple.
      swizzle: bytes of the shared-memory swizzle of K and V.
      stages: stages of the ring.
      stage_bytes: bytes of K and V in one stage.
    """

    heads: int
    pieces: tuple[tuple[int, int], ...]
    swizzle: int
    stages: int
    stage_bytes: int

    @classmethod
    def of(cls, head_dim: int, group: int, itemsize: int) -> DecodeShape:
        """Returns the shape for pages of this kind."""
        stage_bytes = 2 * TILE * head_dim * itemsize
        ring = RING_BYTES if itemsize == 2 else RING_BYTES - 2 * TILE * head_dim * 2  # operands
        return cls(
            heads=-(-group // 8) * 8,
            pieces=((0, head_dim),) if head_dim % 64 == 0 else ((0, 64), (head_dim - 64, 64)),
            swizzle=min(swizzle_of(head_dim * itemsize), 64 * itemsize),
            stages=max(2, min(MAX_STAGES, ring // stage_bytes)),
            stage_bytes=stage_bytes,
        )


def row_stride(group: int) -> int:
    """Rows from one group to the next in the kernel's queries, such that each group that begins
    inside a tile of rows ends inside it.

    Example:
      >>> row_stride(4), row_stride(16), row_stride(3), row_stride(12)
      (4, 16, 8, 16)
    """
    fits = TILE_ROWS % group == 0 or group % TILE_ROWS == 0
    return group if fits else -(-group // TILE_ROWS) * TILE_ROWS


def decode_gpu(
    q, kv_pages, tables, lens,
    *, layer, scale, window, soft_cap, kv_scales, splits, product, interpret,
):  # fmt: skip
    """Partial attentions of the splits: out [splits, parts, S, Hq, D], lse f32[splits, S, Hq].

    q [S, Hq, D]; kv_pages [N, L, 2, H, B, D]; tables i32[S, M], ids in the pool; lens i32[S];
    layer i32[].
    With several splits, each output is the sum of two parts in q's dtype, so that the merge keeps
    its precision: the transposed store to shared memory exists for 16 bits only.
    """
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads = PoolShape.of(kv_pages).num_kv_heads
    group = num_q_heads // num_kv_heads
    shape = DecodeShape.of(head_dim, group, kv_pages.dtype.itemsize)
    heads = shape.heads
    reader = PageReader.of(kv_pages, kv_scales, layer, shape.stages)
    target.declare(target.Pipeline("decode", shape.stages, shape.stage_bytes))
    quantised = kv_scales is not None
    operand_swizzle = swizzle_of(head_dim * q.dtype.itemsize)
    parts = 1 if splits == 1 else 2
    # A thread block fetches `heads` rows of q from its group on; the rows behind the group fill
    # columns that are never read. The last thread blocks start earlier, to stay inside q.
    stride = row_stride(group)
    if stride > group:
        q = q.reshape(-1, group, head_dim)
        q = jnp.pad(q, ((0, 0), (0, stride - group), (0, 0)))
    q = whole_tiles(q.reshape(-1, head_dim), heads)
    last_start = len(q) - heads

    def kernel(q_ref, rows_ref, scales_ref, layer_ref, tables_ref, lens_ref, out_ref, lse_ref,
               q_smem, p_smem, k_operand, v_operand, out_smem, lse_smem, q_ready,
               *ring):  # fmt: skip
        split, s, h = block_index("split", "sequence", "head")
        role = warpgroup_index()
        ring, span = Ring(*ring), split_span(lens_ref[s], s, h, split, splits, window)
        first_row = (s * num_kv_heads + h) * stride
        q_start = jnp.minimum(first_row, last_start)

        @pl.when(role == 0)
        def compute():
            wgmma = plgpu.Layout.WGMMA
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(q_start, heads)], q_smem, q_ready)
            plgpu.barrier_wait(q_ready)

            def operand(smem, slot, converted):
                """A stage as an operand: in place, or codes converted to q's dtype."""
                if not quantised:
                    return smem.at[slot]
                for c in range(0, head_dim, 64):
                    part = smem.at[slot, :, pl.ds(c, 64)]
                    codes = plgpu.load(part, layout=wgmma, optimized=False)
                    converted[:, pl.ds(c, 64)] = codes.astype(q.dtype)
                plgpu.commit_smem()
                return converted

            def of_tokens(scales, slot):
                """Scales [TILE] of a stage; loaded before the codes, whose fence covers them."""
                return plgpu.load(scales.at[slot], layout=wgmma.reduce(1), optimized=False)

            def tile(i, carry):
                acc, m, total = carry
                slot = reader.slot(i, span)
                seen = seen_tokens(i, span, heads)
                plgpu.barrier_wait(ring.k_ready.at[slot])
                k_scale = of_tokens(ring.k_scales, slot) if quantised else None
                k = operand(ring.k, slot, k_operand)
                products = product(k, q_smem.transpose((1, 0)))
                if k_scale is not None:
                    products *= per_row(k_scale, products)
                plgpu.barrier_arrive(ring.k_free.at[slot])
                p, alpha, m, total = weigh(products, seen, m, total, scale, soft_cap)
                plgpu.barrier_wait(ring.v_ready.at[slot])
                if quantised:
                    p = jnp.where(seen, p * per_row(of_tokens(ring.v_scales, slot), p), 0.0)
                # Each warp's part of the last product reads all of p, and a warp waits for its own
                # part alone. Two things keep a fast warp from storing the next p too early: the
                # barriers of the reductions over tokens in `weigh`, and those that Pallas puts
                # around stores unless `unsafe_no_auto_barriers` is set. Without both, a barrier is
                # needed here. The reductions also share one scratch buffer for all threads of the
                # block: a second compute warpgroup needs reductions of its own.
                p_smem.transpose((1, 0))[...] = p.astype(q.dtype)
                plgpu.commit_smem()
                v = operand(ring.v, slot, v_operand)
                acc = tuple(
                    product(
                        v.at[:, pl.ds(*piece)].transpose((1, 0)),
                        p_smem.transpose((1, 0)),
                        a * per_column(alpha, a),
                    )
                    for a, piece in zip(acc, shape.pieces, strict=True)
                )
                plgpu.barrier_arrive(ring.v_free.at[slot])
                return acc, m, total

            carry = start(heads, shape.pieces)
            outputs, lse = finish(*lax.fori_loop(span.from_tile, span.to_tile, tile, carry))
            for out, piece in zip(outputs, shape.pieces, strict=True):
                for part in range(parts):
                    rounded = out.astype(q.dtype)
                    out -= rounded.astype(jnp.float32)
                    store(out_smem.at[part, :, pl.ds(*piece)].transpose((1, 0)), rounded)
            lse_smem[...] = lse
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
        converted = plgpu.SMEM((1, 32), q.dtype)  # unused
    out, lse = launch(
        kernel, q, *reader.operands, tables, lens,
        out_type=(
            jax.ShapeDtypeStruct((splits, parts, num_seqs, num_q_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((splits, num_seqs, num_kv_heads, heads), jnp.float32),
        ),
        grid=dict(split=splits, sequence=num_seqs, head=num_kv_heads), warpgroups=2,
        scratch_types=[
            tiled((heads, head_dim), q.dtype, operand_swizzle),
            tiled((heads, TILE), q.dtype, operand_swizzle),
            converted, converted,
            plgpu.SMEM((parts, *rows_to_copy(heads, head_dim, q.dtype)), q.dtype),
            plgpu.SMEM((heads,), jnp.float32),
            plgpu.Barrier(),
            *reader.scratch(shape.swizzle, readers=1),
        ],
        interpret=interpret,
    )  # fmt: skip
    first = stride * np.arange(num_seqs * num_kv_heads)
    column = (first - np.minimum(first, last_start))[:, None] + np.arange(group)
    lse = jnp.take_along_axis(lse.reshape(splits, -1, heads), jnp.asarray(column)[None], axis=2)
    return out, lse.reshape(splits, num_seqs, num_q_heads)
