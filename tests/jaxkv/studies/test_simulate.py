"""Replays against brute force: LRU by hand, the optimum by search, one live sequence."""

import functools
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import ConfigError
from jaxkv.manager.events import EVICT
from jaxkv.manager.eviction.policies import POLICIES
from jaxkv.studies.belady import belady_hit_rate
from jaxkv.studies.simulate import simulate
from jaxkv.studies.simulated_server import Service, SimulatedServer
from jaxkv.studies.traces import Trace, load_trace


@st.composite
def traces(draw, requests=12, ids=4, alphabet=3, own=3):
    """Prompts of a few ids, some with a tail that no other prompt has."""
    per_id = draw(st.integers(1, 4))
    prompts = draw(st.lists(st.lists(st.integers(0, alphabet), max_size=ids), min_size=1,
                            max_size=requests))  # fmt: skip
    cut = [draw(st.integers(-per_id + 1 if p else 0, own)) for p in prompts]
    lengths = [len(p) * per_id + c for p, c in zip(prompts, cut, strict=True)]
    outputs = [draw(st.integers(0, 5)) for _ in prompts]
    times = np.cumsum([draw(st.integers(0, 3)) for _ in prompts])
    return Trace.of(times, lengths, outputs, hash_ids=prompts, tokens_per_id=per_id)


