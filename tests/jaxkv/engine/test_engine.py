"""Requests through an engine against a dense forward of the same weights, and failures."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from engine_cases import (
    BLOCK,
    dense_greedy,
    engine_of,
    greedy,
    prompt_of,
    run,
    tokens_of,
    verify_idle,
)

import jaxkv
from jaxkv import ConfigError, LogitsProcessor, SamplingParams
from jaxkv.engine.steps import trace_counts


@pytest.mark.quick
def test_requests_of_any_length_equal_the_dense_model(small_model):
    engine = engine_of(small_model)
    prompts = [prompt_of(n) for n in (1, 4, 5, 16, 17, 40)]
    ids = [engine.submit(prompt, greedy(9)) for prompt in prompts]
    outputs = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert outputs[request_id, 0].token_ids == dense_greedy(small_model, prompt, 9)
        assert outputs[request_id, 0].finish_reason == "length"
    assert engine.stats().generated_tokens == 54
    assert engine.stats().preemptions == 0


def test_requests_that_come_while_others_run(small_model):
    engine, wanted, got = engine_of(small_model), {}, {}
    for i in range(8):
        prompt = prompt_of(3 + 4 * i)
        wanted[engine.submit(prompt, greedy(5 + i), request_id=f"r{i}")] = dense_greedy(
            small_model, prompt, 5 + i
        )
        for _ in range(2):
            got |= {o.request_id: o.token_ids for o in engine.step()}
    got |= {request_id: o.token_ids for (request_id, _), o in run(engine).items()}
    assert got == wanted


@pytest.mark.parametrize("options", [
    dict(scheduler=dict(pipeline=False)),
    dict(scheduler=dict(decode_steps_per_dispatch=4)),
    dict(scheduler=dict(decode_steps_per_dispatch=4, pipeline=False)),
    dict(prefix_index=None), dict(prefix_index="radix"), dict(eviction="s3fifo"),
    dict(blocks=16), dict(max_seqs=1), dict(scheduler=dict(policy="priority")),
    dict(copy_on_partial_reuse=True),
], ids=str)  # fmt: skip
def test_however_it_is_run_the_tokens_are_the_same(small_model, options):
    system = prompt_of(18)
    prompts = [system + prompt_of(n, seed=1) for n in (1, 3, 9)] + [prompt_of(7), system[:9]]
    params = [greedy(14), SamplingParams(max_tokens=12, temperature=1.0, seed=5),
              SamplingParams(max_tokens=9, temperature=0.8, top_k=7, seed=6), greedy(20),
              SamplingParams(max_tokens=11, temperature=2.0, top_p=0.8, min_p=0.01, seed=7,
                             repetition_penalty=1.3, frequency_penalty=0.2)]  # fmt: skip
    results = []
    for kind in ({}, options):
        engine = engine_of(small_model, **kind)
        for prompt, one in zip(prompts, params, strict=True):
            engine.submit(prompt, one)
        results.append(tokens_of(run(engine)))
    assert results[0] == results[1]


def test_a_shared_prefix_is_computed_once(small_model):
    engine, system = engine_of(small_model), prompt_of(33)
    for i in range(4):
        engine.submit([*system, i], greedy(3))
    outputs = run(engine)
    cached = sorted(o.num_cached_tokens for o in outputs.values())
    assert cached == [0, 32, 32, 32]
    assert engine.stats().prompt_tokens == 34 + 3 * 2


def test_priorities(small_model):
    engine = engine_of(small_model, max_seqs=1, scheduler=dict(policy="priority"))
    ends = []
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 1)):
        engine.submit(prompt_of(5), greedy(3), request_id=name, priority=priority)
    while engine.has_work:
        ends += [o.request_id for o in engine.step() if o.finished]
    assert ends == ["c", "d", "a", "b"]


def test_nothing_compiles_after_the_first_time(small_model):
    """2,000 steps of arrivals, ends and aborts."""
    rng = np.random.default_rng(0)
    engine = engine_of(small_model, blocks=16, scheduler=dict(decode_buckets=None))

    def drive(steps):
        live = []
        for i in range(steps):
            if rng.random() < 0.3 and len(live) < 9:
                params = SamplingParams(max_tokens=int(rng.integers(1, 9)), seed=i,
                                        temperature=float(rng.integers(0, 2)))  # fmt: skip
                live.append(engine.submit(prompt_of(int(rng.integers(1, 30)), i), params))
            if live and rng.random() < 0.03:
                engine.abort(live[int(rng.integers(len(live)))])
            live = [r for r in live if r in engine._loop.requests]
            engine.step()

    trace_counts.clear()
    drive(250)
    decodes, prompts = {(s, s, 1) for s in (1, 2, 4)}, {(16, 4, 1), (4 + 16, 4 + 4, 1)}
    assert set(trace_counts) <= decodes | prompts  # what was compiled before is not traced again
    traced = trace_counts.copy()
    drive(2000)
    assert trace_counts == traced
    run(engine)
    assert engine.stats().preemptions > 0


def test_nothing_at_all_compiles_after_a_warm_up(small_model):
    """Samples, forks, beams' rows, preemption, aborts, drafts; both kinds of dispatch."""
    scheduler: dict[str, Any] = dict(decode_steps_per_dispatch=2, decode_buckets=(1, 4))
    engine = engine_of(small_model, blocks=20, scheduler=scheduler)
    state = np.asarray(engine._device.state.kv_pages)
    assert engine.warm_up(drafts=True, progress=False) > 0
    np.testing.assert_array_equal(engine._device.state.kv_pages, state)
    rng, compiled = np.random.default_rng(0), []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)  # pyright: ignore[reportArgumentType]
    try:
        for i in range(150):
            if rng.random() < 0.3:
                params = SamplingParams(max_tokens=int(rng.integers(1, 9)), seed=i,
                                        n=int(rng.integers(1, 4)), temperature=1.0)  # fmt: skip
                last = engine.submit(prompt_of(int(rng.integers(1, 30)), i), params)
                if rng.random() < 0.1:
                    engine.abort(last)
            engine.step()
        run(engine)
        drafted = engine.submit(prompt_of(5), greedy(30))
        engine.step()
        while engine.is_running(drafted):
            engine.verify(drafted, rng.integers(0, 61, 3).tolist())
            engine.drain()
        run(engine)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)  # pyright: ignore[reportArgumentType]
    assert not compiled
    assert engine.stats().preemptions > 0


