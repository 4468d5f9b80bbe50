"""Coroutines that share an engine: whatever one of them does, the others get their tokens."""

import asyncio
import gc
import threading
import time

import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, verify_idle

from jaxkv import AsyncEngine, ConfigError, JaxkvError, SamplingParams


async def tokens_of(shared, prompt, max_tokens, pause=0.0, **options):
    tokens = []
    async for output in shared.generate(prompt, greedy(max_tokens), **options):
        tokens += output.new_token_ids
        await asyncio.sleep(pause)
    return tokens


def slowed(engine, seconds=0.01):
    """The engine with steps that last as long as a real model's."""
    step = engine.step

    def slow():
        time.sleep(seconds)
        return step()

    engine.step = slow
    return engine


def wait_until_idle(engine):
    """Waits for the thread of an engine whose consumers have left."""
    for _ in range(500):
        if not any(thread.name == "jaxkv-engine" for thread in threading.enumerate()):
            verify_idle(engine)
            return
        time.sleep(0.01)
    raise AssertionError("the thread runs on though all consumers have left")


def test_a_consumer_cancelled_again_in_its_clean_up_ends_its_request(small_model):
    engine = slowed(engine_of(small_model))

    async def main():
        shared = AsyncEngine(engine)
        task = asyncio.create_task(tokens_of(shared, prompt_of(4), 50, request_id="x"))
        while not engine.is_running("x"):
            await asyncio.sleep(0.005)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
        while engine.is_running("x"):
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(main(), 60))
    wait_until_idle(engine)
    assert engine.stats().generated_tokens < 40


def test_an_id_used_again_before_its_first_consumer_has_read_the_end(small_model):
    engine = engine_of(small_model)

    async def main():
        shared = AsyncEngine(engine)
        first = asyncio.create_task(tokens_of(shared, prompt_of(4), 4, 0.02, request_id="x"))
        other = asyncio.create_task(tokens_of(shared, prompt_of(7), 40, request_id="other"))
        while not engine.is_running("x"):
            await asyncio.sleep(0)
        while engine.is_running("x"):
            await asyncio.sleep(0)
        return await asyncio.gather(
            first, tokens_of(shared, prompt_of(5), 9, request_id="x"), other
        )

    first, second, other = asyncio.run(asyncio.wait_for(main(), 60))
    assert first == dense_greedy(small_model, prompt_of(4), 4)
    assert second == dense_greedy(small_model, prompt_of(5), 9)
    assert other == dense_greedy(small_model, prompt_of(7), 40)


@pytest.mark.parametrize(("prompt", "options"), [
    ([], {}), (None, {}), ([999], {}), ("text", {}), ([1], dict(priority="high")),
    ([1], dict(namespace=1.5)), ([1], dict(request_id=[])), ([1], dict(nonsense=1)),
])  # fmt: skip
def test_a_bad_request_is_its_own_consumers_matter(small_model, prompt, options):
    engine = engine_of(small_model)

    async def main():
        shared = AsyncEngine(engine)
        good = asyncio.create_task(tokens_of(shared, prompt_of(6), 8))
        with pytest.raises((ConfigError, TypeError)):
            await tokens_of(shared, prompt, 4, **options)
        return await good

    assert asyncio.run(asyncio.wait_for(main(), 60)) == dense_greedy(small_model, prompt_of(6), 8)
    wait_until_idle(engine)


def test_an_event_loop_that_ends_with_generators_open(small_model):
    """They are closed while the loop shuts down, when no task can be started any more."""
    engine = slowed(engine_of(small_model))
    shared, kept = AsyncEngine(engine), []

    async def main():
        for i in range(2):
            outputs = shared.generate(prompt_of(4 + i), greedy(50))
            await anext(outputs)
            kept.append(outputs)

    asyncio.run(main())
    wait_until_idle(engine)

    async def again():
        return await tokens_of(shared, prompt_of(6), 8)

    engine.step = type(engine).step.__get__(engine)
    assert asyncio.run(again()) == dense_greedy(small_model, prompt_of(6), 8)


