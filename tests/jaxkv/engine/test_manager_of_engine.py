"""The engine and its block manager: one watermark, one clock, a manager of the caller's."""

from typing import Any

import pytest
from engine_cases import MAX_LEN, SCHEDULER, engine_of, greedy, prompt_of, run, tokens_of

from jaxkv import BlockManager, CacheConfig, ConfigError, Engine, RequestOutput, generate
from jaxkv.manager import events


def watched(engine):
    """Available blocks right after each admission while other sequences run."""
    least = []

    def listener(event):
        if event.kind == events.ALLOCATE and engine.stats().running:
            least.append(event.free_count)

    engine.manager.subscribe(listener)
    return least


@pytest.mark.parametrize("prefix_index", ["hash", None])
def test_a_watermark_is_left_to_the_running_sequences(small_model, prefix_index):
    """Without one, admissions take the last block and the running sequences are preempted."""
    runs = {}
    for watermark in (0.0, 0.4):
        engine = engine_of(small_model, blocks=20, watermark=watermark, prefix_index=prefix_index)
        least = watched(engine)
        for seed in range(4):
            engine.submit(prompt_of(20, seed), greedy(20), request_id=seed)
        runs[watermark] = tokens_of(run(engine)), engine.stats().preemptions, min(least)
    assert runs[0.0][0] == runs[0.4][0]
    assert runs[0.0][1] > runs[0.4][1] == 0
    assert runs[0.0][2] < 8 <= runs[0.4][2]  # 40 % of 20 blocks


def test_a_watermark_keeps_nothing_from_a_request_that_runs_alone(small_model):
    engine = engine_of(small_model, blocks=12, watermark=0.5)
    prompt = prompt_of(40)
    assert engine.manager.can_allocate(prompt).verdict == "never"  # half the pool holds 24 tokens
    engine.submit(prompt, greedy(8))
    ((tokens, reason),) = tokens_of(run(engine)).values()
    assert (len(tokens), reason) == (8, "length")


def test_pins_run_on_the_engines_clock(small_model):
    time = 0.0
    engine = Engine(small_model, cache_of(small_model), SCHEDULER, clock=lambda: time)
    assert engine.manager.clock is engine.clock
    prompt = prompt_of(16)
    request = engine.submit(prompt, greedy(2))
    time = 5.0
    (output,) = [o for o in run(engine).values() if o.request_id == request]
    assert output.time_to_first_token == 5.0
    assert engine.manager.pin(prompt, ttl=10) == 16
    time = 14.9
    assert engine.manager.stats().pinned == 4
    time = 15.1
    assert engine.manager.stats().pinned == 0


def cache_of(model, **changes):
    sizes: dict[str, Any] = dict(max_len=MAX_LEN, block_size=4, max_seqs=4, num_blocks=65) | changes
    return CacheConfig.for_model(model.config, **sizes)


def test_an_engine_uses_the_manager_that_it_is_given(small_model):
    cache = cache_of(small_model)
    manager = BlockManager.for_config(cache, prefix_index="radix", eviction="fifo")
    engine = Engine(small_model, cache, SCHEDULER, manager=manager)
    assert engine.manager is manager
    assert engine.clock is manager.clock
    engine.submit(prompt_of(20), greedy(4))
    run(engine)
    assert manager.lookup(prompt_of(20)) == 20


@pytest.mark.parametrize(("changes", "options", "message"), [
    (dict(block_size=8), {}, "block_size=8, the cache 4"),
    (dict(num_blocks=66), {}, "num_blocks=66, the cache has room for 65"),
    (dict(max_seqs=5), {}, "max_seqs=5, the cache has room for 4"),
    (dict(max_len=80), {}, "max_blocks_per_seq=20, the cache has room for 16"),
    ({}, dict(watermark=0.1), "watermark: options of the block manager"),
    ({}, dict(clock=lambda: 0.0), "an engine has one clock"),
])  # fmt: skip
def test_managers_that_do_not_fit(small_model, changes, options, message):
    manager = BlockManager.for_config(cache_of(small_model, **changes))
    with pytest.raises(ConfigError, match=message):
        Engine(small_model, cache_of(small_model), manager=manager, **options)


def test_a_manager_with_content_is_refused(small_model):
    """Its blocks' KV is in another pool: a hit would read zeros."""
    cache = cache_of(small_model)
    manager = BlockManager.for_config(cache)
    manager.allocate("a", [1, 2, 3, 4, 5])
    with pytest.raises(ConfigError, match="1 sequences, 2 active and 0 cached"):
        Engine(small_model, cache, manager=manager)
    manager.commit("a", 5)
    manager.free("a")
    with pytest.raises(ConfigError, match="0 sequences, 0 active and 1 cached"):
        Engine(small_model, cache, manager=manager)
    assert manager.reset_prefix_cache()
    Engine(small_model, cache, manager=manager)


def test_generate_is_one_call_of_an_engine(small_model):
    prompts, calls = [prompt_of(5), prompt_of(9)], []
    result = generate(
        small_model, prompts, greedy(3), cache=cache_of(small_model), scheduler=SCHEDULER,
        eos_token_ids=(), on_token=lambda *call: calls.append(call),
    )  # fmt: skip
    assert all(isinstance(output, RequestOutput) for output in result.outputs)
    engine = Engine(small_model, cache_of(small_model), SCHEDULER, eos_token_ids=())
    groups = engine.generate(prompts, greedy(3), progress=False)
    assert [o.token_ids for o in result.outputs] == [g[0].token_ids for g in groups]
    assert [[t for i, t in calls if i == k] for k in range(2)] == [
        o.token_ids for o in result.outputs
    ]
    assert all(o.time_to_first_token > 0 and o.finished for o in result.outputs)  # pyright: ignore[reportOptionalOperand]
