import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    assert_equal_up_to_rounding,
    make,
    move_blocks,
    name_heads,
    oracle,
    pick,
    queries,
    run,
)

from jaxkv.pallas_kernels.paged_attention import paged_attention, supports

IMPLEMENTATIONS = ["xla", "reference"]
LENS = [1, 4, 5, 8, 17, 40, 130]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block", [1, 2, 8, 16, 32, 64, 128])
def test_decode(implementation, block):
    case = make(LENS, [1] * len(LENS), block=block, max_query_len=1)
    np.testing.assert_allclose(run(case, implementation), oracle(case), atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block", [1, 4, 16, 128])
def test_prefill_chunks_of_different_lengths(implementation, block):
    case = make([300, 7, 70, 1, 64], [150, 7, 1, 1, 64], block=block)
    np.testing.assert_allclose(run(case, implementation), oracle(case), atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(28, 4), (6, 2), (12, 4), (15, 5), (48, 2), (40, 2), (8, 8), (8, 1)]
)
@pytest.mark.parametrize("decode", [True, False])
def test_query_head_reads_its_own_kv_head(implementation, heads, kv_heads, decode):
    case = make([9], [1 if decode else 3], heads=heads, kv_heads=kv_heads,
                max_query_len=1 if decode else None)  # fmt: skip
    case, names = name_heads(case)
    out = run(case, implementation)
    np.testing.assert_allclose(out, np.broadcast_to(names[:, None], out.shape), rtol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (4, 0), (2, 4)])
