"""Eviction policies and retention by themselves: orders, memory, and a model of LRU."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sortedcontainers import SortedList

from jaxkv.errors import ConfigError
from jaxkv.manager.eviction.policies import (
    NONE,
    POLICIES,
    Decayed,
    Fifo,
    Lru,
    S3Fifo,
    Scored,
    Slru,
    make_policy,
)
from jaxkv.manager.eviction.retention import Retention
from jaxkv.manager.eviction.run_queue import RunQueue

every = pytest.mark.parametrize("name", POLICIES)


def blocks(*ids):
    return np.array(ids, np.int32)


def store(policy, ids, now=0.0):
    """Contents with hashes named after their blocks."""
    policy.stored(blocks(*ids), [b"%d" % i for i in ids], now)


def use(policy, ids, now):
    """A request that hits the blocks and ends at once, which frees the deepest block first."""
    policy.busy(blocks(*ids))
    policy.hit(blocks(*ids), now)
    policy.idle(blocks(*ids[::-1]))


def drain(policy):
    """All victims, in order."""
    order = []
    while (block := policy.victim()) != NONE:
        order.append(block)
    return order


def entries(policy):
    """Number of entries in the policy's containers, without arrays of one entry per block."""
    held = list(vars(policy).values())
    held += [x for queue in held if isinstance(queue, RunQueue) for x in vars(queue).values()]
    return sum(len(x) for x in held if isinstance(x, list | dict | SortedList))


def test_policies_are_chosen_by_name():
    assert set(POLICIES) == {"lru", "decayed", "fifo", "slru", "s3fifo"}
    assert isinstance(make_policy("decayed", 4), Decayed)
    with pytest.raises(ConfigError, match=r"eviction must be one of lru, .*, got 'mru'"):
        make_policy("mru", 4)


# -- all policies ----------------------------------------------------------------------------


@every
def test_an_empty_queue_has_no_victim(name):
    policy = make_policy(name, 4)
    assert policy.victim() == NONE
    store(policy, [1])
    policy.idle(blocks(1))
    assert [policy.victim(), policy.victim(), policy.victim()] == [1, NONE, NONE]
    store(policy, [1])
    policy.idle(blocks(1))
    policy.busy(blocks(1))
    assert policy.victim() == NONE


@every
def test_blocks_of_one_run_are_evicted_in_the_order_given(name):
    policy = make_policy(name, 8)
    store(policy, [1, 2, 3])
    policy.idle(blocks(3, 2, 1))
    assert drain(policy) == [3, 2, 1]


@every
@pytest.mark.parametrize("middle", [1, 2, 3, 4])
def test_a_block_can_be_removed_from_the_middle_of_a_run(name, middle):
    policy = make_policy(name, 8)
    store(policy, [1, 2, 3, 4])
    policy.idle(blocks(4, 3, 2, 1))
    policy.busy(blocks(middle))
    rest = [b for b in (4, 3, 2, 1) if b != middle]
    assert policy.victim() == rest[0]
    policy.busy(blocks(*rest[2:]))
    assert drain(policy) == rest[1:2]


@every
def test_a_block_that_becomes_idle_again_is_a_candidate_once(name):
    policy = make_policy(name, 8)
    store(policy, [1, 2, 3])
    policy.idle(blocks(3, 2, 1))
    for _ in range(5):
        policy.busy(blocks(2))
        policy.idle(blocks(2))
    assert sorted(drain(policy)) == [1, 2, 3]


@every
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_victims_are_the_idle_blocks_each_once(name, data):
    policy, idle, cached, now = make_policy(name, 8), set(), set(), 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.floats(0, 500))
        block = data.draw(st.integers(1, 7))
        if block not in cached:
            store(policy, [block], now)
            cached.add(block)
            policy.idle(blocks(block))
            idle.add(block)
        elif block in idle and data.draw(st.booleans()):
            policy.busy(blocks(block))
            policy.hit(blocks(block), now)
            idle.remove(block)
        elif block not in idle:
            policy.idle(blocks(block))
            idle.add(block)
        else:
            victim = policy.victim()
            assert victim in idle
            policy.removed(victim, b"%d" % victim)
            idle.remove(victim)
            cached.remove(victim)
    assert sorted(drain(policy)) == sorted(idle)


