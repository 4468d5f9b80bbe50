"""Rows whose logits allow no token: their requests end with an error, the others go on."""

import jax.numpy as jnp
import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, run
from flax import nnx

from jaxkv import BeamSearchParams, LogitsProcessor, SamplingParams

BROKEN = 60  # the model's logits after this token are NaN


class BrokenAfter(nnx.Module):
    def __init__(self, model):
        self.model, self.config = model, model.config

    def __call__(self, tokens, state, batch):
        logits, state = self.model(tokens, state, batch)
        broken = jnp.asarray(tokens)[batch.logit_tokens] == BROKEN
        return jnp.where(broken[:, None], jnp.nan, logits), state


@pytest.fixture(scope="module")
def broken_model(small_model):
    return BrokenAfter(small_model)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("params", [
    greedy(9), SamplingParams(max_tokens=9, temperature=1, top_k=5, seed=1, logprobs=1),
], ids=["greedy", "sampled"])  # fmt: skip
def test_a_request_without_a_next_token_ends_alone(small_model, broken_model, steps, params):
    engine = engine_of(broken_model, scheduler=dict(decode_steps_per_dispatch=steps))
    prompt = [p % BROKEN for p in prompt_of(7)]
    engine.submit([3, BROKEN], params, request_id="in its prompt")
    bias = {BROKEN: 1e9}  # chosen after the prompt; nothing can follow it
    engine.submit([4, 5], SamplingParams(max_tokens=9, logit_bias=bias), request_id="on its way")
    engine.submit(prompt, greedy(6), request_id="well")
    outputs = run(engine)
    for name, made in (("in its prompt", []), ("on its way", [BROKEN])):
        output = outputs[name, 0]
        assert (output.finish_reason, output.token_ids) == ("error", made)
        assert f"no token can follow the {2 + len(made)} of this sequence" in output.error
    assert outputs["well", 0].token_ids == dense_greedy(small_model, prompt, 6)


def test_a_processor_that_forbids_all_tokens_ends_its_request(small_model):
    forbids = LogitsProcessor(
        lambda: (), lambda logits, state, tokens, length: (
            jnp.where(length >= 7, -jnp.inf, logits), state),
    )  # fmt: skip
    engine = engine_of(small_model)
    engine.submit([1, 2, 3], greedy(9, logits_processor=forbids))
    output = run(engine)[0, 0]
    assert output.finish_reason == "error"
    assert output.token_ids == dense_greedy(small_model, [1, 2, 3], 4)


def test_a_beam_search_without_a_next_token_ends_whole(broken_model):
    engine = engine_of(broken_model)
    engine.submit([3, BROKEN], BeamSearchParams(width=2, max_tokens=4))
    assert {o.finish_reason for o in run(engine).values()} == {"error"}
