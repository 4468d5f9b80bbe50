"""Counters and histograms: first from events made by hand, then from a real manager."""

import json
import re
import types
from typing import Any

import numpy as np
import pytest

from jaxkv import BlockManager
from jaxkv.errors import ConfigError, OutOfBlocksError
from jaxkv.manager import events
from jaxkv.observe.metrics import RECENT_REQUESTS, SECONDS_BUCKETS, Histogram, Metrics


class Source:
    """Stand-in for a manager that emits given events."""

    num_blocks, block_size = 9, 4

    def __init__(self, prefix_index="hash"):
        self.listeners, self.prefix_index = [], prefix_index

    def subscribe(self, listener):
        self.listeners.append(listener)

    def unsubscribe(self, listener):
        self.listeners.remove(listener)

    def to_dict(self):
        return {"prefix_index": self.prefix_index}

    def stats(self):
        return types.SimpleNamespace(
            active=2, cached=2, free=4, pinned=1, allocated_slots=8, used_slots=5, num_seqs=1
        )

    def emit(self, kind, time=0.0, blocks=(), **detail):
        event = events.Event(kind, time, "a", tuple(blocks), (1,) * len(blocks), 0, detail)
        for listener in self.listeners:
            listener(event)

    def request(self, queries, hits, **arguments):
        self.emit(
            events.OPERATION, name="allocate",
            arguments={"seq_id": "a", "token_ids": [0] * queries} | arguments,
            result={"row": 0, "num_cached_tokens": hits},
        )  # fmt: skip


def source_of(**options) -> Any:
    """A `Source` in place of a block manager."""
    return Source(**options)


def buckets(histogram):
    """Number of values in each bucket, not cumulative."""
    counts = np.diff([0, *histogram["buckets"].values()])
    bounds = histogram["buckets"]
    return {bound: int(n) for bound, n in zip(bounds, counts, strict=True) if n}


def test_the_pool_by_state():
    values = Metrics(source_of()).to_dict()
    assert values["kv_cache_usage"] == {"active": 0.25, "cached": 0.25, "free": 0.5}
    assert values["kv_cache_blocks"] == {"active": 2, "cached": 2, "free": 4}
    assert (values["pinned_blocks"], values["sequences"]) == (1, 1)
    assert values["internal_fragmentation_slots"] == 3


def test_requests_count_once_and_only_when_they_succeed():
    source = source_of()
    metrics = Metrics(source)
    for _ in range(3):
        source.emit(
            events.OPERATION, name="allocate", arguments={"seq_id": "a", "token_ids": [0] * 9},
            error="OutOfBlocksError: 9 > 8",
        )  # fmt: skip
    source.request(9, 8)
    source.emit(events.OPERATION, name="commit", arguments={}, result=None)
    source.request(3, 0, skip_prefix_cache=True)  # no lookup
    values = metrics.to_dict()
    assert (values["requests"], values["requests_refused"]) == (2, 3)
    assert (values["prefix_cache_queries"], values["prefix_cache_hits"]) == (9, 8)
    assert values["prefix_cache_hit_rate"] == 8 / 9


def test_without_a_prefix_cache_nothing_is_looked_up():
    source = source_of(prefix_index=None)
    metrics = Metrics(source)
    source.request(9, 0)
    values = metrics.to_dict()
    assert (values["requests"], values["prefix_cache_queries"]) == (1, 0)
    assert values["prefix_cache_hit_rate"] == values["prefix_cache_hit_rate_recent"] == 0