def test_drain_returns_the_outputs_in_flight(small_model):
    engine = engine_of(small_model)
    request = engine.submit(prompt_of(5), greedy(2))
    told = engine.step()
    assert engine.is_running(request)
    told += engine.step()
    assert engine.is_running(request)  # its last token is on its way
    told += engine.drain()
    assert not engine.is_running(request)
    assert [t for output in told for t in output.new_token_ids] == told[-1].token_ids
    assert told[-1].finished
    assert engine.drain() == []


@pytest.mark.parametrize("buckets", [(), (3, 2), (0, 4), (1, 2)])
def test_rejects_invalid_decode_buckets(small_model, buckets):
    with pytest.raises(ConfigError, match="decode_buckets"):
        engine_of(small_model, scheduler={"decode_buckets": buckets})


def test_a_failed_dispatch_does_not_touch_waiting_requests(small_model):
    engine = engine_of(small_model)
    ids = [engine.submit(prompt_of(2, i), greedy(3)) for i in range(6)]  # 4 at a time
    send, engine._device.send = engine._device.send, None  # pyright: ignore[reportAttributeAccessIssue]
    outputs = engine.step()
    engine._device.send = send
    outputs += run(engine).values()
    errors = {output.request_id: output.error for output in outputs if output.finished}
    assert [errors[i] is None for i in ids] == [False] * 4 + [True] * 2
    assert all("TypeError" in errors[i] for i in ids[:4])  # pyright: ignore[reportOperatorIssue]


def test_an_idle_step_does_nothing(small_model):
    engine, traced = engine_of(small_model), trace_counts.copy()
    assert engine.step() == []
    assert trace_counts == traced
    for _ in range(2):  # all end in the same step, and others come after
        for i in range(3):
            engine.submit(prompt_of(4 + i), greedy(2))
        run(engine)
        assert engine.step() == []


# -- text ------------------------------------------------------------------------------------


class Letters:
    """Token n is the n-th letter; a stream that holds nothing back."""

    def encode(self, text):
        return [ord(c) - ord("A") for c in text]

    def stream(self):
        return self

    def push(self, tokens):
        return "".join(chr(ord("A") + t) for t in tokens)

    def flush(self):
        return ""


