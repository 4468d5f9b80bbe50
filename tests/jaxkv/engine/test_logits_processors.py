"""Logits processors of any misbehaviour end their own requests; states outlast recovery."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, run

from jaxkv import JaxkvError, LogitsProcessor


class Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other):
        raise ValueError("not comparable")

    def __call__(self, logits, state, tokens, length):
        return jnp.where(jnp.arange(len(logits)) == 7, logits + 99, logits), state


PROCESSORS = {
    "raises": (tuple, lambda *_: 1 / 0, "ZeroDivisionError"),
    "its init raises": (lambda: 1 / 0, lambda logits, s, t, n: (logits, s), "ZeroDivisionError"),
    "returns logits alone": (tuple, lambda logits, s, t, n: logits, r"expected \(logits, state\)"),
    "another shape": (lambda: jnp.zeros(3), lambda logits, s, t, n: (logits, jnp.zeros(4)), "init"),
    "another dtype": (
        lambda: jnp.zeros(3),
        lambda logits, s, t, n: (logits, s.astype(int)),
        "init",
    ),
    "another structure": (lambda: (1, 2), lambda logits, s, t, n: (logits, [1, 2]), "structure"),
    "other logits": (tuple, lambda logits, s, t, n: (logits[:5], s), r"logits of shape \(5\)"),
    "integer logits": (tuple, lambda logits, s, t, n: (logits.astype(int), s), "dtype int"),
    "a state of text": (lambda: "text", lambda logits, s, t, n: (logits, s), "logits processor"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_that_breaks_its_promise_ends_its_requests_alone(small_model, name):
    init, apply, message = PROCESSORS[name]
    engine, processor = engine_of(small_model, max_seqs=2), LogitsProcessor(init, apply)
    good = engine.submit(prompt_of(5), greedy(6))
    engine.step()
    for i in range(3):  # also those that would have waited for a row
        engine.submit(prompt_of(6), greedy(6, logits_processor=processor), request_id=f"bad{i}")
    outputs = run(engine)
    assert outputs[good, 0].token_ids == dense_greedy(small_model, prompt_of(5), 6)
    for i in range(3):
        output = outputs[f"bad{i}", 0]
        assert (output.finish_reason, output.token_ids) == ("error", [])
        with pytest.raises(JaxkvError, match=message):
            raise output.exception
    assert outputs[good, 0].num_preemptions == 0


def test_processors_without_a_hash_work(small_model):
    engine = engine_of(small_model)
    processor = LogitsProcessor(tuple, Unhashable())
    for i in range(2):
        engine.submit(prompt_of(5 + i), greedy(4, logits_processor=processor), request_id=i)
    engine.step()
    assert len(engine._device.processors) == 1
    assert {tuple(output.token_ids) for output in run(engine).values()} == {(7, 7, 7, 7)}


def callback_processor(fails_at):
    """Adds 0 through a callback, which raises at a length."""

    def check(length):
        if int(length) == fails_at:
            raise RuntimeError(f"at {fails_at}")
        return np.float32(0)

    def apply(logits, n, tokens, length):
        zero = jax.ShapeDtypeStruct((), np.float32)
        logits = jnp.where(jnp.arange(len(logits)) == n * 7 % len(logits), logits + 30.0, logits)
        return logits + jax.pure_callback(check, zero, length, vmap_method="sequential"), n + 1

    return LogitsProcessor(lambda: jnp.int32(0), apply)


def test_of_several_processors_the_one_whose_callback_raises_ends(small_model):
    engine = engine_of(small_model)
    good, bad = callback_processor(-1), callback_processor(9)
    engine.submit(prompt_of(5), greedy(9), request_id="plain")
    engine.submit(prompt_of(6), greedy(9, logits_processor=good), request_id="good")
    engine.submit(prompt_of(6, 1), greedy(9, logits_processor=bad), request_id="bad")
    outputs = run(engine)
    assert outputs["plain", 0].token_ids == dense_greedy(small_model, prompt_of(5), 9)
    # Its state went on where it was, though everything was computed again.
    assert outputs["good", 0].token_ids == [n * 7 % 61 for n in range(9)]
    assert outputs["bad", 0].finish_reason == "error"
    assert outputs["bad", 0].token_ids == [
        n * 7 % 61 for n in range(len(outputs["bad", 0].token_ids))
    ]
    assert "at 9" in outputs["bad", 0].error


def test_a_processors_state_survives_a_lost_cache_and_preemption(small_model, monkeypatch):
    engine = engine_of(small_model, 7, max_seqs=2)  # too few blocks for both
    processor = callback_processor(-1)
    for i in range(2):
        params = greedy(14, logits_processor=processor)
        engine.submit(prompt_of(5 + i), params, request_id=i)
    engine.submit(prompt_of(4), greedy(4), request_id="fails")
    send, calls = engine._device.send, []

    def fails(work, plan):
        calls.append(None)
        if any(s.request.id == "fails" for s in work.sequences):
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return send(work, plan)

    monkeypatch.setattr(engine._device, "send", fails)
    for _ in range(6):
        engine.step()
    engine._loop.whole.torn = True  # as an interrupt leaves it
    outputs = run(engine)
    for i in range(2):
        assert outputs[i, 0].token_ids == [n * 7 % 61 for n in range(14)]
    assert engine.stats().preemptions > 0


def test_slots_of_processors_are_used_again(small_model):
    engine, most = engine_of(small_model, max_seqs=2), 0
    engine.submit(prompt_of(4), greedy(40), request_id="long")
    for i in range(4):
        processor = LogitsProcessor(tuple, lambda logits, state, tokens, length: (logits, state))
        engine.submit(prompt_of(5), greedy(2, logits_processor=processor), request_id=i)
        while engine.is_running(i):
            engine.step()
            most = max(most, len(engine._device.processors))
    assert most == 1
    run(engine)
    assert not len(engine._device.processors)