def test_the_recent_hit_rate_covers_the_last_requests():
    source = source_of()
    metrics = Metrics(source)
    for _ in range(RECENT_REQUESTS):
        source.request(10, 0)
    for i in range(RECENT_REQUESTS // 2):
        source.request(10 + i % 2, 5)
    values = metrics.to_dict()
    assert values["prefix_cache_hit_rate_recent"] == 2500 / (5000 + 5250)
    assert values["prefix_cache_hit_rate"] == 2500 / (10000 + 5250)
    for _ in range(RECENT_REQUESTS):
        source.request(4, 3)
    assert metrics.to_dict()["prefix_cache_hit_rate_recent"] == 0.75
    assert len(metrics._recent) == RECENT_REQUESTS


def test_lifetimes_and_idle_times():
    source = source_of()
    metrics = Metrics(source)
    source.emit(events.EVICT, blocks=[3], age=70.0, idle=0.0)
    source.emit(events.EVICT, blocks=[4], age=1e9, idle=2.0)
    values = metrics.to_dict()
    assert values["block_evictions"] == 2
    assert buckets(values["block_lifetime_seconds"]) == {"100": 1, "+Inf": 1}
    assert buckets(values["block_idle_before_evict_seconds"]) == {"0.001": 1, "2": 1}
    assert values["block_lifetime_seconds"]["sum"] == 1e9 + 70


def test_reuse_gaps_run_from_store_hit_or_release_to_the_next_hit():
    source = source_of()
    metrics = Metrics(source)
    source.emit(events.HIT, 1.0, [7], num_tokens=4, queried_tokens=5)  # stored before `subscribe`
    source.emit(events.STORED, 10.0, [1])
    source.emit(events.STORED, 12.0, [2])
    source.emit(events.HIT, 13.0, [1, 2], num_tokens=8, queried_tokens=9)  # 3 and 1
    source.emit(events.FREE, 20.0, [2, 1, 7])
    source.emit(events.HIT, 50.0, [7], num_tokens=4, queried_tokens=9)  # 30
    source.emit(events.HIT, 50.5, [7], num_tokens=4, queried_tokens=9)  # 0.5
    source.emit(events.HIT, 51.0, [], num_tokens=1, queried_tokens=9)  # part of a block, copied
    gaps = metrics.to_dict()["block_reuse_gap_seconds"]
    assert buckets(gaps) == {"0.5": 1, "1": 1, "5": 1, "50": 1}
    assert (gaps["sum"], gaps["count"]) == (34.5, 4)


def test_allocations_copies_and_close():
    source = source_of()
    metrics = Metrics(source)
    source.emit(events.COPY, blocks=[1, 2])
    source.emit(events.ALLOCATE, blocks=[1, 2, 3], num_tokens=10, num_new_blocks=2)
    source.emit(events.ALLOCATE, blocks=[4], num_new_blocks=1)
    assert metrics.to_dict()["block_allocations"] == 2 + 1  # the second half of a block is a copy
    metrics.close()
    source.emit(events.COPY, blocks=[1, 2])
    assert source.listeners == []
    assert metrics.to_dict()["block_copies"] == 1


def test_a_value_on_a_bound_belongs_below_it():
    histogram = Histogram()
    histogram.observe(np.array(SECONDS_BUCKETS))
    assert set(histogram.to_dict()["buckets"].values()) == set(range(1, len(SECONDS_BUCKETS) + 1))
    ratios = np.divide(SECONDS_BUCKETS[1:], SECONDS_BUCKETS[:-1])
    assert ratios.min() > 1.9
    assert ratios.max() < 2.6


def test_plain_data():
    source = source_of()
    values = Metrics(source).to_dict()
    assert json.loads(json.dumps(values)) == values


def parse(text):
    """The exposition format: {family: (type, help)} and {sample: value}. Checks the grammar."""
    families, samples = {}, {}
    name = help_text = current = ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if match := re.fullmatch(r"# HELP (\w+) (.+)", line):
            name, help_text = match.groups()
        elif match := re.fullmatch(r"# TYPE (\w+) (counter|gauge|histogram)", line):
            assert match[1] == name
            assert name not in families  # the lines of a family are contiguous
            families[name], current = (match[2], help_text), name
        else:
            label = r'\w+="(?:[^"\\\n]|\\["\\n])*"'
            match = re.fullmatch(rf"(\w+)((?:{{{label}(?:,{label})*}})?) (\S+)", line)
            assert match, line
            suffixes = "(_bucket|_sum|_count)" if families[current][0] == "histogram" else ""
            assert re.fullmatch(current + suffixes, match[1])
            assert match[1] + match[2] not in samples
            samples[match[1] + match[2]] = float(match[3])
    return families, samples


def test_prometheus_text():
    source = source_of()
    metrics = Metrics(source)
    source.request(9, 8)
    source.emit(events.EVICT, blocks=[3], age=0.3, idle=0.002)
    source.emit(events.EVICT, blocks=[3], age=1e6, idle=0.002)
    families, samples = parse(metrics.prometheus())
    assert all(name.startswith("jaxkv_") for name in families)
    assert all(
        name.endswith("_total") == (kind == "counter") for name, (kind, _) in families.items()
    )
    assert samples['jaxkv_kv_cache_usage{state="cached"}'] == 0.25
    assert samples["jaxkv_prefix_cache_queries_total"] == 9
    assert samples["jaxkv_prefix_cache_hit_rate"] == 8 / 9
    name = "jaxkv_block_lifetime_seconds"
    assert families[name][0] == "histogram"
    assert samples[name + '_bucket{le="0.2"}'] == 0
    assert samples[name + '_bucket{le="0.5"}'] == 1
    assert samples[name + '_bucket{le="50000"}'] == 1
    assert samples[name + '_bucket{le="+Inf"}'] == samples[name + "_count"] == 2
    assert samples[name + "_sum"] == 1e6 + 0.3
    bounds = [k for k in samples if k.startswith(name + "_bucket")]
    assert len(bounds) == len(SECONDS_BUCKETS) + 1
    counts = [samples[k] for k in bounds]
    assert counts == sorted(counts)


def test_labels_are_escaped():
    text = Metrics(source_of()).prometheus({"model": 'a "b"\\c\nd', "host": "x"})
    parse(text)
    label = r'model="a \"b\"\\c\nd",host="x"'
    assert f'jaxkv_kv_cache_usage{{{label},state="free"}} 0.5' in text
    assert f'jaxkv_block_lifetime_seconds_bucket{{{label},le="+Inf"}} 0' in text


@pytest.mark.parametrize("name", ["", "1a", "a-b", "__a", "le", "state", "ä"])
def test_bad_label_names_are_rejected(name):
    with pytest.raises(ConfigError, match="label names must"):
        Metrics(source_of()).prometheus({name: "x"})


# -- a real manager --------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(blocks, **options):
    clock = Clock()
    manager = BlockManager(blocks + 1, 4, max_seqs=4, max_blocks_per_seq=8, clock=clock, **options)
    return manager, Metrics(manager), clock


@pytest.mark.parametrize("prefix_index", ["hash", "radix"])
def test_counts_of_a_real_manager(prefix_index):
    manager, metrics, clock = make(4, prefix_index=prefix_index)
    manager.allocate("a", list(range(10)))  # 3 blocks
    manager.commit("a", 10)
    manager.append("a", 10)
    for _ in range(2):
        with pytest.raises(OutOfBlocksError):
            manager.allocate("b", list(range(8)) + [90] * 8)  # 2 hits, 2 new, 1 free
    clock.now = 8.0
    manager.free("a")
    clock.now = 12.0
    assert manager.allocate("b", list(range(8)) + [90] * 8).num_cached_tokens == 8  # after 4 s
    values = metrics.to_dict()
    assert (values["prefix_cache_queries"], values["prefix_cache_hits"]) == (10 + 16, 8)
    assert (values["requests"], values["requests_refused"]) == (2, 2)
    assert values["block_allocations"] == 3 + 2
    assert values["kv_cache_usage"] == {"active": 1.0, "cached": 0.0, "free": 0.0}
    assert buckets(values["block_reuse_gap_seconds"]) == {"5": 2}
    manager.free("b")
    assert values["block_evictions"] == 0
    clock.now = 20.0
    manager.allocate("c", [7] * 13)  # 4 blocks: evicts the cached blocks of "a"
    values = metrics.to_dict()
    assert values["block_evictions"] == 2
    assert buckets(values["block_lifetime_seconds"]) == {"20": 2}
    assert buckets(values["block_idle_before_evict_seconds"]) == {"10": 2}
    assert values["internal_fragmentation_slots"] == 3
    parse(metrics.prometheus())


def test_copies_on_write_and_the_slots_of_forks():
    manager, metrics, _ = make(8)
    manager.allocate("a", list(range(9)))
    manager.fork("a", "b")
    manager.append_batch(["a", "b"], np.array([9, 10]))  # the first of the two copies
    values = metrics.to_dict()
    assert (values["block_copies"], values["requests"], values["sequences"]) == (1, 1, 2)
    assert values["internal_fragmentation_slots"] == 2 * 2


def test_counts_agree_with_the_manager_after_random_operations(rng):
    manager, metrics, clock = make(12)
    live = []
    for i in range(600):
        clock.now += float(rng.exponential())
        if live and (len(live) == 4 or rng.random() < 0.4):
            manager.free(live.pop(int(rng.integers(len(live)))))
            continue
        prompt = [int(rng.integers(3))] * int(rng.integers(1, 20))
        try:
            manager.allocate(i, prompt)
        except OutOfBlocksError:
            continue
        manager.commit(i, len(prompt) - manager.num_computed_tokens(i))
        live.append(i)
    values = metrics.to_dict()
    assert values["block_evictions"] == values["block_lifetime_seconds"]["count"] > 0
    hits = values["prefix_cache_hits"]
    assert hits == 4 * values["block_reuse_gap_seconds"]["count"] > 0
    assert values["requests_refused"] > 0
    assert sum(values["kv_cache_blocks"].values()) == 12


@pytest.mark.parametrize("lookahead", [0, 6])
def test_null_blocks_behind_a_window_are_not_counted_as_allocated(lookahead):
    """Of five cached blocks a hit takes the two that the window sees; the counter never falls."""
    manager = BlockManager(20, 4, max_seqs=4, max_blocks_per_seq=8, sliding_window=5)
    metrics, before = Metrics(manager), 0
    for seq, end in enumerate((20, 21, 22, 9, 21)):
        free = manager.stats().free + manager.stats().cached
        hits = manager.lookup(list(range(end - 1))) > 0
        manager.allocate(seq, list(range(end)), lookahead=lookahead)
        manager.commit(seq, end - manager.num_computed_tokens(seq))
        counted = metrics.to_dict()["block_allocations"]
        taken = free - manager.stats().free - manager.stats().cached
        assert hits or counted - before >= taken  # the first frees what is behind its window
        assert counted - before == -(-(end + lookahead) // 4) - (seq > 0) * ((end - 1) // 4)
        assert counted >= before
        before = counted
        manager.free(seq)
