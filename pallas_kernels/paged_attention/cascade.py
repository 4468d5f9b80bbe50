"""Attention of sequences that share leading blocks: what they share is read once for all of them.

    prefix   every query of a group of neighbouring sequences, over the blocks that the group shares
    suffix   the queries of each sequence, over the blocks behind these
    out      both merged by their log-sum-exps, see `merge`

All queries of a group see the whole prefix, so that the first is attention that is not causal, of
one "sequence" with the group's queries: `paged_attention` with one row of the table for each group.
The second is `paged_attention` with tables and lengths as if each sequence began behind its prefix.

Data movement: the pages of a prefix are read once for as many queries as the implementation takes
at a time (the kernel 128 rows, 64 on Ampere, each of one query head; XLA 64 queries), and not
once for each sequence; the rest as in `paged_attention`. On top, each query is read twice and two
outputs are merged. (Cascade inference: https://flashinfer.ai/2024/02/02/cascade-inference.html.)
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv.pallas_kernels.integers import int32
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
    """`paged_attention`, where groups of neighbouring sequences share leading blocks.

    The same numbers up to rounding: in 16 bits both parts are rounded to q's dtype before they are
    merged. A batch in which nothing is shared is better off with `paged_attention`.

    Args:
      q: [T, num_q_heads, head_dim]; sequences in order, `query_start` says whose is which.
      kv_pages: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
      block_tables: i32[S, max_blocks_per_seq]. A group's shared blocks are read from the row of its
        first sequence; those of the others are not looked at.
      seq_lens: i32[S]; tokens of each sequence, the shared ones and this step's included.
      query_start: i32[S + 1], as in `paged_attention`; None: one query for each sequence.
      group_start: i32[G + 1], from 0 on and rising; sequences `group_start[g] : group_start[g + 1]`
        are group g. A group may be empty, or of one sequence; those behind the last share nothing.
      shared_blocks: i32[G]; full blocks that the sequences of a group share, 0 or more. They hold
        no token of this step: shared_blocks[g] * block_size is at most what each sequence that has
        queries had before it.
      max_query_len: static; no sequence has more queries. 1 selects the decode form of the suffix.
      window: None. A window would end inside a prefix at another place for every query, and mostly
        behind it.
      sinks: [num_q_heads], as in `paged_attention`.
      return_lse: whether to return the log-sum-exp too.
      **options: layer, kv_scales, scale, soft_cap, implementation, interpret: of `paged_attention`,
        for both parts. Without a name, each part takes the first implementation that runs: the
        prefix is of the form "prefill" and not causal for `supports`, whatever the suffix is.

    Returns:
      [T, num_q_heads, head_dim] in q's dtype, with `return_lse` also f32[T, num_q_heads]: as
      `paged_attention`.

    Raises:
      ValueError: shapes, integer types or groups that do not fit.
      NotImplementedError: a window; or the named implementation cannot run, with the reason.

    Example:
      A step of three sequences, of which two begin with the same two blocks of 4 tokens. The host
      finds them in the manager's tables; both arrays go into the step.

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
            f"{window=}: it would end inside a shared prefix at another place for every query, and "
            "mostly behind it: paged_attention reads what a window sees and no more"
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

    first_rows = jnp.pad(tables, ((0, 1), (0, 0)))[groups[:-1]]  # an empty group may stand behind
    prefix = paged_attention(
        q, kv_pages, first_rows, shared * block_size, starts[groups],
        causal=False, max_query_len=max(2, len(q)), return_lse=True, **options,
    )  # fmt: skip

    group = jnp.searchsorted(groups, jnp.arange(len(tables)), side="right") - 1
    skipped = jnp.pad(shared, (0, 1))[group]  # blocks of each sequence; 0 behind the last group
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
    """What a group must be; the numbers where they are known: inside a jitted step they are not."""
    shape, wanted = jnp.shape(group_start), (jnp.size(shared_blocks) + 1,)
    if jnp.ndim(shared_blocks) != 1 or shape != wanted or wanted == (1,):
        raise ValueError(
            f"one number of blocks for each group, and at least one group: group_start of {shape}, "
            f"shared_blocks of {jnp.shape(shared_blocks)}"
        )
    arrays = group_start, shared_blocks, seq_lens, query_start
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    groups, shared, lens, starts = (np.asarray(x).astype(np.int64) for x in arrays)
    if starts.shape != (len(lens) + 1,):
        return  # paged_attention says so
    if groups[0] != 0 or (np.diff(groups) < 0).any() or groups[-1] > len(lens):
        raise ValueError(
            f"group_start={groups.tolist()} does not cut {len(lens)} sequences into groups: it "
            "must begin with 0, not fall, nor end past them"
        )
    counts = np.diff(starts)
    shared = np.repeat(shared, np.diff(groups))
    before = np.where(counts > 0, np.maximum(lens - counts, 0), np.iinfo(np.int64).max)
    wrong = np.flatnonzero((shared < 0) | (shared * block_size > before[: len(shared)]))
    if len(wrong):
        s = wrong[0]
        raise ValueError(
            f"sequence {s} has {before[s]} tokens before this step, and its group is said to share "
            f"{shared[s]} full blocks of {block_size}"
        )