def test_text_and_stop_texts(small_model):
    engine = engine_of(small_model, tokenizer=Letters())
    engine.submit("ABC", SamplingParams(max_tokens=12, temperature=1.0, seed=1), request_id="a")
    text = run(engine)["a", 0].text
    assert len(text) == 12
    stop = text[4:7]
    at = text.index(stop)
    for extra in ({}, dict(min_tokens=at + 4)):
        pieces, params = [], dict(max_tokens=12, temperature=1.0, seed=1, stop=(stop, "never"))
        engine.submit("ABC", SamplingParams(**params, **extra), request_id="a")
        for output in engine.stream():
            pieces.append(output.new_text)
            assert "".join(pieces) == output.text
            assert stop not in output.text or extra
        if extra:  # the text came too early to stop it
            assert output.finish_reason == "length" or stop in text[at + 3 :]  # pyright: ignore[reportPossiblyUnboundVariable]
        else:
            assert (output.text, output.finish_reason) == (text[:at], "stop")  # pyright: ignore[reportPossiblyUnboundVariable]
            assert len(output.token_ids) == at + 3  # pyright: ignore[reportPossiblyUnboundVariable]
    verify_idle(engine)


# -- what the model finds likely -------------------------------------------------------------


def test_log_probabilities(small_model):
    from engine_cases import dense_logprobs

    engine, prompt = engine_of(small_model), prompt_of(21)
    for _ in range(2):  # the second finds the prompt in the cache
        a = engine.submit(prompt, greedy(5, logprobs=3))
        b = engine.submit(prompt, greedy(5, logprobs=2, prompt_logprobs=True))
        outputs = {}
        while engine.has_work:
            for o in engine.step():
                found = outputs.setdefault(o.request_id, ([], []))
                found[0].extend(o.logprobs)
                found[1].extend(o.prompt_logprobs or [])
                tokens = o.token_ids
        want = dense_logprobs(small_model, prompt + tokens)  # pyright: ignore[reportPossiblyUnboundVariable]
        for request, count in ((a, 3), (b, 2)):
            for i, x in enumerate(outputs[request][0]):
                row = want[len(prompt) + i - 1]
                assert x.token == tokens[i]  # pyright: ignore[reportPossiblyUnboundVariable]
                assert x.logprob == pytest.approx(row[x.token], abs=1e-4)
                assert list(x.top) == np.argsort(-row)[:count].tolist()
        assert outputs[a][1] == []
        assert [x.token for x in outputs[b][1]] == prompt[1:]
        np.testing.assert_allclose(
            [x.logprob for x in outputs[b][1]],
            [want[i, token] for i, token in enumerate(prompt[1:])], atol=1e-4,
        )  # fmt: skip


# -- samples ---------------------------------------------------------------------------------


def test_samples_share_the_prompt_and_are_what_each_would_be_alone(small_model):
    engine, prompt = engine_of(small_model, max_seqs=4), prompt_of(22)
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=9, n=6)
    engine.submit(prompt, params, request_id="a")
    outputs = run(engine)  # four rows for six samples
    tokens = [outputs["a", i].token_ids for i in range(6)]
    assert len({tuple(t) for t in tokens}) == 6
    assert engine.stats().prompt_tokens <= 22 + 2 * 2
    wide = engine_of(small_model, max_seqs=1)
    wide.submit(prompt, params, request_id="a")
    assert tokens == [o.token_ids for _, o in sorted(run(wide).items())]
    alone = SamplingParams(max_tokens=10, temperature=1.0, seed=9)
    wide.submit(prompt, alone, request_id="b")
    assert run(wide)["b", 0].token_ids == tokens[0]


def test_best_of(small_model):
    engine, prompt = engine_of(small_model), prompt_of(9)
    drawn: dict[str, Any] = dict(max_tokens=8, temperature=1.5, seed=2)
    engine.submit(prompt, SamplingParams(n=4, logprobs=0, **drawn), request_id="all")
    every = sorted(run(engine).values(), key=lambda o: -o.cumulative_logprob)
    engine.submit(prompt, SamplingParams(n=2, best_of=4, **drawn), request_id="best")
    best = run(engine)
    assert [best["best", i].token_ids for i in range(2)] == [o.token_ids for o in every[:2]]


# -- processors, and errors inside a step ----------------------------------------------------


def never_twice():
    """Forbids the last token; its state counts the calls."""
    return LogitsProcessor(
        init=lambda: np.int32(0),
        apply=lambda logits, n, tokens, length: (
            logits.at[tokens[length - 1]].set(-np.inf), n + 1),
    )  # fmt: skip


def test_a_logits_processor(small_model):
    engine, prompt = engine_of(small_model), prompt_of(6)
    engine.submit(prompt, greedy(12), request_id="plain")
    engine.submit(prompt, greedy(12, logits_processor=never_twice()), request_id="a")
    outputs = run(engine)
    assert outputs["plain", 0].token_ids == dense_greedy(small_model, prompt, 12)
    tokens = prompt[-1:] + outputs["a", 0].token_ids
    assert all(x != y for x, y in itertools.pairwise(tokens))
    assert not engine._device.processors


