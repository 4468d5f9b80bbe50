"""Faults reported by users of other engines. Names end in the number of the case."""

import dataclasses

import pytest
from engine_cases import (
    dense_greedy,
    dense_logprobs,
    engine_of,
    greedy,
    prompt_of,
    run,
    tokens_of,
    verify_idle,
)

from jaxkv import CacheConfig, ConfigError, Engine, SamplingParams
from jaxkv.manager import events


def sampled(max_tokens, **changes):
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=4, **changes)


def alone(model, prompt, params, **options):
    """Outputs of one request with all the blocks there are."""
    engine = engine_of(model, **options)
    engine.submit(prompt, params, request_id=0)
    return [o.token_ids for _, o in sorted(run(engine).items())]


def test_aborting_a_request_takes_its_samples_along_008(small_model):
    engine = engine_of(small_model, blocks=32)
    engine.submit(prompt_of(6), sampled(50, n=3), request_id="r1")
    for _ in range(3):
        engine.step()
    engine.abort("r1")
    assert {o.finish_reason for o in engine.step()} == {"abort"}
    engine.abort("r1")
    engine.step()
    verify_idle(engine)


def test_aborting_what_never_got_a_block_009(small_model):
    engine = engine_of(small_model, blocks=2)
    engine.submit(prompt_of(6), greedy(2), request_id="r1")
    engine.step()
    engine.submit(prompt_of(5), greedy(2), request_id="r2")
    for name in ("r2", "r2", "never-seen"):
        engine.abort(name)
    outputs = run(engine)
    assert outputs["r1", 0].token_ids == dense_greedy(small_model, prompt_of(6), 2)
    assert outputs["r2", 0].token_ids == []


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("ends_early", [True, False])
def test_the_last_slot_is_freed_once_011(small_model, pipeline, ends_early):
    prompt = prompt_of(3)
    want = dense_greedy(small_model, prompt, 5)
    stop = (want[1],) if ends_early else ()
    engine = engine_of(small_model, blocks=16, scheduler=dict(pipeline=pipeline))
    engine.submit(prompt, greedy(5, stop_token_ids=stop), request_id=0)
    output = run(engine)[0, 0]
    assert output.token_ids == (want[: want.index(want[1]) + 1] if ends_early else want)
    stats = engine.manager.stats()
    assert (stats.active, stats.cached + stats.free) == (0, 16)


def test_a_preempted_sample_resumes_though_the_other_has_ended_021(small_model):
    prompt, other = prompt_of(6), prompt_of(7, seed=2)
    free = alone(small_model, prompt, sampled(20, n=2))
    early = next(t for t in free[0] if t not in free[1])  # ends sample 0 only
    params = sampled(20, n=2, stop_token_ids=(early,))
    want = alone(small_model, prompt, params)
    assert len(want[0]) < 20 == len(want[1])
    engine = engine_of(small_model, blocks=8)
    engine.submit(other, greedy(20), request_id="first")
    engine.submit(prompt, params, request_id="r")
    outputs = run(engine)
    assert [outputs["r", i].token_ids for i in range(2)] == want
    assert outputs["first", 0].token_ids == dense_greedy(small_model, other, 20)
    assert engine.stats().preemptions > 0


def test_scores_of_a_prompt_that_is_cached_042(small_model):
    engine, prompt = engine_of(small_model, blocks=16), list(range(1, 10))
    params = greedy(1, prompt_logprobs=True, logprobs=1)
    longer = prompt + list(range(20, 25))
    for ids in (prompt, prompt, longer):
        engine.submit(ids, params, request_id="r")
        scores = run(engine)["r", 0].prompt_logprobs
        want = dense_logprobs(small_model, ids)
        assert [s.token for s in scores] == ids[1:]
        for i, score in enumerate(scores):
            assert score.logprob == pytest.approx(want[i, ids[i + 1]], abs=1e-4)


@pytest.mark.parametrize("aborted", [False, True])
def test_resuming_when_the_prefix_is_gone_051(small_model, aborted):
    engine = engine_of(small_model, blocks=6, prefix_index="radix")
    prompts = {name: prompt_of(8, seed=i) for i, name in enumerate(("r1", "r2"))}
    for name, prompt in prompts.items():
        engine.submit(prompt, greedy(9), request_id=name)
    while not engine.stats().preemptions:
        engine.step()
    if aborted:
        engine.abort("r2")
    engine.submit(prompt_of(12, seed=7), greedy(2), request_id="other")
    outputs = run(engine)
    for name, prompt in prompts.items():
        if not (aborted and name == "r2"):
            assert outputs[name, 0].token_ids == dense_greedy(small_model, prompt, 9)


