"""Groups of sequences that share leading blocks, for attention that reads these once.

Host code, like the block manager. It compares block ids and not tokens, since sequences that share
a prefix have the same ids in their tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxkv._util import ceil_div
from jaxkv.manager.table import NULL_BLOCK


class SharedPrefix(NamedTuple):
    """Groups of neighbouring sequences, the arguments of `cascade_attention`; a PyTree.

    Attributes:
      group_start: i32[G + 1]; group g is sequences `group_start[g] : group_start[g + 1]`. Sequences
        after the last group share nothing; padding groups are empty.
      shared_blocks: i32[G]; number of leading blocks that the sequences of the group share.
    """

    group_start: np.ndarray
    shared_blocks: np.ndarray


def shared_prefix_groups(
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    query_start: ArrayLike | None = None,
    *,
    block_size: int,
    min_sequences: int = 2,
    min_tokens: int = 256,
    max_groups: int = 4,
) -> SharedPrefix:
    """Finds the groups of neighbours for which reading a shared prefix once saves most.

    A group of n sequences that share m blocks saves (n - 1) * m block reads. The groups maximise
    the sum: if all sequences share a system prompt and some share more, either grouping may win.
    Only neighbours are grouped, so sequences with equal prefixes should be side by side. The search
    takes about 10 us per sequence that shares; groups change when sequences start, end, or fill
    another shared block, not with every token.

    Args:
      block_tables: i[S, max_blocks_per_seq]; table rows of the sequences, in batch order.
      seq_lens: i[S]; tokens of each sequence, this step's included. 0 for padding.
      query_start: i[S + 1]; sequence s computes `query_start[s + 1] - query_start[s]` tokens in
        this step; None: one. Only full blocks before these are shared.
      block_size: tokens in a block.
      min_sequences: fewest sequences of a group.
      min_tokens: shortest shared prefix, in tokens; for shorter ones a second pass saves little. The
        default is vLLM's bound.
      max_groups: most groups; those that save most are kept. The arrays have G = 2 * max_groups
        entries, so that the shape of a jitted step is constant.

    Example:
      >>> tables = np.array([[7, 1, 2], [7, 1, 3], [7, 4, 0], [5, 6, 0]])
      >>> lens = np.array([9, 10, 6, 8])
      >>> shared_prefix_groups(tables, lens, block_size=4, min_tokens=4, max_groups=1)
      SharedPrefix(group_start=array([0, 2, 2], dtype=int32), shared_blocks=array([2, 0], dtype=int32))
    """  # noqa: E501
    tables, lens = np.asarray(block_tables), np.asarray(seq_lens).astype(np.int64)
    computed = lens - (1 if query_start is None else np.diff(np.asarray(query_start)))
    full = np.maximum(computed, 0) // block_size
    same = (tables[1:] == tables[:-1]) & (tables[1:] != NULL_BLOCK)
    same = np.pad(same, ((0, 0), (0, 1)))  # so that every row ends
    common = np.minimum(same.argmin(axis=1), np.minimum(full[1:], full[:-1]))  # with the next one
    groups = _best_groups(common, min_sequences, ceil_div(min_tokens, block_size))
    groups = sorted(sorted(groups, key=_saved, reverse=True)[:max_groups])
    start, shared = [0], []
    for first, end, blocks in groups:
        if first > start[-1]:
            start.append(first)
            shared.append(0)
        start.append(end)
        shared.append(blocks)
    padding = 2 * max_groups - len(shared)
    return SharedPrefix(
        np.array(start + [start[-1]] * padding, np.int32),
        np.array(shared + [0] * padding, np.int32),
    )


def _best_groups(
    common: np.ndarray, min_sequences: int, min_blocks: int
) -> list[tuple[int, int, int]]:
    """(first sequence, end, shared blocks) of the groups with the largest sum of savings.

    Args:
      common: i64[S - 1]; blocks that each sequence shares with the next one.
    """
    num_seqs = len(common) + 1
    best = np.zeros(num_seqs + 1, np.int64)  # best[n]: most blocks saved by the first n sequences
    group_first = np.arange(
        -1, num_seqs
    )  # first sequence of the group that ends there; initially one sequence
    run = 0  # first sequence of the run that shares enough
    for end in range(2, num_seqs + 1):
        best[end] = best[end - 1]
        if common[end - 2] < min_blocks:
            run = end - 1
        first = np.arange(run, end - min_sequences + 1)
        if not len(first):
            continue
        shared = np.minimum.accumulate(common[run : end - 1][::-1])[::-1][: len(first)]
        saved = best[first] + (end - first - 1) * shared
        most = saved.argmax()
        if saved[most] > best[end]:
            best[end], group_first[end] = saved[most], first[most]
    groups, end = [], num_seqs
    while end > 0:
        first = int(group_first[end])
        if end - first > 1:
            groups.append((first, end, int(common[first : end - 1].min())))
        end = first
    return groups


def _saved(group: tuple[int, int, int]) -> int:
    first, end, blocks = group
    return (end - first - 1) * blocks
