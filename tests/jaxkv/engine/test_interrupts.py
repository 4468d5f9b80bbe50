"""Interrupts between any two lines of a call: no token is lost, and nothing hangs."""

import collections
import random
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, verify_idle

from jaxkv import AsyncEngine, BeamSearchParams, LogitsProcessor, SamplingParams

PACKAGES = ("jaxkv/engine/", "jaxkv/manager/", "jaxkv/sampling/")

# Likes the token 7 * n at the n-th step: with a state that starts again the tokens differ.
COUNTING = LogitsProcessor(
    lambda: jnp.int32(0),
    lambda logits, n, tokens, length: (
        jnp.where(jnp.arange(len(logits)) == n * 7 % len(logits), logits + 30.0, logits), n + 1,
    ),
)  # fmt: skip


class Letters:
    """A tokenizer of one letter for each token."""

    def encode(self, text):
        return [ord(letter) % 61 for letter in text]

    def stream(self):
        return self

    def push(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)

    def flush(self):
        return ""


class Interrupter:
    """Raises KeyboardInterrupt at given lines, counted over the lines of these packages."""

    def __init__(self, *at: int):
        self.at, self.count, self.places = list(at), 0, []

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if not any(package in name for package in PACKAGES):
            return None
        if event == "line":
            self.count += 1
            if self.at and self.count >= self.at[0]:
                self.at.pop(0)
                self.places.append(f"{name}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return self._trace


def submit_all(engine, *, processor):
    # All with log-probabilities, so that there are few programs to compile.
    drawn = SamplingParams(
        temperature=1.0, logprobs=1, logits_processor=COUNTING if processor else None
    )
    one, three = replace(drawn, max_tokens=7), replace(drawn, max_tokens=6, n=3)
    scored = replace(drawn, max_tokens=9, prompt_logprobs=True, best_of=2, seed=9)
    stopped = replace(drawn, max_tokens=12, stop=("ab", "q", "m"))
    engine.submit(prompt_of(6), one, request_id="one")
    engine.submit(prompt_of(9), three, request_id="three")
    engine.submit(prompt_of(5), scored, request_id="scored")
    engine.submit(prompt_of(4), BeamSearchParams(width=3, max_tokens=5), request_id="beams")
    engine.submit(prompt_of(5, 1), stopped, request_id="stopped")


def run_with(model, interrupter, *, pipeline, blocks, processor):
    """All outputs of a run that goes on after each interrupt."""
    engine = engine_of(model, blocks, scheduler=dict(pipeline=pipeline), tokenizer=Letters())
    submit_all(engine, processor=processor)
    last, tokens, texts = {}, collections.defaultdict(list), collections.defaultdict(str)
    for _ in range(300):
        try:
            with interrupter:
                outputs = engine.step()
        except KeyboardInterrupt:
            continue
        for output in outputs:
            key = output.request_id, output.sample
            last[key] = output.token_ids, output.finish_reason, output.text
            tokens[key] += output.new_token_ids
            texts[key] += output.new_text
        if not engine.has_work:
            verify_idle(engine)
            return last, dict(tokens), dict(texts)
    raise AssertionError(f"still at work after interrupts at {interrupter.places}")


def interrupted_runs(model, count, seed, **options):
    rng, counter = random.Random(seed), Interrupter()
    run_with(model, Interrupter(), **options)  # compiles
    expected = run_with(model, counter, **options)
    for case in range(count):
        first = rng.randrange(1, counter.count)
        # A second one, in every second run soon enough to hit the recovery from the first.
        second = first + rng.randrange(1, (300, counter.count)[case % 2])
        interrupter = Interrupter(first, second)
        assert run_with(model, interrupter, **options) == expected, interrupter.places
        assert interrupter.places


def test_interrupts_between_any_two_lines_of_a_step(small_model):
    interrupted_runs(small_model, 5, seed=0, pipeline=True, blocks=20, processor=True)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("blocks", [20, 40])
@pytest.mark.parametrize("processor", [False, True])
def test_many_interrupts_between_any_two_lines(small_model, pipeline, blocks, processor):
    interrupted_runs(
        small_model, 100, seed=1, pipeline=pipeline, blocks=blocks, processor=processor
    )


CALLS = ("submit", "abort", "fork", "rollback", "generate", "drain", "verify")


@pytest.mark.parametrize("name", CALLS)
def test_interrupts_of_other_calls(small_model, name):
    rng = random.Random(name)
    expected = dense_greedy(small_model, prompt_of(7), 12)

    def call(engine):
        match name:
            case "submit":
                engine.submit(prompt_of(5), greedy(4), request_id="new")
            case "abort":
                engine.abort("other")
            case "fork":
                engine.fork("other", new_id="new")
            case "rollback":
                engine.rollback("other", 2)
            case "generate":
                engine.generate([prompt_of(5), prompt_of(6)], greedy(4), progress=False)
            case "drain":
                engine.drain()
            case "verify":
                engine.verify("other", [1, 2])

    def begin():
        engine = engine_of(small_model)
        engine.submit(prompt_of(7), greedy(12), request_id="kept")
        engine.submit(prompt_of(8), greedy(12), request_id="other")
        for _ in range(5):
            engine.step()
        return engine

    call(begin())  # compiles
    engine, counter = begin(), Interrupter()
    with counter:
        call(engine)
    for at in {*(rng.randrange(1, counter.count + 1) for _ in range(6)), 1}:
        engine, interrupter, last = begin(), Interrupter(at), {}
        with pytest.raises(KeyboardInterrupt), interrupter:
            call(engine)
        for _ in range(100):
            for output in engine.step():
                last[output.request_id] = output
            if not engine.has_work:
                break
        verify_idle(engine)
        assert last["kept"].token_ids == expected, interrupter.places
        # The call's own request is whole as well, whether or not it was submitted.
        if "new" in last and name == "submit":
            assert last["new"].token_ids == dense_greedy(small_model, prompt_of(5), 4)
        if name != "abort":
            assert last["other"].token_ids == dense_greedy(small_model, prompt_of(8), 12)
        if name == "fork" and "new" in last:
            assert last["new"].token_ids == last["other"].token_ids


def test_an_interrupt_while_tokens_are_fetched_computes_nothing_again(small_model, monkeypatch):
    engine = engine_of(small_model)
    request = engine.submit(prompt_of(7), greedy(12))
    for _ in range(3):
        engine.step()
    real = jax.tree.map

    def interrupted(function, *trees, **options):
        if function is np.asarray:
            monkeypatch.setattr(jax.tree, "map", real)
            raise KeyboardInterrupt
        return real(function, *trees, **options)

    monkeypatch.setattr(jax.tree, "map", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    last = {output.request_id: output for output in engine.stream()}
    assert last[request].token_ids == dense_greedy(small_model, prompt_of(7), 12)
    assert last[request].num_preemptions == 0
    assert engine.stats().prompt_tokens == 7


def test_an_interrupted_engine_still_serves_coroutines(small_model):
    import asyncio

    engine = engine_of(small_model)
    engine.submit(prompt_of(8), greedy(4))
    with pytest.raises(KeyboardInterrupt), Interrupter(60):
        engine.step()

    async def main():
        outputs = AsyncEngine(engine).generate(prompt_of(7), greedy(6))
        return [token async for output in outputs for token in output.new_token_ids]

    assert asyncio.run(main()) == dense_greedy(small_model, prompt_of(7), 6)