def test_a_generator_that_is_dropped_or_closed_early_ends_its_request(small_model):
    engine = slowed(engine_of(small_model))

    async def main():
        shared = AsyncEngine(engine)
        closed = shared.generate(prompt_of(4), greedy(50), request_id="closed")
        dropped = shared.generate(prompt_of(5), greedy(50), request_id="dropped")
        never = shared.generate(prompt_of(5), greedy(50), request_id="never")
        await anext(closed)
        await anext(dropped)
        await closed.aclose()
        del dropped, never
        gc.collect()
        while engine.is_running("closed") or engine.is_running("dropped"):
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(main(), 60))
    wait_until_idle(engine)


def test_a_slow_reader_keeps_its_own_outputs_alone(small_model):
    engine = engine_of(small_model)

    async def main():
        shared = AsyncEngine(engine)
        slow = shared.generate(prompt_of(4), greedy(3))
        first = await anext(slow)
        fast = await tokens_of(shared, prompt_of(6), 40)
        rest = [output async for output in slow]
        return first.new_token_ids + [t for o in rest for t in o.new_token_ids], len(rest), fast

    slow, left, fast = asyncio.run(asyncio.wait_for(main(), 60))
    assert slow == dense_greedy(small_model, prompt_of(4), 3)
    assert left <= 2
    assert fast == dense_greedy(small_model, prompt_of(6), 40)


def test_a_failure_of_the_engine_reaches_every_consumer_once(small_model):
    engine = engine_of(small_model)
    step, calls = engine.step, []

    def fails():
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError("no more")
        return step()

    engine.step = fails

    async def main():
        shared = AsyncEngine(engine)
        results = await asyncio.gather(
            *(tokens_of(shared, prompt_of(n), 20) for n in (4, 5)), return_exceptions=True
        )
        return results, await tokens_of(shared, prompt_of(6), 8)

    results, after = asyncio.run(asyncio.wait_for(main(), 60))
    for error in results:
        assert isinstance(error, JaxkvError)
        assert "the engine failed: MemoryError: no more" in str(error)
        assert isinstance(error.__cause__, MemoryError)
    assert after == dense_greedy(small_model, prompt_of(6), 8)
    wait_until_idle(engine)


def test_a_consumer_that_comes_while_a_failure_is_passed_on_is_served(small_model):
    engine = engine_of(small_model)
    step, arrived, calls = engine.step, threading.Event(), []

    def fails():
        calls.append(None)
        if len(calls) == 1:
            arrived.wait(30)
            raise MemoryError("no more")
        return step()

    engine.step = fails

    async def main():
        shared = AsyncEngine(engine)
        first = asyncio.create_task(tokens_of(shared, prompt_of(4), 20))
        while not calls:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(tokens_of(shared, prompt_of(6), 8))
        await asyncio.sleep(0.01)
        arrived.set()
        return await asyncio.gather(first, second, return_exceptions=True)

    error, tokens = asyncio.run(asyncio.wait_for(main(), 60))
    assert isinstance(error, JaxkvError)
    assert tokens == dense_greedy(small_model, prompt_of(6), 8)


def test_many_consumers_that_come_and_go(small_model):
    engine = engine_of(small_model, 20)
    expected = {n: dense_greedy(small_model, prompt_of(n), 12) for n in range(3, 9)}

    async def one(shared, n, stops):
        tokens = []
        async for output in shared.generate(prompt_of(n), SamplingParams(max_tokens=12)):
            tokens += output.new_token_ids
            if stops and len(tokens) > 2:
                return True
        return tokens == expected[n]

    async def main():
        shared = AsyncEngine(engine)
        runs = [one(shared, 3 + i % 6, i % 3 == 0) for i in range(24)]
        return await asyncio.gather(*runs)

    assert all(asyncio.run(asyncio.wait_for(main(), 120)))
    wait_until_idle(engine)