def test_a_processor_that_fails_ends_its_own_request(small_model):
    def fail(*_):
        raise RuntimeError("no such thing")

    engine = engine_of(small_model)
    good = engine.submit(prompt_of(5), greedy(6))
    bad = engine.submit(prompt_of(6), greedy(6, logits_processor=LogitsProcessor(tuple, fail)))
    outputs = run(engine)
    assert outputs[good, 0].token_ids == dense_greedy(small_model, prompt_of(5), 6)
    assert outputs[bad, 0].finish_reason == "error"
    assert "no such thing" in outputs[bad, 0].error


@pytest.mark.parametrize("loses_the_cache", [False, True])
def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    small_model, monkeypatch, loses_the_cache
):
    engine = engine_of(small_model, max_seqs=2)
    first = [engine.submit(prompt_of(5 + i), greedy(30)) for i in range(2)]
    waits = engine.submit(prompt_of(9), greedy(8))
    for _ in range(4):
        engine.step()
    send = engine._device.send

    def fail(work, plan):
        monkeypatch.setattr(engine._device, "send", send)
        if loses_the_cache:
            engine._device.state.kv_pages.delete()
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(engine._device, "send", fail)
    outputs = run(engine)
    for request in first:
        assert outputs[request, 0].finish_reason == "error"
        assert "out of memory" in outputs[request, 0].error
    assert outputs[waits, 0].token_ids == dense_greedy(small_model, prompt_of(9), 8)


def test_an_error_that_shows_when_the_tokens_are_fetched(small_model):
    calls = []

    def fail(length):
        calls.append(int(length))
        if len(calls) > 2:
            raise RuntimeError("too often")
        return np.float32(0)

    def apply(logits, state, tokens, length):
        zero = jax.ShapeDtypeStruct((), np.float32)
        return logits + jax.pure_callback(fail, zero, length, vmap_method="sequential"), state

    engine = engine_of(small_model, max_seqs=1)
    bad = engine.submit(prompt_of(6), greedy(9, logits_processor=LogitsProcessor(tuple, apply)))
    good = engine.submit(prompt_of(5), greedy(6))
    outputs = run(engine)
    assert outputs[good, 0].error is None
    assert outputs[bad, 0].finish_reason == "error"
    assert outputs[good, 0].token_ids == dense_greedy(small_model, prompt_of(5), 6)


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "params", "message"), [
    ([], None, "the prompt is empty"),
    ([1] * 65, None, "65 tokens, the longest sequence has 64"),
    ([61], None, "the vocabulary has 61"),
    ("text", None, "needs the engine's tokenizer="),
    ([1], dict(stop="x"), "needs the engine's tokenizer="),
    ([1], dict(stop_token_ids=tuple(range(17))), "at most 16 stop token ids are supported, got 17"),
])  # fmt: skip
def test_rejects_invalid_requests(small_model, prompt, params, message):
    engine = engine_of(small_model)
    with pytest.raises(ConfigError, match=message):
        engine.submit(prompt, SamplingParams(**(params or {})))
    verify_idle(engine)
    assert engine.step() == []


def test_ids_in_use(small_model):
    engine = engine_of(small_model)
    engine.submit([1, 2], greedy(3), request_id="a")
    with pytest.raises(ConfigError, match="'a' is running already"):
        engine.submit([1, 2], request_id="a")
    assert len(run(engine)["a", 0].token_ids) == 3
    engine.submit([1, 2], greedy(1), request_id="a")  # it is free again
    run(engine)


def test_generate_refuses_all_or_runs_all(small_model):
    engine = engine_of(small_model)
    with pytest.raises(ConfigError, match="prompt 1: the prompt is empty"):
        engine.generate([[1], []], greedy(2), progress=False)
    verify_idle(engine)
    results = engine.generate([[1], [2, 3]], [greedy(2), greedy(4, n=2)], progress=False)
    assert [[len(o.token_ids) for o in samples] for samples in results] == [[2], [4, 4]]