@every
def test_memory_does_not_grow_with_time(name):
    policy = make_policy(name, 8)
    rng = np.random.default_rng(0)
    for i in range(3000):
        ids = rng.permutation(np.arange(1, 8))[: rng.integers(1, 8)].astype(np.int32)
        policy.busy(ids)
        policy.stored(ids, [b"%d.%d" % (i, b) for b in ids], float(i))
        policy.idle(ids)
        if rng.random() < 0.3 and (victim := policy.victim()) != NONE:
            policy.removed(victim, b"%d.%d" % (i, victim))
        assert entries(policy) <= 9 * 8


# -- LRU, FIFO -------------------------------------------------------------------------------


class LruModel:
    """An ordered dictionary."""

    def __init__(self):
        self.order = OrderedDict()

    def idle(self, ids):
        for block in ids:
            self.order[block] = None

    def busy(self, ids):
        for block in ids:
            self.order.pop(block, None)

    def victim(self):
        return self.order.popitem(last=False)[0] if self.order else NONE


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.integers(2, 8))
def test_lru_is_an_ordered_dictionary(data, size):
    policy, model = Lru(size), LruModel()
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["idle", "busy", "victim"]))
        if kind == "victim":
            assert policy.victim() == model.victim()
            continue
        among = set(range(1, size)) - set(model.order) if kind == "idle" else set(range(1, size))
        if not among:
            continue
        ids = data.draw(st.lists(st.sampled_from(sorted(among)), unique=True, min_size=1))
        getattr(policy, kind)(blocks(*ids))
        getattr(model, kind)(ids)
    assert drain(policy) == list(model.order)


def test_lru_orders_by_the_last_release_only():
    policy = Lru(8)
    store(policy, [1, 2, 3])
    for block in (1, 2, 3):
        policy.idle(blocks(block))
    use(policy, [1], 50.0)
    policy.hit(blocks(2), 60.0)  # a hit alone does not move it
    assert drain(policy) == [2, 3, 1]


def test_fifo_orders_by_the_time_of_storing():
    policy = Fifo(8)
    store(policy, [1, 2])
    store(policy, [3])
    policy.idle(blocks(3))
    policy.idle(blocks(2, 1))
    use(policy, [1, 2], 9.0)
    assert drain(policy) == [2, 1, 3]
    policy.removed(1, b"1")
    store(policy, [4])
    store(policy, [1])  # other content
    policy.idle(blocks(1))
    policy.idle(blocks(4))
    assert drain(policy) == [4, 1]


def test_runs_of_rising_score_interleave():
    """The deepest block of a run may score less than that of another run, and its head more."""
    policy = Fifo(8)
    for block in (5, 6, 1, 2):
        store(policy, [block])
    policy.idle(blocks(5, 2))
    policy.idle(blocks(6, 1))
    assert drain(policy) == [5, 6, 1, 2]


def test_crossed_out_blocks_are_dropped():
    policy = Lru(4)
    policy.idle(blocks(1))
    for _ in range(1000):
        policy.idle(blocks(3, 2))
        policy.busy(blocks(2, 3))
        assert len(policy) == len(policy._order) == 1
        assert len(policy._runs) <= 3
    policy.idle(blocks(2, 3))
    assert drain(policy) == [1, 2, 3]


def test_compaction_keeps_the_rest_of_a_run_in_order():
    policy = Fifo(4)
    for block in (1, 2, 3):
        store(policy, [block])
    policy.idle(blocks(1, 2, 3))
    assert policy.victim() == 1
    policy.busy(blocks(2))
    for _ in range(20):
        policy.idle(blocks(1, 2))
        policy.busy(blocks(1, 2))
    policy.idle(blocks(1))
    assert drain(policy) == [1, 3]


