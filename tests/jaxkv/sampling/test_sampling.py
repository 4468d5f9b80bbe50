import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import ConfigError
from jaxkv.sampling.params import LogitsProcessor, SamplingParams
from jaxkv.sampling.sampler import ProcessorError, SamplerState, sample, set_rows

LOGITS = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.07, 0.03]))


def rows_of(
    *params, tokens=((),), num_prompt=1, samples=(0,), max_len=8, stop_ids=(), processor=-1
):
    """One row for each of the parameters; the other lists repeat."""
    state = SamplerState.empty(len(params), max_len)
    for i, one in enumerate(params):
        state.fill(
            i, tokens[i % len(tokens)], one, num_prompt=num_prompt, end=max_len, stop_ids=stop_ids,
            seed=one.seed or 0, sample=samples[i % len(samples)], processor=-1,
        )  # fmt: skip
    return jax.tree.map(jnp.asarray, state)


# Op by op, the compiler would take most of the time.
_sample = jax.jit(sample, static_argnames=("num_logprobs", "processors"))


def choose(logits, state, lengths, rows=None, keep=None, **options):
    logits, lengths = jnp.asarray(logits), jnp.asarray(lengths, jnp.int32)
    rows = jnp.arange(len(logits)) if rows is None else jnp.asarray(rows)
    keep = jnp.ones(len(logits), bool) if keep is None else jnp.asarray(keep)
    return _sample(logits, state, rows, lengths, keep=keep, **options)


def draw(params, count=4000):
    """Share of each token over many positions."""
    state = rows_of(params)
    logits = jnp.tile(LOGITS, (count, 1))
    found, _ = choose(logits, state, jnp.arange(count), jnp.zeros(count, jnp.int32))
    return np.bincount(np.asarray(found.tokens), minlength=5) / count


@pytest.mark.quick
def test_greedy_is_the_argmax_whatever_the_limits():
    assert draw(SamplingParams(temperature=0, top_k=3, top_p=0.1))[0] == 1


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 1000])
def test_greedy_takes_the_first_of_equals(vocab_size):
    logits = np.random.default_rng(0).integers(-3, 4, (40, vocab_size)).astype(np.float32)
    found, _ = choose(logits, rows_of(*[SamplingParams()] * 40), np.arange(40) % 8)
    np.testing.assert_array_equal(found.tokens, logits.argmax(axis=-1))


def test_temperature_one_follows_the_probabilities():
    np.testing.assert_allclose(draw(SamplingParams(temperature=1)), jnp.exp(LOGITS), atol=0.03)


def test_low_temperature_sharpens():
    want = np.asarray(jax.nn.softmax(LOGITS / 0.5))
    np.testing.assert_allclose(draw(SamplingParams(temperature=0.5)), want, atol=0.03)


@pytest.mark.parametrize("top_k", [1, 2, 4, 5, 99])
def test_top_k_keeps_k(top_k):
    got = draw(SamplingParams(temperature=1, top_k=top_k))
    assert (got > 0).sum() == min(top_k, 5)
    kept = np.exp(LOGITS)[: min(top_k, 5)]
    np.testing.assert_allclose(got[: len(kept)], kept / kept.sum(), atol=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.5, 1), (0.6, 2), (0.89, 3), (1.0, 5)])
def test_top_p_keeps_the_fewest_that_reach_p(top_p, kept):
    assert (draw(SamplingParams(temperature=1, top_p=top_p)) > 0).sum() == kept


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 5), (0.2, 3), (0.4, 2), (0.6, 1), (1.0, 1)])
def test_min_p_keeps_what_is_likely_beside_the_likeliest(min_p, kept):
    assert (draw(SamplingParams(temperature=1, min_p=min_p)) > 0).sum() == kept


def test_rows_are_their_own():
    state = rows_of(
        SamplingParams(), SamplingParams(temperature=1, top_k=1), SamplingParams(temperature=9)
    )
    found, _ = choose(jnp.tile(LOGITS, (4, 1)), state, [0, 1, 2, 3], rows=[0, 1, 2, 3])
    assert found.tokens[:2].tolist() == [0, 0]
    assert int(found.tokens[3]) == 0  # padding is greedy


def test_a_draw_is_of_seed_sample_and_position_alone():
    def one(seed, number, position):
        params = SamplingParams(temperature=1, seed=seed)
        state = rows_of(params, params, samples=(9, number))
        return int(choose(jnp.zeros((2, 10_000)), state, [0, position])[0].tokens[1])

    assert one(1, 2, 3) == one(1, 2, 3)
    assert len({one(1, 2, 3), one(4, 2, 3), one(1, 5, 3), one(1, 2, 6)}) == 4


def test_a_token_is_written_where_it_is_kept():
    state = rows_of(*[SamplingParams()] * 3)
    logits = jnp.tile(jnp.arange(5.0), (3, 1))
    _, state = choose(logits, state, [2, 2, 2], rows=[0, 1, 3], keep=[True, False, True])
    assert state.history.token_ids.tolist() == [[0, 0, 4, 0, 0, 0, 0, 0], [0] * 8, [0] * 8]


# -- penalties, bias, bans -------------------------------------------------------------------


