"""The manager's bookkeeping: a refusal changes nothing, and every block is freed in the end."""

import numpy as np
import pytest

from jaxkv.errors import (
    ConfigError,
    InvariantError,
    JaxkvError,
    OutOfBlocksError,
    UnknownSequenceError,
)
from jaxkv.manager.block_manager import BlockManager
from jaxkv.manager.table import NULL_BLOCK


def make(blocks=4, size=4, seqs=4, columns=8):
    """A manager with `blocks` usable blocks."""
    return BlockManager(blocks + 1, size, max_seqs=seqs, max_blocks_per_seq=columns)


@pytest.mark.parametrize("start", [3, 4, 8])
def test_a_block_is_taken_exactly_when_a_token_needs_it(start):
    m = make()
    m.allocate("a", list(range(start)))
    for length in range(start, 13):
        assert len(m.block_table("a")) == -(-length // 4)
        m.append("a", 0)
        m.check()


def test_out_of_blocks_changes_nothing_and_reports_the_numbers():
    m = make(blocks=3)
    m.allocate("a", [0] * 8)
    before = (m.stats(), m.block_table("a").tolist())
    with pytest.raises(OutOfBlocksError, match="needs 2 blocks of 4 tokens, but 1 of 3") as error:
        m.allocate("b", [0] * 5)
    assert (error.value.asked, error.value.free) == (2, 1)
    assert "longest sequence that fits now has 4 tokens" in str(error.value)
    m.allocate("c", [0] * 4)
    with pytest.raises(OutOfBlocksError):
        m.append_batch(["a", "c"], np.zeros(2, int))
    assert m.length("a") == 8
    assert m.length("c") == 4
    m.free("c")
    assert (m.stats().active, m.block_table("a").tolist()) == (before[0].active, before[1])
    m.check()


def test_never_fits_reports_the_longest_that_fits():
    with pytest.raises(JaxkvError, match="never fits: the longest is 16"):
        make(blocks=4).allocate("a", [0] * 17)
    m = make(blocks=9, columns=2)
    m.allocate("a", [0] * 8)
    with pytest.raises(JaxkvError, match="9 tokens never fits: the longest is 8"):
        m.append("a", 0)
    m.check()


def test_rows_run_out():
    m = make(blocks=8, seqs=2)
    m.allocate("a", [0])
    m.allocate("b", [0])
    with pytest.raises(OutOfBlocksError, match="all 2 rows"):
        m.allocate("c", [0])
    m.check()


def test_misuse_raises_a_named_error():
    m = make()
    m.allocate("a", [0])
    for call in (lambda: m.allocate("a", [0]), lambda: m.allocate("b", []),
                 lambda: m.commit("a", 2), lambda: m.commit("a", -1),
                 lambda: m.append_batch(["a", "a"], np.zeros(2, int)),
                 lambda: m.append_batch(["a"], np.zeros(2, int)),
                 lambda: m.append_batch(["a"], [1, 2], [1]),
                 lambda: m.append_batch(["a"], [1, 2], [1, 1]),
                 lambda: m.append_batch(["a"], [], [0]),
                 lambda: m.reserve(["a"], [1, 2]),
                 lambda: m.reserve(["a"], 0)):  # fmt: skip
        with pytest.raises(JaxkvError):
            call()
    assert m.length("a") == 1
    m.free("a")
    for call in (m.free, m.length, m.block_table, m.row):
        with pytest.raises(UnknownSequenceError, match="no live sequence 'a'"):
            call("a")
    with pytest.raises(ConfigError, match="num_blocks=1"):
        BlockManager(1, 4, max_seqs=1, max_blocks_per_seq=1)
    m.check()


def test_the_null_block_is_never_allocated_and_not_counted():
    m = make()
    m.allocate("a", [0] * 16)
    assert sorted(m.block_table("a").tolist()) == [1, 2, 3, 4]
    assert m.stats().active == 4
    assert m.stats().free == 0


def test_the_tail_is_freed_first():
    m = make()
    m.allocate("a", [0] * 16)
    table = m.block_table("a").tolist()
    m.free("a")
    m.allocate("b", [0] * 16)
    assert m.block_table("b").tolist() == table[::-1]


@pytest.mark.parametrize(
    "damage",
    [
        "ref",
        "free_twice",
        "free_live",
        "leak",
        "table",
        "length",
        "slot",
        "hold",
        "cached",
        "child",
    ],
)
def test_check_finds_damage(damage):
    m = make(blocks=6)
    m.allocate("a", [0] * 7)
    m.commit("a", 7)
    m.allocate("b", [1] * 4)
    m.commit("b", 4)
    m.free("b")
    pool, table, row = m._pool, m._table, m.row("a")
    block = int(m.block_table("a")[0])
    m.check()
    if damage == "ref":
        pool.ref_counts[block] = 2
    elif damage == "free_twice":
        pool._free[0] = pool._free[1]
    elif damage == "free_live":
        pool._free[pool._num_free], pool._num_free = block, pool._num_free + 1
    elif damage == "leak":
        pool._num_free -= 1
    elif damage == "table":
        table.blocks[row, 0] = NULL_BLOCK
    elif damage == "length":
        table.lengths[row] = 9
    elif damage == "slot":
        table.next_slot[row] -= 1
    elif damage == "hold":
        pool.holds[block] = 1
    elif damage == "cached":
        pool.num_cached += 1
    else:
        pool.tree.parents[block] = 3
    with pytest.raises(InvariantError):
        m.check()


def test_plans_are_taken_once():
    m = make()
    m.allocate("a", [0] * 6)
    plan = m.take_plan()
    assert len(plan.cells) == 2
    assert plan.lengths.tolist() == [[m.row("a"), 0]]
    plan = m.take_plan()
    assert len(plan.cells) == len(plan.lengths) == len(plan.copies) == 0


class Unlisted(dict):
    """A dict that answers for single keys only."""

    def __iter__(self):
        raise AssertionError("a call went through all pinned blocks")

    keys = values = items = __iter__


def test_an_append_asks_for_its_own_blocks_among_the_pinned_ones():
    m = make(blocks=40, columns=30)
    m.allocate("a", [1] * 21)
    m.commit("a", 21)
    m.pin([1] * 20)
    m.fork("a", "b")
    pool = m._pool
    pool.kept, pool.holds = Unlisted(pool.kept), Unlisted(pool.holds)
    for _ in range(9):
        m.append_batch(["a", "b"], [2, 3])
    m.reserve(["a", "b"], 9)
    assert m.token_ids("a").tolist() == [1] * 21 + [2] * 9


def test_check_follows_each_link_once(monkeypatch):
    """A thousand blocks under one parent: as many steps as links, not their square."""
    m = BlockManager(1010, 1, max_seqs=1, max_blocks_per_seq=4)
    for i in range(1000):
        m.allocate("a", [7, i])
        m.commit("a", 2 - m.num_computed_tokens("a"))
        m.free("a")
    tree, steps = type(m._pool.tree), []
    edges = tree.edges
    monkeypatch.setattr(tree, "edges", lambda self: (steps.append(e) or e for e in edges(self)))
    monkeypatch.setattr(tree, "children", None)  # listing them for each child was the square
    m.check()
    assert len(steps) == 1000


def test_check_ends_where_links_go_round():
    m = make(blocks=6)
    for last in (2, 3, 4):
        m.allocate("a", [1, 1, 1, 1, last, 0, 0, 0])
        m.commit("a", 8 - m.num_computed_tokens("a"))
        m.free("a")
    tree = m._pool.tree
    children = tree.children(int(np.flatnonzero(tree._first_child)[0]))
    tree._next[children[-1]] = children[0]
    m._pool.tree.parents[children[1]] = 3
    with pytest.raises(InvariantError):
        m.check()