def test_the_base_class_requires_subclasses_to_score():
    with pytest.raises(NotImplementedError):
        Scored(4).stored(blocks(1), [b""], 0.0)
    with pytest.raises(NotImplementedError):
        Scored(4).hit(blocks(1), 0.0)


# -- decayed counts --------------------------------------------------------------------------


def brute_force(times, now, half_life):
    return sum(2.0 ** ((t - now) / half_life) for t in times)


@pytest.mark.parametrize("epoch", [0.0, 1e9])
@pytest.mark.parametrize("half_life", [10.0, 300.0, 1e5])
def test_decayed_orders_as_the_decayed_counts_do(epoch, half_life):
    """At any epoch: the score is a logarithm, so that nothing overflows or rounds to equal."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        policy, uses = Decayed(8, half_life, debounce=0.0), {}
        for block in range(1, 8):
            uses[block] = np.cumsum(rng.exponential(half_life, rng.integers(1, 12))).tolist()
        for time, block in sorted((t, b) for b, ts in uses.items() for t in ts):
            if time == uses[block][0]:
                store(policy, [block], epoch + time)
                policy.idle(blocks(block))
            else:
                use(policy, [block], epoch + time)
        now = max(max(ts) for ts in uses.values())
        counts = {b: brute_force(ts, now, half_life) for b, ts in uses.items()}
        assert np.isfinite(policy.score[1:]).all()
        assert drain(policy) == sorted(counts, key=counts.__getitem__)


@pytest.mark.parametrize("epoch", [0.0, 1e9])
def test_one_use_a_half_life_later_is_worth_two(epoch):
    policy = Decayed(8, half_life=300.0)
    store(policy, [1], epoch)
    policy.idle(blocks(1))
    use(policy, [1], epoch + 2)
    for block, later in ((2, 295.0), (3, 310.0)):
        store(policy, [block], epoch + later)
        policy.idle(blocks(block))
    assert drain(policy) == [2, 1, 3]


def test_a_burst_counts_once():
    policy = Decayed(8, half_life=300.0, debounce=1.0)
    store(policy, [1, 2], 10.0)
    policy.idle(blocks(2))
    policy.idle(blocks(1))
    for i in range(9):
        use(policy, [1], 10.0 + 0.1 * i)
    assert policy.score[1] == policy.score[2]
    use(policy, [2], 11.0)
    assert policy.score[1] < policy.score[2]
    assert drain(policy) == [1, 2]


def test_the_debounce_starts_at_the_last_counted_use():
    policy = Decayed(8, half_life=300.0, debounce=1.0)
    store(policy, [1], 0.0)
    scores = []
    for time in (0.6, 1.2, 1.8, 2.4):  # counts at 1.2 and 2.4
        policy.hit(blocks(1), time)
        scores.append(float(policy.score[1]))
    assert scores[0] == 0.0 < scores[1] == scores[2] < scores[3]


def test_evicted_content_is_stored_again_with_its_score():
    policy = Decayed(8, half_life=300.0)
    store(policy, [1], 0.0)
    for i in range(8):
        policy.hit(blocks(1), 2.0 * i)
    score = float(policy.score[1])
    policy.removed(1, b"1")
    policy.stored(blocks(5), [b"1"], 20.0)  # in another block
    assert policy.score[5] == pytest.approx(np.log2(2**score + 2 ** (20.0 / 300)))
    assert not policy._ghosts
    policy.stored(blocks(1), [b"other"], 20.0)
    assert policy.score[1] == 20.0 / 300


@pytest.mark.parametrize("ghosts", [0.0, 0.5, 4.0])
def test_ghosts_are_bounded_and_the_oldest_is_dropped(ghosts):
    policy = Decayed(8, ghosts=ghosts)
    for i in range(100):
        store(policy, [1], float(i))
        policy.removed(1, b"%d" % i)
        assert len(policy._ghosts) <= int(8 * ghosts)
    kept = int(8 * ghosts)
    assert list(policy._ghosts) == [b"%d" % i for i in range(100 - kept, 100)]


# -- SLRU, S3-FIFO ---------------------------------------------------------------------------


def test_slru_protects_blocks_that_were_hit():
    policy = Slru(10)
    store(policy, [1, 2, 3])
    for block in (1, 2, 3):
        policy.idle(blocks(block))
    use(policy, [1], 1.0)
    store(policy, [4])
    policy.idle(blocks(4))
    assert drain(policy) == [2, 3, 4, 1]


def test_slru_demotes_the_least_recent_when_too_many_are_protected():
    policy = Slru(10, protected=0.2)
    store(policy, [1, 2, 3, 4])
    for block in (1, 2, 3, 4):
        policy.idle(blocks(block))
    for block in (1, 2, 3):
        use(policy, [block], 1.0)
    assert len(policy._protected) == 2
    assert drain(policy) == [4, 1, 2, 3]


def test_slru_resets_hits_when_the_content_changes():
    policy = Slru(10)
    store(policy, [1, 2])
    policy.idle(blocks(2))
    policy.idle(blocks(1))
    use(policy, [1], 1.0)
    policy.removed(1, b"1")
    policy.busy(blocks(1))
    store(policy, [1])
    policy.idle(blocks(1))
    assert drain(policy) == [2, 1]


def test_s3fifo_moves_reused_blocks_to_the_main_queue():
    policy = S3Fifo(20)  # two blocks are small
    store(policy, [1, 2, 3, 4])
    for block in (1, 2, 3, 4):
        policy.idle(blocks(block))
    use(policy, [2], 1.0)
    assert [policy.victim(), policy.victim()] == [1, 3]
    assert policy.victim() == 4  # two are left, and main is empty
    assert policy._small
    assert policy.victim() == 2
    assert policy._in_main[2]


def test_s3fifo_stores_evicted_content_of_the_small_queue_in_main():
    policy = S3Fifo(10)
    store(policy, [1, 2, 3])
    policy.idle(blocks(1))
    assert policy.victim() == 1
    policy.removed(1, b"1")
    policy.idle(blocks(2))
    policy.idle(blocks(3))
    policy.stored(blocks(4), [b"1"], 1.0)  # stored again: to main
    policy.idle(blocks(4))
    assert policy._in_main[4]
    assert drain(policy) == [2, 4, 3]  # small holds one: blocks above that are evicted first


def test_s3fifo_keeps_a_main_block_one_round_per_use():
    policy = S3Fifo(10)
    for block in (1, 2):
        policy.removed(block, b"%d" % block)
    store(policy, [1, 2])
    policy.idle(blocks(1))
    policy.idle(blocks(2))
    use(policy, [1], 1.0)
    policy.busy(blocks(2))
    policy.idle(blocks(2))
    assert len(policy._main) == 2
    assert drain(policy) == [2, 1]


def test_s3fifo_ghosts_are_bounded():
    policy = S3Fifo(10)
    for i in range(100):
        policy.stored(blocks(1), [b"%d" % i], 0.0)
        policy.removed(1, b"%d" % i)
    assert list(policy._ghosts) == [b"%d" % i for i in range(90, 100)]


# -- priorities ------------------------------------------------------------------------------


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self):
        return self.now


def retention(num_blocks=16, policy="lru"):
    clock = Clock()
    return Retention(make_policy(policy, num_blocks), num_blocks, clock), clock


def keep(r, ids, priority, expires=None, *, new=True):
    r.keep(blocks(*ids), priority, expires, new=new)


@every
def test_retention_without_priorities_is_the_policy(name):
    r, _ = retention(policy=name)
    bare = make_policy(name, 16)
    for policy in (r, bare):
        store(policy, [1, 2, 3, 4])
        policy.idle(blocks(2, 1))
        policy.idle(blocks(4, 3))
        use(policy, [1], 10.0)
    assert drain(r) == drain(bare)


@every
def test_the_lowest_priority_is_evicted_first_with_the_policy_at_zero(name):
    r, _ = retention(policy=name)
    store(r, range(1, 11))
    for ids, priority in (((1, 2), 3), ((3, 4), -1), ((5, 6), 1), ((7, 8), -5)):
        keep(r, ids, priority)
    for block in (2, 1, 4, 3, 6, 5, 8, 7, 10, 9):
        r.idle(blocks(block))
    assert drain(r) == [8, 7, 4, 3, 10, 9, 6, 5, 2, 1]


def test_a_run_of_mixed_priorities_keeps_its_order_in_each():
    r, _ = retention()
    store(r, range(1, 7))
    keep(r, [1, 3, 5], 1)
    r.idle(blocks(6, 5, 4, 3, 2, 1))
    assert drain(r) == [6, 4, 2, 5, 3, 1]


def test_within_a_priority_the_least_recently_used_is_evicted_first():
    r, _ = retention(policy="fifo")
    store(r, [1, 2, 3])
    keep(r, [1, 2, 3], 1)
    for block in (1, 2, 3):
        r.idle(blocks(block))
    use(r, [1], 5.0)
    assert drain(r) == [2, 3, 1]


@pytest.mark.parametrize("priority", [-1, 1])
def test_a_busy_block_is_not_a_victim_at_any_priority(priority):
    r, _ = retention()
    store(r, [1, 2])
    keep(r, [1], priority)
    r.idle(blocks(1))
    r.idle(blocks(2))
    r.busy(blocks(1))
    assert drain(r) == [2]
    r.idle(blocks(1))
    assert drain(r) == [1]


def test_a_priority_ends_when_its_content_is_removed():
    r, _ = retention()
    store(r, [1, 2])
    keep(r, [1], 5)
    r.idle(blocks(1))
    r.busy(blocks(1))
    r.removed(1, b"1")
    store(r, [1])
    r.idle(blocks(1))
    r.idle(blocks(2))
    assert drain(r) == [1, 2]


@every
def test_an_expired_priority_leaves_the_choice_to_the_policy(name):
    r, clock = retention(policy=name)
    store(r, [1, 2, 3])
    keep(r, [1], 5, expires=10.0)
    keep(r, [2], 1)
    for block in (1, 2, 3):
        r.idle(blocks(block))
    clock.now = 9.9
    assert r.victim() == 3
    clock.now = 10.0
    assert drain(r) == [1, 2]


def test_an_expired_low_priority_has_no_effect():
    r, clock = retention()
    store(r, [1, 2, 3])
    keep(r, [3], -1, expires=10.0)
    for block in (1, 2, 3):
        r.idle(blocks(block))
    clock.now = 10.0
    assert drain(r) == [1, 2, 3]


def test_a_later_end_replaces_an_earlier_one():
    r, clock = retention()
    store(r, [1, 2, 3])
    keep(r, [1, 2], 1, expires=10.0)
    keep(r, [1], 1, expires=20.0, new=False)
    for block in (1, 2, 3):
        r.idle(blocks(block))
    clock.now = 15.0
    assert drain(r) == [3, 2, 1]


def test_an_expired_priority_does_not_hide_a_new_one():
    r, clock = retention()
    store(r, [1, 2, 3])
    keep(r, [1], 5, expires=10.0)
    clock.now = 20.0
    keep(r, [1], 1, new=False)
    r.idle(blocks(1))
    r.idle(blocks(3))
    assert r.victim() == 3
    r.idle(blocks(2))
    assert drain(r) == [2, 1]


def test_end_times_of_removed_contents_do_not_accumulate():
    r, _ = retention()
    for i in range(2000):
        store(r, [1])
        keep(r, [1], 1, expires=1e9 + i)
        r.idle(blocks(1))
        assert r.victim() == 1
        r.removed(1, b"1")
    assert not r.keeps
    assert [len(queue) for queue in r._levels_and_ends()] == [0, 0]


def test_priorities_of_very_many_requests_end_over_several_calls():
    """One victim gives back the runs of 64 requests, a clock that stands still one more each."""
    r, clock = retention(num_blocks=1000)
    store(r, range(1, 1000))
    for block in range(1, 1000):
        keep(r, [block], 1, expires=10.0)
        r.idle(blocks(block))
    levels, ends = r._levels_and_ends()
    clock.now = 10.0
    assert r.victim() == 1
    assert (len(levels), len(ends)) == (999 - 64, 999 - 64)
    assert [r.victim() for _ in range(5)] == [2, 3, 4, 5, 6]
    assert len(levels) == 999 - 69
    clock.now = 11.0
    assert drain(r) == list(range(7, 1000))
    assert not r.keeps
    assert (len(levels), len(ends)) == (0, 0)


# -- the queue behind them ---------------------------------------------------------------------


class QueueModel:
    """A sorted list of (score of the run's next block, number of the run, index in it)."""

    def __init__(self):
        self.runs, self.number = {}, 0

    def push(self, ids):
        self.discard(ids)
        self.number += 1
        self.runs[self.number] = list(ids)

    def discard(self, ids):
        self.runs = {
            n: left for n, run in self.runs.items() if (left := [b for b in run if b not in ids])
        }

    def pop(self, score):
        if not self.runs:
            return NONE
        number = min(self.runs, key=lambda n: (score[self.runs[n][0]], n))
        block = self.runs[number].pop(0)
        self.discard([])
        return block


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_queue_of_runs_is_a_sorted_list_of_blocks(data):
    """Runs have rising scores, as policies give them."""
    queue, model = RunQueue(12), QueueModel()
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["push", "push", "discard", "pop"]))
        ids = data.draw(st.lists(st.integers(1, 11), unique=True, min_size=1))
        if kind == "push":
            queue.discard(blocks(*ids))
            model.discard(ids)
            scores = data.draw(st.lists(st.integers(-3, 3), min_size=len(ids), max_size=len(ids)))
            queue.score[ids] = sorted(scores)
            queue.push(blocks(*ids))
            model.push(ids)
        elif kind == "discard":
            queued = {b for run in model.runs.values() for b in run}
            assert queue.discard(blocks(*ids)).tolist() == [b in queued for b in ids]
            model.discard(ids)
        else:
            assert queue.pop() == model.pop(queue.score)
        assert len(queue) == sum(map(len, model.runs.values()))
        assert len(queue._order) == len(model.runs)
        held = sum(len(run) - at for run, at in zip(queue._runs, queue._at, strict=True))
        assert held == queue._held <= len(queue) + 12
    rest = []
    while (block := queue.pop()) != NONE:
        rest.append(block)
        assert block == model.pop(queue.score)
    assert not model.runs
    assert not queue._order
    assert sum(map(len, queue._runs)) == 0


def test_no_call_pays_for_what_others_crossed_out():
    """A call replaces its own run; the other 9,999 are not rebuilt, and nothing piles up."""
    queue = RunQueue(100_001)
    for start in range(1, 100_000, 10):
        queue.push(np.arange(start, start + 10))
    held = lambda: sum(map(len, queue._runs))  # noqa: E731
    before, most = held(), 0
    for i in range(20_000):
        first = 1 + 10 * (i * 7919 % 10_000)
        untouched = {id(run) for run in queue._runs} if i % 5000 == 0 else None
        queue.discard(np.arange(first, first + 10))
        queue.push(np.arange(first, first + 10)[::-1])
        if untouched is not None:
            most = max(most, sum(id(run) not in untouched for run in queue._runs))
    assert most <= 2  # the run itself, and the one in its place
    assert held() == before
    assert len(queue) == 100_000


def test_a_long_run_is_entered_in_parts_and_keeps_its_order():
    queue = RunQueue(10_001)
    queue.push(np.arange(1, 10_001))
    assert max(map(len, queue._runs)) == 4096
    queue.discard(np.arange(2, 10_001, 2))
    assert [queue.pop() for _ in range(5000)] == list(range(1, 10_001, 2))
    assert queue.pop() == NONE