def test_rejects_head_counts_that_do_not_divide(heads, kv_heads):
    case = make([9], [1], kv_heads=kv_heads, heads=heads, max_query_len=1)
    with pytest.raises(ValueError, match=f"{heads} query heads .* over {kv_heads} KV heads"):
        run(case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("scale_dtype", [None, jnp.float32])
def test_unused_slots_change_nothing(implementation, fill, decode, scale_dtype):
    """With int8 pages, the scales of unused slots."""
    counts = [1, 1, 1] if decode else [13, 2, 5]
    kind: dict[str, Any] = dict(max_query_len=1 if decode else None, scale_dtype=scale_dtype)
    clean, dirty = make([13, 4, 7], counts, **kind), make([13, 4, 7], counts, fill=fill, **kind)
    out = run(clean, implementation)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(run(dirty, implementation), out)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zero_length_rows_are_zeros(implementation):
    case = make([5, 0, 3], [1, 1, 1], max_query_len=1, fill=np.nan)
    out = run(case, implementation)
    assert (out[1] == 0).all()
    case.dense[1] = (np.ones((1, 2, 8)), np.zeros((1, 2, 8)))
    np.testing.assert_allclose(out, oracle(case), atol=2e-5)
    nothing = make([0, 0], [1, 1], max_query_len=1, fill=np.nan)
    assert (run(nothing, implementation) == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_tokens_and_sequences_are_zeros(implementation):
    case = make([9, 6, 0, 0], [4, 2, 0, 0], padding_tokens=3, fill=np.nan)
    out = run(case, implementation)
    assert (out[6:] == 0).all()
    np.testing.assert_allclose(out[:6], oracle(case)[:6], atol=2e-5)


def test_empty_batch():
    pages, tables = jnp.zeros((2, 1, 2, 1, 4, 8)), jnp.zeros((0, 3), jnp.int32)
    compiled = []

    def listen(*event, **_):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            compiled.clear()
            out = paged_attention(jnp.zeros((0, 2, 8)), pages, tables, jnp.zeros(0, int), layer=0)
            assert out.shape == (0, 2, 8)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("counts", [None, [3, 8, 1]])
def test_moving_blocks_changes_nothing_bit_for_bit(implementation, counts):
    case = make([11, 8, 3], counts or [1] * 3, max_query_len=None if counts else 1)
    moved = move_blocks(case)
    assert (moved.tables != case.tables).any()
    np.testing.assert_array_equal(run(moved, implementation), run(case, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("counts", [None, [5, 3, 9]])
def test_rows_do_not_depend_on_their_order_or_on_other_rows(implementation, counts):
    """Up to rounding: a product may be summed in another order at another place of the batch."""
    case = make([5, 3, 9], counts or [1] * 3, max_query_len=None if counts else 1, fill=np.nan)
    out = run(case, implementation)
    np.testing.assert_allclose(out, oracle(case), atol=2e-5)
    for order in ([2, 0, 1], [0], [1], [2]):
        want = out[queries(case, order)]
        got = run(pick(case, order), implementation)[: len(want)]
        assert_equal_up_to_rounding(got, want, case)


def test_a_row_in_a_batch_of_one():
    case = make([5, 3, 9], [1] * 3, max_query_len=1, fill=np.nan)
    out = run(case)
    for s in range(3):
        some = pick(case, [s])
        one: dict[str, Any] = dict(q=some.q[:1], tables=some.tables[:1], lens=some.lens[:1])
        alone = dataclasses.replace(some, **one, query_start=some.query_start[:2])
        np.testing.assert_allclose(run(alone), out[s : s + 1], atol=1e-6)


def test_the_contents_of_other_rows_leave_a_row_bit_equal():
    a, b = (make([9, 14], [1, 1], max_query_len=1) for _ in range(2))
    b.q = b.q.at[1].set(7)
    b.pages = b.pages.at[b.tables[1, :4]].add(3)
    np.testing.assert_array_equal(run(a)[0], run(b)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_outside_the_pool_in_unused_entries(implementation):
    """They are ignored, whatever the last block holds, to which -1 would wrap."""
    case = make([6, 3], [1, 1], max_query_len=1)
    case.pages = jnp.pad(case.pages, ((0, 1), *((0, 0),) * 5), constant_values=np.nan)
    before = run(case, implementation)
    np.testing.assert_allclose(before, oracle(case), atol=2e-5)
    for junk in (-1, 10**6, np.iinfo(np.int32).min):
        case.tables = case.tables.at[0, 2:].set(junk).at[1, 1:].set(junk)
        np.testing.assert_array_equal(run(case, implementation), before)
    # A row of padding entries with a nonzero length reads the null block.
    case.tables = case.tables.at[1].set(-1)
    out = run(case, implementation)
    assert (out[1] == 0).all()
    np.testing.assert_array_equal(out[0], before[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block", [4, 16])
def test_decode_over_block_edges_in_a_dirty_pool(implementation, block):
    for length in range(14, 36):
        case = make([length], [1], block=block, max_query_len=1, fill=1e9, room=36)
        np.testing.assert_allclose(run(case, implementation), oracle(case), atol=2e-5)


@pytest.mark.parametrize(("counts", "padding"), [(3, 0), (3, 1), (1, 0), (8, 0)])
def test_few_queries_over_many_keys_is_the_end_of_full_causal(counts, padding):
    full = make([8], [8], seed=3, fill=np.nan)
    more: dict[str, Any] = dict(padding_tokens=padding, max_query_len=max(counts + padding, 2))
    part = make([8], [counts], seed=3, fill=np.nan, **more)
    part.q = part.q.at[:counts].set(full.q[8 - counts :])
    want = run(full)[8 - counts :]
    np.testing.assert_allclose(want, oracle(full)[8 - counts :], atol=2e-5)
    np.testing.assert_allclose(run(part)[:counts], want, atol=1e-6)
    if counts == 1:
        part.max_query_len = 1  # the decode form
        np.testing.assert_allclose(run(part), want, atol=1e-6)


@pytest.mark.parametrize("window", [None, 20])
def test_sequences_that_end_inside_tiles_of_either_size(window):
    """The XLA path takes tiles of 64 queries, and 32 at the end of a sequence."""
    counts = [100, 30, 64, 65, 96, 0, 97, 1, 33, 32, 128]
    lens = [100, 90, 64, 70, 96, 7, 200, 5, 33, 50, 130]
    case = make(lens, counts, block=16, fill=np.nan, padding_tokens=3, max_query_len=128)
    out = run(case, "xla", window=window)
    np.testing.assert_allclose(out, oracle(case, window=window), atol=2e-5)


METADATA = ("tables", "lens", "query_start")


def call(case, **changed):
    """Calls paged_attention outside jit, since jit converts the metadata before the call."""
    args = (changed.get(name, getattr(case, name)) for name in METADATA)
    return paged_attention(case.q, case.pages, *args, **case.kwargs(), implementation="xla")


@pytest.mark.parametrize("kind", ["int16", "uint32", "int64", "uint64"])
def test_other_integer_types_give_the_same_result(kind):
    case = make([9, 6], [2, 3])
    case.tables = jnp.maximum(case.tables, 0)
    before = call(case)
    of_kind = {name: np.asarray(getattr(case, name)).astype(kind) for name in METADATA}
    np.testing.assert_array_equal(call(case, **of_kind), before)
    if kind in ("int16", "uint32"):
        on_device = {name: jnp.asarray(x) for name, x in of_kind.items()}
        np.testing.assert_array_equal(call(case, **on_device), before)


def test_rejects_values_that_do_not_fit_32_bits():
    """JAX alone would keep the lower half of a 64-bit NumPy array."""
    case = make([9, 6], [2, 3])
    for name, message in (("lens", "seq_lens holds 4294967302"), ("query_start", "query_start")):
        with pytest.raises(ValueError, match=message):
            call(case, **{name: np.asarray(getattr(case, name)).astype(np.int64) + 2**32})
    with pytest.raises(ValueError, match="seq_lens holds 2147483654"):
        call(case, lens=np.asarray(case.lens).astype(np.uint32) + np.uint32(2**31))
    # Ids in unused entries may be anything outside the pool.
    far = np.asarray(case.tables).astype(np.int64)
    far[1, 2:] += 2**32
    np.testing.assert_array_equal(call(case, tables=far), call(case))
    case.pages = case.pages.at[0].set(0)
    far[1] = np.asarray(case.tables)[1].astype(np.int64) + 2**32  # read as the null block
    assert (call(case, tables=far)[2:] == 0).all()


@pytest.mark.parametrize("host", [True, False])
def test_float_metadata_is_rejected(host):
    case = make([9, 6], [1, 1], max_query_len=1)
    names = {"tables": "block_tables", "lens": "seq_lens", "query_start": "query_start"}
    for name, public in names.items():
        x = (np if host else jnp).asarray(getattr(case, name), np.float32)
        with pytest.raises(ValueError, match=f"{public} must be integers, got float32"):
            call(case, **{name: x})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("decode", [True, False])
def test_half_precision(dtype, decode):
    case = make([70, 9], [1, 1] if decode else [20, 9], dtype=dtype,
                max_query_len=1 if decode else None)  # fmt: skip
    assert run(case).dtype == dtype
    np.testing.assert_allclose(run(case).astype(np.float32), oracle(case), atol=4e-2)


def test_scale():
    case = make([9], [1], max_query_len=1)
    half = paged_attention(*case.args(), **case.kwargs(), scale=0.5, implementation="xla")
    case.q = case.q * 0.5 * np.sqrt(8)
    np.testing.assert_allclose(half, run(case), atol=1e-6)


def test_a_named_implementation_that_cannot_run_raises():
    case = make([9], [1], max_query_len=1)
    assert supports("xla") == (True, "")
    for name in ("mosaic_gpu", "nonsense"):
        with pytest.raises(NotImplementedError, match=name):
            run(case, name)


def test_memory_does_not_grow_with_the_table():
    def temp(columns):
        spec = jax.ShapeDtypeStruct
        f = jax.jit(lambda *a: paged_attention(*a, layer=0, implementation="xla"))
        lowered = f.lower(spec((4, 4, 8), jnp.float32), spec((64, 1, 2, 2, 4, 8), jnp.float32),
                          spec((4, columns), jnp.int32), spec((4,), jnp.int32))  # fmt: skip
        return lowered.compile().memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]

    tables_alone = 4 * 4 * 2048 * 4  # a few i32 copies of the wider table
    assert temp(2048) - temp(64) < tables_alone
