"""Exact selection: limits against an oracle in float64, extreme temperatures, odd logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.sampling.params import SamplingParams
from jaxkv.sampling.sampler import NO_TOKEN, SamplerState, _limit, sample

INF, NAN = np.inf, np.nan
F32 = np.finfo(np.float32)
VOCAB, ROWS = 12, 4  # one shape: one program


@functools.partial(jax.jit, static_argnames="positions")
def _draw(logits, state, positions):
    """Tokens of each row at several positions: i32[positions, rows]."""

    def at(position):
        rows = jnp.arange(len(logits))
        keep, lengths = jnp.zeros(len(logits), bool), jnp.full(len(logits), position)
        return sample(logits, state, rows, lengths, keep=keep)[0].tokens

    return jax.lax.map(at, jnp.arange(1, positions + 1))


def draw(logits, params, positions=64):
    """Tokens i32[positions, rows] of rows with these logits and parameters."""
    state = SamplerState.empty(len(params), 8)
    for row, one in enumerate(params):
        state.fill(row, [0], one, num_prompt=1, end=8, stop_ids=(), seed=row, sample=0,
                   processor=-1)  # fmt: skip
    state = jax.tree.map(jnp.asarray, state)
    return np.asarray(_draw(jnp.asarray(logits, jnp.float32), state, positions))


def kept_by(logits, top_k, top_p):
    """Ids that the limits keep, by definition; sums of the float32 weights in float64."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ranked = ranked[: top_k or None]
    if top_p == 1:
        return {i for i in ranked if logits[i] > -INF}
    weights = np.exp((logits - logits.max()).astype(np.float32)).astype(np.float64)[ranked]
    before = np.concatenate([[0], np.cumsum(weights)[:-1]])
    most = before < np.float64(np.float32(top_p)) * weights.sum()
    return {i for i, keep in zip(ranked, most, strict=True) if keep and logits[i] > -INF}


def limit(logits, top_k, top_p):
    """Ids that `_limit` keeps, row by row."""
    top_k, top_p = jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32)
    out = np.asarray(jax.jit(_limit)(jnp.asarray(logits), top_k, top_p))
    for row, before in zip(out, logits, strict=True):
        kept = row > -INF
        np.testing.assert_array_equal(row[kept], before[kept])
    return [set(np.flatnonzero(row > -INF).tolist()) for row in out]


# Multiples of log 2: weights are powers of two, whose sums are exact.
LEVELS = st.sampled_from([-INF, *(np.float32(np.log(2.0) * i) for i in range(-3, 3))])


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_limits_keep_what_their_definition_says(data):
    rows = [data.draw(st.lists(LEVELS, min_size=VOCAB, max_size=VOCAB)) for _ in range(ROWS)]
    logits = np.array(rows, np.float32)
    logits[:, 0] = np.where((logits == -INF).all(axis=1), 0, logits[:, 0])
    top_k = [data.draw(st.sampled_from([0, 1, 2, 3, 5, VOCAB, 99, 2**31 - 1])) for _ in rows]
    top_p = [data.draw(st.sampled_from([1e-30, 0.3, 0.49, 0.51, 0.77, 0.99, 1.0])) for _ in rows]
    want = [kept_by(*one) for one in zip(logits, top_k, top_p, strict=True)]
    assert limit(logits, top_k, top_p) == want


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 50])
def test_top_k_of_equal_logits_keeps_k_the_first_by_id(top_k):
    logits = np.zeros((1, 50), np.float32)
    logits[0, [3, 9, 20, 31]] = 7
    ranked = [3, 9, 20, 31, *(i for i in range(50) if i not in (3, 9, 20, 31))]
    assert limit(logits, [top_k], [1.0]) == [set(ranked[:top_k])]


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 5), (0.3, 3), (0.05, 1), (0.95, 10)])
def test_top_p_of_equal_logits_keeps_the_fewest_the_first_by_id(top_p, kept):
    assert limit(np.full((1, 10), 2.5, np.float32), [0], [top_p]) == [set(range(kept))]


def test_top_p_next_to_one_loses_no_token_of_a_large_vocabulary():
    size = 150_000
    almost = np.nextafter(np.float32(1), np.float32(0))  # drops less than a hundredth of a token
    logits = np.zeros((2, size), np.float32)
    logits[1, 1:] = -12  # the tail has 48 percent, its tokens 3e-6 each
    kept = limit(logits, [0, 0], [almost, almost])
    assert [len(row) for row in kept] == [size, size]


def test_top_p_cuts_a_long_tail_where_the_sum_in_float64_does():
    """The tail's tokens are a millionth each; a sum from the top would lose them in rounding."""
    logits = np.full((1, 20_000), -14.0, np.float32)
    logits[0, 0] = 0
    weight = float(np.exp(np.float32(-14)))
    total = 1 + 19_999 * weight
    for top_p in (0.9975, 0.999, 0.9999):
        want = 1 + int(np.ceil((float(np.float32(top_p)) * total - 1) / weight))
        count = len(limit(logits, [0], [top_p])[0])
        # The sum of the tail is right to log2(20,000) roundings, 1 - p to that of p.
        assert abs(count - want) <= 1 + 20_000 * 16 * F32.eps


