import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make, oracle, run

from pallas_kernels.paged_attention import paged_attention, supports

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
    names = jnp.arange(kv_heads, dtype=jnp.float32)[:, None, None]
    case.pages = case.pages.at[:, :, 1].set(jnp.broadcast_to(names, case.pages.shape[3:]))
    out = run(case, implementation)
    wanted = np.arange(heads) // (heads // kv_heads)
    np.testing.assert_allclose(out, np.broadcast_to(wanted[None, :, None], out.shape), rtol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (2, 4)])
def test_head_counts_that_do_not_divide(heads, kv_heads):
    case = make([9], [1], kv_heads=kv_heads, heads=heads, max_query_len=1)
    with pytest.raises(ValueError, match=f"{heads} query heads"):
        run(case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("decode", [True, False])
def test_unused_slots_change_nothing(implementation, fill, decode):
    counts = [1, 1, 1] if decode else [13, 2, 5]
    kind = dict(max_query_len=1 if decode else None)
    clean, dirty = make([13, 4, 7], counts, **kind), make([13, 4, 7], counts, fill=fill, **kind)
    np.testing.assert_array_equal(run(clean, implementation), run(dirty, implementation))


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
    pages = jnp.zeros((2, 1, 2, 1, 4, 8))
    out = paged_attention(
        jnp.zeros((0, 2, 8)), pages, jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32), layer=0
    )
    assert out.shape == (0, 2, 8)


def test_moving_blocks_changes_nothing_bit_for_bit():
    case = make([11, 8, 3], [3, 8, 1])
    before = run(case)
    rng = np.random.default_rng(1)
    new = np.concatenate([[0], rng.permutation(np.arange(1, len(case.pages)))])
    pages = np.empty_like(case.pages)
    pages[new] = case.pages
    case.pages, case.tables = jnp.asarray(pages), jnp.asarray(new[case.tables], jnp.int32)
    np.testing.assert_array_equal(run(case), before)


def test_rows_do_not_depend_on_their_order_or_company():
    together = make([5, 3, 9], [1, 1, 1], max_query_len=1)
    out = run(together)
    for order in ([2, 0, 1], [0], [1], [2]):
        some = make([5, 3, 9], [1, 1, 1], max_query_len=1)
        index = jnp.asarray(order)
        some.q, some.tables, some.lens = some.q[index], some.tables[index], some.lens[index]
        some.query_start = jnp.arange(len(order) + 1)
        np.testing.assert_allclose(run(some), out[np.asarray(order)], atol=1e-6)


def test_other_rows_contents_leave_a_row_bit_equal():
    a, b = (make([9, 14], [1, 1], max_query_len=1) for _ in range(2))
    b.q = b.q.at[1].set(7)
    b.pages = b.pages.at[b.tables[1, :4]].add(3)
    np.testing.assert_array_equal(run(a)[0], run(b)[0])


def test_ids_outside_the_pool_in_unused_entries():
    case = make([6, 3], [1, 1], max_query_len=1)
    before = run(case)
    for junk in (-1, 10**6, np.iinfo(np.int32).min):
        case.tables = case.tables.at[0, 2:].set(junk).at[1, 1:].set(junk)
        np.testing.assert_array_equal(run(case), before)


def test_decode_over_block_edges_in_a_dirty_pool():
    for length in range(14, 36):
        case = make([length], [1], block=16, max_query_len=1, fill=1e9, room=36)
        np.testing.assert_allclose(run(case), oracle(case), atol=2e-5)


@pytest.mark.parametrize("counts", [3, 1, 8])
def test_few_queries_over_many_keys_is_the_end_of_full_causal(counts):
    full, part = make([8], [8], seed=3), make([8], [counts], seed=3)
    part.q = full.q[8 - counts :]
    np.testing.assert_allclose(run(part), run(full)[8 - counts :], atol=1e-6)


@pytest.mark.parametrize("kind", ["int16", "uint32", "int64"])
def test_other_integer_types_are_the_same(kind):
    case = make([9, 6], [2, 3])
    before = run(case)
    metadata = (np.asarray(x).astype(kind) for x in (case.tables, case.lens, case.query_start))
    out = paged_attention(case.q, case.pages, *metadata, **case.kwargs(), implementation="xla")
    np.testing.assert_allclose(out, before, atol=1e-6)


def test_float_metadata_is_refused():
    case = make([9, 6], [1, 1], max_query_len=1)
    case.lens = case.lens.astype(jnp.float32)
    with pytest.raises(ValueError, match="seq_lens must be integers"):
        run(case)


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


def test_a_named_implementation_fails_loudly():
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
        return lowered.compile().memory_analysis().temp_size_in_bytes

    tables_alone = 4 * 4 * 2048 * 4  # a few i32 copies of the wider table
    assert temp(2048) - temp(64) < tables_alone
