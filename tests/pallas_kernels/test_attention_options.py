"""Windows, soft caps, sinks, the log-sum-exp and int8 pages, each against the dense oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Case,
    assert_equal_up_to_rounding,
    make,
    means_of_positions,
    oracle,
    oracle_with_lse,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.pallas_kernels.formats import quantise
from jaxkv.pallas_kernels.paged_attention import paged_attention, xla

IMPLEMENTATIONS = ["xla", "reference"]
SINKS = jnp.array([0.5, -jnp.inf, 3.0, -2.0])
KINDS = {  # lengths and queries of each: a decode step, a prefill step
    "decode": ([1, 4, 5, 0, 17, 300], [1] * 6),
    "prefill": ([300, 7, 0, 40, 1, 9], [70, 7, 0, 3, 1, 2]),
}


def check(got, want, tolerance=2e-5):
    """Compares outputs and log-sum-exps of `run` and `oracle_with_lse`."""
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


def of_kind(kind, **changes):
    lens, counts = KINDS[kind]
    return make(lens, counts, max_query_len=1 if kind == "decode" else None, **changes)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale_dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap", "sinks"), [
    (None, None, None), (5, 0.7, SINKS),
    pytest.param(None, 0.7, None, marks=pytest.mark.slow),
    pytest.param(None, None, SINKS, marks=pytest.mark.slow),
])  # fmt: skip
def test_options_alone_and_together(implementation, kind, scale_dtype, window, soft_cap, sinks):
    case = of_kind(kind, window=window, scale_dtype=scale_dtype, fill=np.nan)
    options: dict[str, Any] = dict(window=window, soft_cap=soft_cap, sinks=sinks)
    got = run(case, implementation, return_lse=True, **options)
    check(got, oracle_with_lse(case, **options))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_returning_the_log_sum_exp_changes_no_output(implementation, kind):
    case = of_kind(kind)
    with_lse, _ = run(case, implementation, return_lse=True)
    assert_equal_up_to_rounding(run(case, implementation), with_lse, case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_non_causal_queries(implementation, kind):
    """Also for sequences with fewer tokens than queries."""
    case = of_kind(kind, fill=np.nan)
    if kind == "prefill":
        case = make([300, 7, 0, 40, 2], [70, 7, 5, 3, 9], fill=np.nan, padding_tokens=2)
    options: dict[str, Any] = dict(causal=False, soft_cap=0.7, sinks=SINKS)
    check(run(case, implementation, return_lse=True, **options), oracle_with_lse(case, **options))


def test_rejects_a_window_of_non_causal_queries():
    with pytest.raises(ValueError, match="a window needs causal attention: got window=4"):
        run(of_kind("prefill"), window=4, causal=False)


# -- windows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block", "fill"), [(1, np.nan), (4, np.nan), (4, np.inf), (64, np.nan)])
def test_tokens_behind_the_window_are_not_used(implementation, kind, block, fill):
    for window in (1, block + 1, 1000):
        case = of_kind(kind, block=block, window=window, fill=fill)
        np.testing.assert_allclose(
            run(case, implementation, window=window), oracle(case, window=window), atol=2e-5
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "chunks", [[1] * 10, [10], [4, 6], [3, 4, 3]], ids=lambda chunks: "+".join(map(str, chunks))
)
def test_position_9_of_a_window_of_4_sees_6_to_9(implementation, chunks):
    outs = means_of_positions(chunks, lambda case: run(case, implementation, window=4))
    seen = [range(max(0, p - 3), p + 1) for p in range(10)]
    assert [list(seen[p]) for p in (3, 4, 9)] == [[0, 1, 2, 3], [1, 2, 3, 4], [6, 7, 8, 9]]
    np.testing.assert_allclose(outs, [np.mean(x) for x in seen], rtol=1e-6)


def _passes(f, *args):
    """Number of page reads in the loops of f, counted by running it."""
    count = []
    read = xla.read_pages

    def counting(*a, **k):
        jax.debug.callback(lambda: count.append(1))
        return read(*a, **k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "read_pages", counting)
        jax.block_until_ready(f(*args))
        jax.effects_barrier()
    return len(count)


@pytest.mark.parametrize(("counts", "whole", "windowed"), [
    # Two sequences of different lengths in the same passes, in tiles of 256 keys.
    ([1, 1], 8, 1),
    # Queries 1792 to 2047 in tiles of 64 see 8 tiles of keys each; with a window of 64 the first
    # touches two and the others one. The only query of the second sequence sees 8, and 1.
    ([256, 1], 4 * 8 + 8, 2 + 3 + 1),
])  # fmt: skip
def test_tiles_behind_the_window_are_not_read(counts, whole, windowed):
    case = make([2048, 2000], counts, block=16, max_query_len=1 if counts == [1, 1] else None)

    def call(window):
        return lambda q: paged_attention(
            q, *case.args()[1:], **case.kwargs(), window=window, implementation="xla"
        )

    assert _passes(call(None), case.q) == whole
    assert _passes(call(64), case.q) == windowed


# -- sinks and soft caps ---------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_is_one_more_key_of_value_zero(implementation, kind):
    case = of_kind(kind, fill=np.nan)
    out, lse = run(case, implementation, return_lse=True)
    sunk, sunk_lse = run(case, implementation, return_lse=True, sinks=SINKS)
    live = np.isfinite(lse)
    share = 1 / (1 + np.exp(np.broadcast_to(SINKS, lse.shape)[live] - lse[live]))
    np.testing.assert_allclose(sunk[live], out[live] * share[:, None], atol=2e-6)
    assert (sunk[~live] == 0).all()
    assert (np.isfinite(sunk_lse) == live).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_overwhelming_sink_gives_a_zero_output(implementation):
    case = of_kind("decode")
    out, lse = run(case, implementation, return_lse=True, sinks=jnp.full(4, 1e4))
    assert (out == 0).all()
    assert (lse[np.asarray(case.lens) > 0] == 1e4).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_without_a_query_are_zeros_with_sinks(implementation):
    case = make([0, 5, 0], [1, 1, 0], padding_tokens=2, fill=np.nan)
    out, lse = run(case, implementation, return_lse=True, sinks=SINKS, window=3)
    dead = [0, 2, 3]
    assert (out[dead] == 0).all()
    assert np.isneginf(lse[dead]).all()
    assert np.isfinite(lse[1]).all()


# -- int8 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
def test_the_error_of_int8_pages_is_bounded_by_rounding(kind, scale_dtype):
    """An element's error is at most e = 3/4 scale (1/2 from rounding, the rest from a bf16 scale).

    So the error of a logit is at most d = scale |q|_1 e_k, that of a weight a factor within
    exp(+-2d), and that of the output e_v + (exp(2d) - 1) max|v|.
    """
    real = of_kind(kind, dim=32)
    held = of_kind(kind, dim=32, scale_dtype=scale_dtype)
    largest = max(np.abs(x).max() for kv in real.dense for x in kv if x.size)
    error = 0.75 * largest / 127
    logit = np.abs(np.asarray(real.q)).sum(-1).max() / np.sqrt(32) * error
    bound = error + np.expm1(2 * logit) * largest
    off = np.abs(run(held) - oracle(real)).max()
    assert 0 < off < min(bound, 0.1), (off, bound)


def test_int8_in_half_precision():
    case = of_kind("prefill", scale_dtype=jnp.bfloat16, dtype=jnp.bfloat16, fill=np.nan)
    # The codes are exact: the only error is the rounding of queries and weights, 2 ** -9 each.
    np.testing.assert_allclose(run(case).astype(np.float32), oracle(case), atol=3e-2)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=8),
       st.sampled_from([jnp.float32, jnp.bfloat16]))  # fmt: skip
@settings(deadline=None)
def test_quantise_rounds_to_the_stored_scale(row, scale_dtype):
    codes, scale = quantise(jnp.asarray(row, jnp.float32), scale_dtype)
    assert codes.dtype == jnp.int8
    assert scale.dtype == scale_dtype
    s = float(scale)
    x = np.asarray(row, np.float32).astype(np.float64)
    assert s >= np.abs(x).max() / 127 * (1 - 2**-8)
    assert (np.abs(np.asarray(codes, np.float64) * s - x) <= 0.76 * s).all()
    assert codes.min() >= -127


def test_scales_are_required_exactly_with_int8():
    case = make([9], [1], max_query_len=1, scale_dtype=jnp.float32)
    with pytest.raises(ValueError, match="kv_scales must be None: float32 pages"):
        paged_attention(case.q, case.pages.astype(jnp.float32), *case.args()[2:], **case.kwargs())
    for scales, message in (
        (None, "int8 pages need kv_scales of shape"),
        (case.scales[:, :1], r"kv_scales.shape must be .*, got \(8, 1, 2, 2, 4\)"),  # pyright: ignore[reportOptionalSubscript]
        (case.scales.astype(jnp.float16), "float32 or bfloat16, got float16"),  # pyright: ignore[reportOptionalMemberAccess]
    ):
        case.scales = scales
        with pytest.raises(ValueError, match=message):
            run(case)


# -- all options together --------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    st.sampled_from([1, 3, 4, 16]),
    st.one_of(st.none(), st.integers(1, 20)),
    st.one_of(st.none(), st.floats(0.5, 30)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
)
def test_any_ragged_batch_with_any_options(pairs, block, window, soft_cap, sunk, int8, seed):
    lens = [max(pair) for pair in pairs]
    counts = [min(pair) for pair in pairs]
    case = make(lens, counts, block=block, seed=seed, fill=np.nan, window=window,
                scale_dtype=jnp.float32 if int8 else None)  # fmt: skip
    options: dict[str, Any] = dict(window=window, soft_cap=soft_cap, sinks=SINKS if sunk else None)
    check(run(case, return_lse=True, **options), oracle_with_lse(case, **options), 5e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_new_tokens_after_cached_ones_in_shuffled_blocks(implementation):
    case = make([11], [3], spare_columns=0)
    order = np.array([5, 2, 7])
    pages = np.full_like(case.pages, np.nan)
    pages[order] = case.pages[case.tables[0]]
    case.pages, case.tables = jnp.asarray(pages), jnp.asarray(order[None], jnp.int32)
    np.testing.assert_allclose(run(case, implementation), oracle(case), atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_hits_of_different_lengths_in_one_batch(implementation):
    case = make([9, 13, 17], [9, 9, 9], fill=np.nan)  # 0, 4 and 8 cached tokens before 9 new ones
    np.testing.assert_allclose(run(case, implementation), oracle(case), atol=2e-5)


@pytest.mark.parametrize("changes", [
    dict(window=0), dict(soft_cap=0.0), dict(sinks=jnp.zeros(3)),
])  # fmt: skip
def test_rejects_invalid_options(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        run(make([9], [1], max_query_len=1), **changes)


def test_rejects_queries_that_do_not_fit():
    case: Case = make([9, 6], [4, 2])
    for changes, message in (
        (dict(q=case.q[:5]), r"exceed the number of queries, 5, got \[0, 4, 6\]"),
        (dict(query_start=jnp.array([0, 4, 2])), r"must not decrease .*, 6, got \[0, 4, 2\]"),
        (dict(max_query_len=3), r"max_query_len must be at least 4 .*, got 3"),
        (dict(max_query_len=1), "max_query_len=1 with 6 queries of 2 sequences"),
        (dict(q=case.q.astype(jnp.int32)), "floating-point dtype, got int32"),
    ):
        wrong = Case(**(vars(case) | changes))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=message):
            paged_attention(*wrong.args(), **wrong.kwargs())


def test_python_and_numpy_numbers():
    case = make([9, 6], [2, 3])
    want = run(case, window=4, soft_cap=2.0)
    args = [case.q, case.pages, *(np.asarray(x).tolist() for x in case.args()[2:])]
    args[3] = [np.int64(n) for n in args[3]]
    got = paged_attention(
        *args, layer=np.int64(1), max_query_len=np.int32(3), scale=np.float64(8**-0.5),  # pyright: ignore[reportArgumentType]
        window=np.int16(4), soft_cap=np.float32(2), implementation="xla",  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    np.testing.assert_allclose(got, want, atol=1e-6)
