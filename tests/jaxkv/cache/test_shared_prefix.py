"""Groups of sequences that share leading blocks, against all groupings of small batches."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.cache.shared_prefix import shared_prefix_groups


def found(tables, lens, query_start=None, **options):
    """[(first sequence, end, shared blocks)] of the groups that share; blocks of 4 tokens."""
    options = dict(min_tokens=4) | options
    start, shared = shared_prefix_groups(tables, lens, query_start, block_size=4, **options)
    assert start.dtype == shared.dtype == np.int32
    assert len(start) == len(shared) + 1 == 2 * options.get("max_groups", 4) + 1
    assert start[0] == 0
    assert (np.diff(start) >= 0).all()
    assert start[-1] <= len(lens)
    groups = zip(start[:-1], start[1:], shared, strict=True)
    return [tuple(map(int, group)) for group in groups if group[2]]


SYSTEM = [[7, 8, 9, 1], [7, 8, 9, 2], [7, 8, 9, 3]]


def test_what_a_system_prompt_shares():
    assert found(SYSTEM, [16, 16, 16]) == [(0, 3, 3)]


def test_gaps_are_groups_that_share_nothing():
    tables = [[1, 0], [5, 2], [5, 3], [4, 0], [6, 2], [6, 3]]
    start, shared = shared_prefix_groups(tables, [8] * 6, block_size=4, min_tokens=4, max_groups=2)
    assert start.tolist() == [0, 1, 3, 4, 6]
    assert shared.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("lens", "query_start", "blocks"), [
    ([13, 16, 14], None, 3),
    ([13, 12, 14], None, 2),  # the 12th token is written in this step
    ([13, 16, 14], [0, 1, 5, 6], 3),
    ([13, 16, 14], [0, 1, 6, 7], 2),
    ([13, 16, 14], [0, 5, 6, 7], 2),
    ([20, 20, 20], [0, 0, 1, 1], 3),  # two that compute nothing
])  # fmt: skip
def test_only_full_blocks_before_the_step_are_shared(lens, query_start, blocks):
    assert found(SYSTEM, lens, query_start) == [(0, 3, blocks)]


def test_padding_and_null_blocks_are_not_shared():
    """Rows of padding are all alike, and so is what lies behind a window."""
    assert found([[0, 0], [0, 0], [0, 5], [0, 5]], [0, 0, 8, 8]) == []
    assert found([[3, 3], [3, 3], [3, 3]], [0, 9, 0], [0, 0, 1, 1]) == []
    assert found(SYSTEM + [[0] * 4] * 2, [16, 16, 16, 0, 0], [0, 1, 2, 3, 3, 3]) == [(0, 3, 3)]


def test_the_smallest_group_and_the_shortest_prefix():
    assert found(SYSTEM, [16] * 3, min_sequences=3, min_tokens=12) == [(0, 3, 3)]
    assert found(SYSTEM, [16] * 3, min_sequences=4) == []
    assert found(SYSTEM, [16] * 3, min_tokens=13) == []
    assert found(SYSTEM, [16] * 3, min_tokens=256) == []


def test_all_together_or_each_pair_with_more():
    pairs = [[1, *[2] * n] for n in (3, 3)] + [[1, *[5] * 3]] * 2
    assert found(pairs, [20] * 4) == [(0, 2, 4), (2, 4, 4)]  # 4 + 4 against 3 * 1
    many = [[1, 2, 3, 4 + i // 2] for i in range(8)]
    assert found(many, [20] * 8) == [(0, 8, 3)]  # 7 * 3 against 4 * 4


def test_of_too_many_groups_those_that_save_most_are_kept():
    tables = [[5 + n, 20 * n + i] for n, size in enumerate((2, 4, 3)) for i in range(size)]
    assert found(tables, [8] * 9, max_groups=2) == [(2, 6, 1), (6, 9, 1)]


@pytest.mark.parametrize("size", [0, 1])
def test_a_batch_of_none_or_one(size):
    assert found(np.ones((size, 3), int), np.full(size, 12)) == []


def _saved_by(common, cuts, min_sequences, min_blocks):
    saved = 0
    for first, end in itertools.pairwise((0, *cuts, len(common) + 1)):
        shared = min(common[first : end - 1], default=0)
        if end - first >= min_sequences and shared >= min_blocks:
            saved += (end - first - 1) * shared
    return saved


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(2, 4), st.integers(1, 3))
def test_no_grouping_saves_more(common, min_sequences, min_blocks):
    tables = np.zeros((len(common) + 1, 6), int)
    fresh = itertools.count(1)
    tables[0] = [next(fresh) for _ in range(6)]
    for s, blocks in enumerate(common):
        tables[s + 1, :blocks] = tables[s, :blocks]
        tables[s + 1, blocks:] = [next(fresh) for _ in range(6 - blocks)]
    groups = found(
        tables, [24] * len(tables), min_sequences=min_sequences, min_tokens=4 * min_blocks
    )
    for first, end, blocks in groups:
        assert end - first >= min_sequences
        assert blocks >= min_blocks
        assert (tables[first:end, :blocks] == tables[first, :blocks]).all()
    cuts = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(tables)), n) for n in range(len(tables))
    )
    best = max(_saved_by(common, cut, min_sequences, min_blocks) for cut in cuts)
    assert sum((end - first - 1) * blocks for first, end, blocks in groups) == best


def test_a_managers_tables():
    manager = jaxkv.BlockManager(64, 4, max_seqs=4, max_blocks_per_seq=8)
    for name in "abc":
        prompt = [*range(12), ord(name), 7]
        cached = manager.allocate(name, prompt).num_cached_tokens
        manager.commit(name, len(prompt) - cached)
    tables = np.stack([manager.block_table(name) for name in "abc"])
    lens = [manager.length(name) for name in "abc"]
    assert found(tables, lens) == [(0, 3, 3)]