def test_top_k_of_one_is_greedy_at_any_temperature(rng):
    logits = rng.integers(-2, 3, (ROWS, VOCAB))
    params = [SamplingParams(temperature=t, top_k=1) for t in (1e-37, 0.7, 100, 3e38)]
    tokens = draw(logits, params)
    np.testing.assert_array_equal(tokens, np.tile(logits.argmax(axis=1), (len(tokens), 1)))


def test_min_p_keeps_equals_together_and_never_an_impossible_token():
    row = [0, -INF, 0, np.log(0.5), -INF, *[-3.0] * 7]
    params = [SamplingParams(temperature=1, min_p=p) for p in (1.0, 0.6, 0.5, 1e-38)]
    kept = [set(tokens.tolist()) for tokens in draw([row] * ROWS, params, 256).T]
    assert kept == [{0, 2}, {0, 2}, {0, 2, 3}, {0, 2, 3, *range(5, 12)}]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 2e-38, 1e-30, 1e-8])
def test_next_to_zero_is_greedy(temperature, rng):
    logits = np.round(rng.normal(size=(ROWS, VOCAB)) * 5, 3)
    logits[1] *= 1e30  # their quotients are not numbers of 32 bits
    logits[2, :6] = -INF
    tokens = draw(logits, [SamplingParams(temperature=temperature)] * ROWS)
    np.testing.assert_array_equal(tokens, np.tile(logits.argmax(axis=1), (len(tokens), 1)))


def test_below_the_least_normal_number_equals_go_to_the_first():
    tokens = draw(np.zeros((ROWS, VOCAB)), [SamplingParams(temperature=1e-38)] * ROWS)
    assert set(tokens.ravel().tolist()) == {0}


@pytest.mark.parametrize("temperature", [1e4, 1e30, 1e38])
def test_a_huge_temperature_draws_alike_from_all_that_are_possible(temperature):
    logits = np.array([[5.0, -INF, 3, -2, -INF, 0, 0, 0, 0, 0, 0, -900]] * ROWS)
    tokens = draw(logits, [SamplingParams(temperature=temperature)] * ROWS, 1500)
    shares = np.bincount(tokens.ravel(), minlength=VOCAB) / tokens.size
    # Ten tokens of 6,000 draws: a share's deviation is 0.004.
    np.testing.assert_allclose(shares, np.where(logits[0] > -INF, 0.1, 0), atol=0.02)


LOGIT = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 3.4e38, -3.4e38, 1e-45, -INF, INF, NAN]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_sampled_token_was_possible_or_the_row_has_none(data):
    rows = [data.draw(st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB)) for _ in range(ROWS)]
    temperatures = st.sampled_from([0, 1e-45, 1e-38, 1e-30, 0.7, 1.0, 1e30, 3e38])
    params = [
        SamplingParams(
            temperature=data.draw(temperatures),
            top_k=data.draw(st.sampled_from([0, 1, 3])),
            top_p=data.draw(st.sampled_from([1e-30, 0.4, 0.999, 1.0])),
            min_p=data.draw(st.sampled_from([0, 0.01, 1.0])),
        )
        for _ in rows
    ]
    whole = np.where(np.abs(rows) < F32.tiny, 0, rows)  # a processor may flush them to 0
    for logits, one, tokens in zip(whole, params, draw(rows, params, 8).T, strict=True):
        if np.isnan(logits).any() or (logits == -INF).all():
            assert set(tokens.tolist()) == {NO_TOKEN}
            continue
        assert (logits[tokens] > -INF).all()
        if one.temperature == 0:
            assert set(tokens.tolist()) == {int(logits.argmax())}
        if (logits == INF).any():
            assert (logits[tokens] == INF).all()


NEIGHBOURS = [
    SamplingParams(temperature=1, top_k=3), SamplingParams(temperature=1, top_p=0.6),
    SamplingParams(temperature=1e-30, top_k=2, top_p=0.1), SamplingParams(temperature=2, min_p=0.3),
    SamplingParams(repetition_penalty=3, presence_penalty=1), SamplingParams(logit_bias={1: 9.0}),
    SamplingParams(temperature=1, top_p=0.99999), SamplingParams(),
]  # fmt: skip


@pytest.mark.parametrize("own", [
    SamplingParams(), SamplingParams(temperature=1), SamplingParams(temperature=1, top_k=4),
    SamplingParams(temperature=0.8, top_p=0.8), SamplingParams(temperature=1, min_p=0.1),
], ids=["greedy", "plain", "top-k", "top-p", "min-p"])  # fmt: skip
def test_a_row_draws_the_same_whatever_its_neighbours_are(own, rng):
    logits = rng.normal(size=(ROWS, VOCAB))
    alone = draw(logits, [own] * ROWS)[:, 0]
    for i in range(len(NEIGHBOURS)):
        others = [NEIGHBOURS[(i + j) % len(NEIGHBOURS)] for j in range(ROWS - 1)]
        changed = np.concatenate([logits[:1], rng.normal(size=(ROWS - 1, VOCAB)) * 9])
        changed[1, 2] = NAN
        np.testing.assert_array_equal(draw(changed, [own, *others])[:, 0], alone)


def test_a_row_without_limits_keeps_every_bit_beside_one_with_limits(rng):
    logits = rng.normal(size=(2, 5000)).astype(np.float32) * 20
    kept = limit(logits, [0, 1], [1.0, 1.0])
    assert [len(row) for row in kept] == [5000, 1]