def penalised(logits, tokens, num_prompt, **penalties):
    """Hugging Face's repetition penalty and OpenAI's two others, one token at a time."""
    out = np.array(logits, np.float64)
    made = tokens[num_prompt:]
    for token in set(tokens):
        factor = penalties.get("repetition_penalty", 1)
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(made):
        out[token] -= penalties.get("presence_penalty", 0)
        out[token] -= penalties.get("frequency_penalty", 0) * made.count(token)
    return out


@pytest.mark.parametrize("penalties", [
    dict(repetition_penalty=1.7), dict(presence_penalty=0.6), dict(frequency_penalty=0.4),
    dict(repetition_penalty=0.8, presence_penalty=-0.3, frequency_penalty=0.9),
])  # fmt: skip
def test_penalties(rng, penalties):
    tokens, length = [3, 1, 4, 1, 1, 3, 0, 2], 6  # what lies behind the length is of others
    state = rows_of(SamplingParams(**penalties), tokens=[tokens], num_prompt=2)
    logits = rng.normal(size=(40, 5)).astype(np.float32)
    found, _ = choose(logits, state, [length] * 40, rows=[0] * 40)
    want = [penalised(x, tokens[:length], 2, **penalties).argmax() for x in logits]
    assert found.tokens.tolist() == want


def test_bias_and_banned_ends():
    params = SamplingParams(logit_bias={2: 50.0, 0: -100.0, 4: 49.0}, min_tokens=2)
    state = rows_of(params, tokens=[(1,)], stop_ids=(2,))
    chosen = [int(choose(LOGITS[None], state, [n], rows=[0])[0].tokens[0]) for n in (1, 2, 3)]
    assert chosen == [4, 4, 2]  # the end token wins from the third token on


# -- log-probabilities -----------------------------------------------------------------------


def test_log_probabilities_are_the_models_own():
    params = SamplingParams(temperature=0.3, logit_bias={4: 90.0})
    found, _ = choose(LOGITS[None], rows_of(params), [1], num_logprobs=2)
    assert found.tokens.tolist() == [4]
    np.testing.assert_allclose(found.logprobs, LOGITS[4:], atol=1e-6)
    assert found.top_ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(found.top_logprobs[0], LOGITS[:2], atol=1e-6)
    found, _ = choose(LOGITS[None], rows_of(params), [1], num_logprobs=0, targets=jnp.array([1]))
    np.testing.assert_allclose(found.logprobs, LOGITS[1:2], atol=1e-6)
    assert found.top_ids.shape == (1, 0)


# -- logits processors -----------------------------------------------------------------------


def counting():
    """Forbids token n in its n-th call, and counts its calls."""
    return LogitsProcessor(
        init=lambda: np.int32(0),
        apply=lambda logits, n, tokens, length: (logits.at[n].set(-jnp.inf), n + 1),
    )


def test_a_processor_has_its_rows_and_its_state():
    state = rows_of(*[SamplingParams()] * 3)
    state = dataclasses.replace(
        state.with_processor_states((jnp.zeros(3, jnp.int32),)),
        params=dataclasses.replace(state.params, processor=jnp.array([0, -1, 0])),
    )
    logits, keep = jnp.tile(LOGITS, (3, 1)), jnp.array([True, True, False])
    seen = []
    for _ in range(3):
        found, state = sample(
            logits,
            state,
            jnp.arange(3),
            jnp.ones(3, jnp.int32),
            keep=keep,
            processors=(counting(),),
        )
        seen.append(found.tokens.tolist())
    assert seen == [[1, 0, 1], [0, 0, 1], [0, 0, 1]]
    assert state.history.processor_states[0].tolist() == [3, 0, 0]


def test_a_processor_that_fails_is_named():
    def fail(*_):
        raise KeyError("oh")

    state = rows_of(SamplingParams()).with_processor_states((jnp.zeros(1),))
    with pytest.raises(ProcessorError, match="the logits processor raised KeyError: 'oh'"):
        choose(LOGITS[None], state, [1], processors=(LogitsProcessor(lambda: 0, fail),))


# -- rows ------------------------------------------------------------------------------------


def test_rows_are_set():
    state = rows_of(*[SamplingParams()] * 4)
    new = SamplerState.empty(2, 8)
    new.fill(0, [5, 6], SamplingParams(temperature=2, seed=3), num_prompt=2, end=7, stop_ids=(9,),
             seed=3, sample=1, processor=-1)  # fmt: skip
    state = set_rows(state, np.array([2, 4], np.int32), new)
    assert state.history.token_ids[2, :2].tolist() == [5, 6]
    assert state.params.temperature.tolist() == [0, 0, 2, 0]
    params = state.params
    assert (int(params.seed[2]), int(params.sample[2]), int(params.end[2])) == (3, 1, 7)


# -- parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [
    dict(min_p=1.5), dict(repetition_penalty=0), dict(presence_penalty=float("nan")),
    dict(frequency_penalty=float("inf")), dict(logit_bias={1: float("nan")}),
    dict(logit_bias=dict.fromkeys(range(65), 1.0)), dict(n=0), dict(best_of=1, n=2),
    dict(min_tokens=9, max_tokens=8), dict(stop=("",)), dict(logprobs=-1), dict(seed=2**32),
])  # fmt: skip
def test_parameters_out_of_range_are_named(field):
    with pytest.raises(ConfigError, match=f"^{next(iter(field))}="):
        SamplingParams(**field)


def test_one_stop_text_may_come_without_its_tuple():
    assert SamplingParams(stop="end").stop == ("end",)  # pyright: ignore[reportArgumentType]
