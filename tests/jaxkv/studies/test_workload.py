"""Workloads made from traces."""

import json

import pytest

from jaxkv.errors import ConfigError
from jaxkv.studies.traces import Trace, load_trace
from jaxkv.studies.workload import Workload


def of(trace, **options):
    return Workload.of(trace, **(dict(requests=10, vocab_size=50, max_len=64) | options))


def test_lengths_follow_the_trace_and_equal_ids_are_equal_tokens():
    trace = Trace.of([0, 1, 2], [30, 30, 12], [5, 7, 9], hash_ids=[[1, 2], [1, 3], []],
                     tokens_per_id=16)  # fmt: skip
    load = of(trace)
    a, b, c = load.prompts
    assert [len(a), len(b), len(c)] == [30, 30, 12]
    assert load.max_tokens == [5, 7, 9]
    assert a[:16] == b[:16]
    assert a[16:] != b[16:]
    assert c != a[:12]
    assert max(map(max, load.prompts)) < 50
    assert of(trace).prompts == load.prompts
    assert of(trace, seed=1).prompts != load.prompts


def test_scaled_prompts_share_the_same_fraction():
    trace = Trace.of([0, 1], [64, 64], [8, 8], hash_ids=[[1, 2], [1, 3]], tokens_per_id=32)
    load = of(trace, scale=4)
    a, b = load.prompts
    assert load.max_tokens == [2, 2]
    assert len(a) == len(b) == 16
    assert a[:8] == b[:8]
    assert a[8:] != b[8:]


def test_long_requests_are_cut_and_none_is_empty():
    load = of(Trace.of([0, 1, 2], [500, 10, 0], [30, 900, 0]))
    assert [(len(p), n) for p, n in zip(load.prompts, load.max_tokens, strict=True)] == [
        (34, 30), (1, 63), (1, 1),
    ]  # fmt: skip
    assert load.max_len == 64


@pytest.mark.parametrize("options", [{"requests": 0}, {"scale": 0}, {"max_len": 1}])
def test_nothing_to_run(options):
    with pytest.raises(ConfigError, match="leave nothing to run"):
        of(load_trace("azure-code"), **options)


def test_save_writes_json(tmp_path):
    load = of(load_trace("azure-conv"), requests=4, scale=64)
    load.save(tmp_path / "w.json")
    requests = json.loads((tmp_path / "w.json").read_text())["requests"]
    assert [r["prompt_ids"] for r in requests] == load.prompts
    assert [r["max_tokens"] for r in requests] == load.max_tokens
