"""Copies of a manager go on by themselves; a copy that could not is refused."""

import copy
import pickle

import numpy as np
import pytest
from oracle import Oracle, run
from scene import CALLS, CHANGES, digest, scene

from jaxkv import BlockManager, JaxkvError, OutOfBlocksError
from jaxkv.manager.eviction.policies import POLICIES


def pickled(manager):
    return pickle.loads(pickle.dumps(manager))


def now():
    return 1.0  # a clock that pickle can name


ways = pytest.mark.parametrize("way", [copy.deepcopy, pickled])
both = pytest.mark.parametrize("index", ["hash", "radix"])


@ways
@both
def test_a_copy_has_everything_and_shares_nothing(way, index):
    m = scene(index, clock=now)
    before = digest(m)
    twin = way(m)
    twin.check()
    assert digest(twin) == before
    assert twin.to_dict() == m.to_dict()
    arrays = [x for part in (m._pool, m._pool.tree, m._table) for x in vars(part).values()]
    others = [x for part in (twin._pool, twin._pool.tree, twin._table) for x in vars(part).values()]
    for mine in (x for x in arrays if isinstance(x, np.ndarray)):
        assert not any(np.shares_memory(mine, x) for x in others if isinstance(x, np.ndarray))
    assert np.shares_memory(twin._table.lengths, twin._table._columns)
    assert np.shares_memory(twin._pool.slots, twin._pool.tokens)
    if index == "hash":
        assert twin._pool.index._tokens is twin._pool.tokens
        assert twin._pool.index._parents is twin._pool.tree.parents


def outcome(call, m):
    try:
        return call(m)
    except OutOfBlocksError as error:
        return str(error)


@ways
@both
@pytest.mark.parametrize("name", CALLS)
def test_each_call_does_the_same_to_the_copy_and_leaves_the_original(way, index, name):
    m = scene(index, clock=now)
    before, twin = digest(m), way(m)
    result = outcome(CALLS[name], twin)
    twin.check()
    assert digest(m) == before
    assert str(outcome(CALLS[name], m)) == str(result)
    if name in CHANGES:
        assert digest(m) == digest(twin)


class Fork(Oracle):
    """An oracle whose manager is a copy of another's."""

    def __init__(self, of, way):
        self.__dict__.update(
            copy.deepcopy({k: v for k, v in vars(of).items() if k not in ("m", "ids")})
        )
        self.ids, self.m = copy.copy(iter(range(10_000 + of.made, 20_000))), way(of.m)
        self.made = 0


class Counting(Oracle):
    made = 0


def drive(o, rng, steps):
    """Random operations of every kind, each verified against the KV of every slot."""
    for _ in range(steps):
        live, kind = sorted(o.tokens), int(rng.integers(9))
        seq = live[int(rng.integers(len(live)))] if live else None
        if kind < 3 or seq is None:
            seq = o.allocate(rng.integers(0, 2, int(rng.integers(1, 12))).tolist(),
                             priority=int(rng.integers(-1, 2)))  # fmt: skip
            if seq is not None:
                o.write(seq)
        elif kind == 3:
            if o.append([seq], [int(rng.integers(2))]):
                o.write(seq)
        elif kind == 4:
            o.fork(seq)
        elif kind == 5 and o.m.sliding_window is None:
            o.truncate(seq, int(rng.integers(o.m.length(seq) + 1)))
        elif kind == 6:
            o.m.pin(o.tokens[seq])
        elif kind == 7:
            o.reorder(live, rng.integers(0, len(live), len(live)).tolist())
        else:
            o.free(seq)
        o.verify()


@ways
@both
@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("window", [None, 5])
def test_original_and_copy_run_on(way, index, eviction, window):
    rng = np.random.default_rng(0)
    o = Counting(14, 2, 4, 9, prefix_index=index, eviction=eviction, sliding_window=window,
                 copy_on_partial_reuse=window is None)  # fmt: skip
    o.m = BlockManager(15, 2, max_seqs=4, max_blocks_per_seq=9, prefix_index=index, clock=now,
                       eviction=eviction, sliding_window=window, debug=True,
                       copy_on_partial_reuse=window is None)  # fmt: skip
    drive(o, rng, 25)
    twin = Fork(o, way)
    drive(twin, rng, 20)
    drive(o, rng, 20)
    twin.verify()
    twin.finish()
    o.finish()


@ways
def test_a_copy_has_the_clock_and_no_listeners(way):
    m, seen = scene(clock=now), []
    m.subscribe(seen.append)
    twin = way(m)
    assert twin.clock is m.clock
    twin.free("a")
    assert seen == []
    m.free("a")
    assert len(seen) == 2


def test_a_deep_copy_shares_a_clock_that_is_an_object():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    m = scene(clock=clock)
    twin = copy.deepcopy(m)
    clock.now = 100.0
    assert twin.stats().pinned == m.stats().pinned == 1  # the pin with an end has ended in both


def test_rows_that_were_selected_before_the_copy_are_looked_up_again():
    m = scene(clock=now)
    rows = m.select(["a", "c"])
    twin = copy.deepcopy(m)
    twin.free("a")
    twin.allocate("x", [1])
    twin.free("c")
    twin.allocate("c", run(301, 302))
    twin.allocate("a", run(401, 402))
    twin.append_batch(rows, [11, 12])
    assert twin.token_ids("a").tolist() == [401, 402, 11]
    assert twin.token_ids("c").tolist() == [301, 302, 12]
    twin.check()


def test_a_deep_tree_can_be_copied():
    """A prompt that parts from the others at each of its 400 blocks."""
    m = BlockManager(900, 1, max_seqs=1, max_blocks_per_seq=400, prefix_index="radix", clock=now)
    for end in range(400, 0, -1):
        tokens = [*([0] * (end - 1)), 1 + end % 2]
        m.allocate(0, tokens)
        m.commit(0, end - m.num_computed_tokens(0))
        m.free(0)
    for twin in (copy.deepcopy(m), pickled(m)):
        twin.check()
        assert digest(twin._pool.index.__getstate__()) == digest(m._pool.index.__getstate__())  # pyright: ignore
        assert twin.lookup([0] * 399) == m.lookup([0] * 399) == 399


def test_a_shallow_copy_and_a_copy_in_mid_call_are_refused():
    m = scene(clock=now)
    with pytest.raises(JaxkvError, match=r"use copy\.deepcopy"):
        copy.copy(m)
    with pytest.raises(JaxkvError, match="while a call changes it"):
        m.allocate("new", run(1, 4), media=(pickle.dumps(m) for _ in range(1)))  # pyright: ignore
    m.check()


def test_a_clock_without_a_name_cannot_be_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(scene(clock=lambda: 0.0))
