"""What is wrong with one request is refused, or ends that request alone."""

import numpy as np
import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, run

from jaxkv import ConfigError, SamplingParams
from jaxkv.sampling.sampler import SamplerState


@pytest.mark.parametrize(("params", "options", "message"), [
    (dict(stop_token_ids=(61,)), {}, "stop_token_ids has token ids outside the vocabulary of 61"),
    (dict(logit_bias={61: 1.0}), {}, "logit_bias has token ids outside the vocabulary of 61"),
    ({}, dict(namespace=1.5), "namespace=1.5"),
    ({}, dict(namespace=object()), "namespace="),
    ({}, dict(namespace={1, 2}), "namespace="),
    ({}, dict(namespace=np.zeros(3)), "namespace="),
    ({}, dict(priority=1.5), "priority=1.5 must be an integer"),
    ({}, dict(request_id=[1]), r"request_id=\[1\] must be hashable"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_at_submission(small_model, params, options, message):
    engine = engine_of(small_model)
    with pytest.raises(ConfigError, match=message):
        engine.submit([1, 2], SamplingParams(**params), **options)
    assert not engine.has_work


def test_end_tokens_outside_the_vocabulary_are_refused(small_model):
    with pytest.raises(ConfigError, match="eos_token_ids has token ids outside the vocabulary"):
        engine_of(small_model, eos_token_ids=(2, 61))


@pytest.mark.parametrize("prompt", [b"12", {1: 2}, None, 5, np.array(3), [[1]], [1, None]])
def test_what_is_not_a_prompt(small_model, prompt):
    with pytest.raises(ConfigError, match="prompt"):
        engine_of(small_model).submit(prompt)


def test_a_row_that_cannot_be_filled_ends_its_request_alone(small_model, monkeypatch):
    fill = SamplerState.fill

    def fails(self, row, token_ids, params, **options):
        if params.top_k == 5:
            raise OverflowError("Python int too large to convert to C long")
        fill(self, row, token_ids, params, **options)

    monkeypatch.setattr(SamplerState, "fill", fails)
    engine = engine_of(small_model)
    running = engine.submit(prompt_of(6), greedy(9))
    engine.step()
    bad = engine.submit(prompt_of(5), greedy(4, top_k=5))
    beside = engine.submit(prompt_of(7), greedy(6))
    outputs = run(engine)
    assert outputs[bad, 0].finish_reason == "error"
    assert isinstance(outputs[bad, 0].exception, OverflowError)
    assert outputs[running, 0].token_ids == dense_greedy(small_model, prompt_of(6), 9)
    assert outputs[beside, 0].token_ids == dense_greedy(small_model, prompt_of(7), 6)


class FailsAt:
    """A tokenizer whose streams raise at one token."""

    def __init__(self, token):
        self.token = token

    def encode(self, text):
        return [ord(x) % 61 for x in text]

    def stream(self):
        return self

    def push(self, token_ids):
        if self.token in token_ids:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return "x" * len(token_ids)

    def flush(self):
        return ""


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_tokenizer_that_raises_ends_the_request_of_its_text(small_model, stop):
    expected = {n: dense_greedy(small_model, prompt_of(n), 8) for n in (5, 6, 7)}
    token = next(t for t in expected[6] if t not in expected[5] and t not in expected[7])
    engine = engine_of(small_model, tokenizer=FailsAt(token))
    for n in (5, 6, 7):
        engine.submit(prompt_of(n), greedy(8, stop=stop), request_id=n)
    outputs = run(engine)
    assert outputs[5, 0].token_ids == expected[5]
    assert outputs[7, 0].token_ids == expected[7]
    assert outputs[7, 0].text == "x" * 8
    assert outputs[6, 0].finish_reason == "error"
    assert "UnicodeDecodeError" in outputs[6, 0].error
