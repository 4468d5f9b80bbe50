"""An engine whose cache and manager come apart says so; windows that are not the model's."""

import dataclasses
from types import SimpleNamespace

import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, run

from jaxkv import BlockManager, ConfigError, StateError
from jaxkv.engine.validation import require_window


def test_a_plan_that_someone_else_takes_is_noticed_and_the_rest_goes_on(small_model):
    engine = engine_of(small_model)
    engine.submit(prompt_of(30), greedy(20), request_id="running")
    engine.step()
    engine.submit(prompt_of(5), greedy(20), request_id="other")
    schedule, taken = engine._scheduler.schedule, []

    def steal():
        work = schedule()
        if not taken:
            taken.append(engine.manager.take_plan())  # blocks of "other", never applied
        return work

    engine._scheduler.schedule = steal
    outputs = run(engine)
    assert {o.finish_reason for o in outputs.values()} == {"error"}
    assert all("StateError: plan" in o.error for o in outputs.values())
    engine.submit(prompt_of(9), greedy(6), request_id="later")
    assert run(engine)["later", 0].token_ids == dense_greedy(small_model, prompt_of(9), 6)


def test_a_state_that_differs_is_found_at_the_next_step(small_model):
    engine = engine_of(small_model, scheduler=dict(check_state=True))
    engine.submit(prompt_of(9), greedy(9))
    for _ in range(4):
        engine.step()
    state = engine._device.state
    wrong = state.block_tables.at[0, 1].set(7)
    engine._device.state = dataclasses.replace(state, block_tables=wrong)
    with pytest.raises(StateError, match="row 0, column 1 of sequence 0: block 7 on the device"):
        engine.step()


def test_checked_steps_give_the_same_tokens(small_model):
    engine = engine_of(small_model, blocks=14, scheduler=dict(check_state=True))
    prompts = [prompt_of(n) for n in (3, 9, 17)]
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, greedy(12), request_id=i)
    outputs = run(engine)
    for i, prompt in enumerate(prompts):
        assert outputs[i, 0].token_ids == dense_greedy(small_model, prompt, 12)


def test_a_window_for_a_model_without_one_is_refused(small_model):
    with pytest.raises(ConfigError, match=r"sliding_window=4 frees .* the model's config has None"):
        engine_of(small_model, sliding_window=4)


@pytest.mark.parametrize(("config", "given", "message"), [
    (dict(sliding_window=8), 8, None), (dict(sliding_window=8), 9, None),
    (dict(sliding_window=8), None, None), (dict(), None, None),
    (dict(sliding_window=8), 7, "the model's config has 8"),
    (dict(sliding_window=None), 8, "has None"), (dict(), 8, "has None"),
    (dict(sliding_window=8, use_sliding_window=False), 8, "has None"),
    (dict(sliding_window=8, layer_types=["sliding_attention"] * 2), 8, None),
    (dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]), 8,
     r"layers \[1\] have none"),
])  # fmt: skip
def test_a_window_must_be_one_of_all_layers(config, given, message):
    manager = BlockManager(4, 2, max_seqs=1, max_blocks_per_seq=3, sliding_window=given)
    if message is None:
        require_window(manager, SimpleNamespace(**config))
    else:
        with pytest.raises(ConfigError, match=message):
            require_window(manager, SimpleNamespace(**config))