@pytest.mark.parametrize("steps", [1, 3])
def test_used_slots_are_counted_at_each_step_and_synced_once_per_block(small_model, steps):
    engine = engine_of(small_model, scheduler=dict(pipeline=False, decode_steps_per_dispatch=steps))
    request, other = engine.submit(prompt_of(5), greedy(40)), engine.submit([1], greedy(33))
    tokens, told = {request: 5, other: 1}, set()
    while len(tokens) == 2:
        for output in engine.step():
            tokens[output.request_id] += len(output.new_token_ids)
            if output.finished:
                del tokens[output.request_id]
        if len(tokens) == 2:  # the newest token of each has no slot yet
            assert engine.stats().blocks.used_slots == sum(tokens.values()) - 2  # pyright: ignore[reportOptionalMemberAccess]
            told.add(engine.manager.length(engine._loop.requests[request].samples[0].key))
            assert 0 <= tokens[request] - 1 - max(told) < BLOCK + steps
    assert len(told) < 40 / BLOCK + 2
    run(engine)


def test_a_rollback_while_it_computes_again_leaves_nothing_to_wait_for(small_model):
    engine = engine_of(small_model)
    request = engine.submit(prompt_of(5), greedy(40))
    for _ in range(35):
        engine.step()
    engine.drain()
    (sequence,) = engine._loop.requests[request].samples
    engine._scheduler.preempt(sequence, "of the test")
    assert engine.manager.reset_prefix_cache()
    engine.step()  # the first chunk of its tokens
    assert engine._scheduler.rows.prefilling(sequence)
    engine.rollback(request, 12)
    (output,) = [o for o in run(engine).values() if o.finished]
    assert output.token_ids == dense_greedy(small_model, prompt_of(5), 40)


def test_slots_reserved_early_take_no_block_from_others(small_model):
    lengths = [(5, 19), (7, 13), (2, 20)]  # prompt and output: to the end of their blocks
    blocks = sum(-(-(prompt + output) // BLOCK) for prompt, output in lengths)
    engine = engine_of(small_model, blocks)
    for i, (prompt, output) in enumerate(lengths):
        engine.submit(prompt_of(prompt, seed=i), greedy(output))
    outputs = run(engine)
    assert [len(o.token_ids) for o in outputs.values()] == [output for _, output in lengths]
    assert engine.stats().preemptions == 0
    assert engine.stats().blocks.peak_active <= blocks  # pyright: ignore[reportOptionalMemberAccess]


def test_generate_keeps_outputs_of_other_requests(small_model):
    engine = engine_of(small_model)
    first = engine.submit([5, 6], greedy(6))
    head = engine.step()
    engine.generate([[1, 2, 3]], greedy(12), progress=False)
    assert engine.has_work
    outputs = head + list(engine.stream())
    assert {o.request_id for o in outputs} == {first}
    assert [token for o in outputs for token in o.new_token_ids] == outputs[-1].token_ids
    assert len(outputs[-1].token_ids) == 6
    verify_idle(engine)


def test_an_interrupted_generate_ends_its_requests_alone(small_model, monkeypatch):
    engine = engine_of(small_model)
    other = engine.submit([5, 6], greedy(6))
    step, calls = engine.step, []

    def interrupted():
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2, 3]], greedy(12), progress=False)
    outputs = list(engine.stream())
    assert {o.request_id for o in outputs} == {other}
    assert len(outputs[-1].token_ids) == 6
    verify_idle(engine)


@pytest.mark.parametrize("prompt", [[1.5, 2], ["a"], [None], np.array([1.0])])
def test_rejects_prompts_that_are_not_integers(small_model, prompt):
    with pytest.raises(ConfigError, match="prompt token ids must be integers, got"):
        engine_of(small_model).submit(prompt)


def test_rejects_invalid_scheduler_configurations():
    wrong: tuple[dict[str, Any], ...] = (
        dict(prefill_buckets=(16, 8)), dict(max_tokens_per_step=99),
        dict(policy="sjf"), dict(policy=None), dict(decode_steps_per_dispatch=0),
        dict(decode_steps_per_dispatch=2.0), dict(decode_steps_per_dispatch=True),
        dict(max_tokens_per_step="16"), dict(prefill_buckets=()), dict(prefill_buckets=16),
        dict(prefill_buckets=(0, 256)), dict(prefill_buckets=(16.0, 256)),
        dict(decode_buckets="4"), dict(decode_buckets=(2**31,)), dict(pipeline=1),
        dict(check_state="no"), dict(defer_shared_prefixes=None),
    )  # fmt: skip
    for changes in wrong:
        with pytest.raises(ConfigError, match=next(iter(changes))):
            jaxkv.SchedulerConfig(**changes)
    given: dict[str, Any] = dict(prefill_buckets=np.array([4, 8]), max_tokens_per_step=np.int32(8))
    same = jaxkv.SchedulerConfig(prefill_buckets=(4, 8), max_tokens_per_step=8)
    assert jaxkv.SchedulerConfig(**given) == same