def keys_of(trace, block_size):
    """For each request its blocks, each as all tokens up to its end."""
    for request, length in enumerate(trace.input_tokens.tolist()):
        tokens = [(h, i) for h in trace.ids(request).tolist() for i in range(trace.tokens_per_id)]
        padded = -(-length // block_size) * block_size
        tokens = (tokens + [("own", request)] * padded)[:padded]
        yield [tuple(tokens[:end]) for end in range(block_size, padded + 1, block_size)]


def lru_hits(trace, num_blocks, block_size):
    cache, hits = OrderedDict(), []
    for keys in keys_of(trace, block_size):
        found = 0
        if len(keys) <= num_blocks:
            while found < len(keys) and keys[found] in cache:
                found += 1
            for key in keys[:found]:
                del cache[key]
            while len(cache) + len(keys) > num_blocks:
                cache.popitem(last=False)
            cache.update(dict.fromkeys(reversed(keys)))
        hits.append(found)
    return hits


def most_hits(references, capacity):
    """The optimum, by exhaustive search."""

    @functools.cache
    def best(position, cache):
        if position == len(references):
            return 0
        key, rest = references[position], position + 1
        if key in cache:
            return 1 + best(rest, cache)
        grown = cache | {key}
        keep = [cache, *([grown] if len(grown) <= capacity else [grown - {k} for k in cache])]
        return max(best(rest, each) for each in keep)

    return best(0, frozenset())


@given(traces(), st.integers(1, 12), st.integers(1, 5))
def test_lru_finds_what_brute_force_finds(trace, num_blocks, block_size):
    r = simulate(trace, num_blocks=num_blocks, block_size=block_size)
    assert r.request_hits.tolist() == lru_hits(trace, num_blocks, block_size)
    assert r.request_blocks.tolist() == [len(k) for k in keys_of(trace, block_size)]
    assert r.rejected == (r.request_blocks > num_blocks).sum()
    fitting = r.request_blocks <= num_blocks
    assert r.blocks_written == (r.request_blocks - r.request_hits)[fitting].sum()
    assert r.peak_blocks == r.request_blocks[fitting].max(initial=0)


@given(traces(requests=5, ids=2, own=0), st.integers(1, 3), st.integers(1, 4))
@settings(deadline=None)
def test_belady_is_the_optimum(trace, num_blocks, block_size):
    references = [key for keys in keys_of(trace, block_size) for key in keys]
    expected = most_hits(references, num_blocks) / max(1, len(references))
    assert belady_hit_rate(trace, num_blocks, block_size) == expected


@pytest.mark.parametrize("policy", POLICIES)
@given(traces(requests=30), st.integers(1, 12), st.integers(1, 5))
@settings(max_examples=40)
def test_no_policy_beats_belady(policy, trace, num_blocks, block_size):
    for index in ("hash", "radix"):
        r = simulate(trace, num_blocks=num_blocks, block_size=block_size, policy=policy,
                     prefix_index=index)  # fmt: skip
        assert r.hit_rate <= r.belady_hit_rate  # pyright: ignore[reportOperatorIssue]


@given(traces(), st.integers(3, 12), st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None)
def test_invariants_of_requests_that_take_time(trace, num_blocks, block_size, concurrency):
    service = Service(prefill_tokens_per_s=3, decode_tokens_per_s=1, concurrency=concurrency)
    replay = SimulatedServer(trace, num_blocks, "lru", block_size, "hash", service)
    evicted = []
    replay.manager.subscribe(lambda e: evicted.extend(e.blocks if e.kind == EVICT else ()))
    assert sorted(replay.live()) == list(range(len(trace)))
    replay.manager.check()
    stats, line = replay.manager.stats(), replay.timeline()
    assert (stats.active, stats.num_seqs) == (0, 0)
    assert replay.evictions == len(evicted)
    final = trace.input_tokens + trace.output_tokens
    served = (trace.input_tokens > 0) & (-(-final // block_size) <= num_blocks)
    assert (replay.length == np.where(served, final, trace.input_tokens)).all()
    assert line.active.max(initial=0) <= num_blocks
    assert line.seqs.max(initial=0) <= concurrency
    assert (line.unfilled <= line.seqs * (block_size - 1)).all()
    if not replay.preemptions:
        asked = replay.request_blocks.sum()
        assert replay.request_hits.sum() <= belady_hit_rate(trace, num_blocks, block_size) * asked


def test_evictions_of_requests_that_take_no_time_are_those_of_the_events():
    trace = Trace.of(range(40), [6] * 40, [1] * 40, hash_ids=[[i % 7, i % 3] for i in range(40)],
                     tokens_per_id=3)  # fmt: skip
    replay = SimulatedServer(trace, 5, "decayed", 3, "hash", None)
    evicted = []
    replay.manager.subscribe(lambda e: evicted.extend(e.blocks if e.kind == EVICT else ()))
    assert len(list(replay.instant())) == 40
    assert replay.evictions == len(evicted) > 0
    replay.manager.check()


def test_one_sequence_step_by_step():
    trace = Trace.of([10.0], [5], [3])
    service = Service(prefill_tokens_per_s=5, decode_tokens_per_s=1, concurrency=2)
    r = simulate(trace, num_blocks=4, block_size=4, service=service)
    line = r.timeline
    assert line.seconds.tolist() == [0, 1, 2, 3, 4]  # a second of prefill, three of decode
    assert line.used.tolist() == [5, 6, 7, 8, 0]
    assert line.active.tolist() == [2, 2, 2, 2, 0]
    assert line.cached.tolist() == [0, 0, 0, 0, 2]
    assert line.unfilled.tolist() == [3, 2, 1, 0, 0]
    assert r.seconds == 4
    assert r.waste == 6 / 32
    assert r.contiguous_waste == 1 - 26 / 32
    assert (r.peak_blocks, r.contiguous_peak_blocks, r.blocks_written) == (2, 2, 2)
    assert r.table_bytes == 2 * 2 * 4


def test_the_youngest_is_preempted_and_admitted_again():
    trace = Trace.of([0, 0], [4, 4], [4, 4])
    service = Service(prefill_tokens_per_s=100, decode_tokens_per_s=1, concurrency=2)
    r = simulate(trace, num_blocks=3, block_size=4, service=service, prefix_index=None)
    assert r.preemptions == 2  # once it is admitted again too early
    assert r.timeline.active.max() == 3
    assert r.timeline.used[-2:].tolist() == [8, 0]
    assert r.hit_rate == 0


def test_concurrency_makes_others_wait_and_lengthens_the_run():
    trace = Trace.of([0] * 6, [8] * 6, [8] * 6)
    runs = [
        simulate(trace, num_blocks=64, block_size=4, service=Service(concurrency=n)) for n in (1, 6)
    ]
    assert [r.peak_seqs for r in runs] == [1, 6]
    assert [r.peak_blocks for r in runs] == [4, 24]
    assert runs[0].seconds > 5 * runs[1].seconds


def test_a_common_prefix_is_found_by_all_but_the_first():
    plain = load_trace("azure-conv").head(150)
    shared = plain.with_shared_prefix(64)
    r = simulate(shared, num_blocks=20_000, block_size=16)
    assert r.hit_blocks == len(shared.hash_ids) - 4
    assert r.hit_rate == pytest.approx(r.belady_hit_rate)
    assert simulate(plain, num_blocks=20_000, block_size=16).hit_blocks == 0
    assert simulate(shared, num_blocks=20_000, block_size=16, prefix_index=None).hit_blocks == 0


def test_packaged_azure_traces_waste_less_in_smaller_blocks():
    for name in ("azure-code", "azure-conv"):
        trace = load_trace(name).head(4000)
        waste = {
            size: simulate(trace, num_blocks=8_000, block_size=size, prefix_index=None).waste
            for size in (128, 512)
        }
        padded = -(-trace.input_tokens // 128) * 128
        assert waste[128] == pytest.approx(1 - trace.input_tokens.sum() / padded.sum())
        assert 0 < waste[128] < waste[512]
        few = trace.head(100)
        assert simulate(few, num_blocks=8_000, block_size=1, prefix_index=None).waste == 0


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 0}, {"block_size": 0}, {"policy": "mru"}, {"prefix_index": "tree"},
    ],
)  # fmt: skip
def test_bad_settings(change):
    with pytest.raises(ConfigError):
        simulate(Trace.of([0], [1], [1]), **{"num_blocks": 4, "block_size": 4} | change)


@pytest.mark.parametrize("change", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1, 1, 1.5)])
def test_bad_service(change):
    with pytest.raises(ConfigError):
        Service(*change)


def test_the_result_as_plain_data():
    trace = Trace.of([0, 1], [4, 4], [1, 1], hash_ids=[[0], [0]], tokens_per_id=4)
    d = simulate(trace, num_blocks=4, block_size=4, service=Service(concurrency=1)).to_dict()
    assert d["service"]["concurrency"] == 1
    assert "timeline" not in d
    d = simulate(trace, num_blocks=4, block_size=4, belady=False).to_dict()
    assert (d["service"], d["belady_hit_rate"], d["hit_rate"]) == (None, None, 0.5)