def test_a_request_that_never_fits_is_refused_and_blocks_no_other_057(small_model):
    cache = CacheConfig.for_model(small_model.config, max_len=64, block_size=4, num_blocks=5)
    engine = Engine(small_model, cache)
    with pytest.raises(ConfigError, match="need 5 blocks of 4 tokens; the pool has 4"):
        engine.submit(prompt_of(20), greedy(0))
    with pytest.raises(ConfigError, match="raise num_blocks to 8 or lower max_tokens"):
        engine.submit(prompt_of(8), greedy(20))
    engine = engine_of(small_model, blocks=4)
    with pytest.raises(ConfigError):
        engine.submit(prompt_of(20), greedy(1))
    engine.submit(prompt_of(4), greedy(4), request_id="r2")
    assert len(run(engine, steps=20)["r2", 0].token_ids) == 4


def test_one_token_over_the_longest_058(small_model):
    """A sequence of maximum length generates no token."""
    with pytest.raises(ConfigError, match="65 tokens, the longest sequence has 64"):
        engine_of(small_model).submit(prompt_of(65), greedy(1))
    engine = engine_of(small_model)
    for length, wanted, gets in ((64, 1, 0), (63, 1, 1), (60, 10, 4)):
        request = engine.submit(prompt_of(length), greedy(wanted))
        output = run(engine)[request, 0]
        assert (len(output.token_ids), output.finish_reason) == (gets, "length")
    assert output.token_ids == dense_greedy(small_model, prompt_of(60), 4)


@pytest.mark.parametrize("count", [2, 10])
def test_a_very_small_pool_makes_progress_060(small_model, count):
    engine = engine_of(small_model, blocks=4)
    for i in range(count):
        engine.submit(prompt_of(4, seed=i), greedy(12), request_id=i)
        if i % 3:
            engine.step()
    outputs = run(engine)
    for i in range(count):
        assert outputs[i, 0].token_ids == dense_greedy(small_model, prompt_of(4, seed=i), 12)
        assert outputs[i, 0].num_preemptions <= 3
    assert outputs[0, 0].num_preemptions == 0  # the first to come keeps its blocks


@pytest.mark.parametrize("prefix_index", ["hash", "radix", None])
def test_preemption_changes_nothing_062(small_model, prefix_index):
    results = []
    for blocks in (60, 5):
        engine = engine_of(small_model, blocks=blocks, prefix_index=prefix_index)
        log = []
        engine.manager.subscribe(log.append)
        engine.submit(prompt_of(8), greedy(8), request_id="r1")
        engine.submit(prompt_of(6), sampled(8), request_id="r2")
        results.append(tokens_of(run(engine)))
    assert results[0] == results[1]
    preempted = [e for e in log if e.kind == events.PREEMPT]
    assert engine.stats().preemptions == len(preempted) > 0
    assert {e.detail["request"] for e in preempted} == {"r2"}
    assert "blocks needed" in preempted[0].detail["reason"]


@pytest.mark.parametrize("steps", [1, 4])
def test_lookahead_at_the_longest_length_064(small_model, steps):
    engine = engine_of(small_model, scheduler=dict(decode_steps_per_dispatch=steps))
    engine.submit(prompt_of(57), greedy(99), request_id="long")
    engine.submit(prompt_of(5), greedy(30), request_id="watched")
    outputs = run(engine)
    assert outputs["long", 0].token_ids == dense_greedy(small_model, prompt_of(57), 7)
    assert outputs["watched", 0].token_ids == dense_greedy(small_model, prompt_of(5), 30)


def test_zero_sizes_066(small_model):
    engine = engine_of(small_model)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        engine.submit([])
    request = engine.submit([1], greedy(0))
    (output,) = engine.step()
    assert (output.request_id, output.token_ids, output.finish_reason) == (request, [], "length")
    verify_idle(engine)


def test_pins_that_leave_no_room_are_an_error_and_not_a_stall(small_model):
    engine = engine_of(small_model, blocks=6)
    prompt = prompt_of(16)
    engine.submit(prompt, greedy(1))
    run(engine)
    engine.manager.pin(prompt)
    request = engine.submit(prompt_of(16, seed=1), greedy(2))
    last = None
    for output in engine.stream():
        last = output
    assert (last.request_id, last.finish_reason) == (request, "error")  # pyright: ignore[reportOptionalMemberAccess]
    assert "out of cache: 16 tokens need 4 blocks, 2 are available" in last.error  # pyright: ignore[reportOperatorIssue, reportOptionalMemberAccess]
    engine.manager.unpin(prompt)
    verify_idle(engine)


def test_params_are_not_shared_between_requests(small_model):
    params = sampled(5)
    changed = dataclasses.replace(params, seed=8)
    assert alone(small_model, [1, 2], params) != alone(small_model, [1, 2], changed)
