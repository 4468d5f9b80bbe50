import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.sampling import SamplingArrays, SamplingParams, sample

LOGITS = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.07, 0.03]))


def draw(params, count=4000):
    """Counts of each token over many positions."""
    rows = SamplingArrays.of([params] * count, [0] * count, count)
    tokens = jax.jit(sample)(jnp.tile(LOGITS, (count, 1)), rows, jnp.arange(count))
    return np.bincount(np.asarray(tokens), minlength=5) / count


@pytest.mark.quick
def test_greedy_is_the_argmax_whatever_the_limits():
    assert draw(SamplingParams(temperature=0, top_k=3, top_p=0.1))[0] == 1


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 1000])
def test_greedy_takes_the_first_of_equals(vocab_size):
    logits = np.random.default_rng(0).integers(-3, 4, (40, vocab_size)).astype(np.float32)
    rows = SamplingArrays.of([], [], len(logits))
    tokens = sample(jnp.asarray(logits), rows, jnp.arange(len(logits)))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))


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


def test_rows_are_their_own():
    params = [
        SamplingParams(),
        SamplingParams(temperature=1, top_k=1),
        SamplingParams(temperature=9),
    ]
    rows = SamplingArrays.of(params, [0, 1, 2], 4)
    tokens = sample(jnp.tile(LOGITS, (4, 1)), rows, jnp.arange(4))
    assert tokens[:2].tolist() == [0, 0]
    assert int(tokens[3]) == 0  # padding is greedy


def test_a_draw_is_of_seed_request_and_position_alone():
    def one(seed, request, position):
        rows = SamplingArrays.of([SamplingParams(temperature=1, seed=seed)] * 2, [9, request], 2)
        flat = jnp.zeros((2, 10_000))
        return int(sample(flat, rows, jnp.array([0, position]))[1])

    assert one(1, 2, 3) == one(1, 2, 3)
    assert len({one(1, 2, 3), one(4, 2, 3), one(1, 5, 3), one(1, 2, 6)}) == 4
