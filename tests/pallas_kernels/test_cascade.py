"""Cascade attention against the dense oracle, which ignores groups.

Unused slots hold NaN. Only the table row of a group's first sequence holds the shared blocks; in
the other rows, their columns hold random ids.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, Case, assert_equal_up_to_rounding, forget_programs, make, oracle_with_lse
from cases import run as run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from races import detector

import jaxkv
from jaxkv.pallas_kernels.paged_attention import mosaic_gpu, xla
from jaxkv.pallas_kernels.paged_attention.cascade import cascade_attention

SINKS = jnp.array([0.5, -jnp.inf, 3.0, -2.0])
OPTIONS: dict[str, Any] = dict(soft_cap=0.7, sinks=SINKS)


def make_shared(lens, counts, group_start, shared_blocks, *, fill=np.nan, rubbish=True, **kind):
    """Returns (case, groups); the sequences of a group share their first tokens and blocks."""
    decode = max(counts, default=1) == 1
    case = make(lens, counts, fill=fill, max_query_len=1 if decode else None, **kind)
    tables, block = np.array(case.tables), case.pages.shape[4]
    rng = np.random.default_rng(1)
    for g, blocks in enumerate(shared_blocks):
        first = group_start[g]
        for s in range(first + 1, group_start[g + 1]):
            tables[s, :blocks] = rng.integers(-9, 99, blocks) if rubbish else tables[first, :blocks]
            for mine, shared in zip(case.dense[s], case.dense[first], strict=True):
                mine[: blocks * block] = shared[: blocks * block]
    case.tables = jnp.asarray(tables)
    return case, dict(group_start=np.array(group_start), shared_blocks=np.array(shared_blocks))


STATIC = ("layer", "max_query_len", "soft_cap", "implementation", "return_lse", "interpret")
jitted: Any = jax.jit(cascade_attention, static_argnames=STATIC, compiler_options=QUICK)


def run(case: Case, groups, implementation="xla", call: Any = jitted, **options):
    usual: dict[str, Any] = dict(implementation=implementation, return_lse=True)
    out = call(*case.args(), **case.kwargs(), **groups, **(usual | options))
    return jax.tree.map(np.asarray, out)


def check(case: Case, groups, implementation="xla", **options):
    out, lse = run(case, groups, implementation, **options)
    want, want_lse = oracle_with_lse(case, **options)
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5, rtol=2e-5)
    return out, lse


def check_gpu(case: Case, groups, **options):
    """Compares the output within bf16 rounding, the log-sum-exp (float32 products) more closely."""
    forget_programs()
    jitted.clear_cache()
    out, lse = run(case, groups, "mosaic_gpu", interpret=detector(), **options)
    want, want_lse = oracle_with_lse(case, **options)
    np.testing.assert_allclose(out.astype(np.float32), want, atol=2e-2, rtol=2e-2)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4, rtol=1e-4)


# Lengths, queries, group starts, shared blocks of 4 tokens.
CASES = {
    "one group": ([40, 37, 50, 33], [1] * 4, [0, 4], [8]),
    "two groups": ([40, 37, 21, 300, 290], [1] * 5, [0, 3, 5], [5, 70]),
    "some after the groups": ([40, 37, 9, 0], [1] * 4, [0, 2, 2, 2], [9, 0, 0]),
    "one between the groups": ([9, 9, 30, 9, 9], [1] * 5, [0, 2, 3, 5], [2, 0, 1]),
    "a group of one": ([41, 1, 7], [1] * 3, [0, 1, 2, 3], [10, 0, 1]),
    "nothing shared": ([9, 0, 17], [1] * 3, [0, 2, 3], [0, 0]),
    "all but one token": ([33, 33, 33], [1] * 3, [0, 3], [8]),
    "one sequence": ([33], [1], [0, 1], [8]),
    "chunks": ([300, 150, 130, 41, 20], [150, 70, 1, 1, 20], [0, 3, 4, 5], [20, 10, 0]),
    "chunks of more than a tile": ([270, 260, 8], [70, 60, 8], [0, 2], [50]),
    "some without queries": ([40, 60, 33, 0], [3, 0, 1, 0], [0, 3, 4], [8, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_groups(name):
    """Decode cases are padded to common shapes with empty groups and sequences."""
    lens, counts, starts, blocks = CASES[name]
    shapes = {}
    if max(counts) == 1:
        shapes, more = dict(room=300), 5 - len(lens)
        lens, counts = [*lens, *[0] * more], [1] * 5
        starts, blocks = (
            [*starts, *starts[-1:] * (5 - len(starts))],
            [*blocks, *[0] * (4 - len(blocks))],
        )
    check(*make_shared(lens, counts, starts, blocks, **shapes), **OPTIONS)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["two groups", "chunks"])
def test_groups_with_the_reference(name):
    check(*make_shared(*CASES[name]), "reference", **OPTIONS)


@pytest.mark.parametrize("name", ["two groups", "chunks"])
def test_int8_pages(name):
    check(*make_shared(*CASES[name], scale_dtype=jnp.float32), **OPTIONS)


def test_padding_tokens_are_zeros():
    case, groups = make_shared([40, 37, 0], [3, 4, 0], [0, 2], [8], padding_tokens=3)
    out, lse = check(case, groups, sinks=SINKS)
    assert (out[7:] == 0).all()
    assert np.isneginf(lse[7:]).all()


def test_without_shared_blocks_the_output_is_that_of_paged_attention():
    case, groups = make_shared(*CASES["nothing shared"])
    want = run_plain(case, **OPTIONS)
    got = run(case, groups, return_lse=False, **OPTIONS)
    assert_equal_up_to_rounding(got, want, case)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_xla_is_the_reference_on_random_groups(data):
    """The shapes are few, so that they compile once; the values are random."""
    sizes = data.draw(st.sampled_from([(1, 2, 1), (2, 0, 1, 1), (4,), (1, 1, 1, 1)]))
    decode = data.draw(st.booleans())
    shared = [data.draw(st.integers(0, 6)) for _ in sizes]
    blocks = np.repeat(shared, sizes)
    counts = [1] * 4 if decode else [data.draw(st.integers(0, 5)) for _ in range(4)]
    behind = [data.draw(st.integers(0, 8)) for _ in range(4)]
    lens = [4 * m + c + n for m, c, n in zip(blocks, counts, behind, strict=True)]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    width = max(-(-max(lens) // 4), 1)
    case = make(
        lens, counts, fill=np.nan, spare_columns=12 - width, seed=data.draw(st.integers(0, 9)),
        padding_tokens=0 if decode else 20 - sum(counts), max_query_len=1 if decode else 5,
    )  # fmt: skip
    case.pages = jnp.pad(case.pages, ((0, 60 - len(case.pages)), *((0, 0),) * 5))
    groups: dict[str, Any] = dict(
        group_start=np.pad(starts, (0, 5 - len(starts)), mode="edge"),
        shared_blocks=np.pad(shared, (0, 4 - len(shared))),
    )
    for x, y in zip(run(case, groups), run(case, groups, "reference"), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_the_pages_of_a_prefix_are_read_once(monkeypatch):
    """Counts the ids that the loops pass to `read_pages`."""
    case, groups = make_shared([520, 513, 528, 515], [1] * 4, [0, 4], [32], block=16)
    prefix = np.asarray(case.tables[0, :32])
    case.tables = case.tables.at[:, 33:].set(0)  # unused entries may be read and masked
    read, ids = xla.read_pages, []

    def noting(pages, scales, blocks, *rest):
        jax.debug.callback(lambda found: ids.extend(np.asarray(found).ravel()), blocks)
        return read(pages, scales, blocks, *rest)

    monkeypatch.setattr(xla, "read_pages", noting)
    jitted.clear_cache()
    run(case, groups)
    jax.effects_barrier()
    np.testing.assert_array_equal(np.bincount(ids)[prefix], 1)


# -- the GPU kernels, interpreted, with race detection ---------------------------------------


@pytest.mark.parametrize(("splits", "kind"), [
    # A split of two tiles, one with a partial tile, one without a tile.
    (3, dict(block=64, dim=64, heads=2, kv_heads=1)),
    *(pytest.param(*values, marks=pytest.mark.slow) for values in (
        (1, dict(block=16, dim=64, heads=4, kv_heads=2)),
        (2, dict(block=16, dim=256, heads=3, kv_heads=1)),
        (1, dict(block=8, dim=80, heads=4, kv_heads=2)),
    )),
])  # fmt: skip
def test_decode_on_the_gpu(splits, kind, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "num_splits", lambda *_: 1)
    monkeypatch.setattr(mosaic_gpu, "shared_splits", lambda *_: splits)
    blocks = 192 // kind["block"]
    case, groups = make_shared([193, 270, 20], [1] * 3, [0, 2, 2], [blocks, 0], dtype=jnp.bfloat16,
                               **kind)  # fmt: skip
    options: dict[str, Any] = dict(sinks=SINKS[: kind["heads"]], soft_cap=1.5)
    check_gpu(case, groups, **options)


@pytest.mark.slow
def test_chunks_on_the_gpu():
    """Rows of a group across two tiles, a ragged end of a prefix, a group without a prefix."""
    case, groups = make_shared(
        [150, 120, 9], [70, 9, 9], [0, 2, 3], [5, 0], dtype=jnp.bfloat16, dim=64, block=16,
        heads=2, kv_heads=1,
    )  # fmt: skip
    check_gpu(case, groups, sinks=SINKS[:2])


def test_int8_pages_have_no_kernel_for_the_prefix():
    case, groups = make_shared([130, 129], [1, 1], [0, 2], [2], block=64, dim=64,
                               scale_dtype=jnp.float32)  # fmt: skip
    case.q = case.q.astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="int8 pages are not supported in prefill"):
        run(case, groups, "mosaic_gpu", call=cascade_attention, interpret=detector())


# -- calls -----------------------------------------------------------------------------------


def test_groups_change_without_retracing():
    traces = []

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(q, pages, tables, lens, found):
        traces.append(1)
        return cascade_attention(q, pages, tables, lens, **found._asdict(), layer=1)

    for lens, starts, blocks in (
        ([40, 37, 50, 33], [0, 4], [8]),
        ([40, 37, 50, 45], [0, 2, 4], [8, 9]),
        ([40, 37, 50, 49], [0, 1], [0]),
    ):
        case, _ = make_shared(lens, [1] * 4, starts, blocks, rubbish=False)
        found = jaxkv.shared_prefix_groups(case.tables, case.lens, block_size=4, min_tokens=8)
        assert found.shared_blocks.max() == max(blocks)
        pages = jnp.pad(case.pages, ((0, 60 - len(case.pages)), *((0, 0),) * 5))
        out = step(case.q, pages, case.tables[:, :13], case.lens, found)
        np.testing.assert_allclose(out, oracle_with_lse(case)[0], atol=2e-5)
    assert len(traces) == 1


def test_other_integer_types_give_the_same_result():
    case, groups = make_shared(*CASES["two groups"])
    want = run(case, groups)
    case.lens = np.asarray(case.lens).astype("int16")  # pyright: ignore[reportAttributeAccessIssue]
    case.query_start = np.asarray(case.query_start).astype("uint32")  # pyright: ignore[reportAttributeAccessIssue]
    groups: dict[str, Any] = dict(
        group_start=groups["group_start"].astype("uint32"),
        shared_blocks=groups["shared_blocks"].astype("int16"),
    )
    for x, y in zip(run(case, groups), want, strict=True):
        assert_equal_up_to_rounding(x, y, case)


def test_an_empty_batch():
    pages, none = jnp.zeros((2, 1, 2, 1, 4, 8)), np.zeros(0, np.int32)
    found = jaxkv.shared_prefix_groups(np.zeros((0, 3), np.int32), none, block_size=4)
    tables = np.zeros((0, 3), np.int32)
    out = cascade_attention(jnp.zeros((0, 2, 8)), pages, tables, none, **found._asdict(), layer=0)
    assert out.shape == (0, 2, 8)


def test_rejects_a_window():
    with pytest.raises(
        NotImplementedError, match="window must be None in cascade_attention, got 9"
    ):
        run(*make_shared(*CASES["one group"]), call=cascade_attention, window=9)


@pytest.mark.parametrize(("starts", "blocks", "message"), [
    ([0, 4], [9], "sequence 3 has 32, its group shares 9 blocks of 4"),
    ([0, 4], [-1], "shared_blocks must be 0 or more .* sequence 0 has 39, its group shares -1"),
    ([1, 4], [2], r"must begin with 0 .* the number of sequences, 4, got \[1, 4\]"),
    ([0, 3, 2], [2, 2], r"not decrease .*, 4, got \[0, 3, 2\]"),
    ([0, 5], [2], r"exceed the number of sequences, 4, got \[0, 5\]"),
    ([0, 4], [2, 2], r"must have shapes .*, got \(2,\) and \(2,\)"),
    ([0], [], r"for G >= 1 groups, got \(1,\) and \(0,\)"),
    ([0.0, 4.0], [2], "group_start must be integers, got float64"),
])  # fmt: skip
def test_rejects_groups_that_do_not_fit(starts, blocks, message):
    case, _ = make_shared(*CASES["one group"])
    groups: dict[str, Any] = dict(
        group_start=np.array(starts), shared_blocks=np.array(blocks, np.int32)
    )
    with pytest.raises(ValueError, match=message):
        run(case, groups, call=cascade_attention)
