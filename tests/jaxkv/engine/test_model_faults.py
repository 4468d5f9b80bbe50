"""A model that raises or breaks its promise raises where the user is."""

import dataclasses
import traceback

import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import greedy
from following import Following

import jaxkv
from jaxkv.errors import ModelError


class Raises(Following):
    def __call__(self, tokens, state, batch):
        raise ZeroDivisionError("in the third layer")


class ReturnsLogitsAlone(Following):
    def __call__(self, tokens, state, batch):
        return super().__call__(tokens, state, batch)[0]


class ForgetsTheState(Following):
    def __call__(self, tokens, state, batch):
        return super().__call__(tokens, state, batch)[0], state


class DropsTheAttentionsState(Following):
    def __call__(self, tokens, state, batch):
        x = jnp.ones((len(tokens), 1, 4))
        jaxkv.attention(x, x, x, state, 0, batch)
        return super().__call__(tokens, state, batch)


class ReturnsLogitsOfAllTokens(Following):
    def __call__(self, tokens, state, batch):
        return self.table[...][jnp.tile(tokens, 2)], jaxkv.advance(state, batch)


class HasAnotherVocabulary(Following):
    def __call__(self, tokens, state, batch):
        logits, state = super().__call__(tokens, state, batch)
        return logits[:, :-1], state


class ReturnsIntegers(Following):
    def __call__(self, tokens, state, batch):
        logits, state = super().__call__(tokens, state, batch)
        return logits.astype(jnp.int32), state


class ChangesTheStatesType(Following):
    def __call__(self, tokens, state, batch):
        logits, state = super().__call__(tokens, state, batch)
        return logits, dataclasses.replace(state, kv_pages=state.kv_pages.astype(jnp.bfloat16))


FAULTY = {
    Raises: (ZeroDivisionError, "in the third layer"),
    ReturnsLogitsAlone: (ModelError, r"expected \(logits, state\)"),
    ForgetsTheState: (ModelError, "returned the state that it was given"),
    DropsTheAttentionsState: (ModelError, "dropped the state that jaxkv.attention returned"),
    ReturnsLogitsOfAllTokens: (ModelError, "logits of shape"),
    HasAnotherVocabulary: (ModelError, r"logits of shape \(\d+, 7\), expected .*vocab_size=8"),
    ReturnsIntegers: (ModelError, "dtype int32"),
    ChangesTheStatesType: (ModelError, "kv_pages is bfloat16"),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_a_model_that_fails_raises_where_the_user_is(kind):
    model, (error, message) = kind(np.eye(8)), FAULTY[kind]
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=64, max_seqs=2)
    with pytest.raises(error, match=message) as raised:
        jaxkv.generate(model, [[1, 2]], greedy(3), cache=cache)
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert kind is not Raises or "__call__" in frames
    engine = jaxkv.Engine(model, cache)
    with pytest.raises(error, match=message):
        engine.warm_up(progress=False)
    engine.submit([1, 2], greedy(3))
    with pytest.raises(error, match=message):
        engine.step()
    (output,) = engine.step()  # its request has ended, with the error itself
    assert output.finish_reason == "error"
    assert isinstance(output.exception, error)
    assert not engine.has_work


class RaisesOnDrafts(Following):
    """Fails in the shape of a draft alone: logits after each of 16 tokens."""

    def __call__(self, tokens, state, batch):
        if len(batch.logit_tokens) == 16:
            raise ZeroDivisionError("in a draft")
        return super().__call__(tokens, state, batch)


def test_a_model_that_fails_on_a_draft_raises_from_verify():
    model = RaisesOnDrafts(np.eye(8))
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=64, max_seqs=2)
    scheduler = jaxkv.SchedulerConfig(max_tokens_per_step=16, prefill_buckets=(16,))
    engine = jaxkv.Engine(model, cache, scheduler)
    request = engine.submit([1, 2], greedy(9))
    for _ in range(3):
        engine.step()
    with pytest.raises(ZeroDivisionError, match="in a draft"):
        engine.verify(request, [3, 4])
    assert [output.finish_reason for output in engine.step()] == ["error"]
    assert not engine.has_work
