"""Cascade attention: leading blocks that several sequences share are read once for all of them.

    prefix   every query of a group of neighbouring sequences, over the blocks that the group shares
    suffix   the queries of each sequence, over its remaining blocks
    out      both merged by their log-sum-exps, see `merge`

All queries of a group see the whole prefix, so the prefix part is non-causal attention of one
"sequence" with the group's queries: `paged_attention` with one table row per group. The suffix part
is `paged_attention` with tables and lengths as if each sequence began after its prefix.

Data movement: the pages of a prefix are read once per batch of queries that the implementation
takes at a time (the kernel 128 rows, 64 on Ampere, each of one query head; XLA 64 queries), and not
once per sequence; the rest as in `paged_attention`. In addition, each query is read twice and two
outputs are merged. (Cascade inference: https://flashinfer.ai/2024/02/02/cascade-inference.html.)
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv.pallas_kernels.integers import count_up_to, int32
from jaxkv.pallas_kernels.layout import PoolShape, or_null
from jaxkv.pallas_kernels.paged_attention import merge_attention, paged_attention


@overload
def cascade_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    query_start: ArrayLike | None = None,
    *,
    group_start: ArrayLike,
    shared_blocks: ArrayLike,
    max_query_len: int = 1,
    window: int | None = None,
    sinks: jax.Array | None = None,
    return_lse: Literal[False] = False,
    **options: Any,
) -> jax.Array: ...


@overload
def cascade_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    query_start: ArrayLike | None = None,
    *,
    group_start: ArrayLike,
    shared_blocks: ArrayLike,
    max_query_len: int = 1,
    window: int | None = None,
    sinks: jax.Array | None = None,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[jax.Array, jax.Array]: ...


def cascade_attention(
    q, kv_pages, block_tables, seq_lens, query_start=None,
    *, group_start, shared_blocks, max_query_len=1, window=None, sinks=None, return_lse=False,
    **options,
):  # fmt: skip
    """`paged_attention` for groups of neighbouring sequences that share leading blocks.

    The results are equal up to rounding: in 16 bits, both parts are rounded to q's dtype before
    they are merged. `paged_attention` is faster for a batch without shared blocks.

    Args:
      q: [T, num_q_heads, head_dim], in the order of the sequences; `query_start` delimits them.
      kv_pages: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
      block_tables: i32[S, max_blocks_per_seq]. A group's shared blocks are read from the row of its
        first sequence; the entries of its other rows are ignored.
      seq_lens: i32[S], tokens of each sequence, including the shared ones and this step's.
      query_start: i32[S + 1], as in `paged_attention`; None: one query for each sequence.
      group_start: i32[G + 1], nondecreasing from 0; sequences `group_start[g] : group_start[g + 1]`
        are group g. A group may be empty or have one sequence; sequences after the last group share
        nothing.
      shared_blocks: i32[G], full blocks that the sequences of a group share, 0 or more. They hold
        no token of this step: shared_blocks[g] * block_size must not exceed the tokens that any of
        the group's sequences with queries had before the step.
      max_query_len: upper bound of the queries per sequence (static). 1 selects the decode form of
        the suffix.
      window: must be None. A window would start at a different place for each query, mostly after
        the prefix.
      sinks: [num_q_heads], as in `paged_attention`.
      return_lse: whether to return the log-sum-exp too.
      **options: layer, kv_scales, scale, soft_cap, implementation and interpret, passed to
        `paged_attention` for both parts. Without a named implementation, each part uses the first
        that can run; for `supports`, the prefix is a non-causal "prefill" whatever the suffix is.

    Returns:
      [T, num_q_heads, head_dim] in q's dtype; with `return_lse` also f32[T, num_q_heads], as in
      `paged_attention`.

    Raises:
      ValueError: the shapes, integer types or groups do not fit.
      NotImplementedError: a window was given, or the named implementation cannot run; the error
        gives the reason.

    Example:
      A step of three sequences, of which two begin with the same two blocks of 4 tokens. The host
      finds the groups in the manager's tables and passes both arrays to the step.

      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import jaxkv
      >>> from jaxkv.pallas_kernels.paged_attention import paged_attention
      >>> from jaxkv.pallas_kernels.paged_attention.cascade import cascade_attention
      >>> tables = np.array([[4, 2, 1], [4, 2, 3], [5, 0, 0]], np.int32)
      >>> lens = np.array([10, 12, 3], np.int32)
      >>> found = jaxkv.shared_prefix_groups(tables, lens, block_size=4, min_tokens=8, max_groups=1)
      >>> found.group_start.tolist(), found.shared_blocks.tolist()
      ([0, 2, 2], [2, 0])
      >>> pages = jnp.sin(jnp.arange(6 * 2 * 4 * 8.0)).reshape(6, 1, 2, 1, 4, 8)
      >>> args = jnp.ones((3, 2, 8)), pages, tables, lens
      >>> out = cascade_attention(*args, **found._asdict(), layer=0)
      >>> bool(jnp.allclose(out, paged_attention(*args, layer=0), atol=1e-5))
      True
    """
    if window is not None:
        raise NotImplementedError(
            f"window must be None in cascade_attention, got {window}: use paged_attention, which "
            "reads only the pages inside a window"
        )
    if query_start is None:
        query_start = np.arange(len(seq_lens) + 1, dtype=np.int32)
    block_size = PoolShape.of(kv_pages).block_size
    metadata = dict(
        group_start=group_start, shared_blocks=shared_blocks, seq_lens=seq_lens,
        query_start=query_start,
    )  # fmt: skip
    metadata = {name: int32(name, x) for name, x in metadata.items()}
    _validate_groups(*metadata.values(), block_size)
    groups, shared, lens, starts = map(jnp.asarray, metadata.values())
    tables = or_null("block_tables", block_tables, kv_pages)

    first_rows = jnp.pad(tables, ((0, 1), (0, 0)))[groups[:-1]]  # an empty group may come last
    prefix = paged_attention(
        q, kv_pages, first_rows, shared * block_size, starts[groups],
        causal=False, max_query_len=max(2, len(q)), return_lse=True, **options,
    )  # fmt: skip

    group = count_up_to(groups, jnp.arange(len(tables), dtype=jnp.int32)) - 1
    skipped = jnp.pad(shared, (0, 1))[group]  # per sequence; 0 after the last group
    columns = skipped[:, None] + jnp.arange(tables.shape[1], dtype=jnp.int32)
    tables = jnp.take_along_axis(tables, columns, axis=1, mode="fill", fill_value=0)
    suffix = paged_attention(
        q, kv_pages, tables, lens - skipped * block_size, starts,
        max_query_len=max_query_len, sinks=sinks, return_lse=True, **options,
    )  # fmt: skip

    outs, lses = (jnp.stack(parts) for parts in zip(prefix, suffix, strict=True))
    out, lse = merge_attention(outs, lses)
    return (out.astype(q.dtype), lse) if return_lse else out.astype(q.dtype)


def _validate_groups(group_start, shared_blocks, seq_lens, query_start, block_size) -> None:
    """Checks the groups: their shapes, and outside a jitted function their values."""
    shape, wanted = jnp.shape(group_start), (jnp.size(shared_blocks) + 1,)
    if jnp.ndim(shared_blocks) != 1 or shape != wanted or wanted == (1,):
        raise ValueError(
            "group_start and shared_blocks must have shapes (G + 1,) and (G,) for G >= 1 groups, "
            f"got {shape} and {jnp.shape(shared_blocks)}"
        )
    arrays = group_start, shared_blocks, seq_lens, query_start
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    groups, shared, lens, starts = (np.asarray(x).astype(np.int64) for x in arrays)
    if starts.shape != (len(lens) + 1,):
        return  # paged_attention raises the error
    if groups[0] != 0 or (np.diff(groups) < 0).any() or groups[-1] > len(lens):
        raise ValueError(
            "group_start must begin with 0 and not decrease or exceed the number of sequences, "
            f"{len(lens)}, got {groups.tolist()}"
        )
    counts = np.diff(starts)
    shared = np.repeat(shared, np.diff(groups))
    before = np.where(counts > 0, np.maximum(lens - counts, 0), np.iinfo(np.int64).max)
    wrong = np.flatnonzero((shared < 0) | (shared * block_size > before[: len(shared)]))
    if len(wrong):
        s = wrong[0]
        raise ValueError(
            "shared_blocks must be 0 or more and fit the tokens of each sequence before the step: "
            f"sequence {s} has {before[s]}, its group shares {shared[s]} blocks of {block_size}"
        )
