"""The Mosaic GPU kernels, interpreted on the CPU with race detection, against the dense oracle.

All unused slots hold NaN, and unused table entries point anywhere. A grid block costs about a
millisecond, so shapes are small and chosen to reach each branch; tests that differ from another in
one size only are marked `slow`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    forget_programs,
    make,
    means_of_positions,
    move_blocks,
    name_heads,
    oracle_with_lse,
    pick,
    queries,
    run,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from races import detector

from jaxkv.pallas_kernels import target
from jaxkv.pallas_kernels.paged_attention import mosaic_gpu
from jaxkv.pallas_kernels.paged_attention.decode_steps_gpu import SLOTS, num_splits
from jaxkv.pallas_kernels.paged_attention.pages_gpu import TILE, PageReader, Pages, Span

SINKS = jnp.array([0.5, -jnp.inf, 3.0, -2.0])
BF16_STEP = 2.0**-8  # relative distance of a bfloat16 from its neighbours, at most


def run_kernel(case, **options):
    """Returns output and log-sum-exp."""
    return run(case, "mosaic_gpu", interpret=detector(), return_lse=True, **options)


def check(case, tolerance=2e-2, **options):
    """Compares the output within bf16 rounding, the log-sum-exp (float32 products) more closely."""
    out, lse = run_kernel(case, **options)
    want, want_lse = oracle_with_lse(case, **options)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4, rtol=1e-4)
    return out, lse


def paged(lens, counts=None, **kind):
    """A decode step, or a prefill step of `counts` queries."""
    usual: dict[str, Any] = dict(
        dtype=jnp.bfloat16, dim=128, block=16, heads=4, kv_heads=1, fill=np.nan,
        max_query_len=None if counts else 1,
    )  # fmt: skip
    kind = usual | kind
    return make(lens, counts or [1] * len(lens), **kind)


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """One split unless the test sets more; on a GPU, as many as fill it."""
    forget_programs()
    monkeypatch.setattr(mosaic_gpu, "num_splits", lambda *_: 1)


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("block", [8, 128, *slow(16, 32, 64)])
def test_decode_blocks(block):
    check(paged([150, 1, 64, 0], block=block))


@pytest.mark.parametrize("dim", [80, 256, *slow(64, 96)])
def test_decode_head_dims(dim):
    check(paged([100, 70], dim=dim))


@pytest.mark.parametrize("groups", [
    (6, 2), *slow((28, 4), (12, 4), (15, 5), (8, 8), (8, 1), (16, 1), (3, 3), (1, 1))
])  # fmt: skip
@pytest.mark.parametrize("counts", [None, *slow([3, 2])])
def test_query_heads_read_their_own_kv_head(groups, counts):
    heads, kv_heads = groups
    case = paged([70, 9], counts, dim=64, block=64, heads=heads, kv_heads=kv_heads)
    check(case)
    named, names = name_heads(case)
    out, _ = run_kernel(named)
    np.testing.assert_array_equal(out, np.broadcast_to(names[:, None], out.shape))


def test_decode_of_float16():
    check(paged([100, 3], dtype=jnp.float16), tolerance=5e-3)


@pytest.mark.parametrize("splits", [3, *slow(2, 7)])
def test_decode_splits(splits, monkeypatch):
    """Also with more splits than tiles: splits without a tile add nothing."""
    monkeypatch.setattr(mosaic_gpu, "num_splits", lambda *_: splits)
    check(paged([300, 64, 5], dim=64))


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    dict(window=70, soft_cap=2.0, sinks=SINKS),
    *slow(dict(window=33), dict(window=1), dict(soft_cap=1.5), dict(sinks=SINKS)),
])  # fmt: skip
def test_decode_options(options, monkeypatch):
    if "soft_cap" in options:
        monkeypatch.setattr(mosaic_gpu, "num_splits", lambda *_: 2)
    check(paged([150, 20, 128], dim=64, window=options.get("window")), **options)


@pytest.mark.parametrize("kind", [
    (128, jnp.bfloat16), *slow((64, jnp.float32), (256, jnp.float32))
])  # fmt: skip
def test_decode_int8(kind):
    dim, scale_dtype = kind
    check(paged([150, 3], dim=dim, block=64, scale_dtype=scale_dtype))


@pytest.mark.slow
def test_decode_int8_of_large_blocks_with_options(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "num_splits", lambda *_: 2)
    case = paged([200, 40], dim=64, block=128, scale_dtype=jnp.float32, window=90)
    check(case, window=90, sinks=SINKS)


@pytest.mark.parametrize("block", [16, *slow(8, 64, 128)])
def test_prefill_blocks(block):
    check(paged([100, 20, 9], [80, 20, 0], block=block, heads=2, dim=64, padding_tokens=7))


@pytest.mark.parametrize("dim", [80, *slow(96, 128, 256)])
def test_prefill_head_dims(dim):
    check(paged([90], [70], dim=dim, heads=1))


def test_prefill_tiles_of_two_warpgroups():
    """130 queries: a whole tile, a ragged end, and a neighbour that must not be overwritten."""
    check(paged([150, 64], [130, 64], dim=64, heads=1))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [256, *slow(64)])
def test_prefill_options(dim):
    options: dict[str, Any] = dict(window=50, soft_cap=1.5, sinks=SINKS[:1])
    check(paged([200, 30], [140, 30], dim=dim, heads=1, window=50), **options)


def test_prefill_of_a_few_queries_behind_a_prefix():
    check(paged([130, 67], [3, 1], dim=64, heads=4, kv_heads=2))


@pytest.fixture
def ampere(monkeypatch):
    """Kernels of an A100, with wgmma, TMA and its fence removed."""
    for name in ("wgmma", "copy_gmem_to_smem", "copy_smem_to_gmem", "commit_smem"):
        monkeypatch.delattr(plgpu, name)
    with target.compile_for("gpu", (8, 0)):
        yield


@pytest.fixture
def blackwell(monkeypatch):
    """Kernels of a B200, with wgmma removed."""
    monkeypatch.delattr(plgpu, "wgmma")
    with target.compile_for("gpu", (10, 0)):
        yield


@pytest.mark.parametrize("kind", [
    dict(dim=128, block=16, heads=14, kv_heads=2),
    *slow(
        dict(dim=64, block=8, dtype=jnp.float16),
        dict(dim=64, block=128, heads=16),
        dict(dim=256, block=64),
        dict(dim=256, block=8, heads=9, kv_heads=3),
    ),
])  # fmt: skip
def test_ampere_decode(kind, ampere):
    check(paged([150, 1, 0], **kind))


@pytest.mark.slow
def test_ampere_decode_options(ampere, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "num_splits", lambda *_: 3)
    case = paged([300, 20], dim=64, block=128, window=70)
    check(case, window=70, soft_cap=2.0, sinks=SINKS)


@pytest.mark.parametrize("block", [64, *slow(128)])
def test_ampere_decode_int8(block, ampere):
    case = paged([150, 40], dim=64, block=block, scale_dtype=jnp.bfloat16, window=70)
    check(case, window=70)


@pytest.mark.parametrize("block", [16, *slow(8, 32, 128)])
def test_ampere_prefill(block, ampere):
    """A whole tile, a ragged end, neighbours, a prefix, padding."""
    case = paged([100, 20, 9, 70], [80, 20, 0, 2], block=block, heads=2, dim=64, padding_tokens=7)
    check(case)


@pytest.mark.slow
def test_ampere_prefill_options(ampere):
    options: dict[str, Any] = dict(window=50, soft_cap=1.5, sinks=SINKS[:1])
    check(paged([200, 30], [140, 30], dim=128, heads=1, window=50), **options)


@pytest.mark.parametrize("kind", [
    dict(dim=128, heads=7, scale_dtype=jnp.bfloat16, block=64),
    *slow(
        dict(dim=80, heads=16, block=8),
        dict(dim=64, dtype=jnp.float16),
        dict(dim=96, block=128),
        dict(dim=256, block=64),
    ),
])  # fmt: skip
def test_blackwell_decode(kind, blackwell, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "num_splits", lambda *_: 2)
    check(paged([200, 9], **kind))


@pytest.mark.parametrize("dim", [80, *slow(64, 96, 128, 256)])
def test_blackwell_prefill(dim, blackwell):
    check(paged([90, 20], [70, 9], dim=dim, heads=1, window=50), window=50)


GENERATIONS = ["hopper", *slow("ampere", "blackwell")]


@pytest.fixture
def generation(request):
    """Kernels of one GPU generation."""
    if request.param != "hopper":
        request.getfixturevalue(request.param)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # for an infinite K
@pytest.mark.parametrize("generation", GENERATIONS, indirect=True)
@pytest.mark.parametrize("decode", [True, False])
def test_rows_depend_on_their_own_tokens_alone(decode, generation):
    """Not on other rows, on the place of blocks, or on the contents of unused slots.

    Equal up to rounding: a matrix product may add up a row in another order if the row is elsewhere
    in the tile. The log-sum-exp then changes by float32 steps, and a probability that crosses a
    rounding edge changes the output by one bfloat16 step of the largest V. All checks have the same
    shapes and share one program.
    """
    if decode:
        lens, counts, kind = [5, 0, 3, 13], None, dict(dim=64, room=36)
    else:  # 9 new tokens after hits of 0, 4 and 8
        lens, counts, kind = [9, 13, 17], [9, 9, 9], dict(dim=64, room=36, heads=1)
    case = paged(lens, counts, **kind)
    want, want_lse = check(case)
    largest = max(float(np.abs(v).max(initial=0)) for _, v in case.dense)
    for fill, order in ((np.inf, [len(lens) - 1, *range(len(lens) - 1)]), (0, [2])):
        other = move_blocks(pick(paged(lens, counts, **kind | dict(fill=fill)), order))
        out, lse = run_kernel(other)
        at = queries(case, order)
        got, expected = np.asarray(out[: len(at)], np.float32), np.asarray(want[at], np.float32)
        np.testing.assert_allclose(got, expected, rtol=BF16_STEP, atol=BF16_STEP * largest)
        np.testing.assert_allclose(lse[: len(at)], want_lse[at], rtol=2e-6, atol=2e-6)
        assert (out[len(at) :] == 0).all()
    if decode:  # across block edges, and without any token
        for lens in ([15, 16, 17, 32], [14, 31, 33, 35], [0, 0, 0, 0]):
            check(paged(lens, **kind))
    else:  # the last 8, 3 and 1 of 8 keys, and padding
        check(paged([8, 8, 8], [8, 3, 1], **kind, padding_tokens=15, max_query_len=9))


@pytest.mark.parametrize("generation", GENERATIONS, indirect=True)
@pytest.mark.parametrize("chunks", [[[1] * 10], [[10], [4, 6], [3, 4, 3]]])
@pytest.mark.parametrize("cached", [0, *slow(60)])  # 60: across the edge of a block and a tile
def test_position_9_of_a_window_of_4_sees_6_to_9(cached, chunks, generation):
    kind: dict[str, Any] = dict(
        dtype=jnp.bfloat16, dim=64, block=64, heads=1, kv_heads=1, room=cached + 10
    )
    for parts in chunks:
        means = means_of_positions(
            parts, lambda case: run_kernel(case, window=4)[0], cached=cached, **kind
        )
        want = [np.mean(range(max(0, p - 3), p + 1)) for p in range(cached, cached + 10)]
        np.testing.assert_allclose(means.astype(np.float32), want, rtol=1e-3)


@pytest.mark.parametrize("block", [8, 16, 128])
@pytest.mark.parametrize("window", [None, 20])
def test_only_pages_with_visible_tokens_are_read(block, window):
    """Each page id is its column of the table; lengths cross block edges."""
    length = np.arange(1, 300)
    first = np.zeros_like(length) if window is None else np.maximum(length - window, 0)
    reader = PageReader.of(jnp.zeros((1, 1, 2, 1, block, 8)), None, jnp.int32(0), stages=2)
    pages = Pages(None, None, None, np.arange(50)[None])
    span = Span(0, 0, *(jnp.asarray(x, jnp.int32) for x in (first, length, length)), None, None)  # pyright: ignore[reportCallIssue]
    read = np.zeros((len(length), 50), bool)
    for tile in range(-(-300 // TILE)):
        inside = np.flatnonzero((tile * TILE < length) & ((tile + 1) * TILE > first))
        for page, _ in reader.sources(jnp.int32(tile), pages, span):
            read[inside, np.asarray(page)[inside]] = True
    column = np.arange(50)
    wanted = (column >= (first // block)[:, None]) & (column * block < length[:, None])
    np.testing.assert_array_equal(read, wanted)


@pytest.mark.parametrize("splits", [1, *slow(3)])
def test_non_causal_prefill(splits, monkeypatch):
    """Query heads are rows: 3 x 42 and 3 x 2 rows. The first sequence has 6 tiles and a partial
    one, more than the ring has stages, as the prefix of cascade attention may have."""
    monkeypatch.setattr(mosaic_gpu, "shared_splits", lambda *_: splits)
    case = paged([400, 20], [42, 2], dim=64, heads=3, block=32, padding_tokens=1)
    check(case, causal=False, soft_cap=1.5, sinks=SINKS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["ampere", *slow("blackwell")])
def test_non_causal_prefill_of_other_generations(generation, request, monkeypatch):
    request.getfixturevalue(generation)
    monkeypatch.setattr(mosaic_gpu, "shared_splits", lambda *_: 2)
    check(paged([140, 20], [25, 2], dim=64, heads=3, block=64), causal=False)


def test_interpreted_calls_are_checked_for_support():
    with pytest.raises(NotImplementedError, match="block_size=4 is not supported"):
        run(paged([9], block=4), "mosaic_gpu", interpret=detector())


def test_splits_fill_the_gpu_and_no_more():
    assert num_splits(1, 8, 131072) * 8 >= SLOTS
    assert num_splits(1, 1, 40) == 1  # one tile
    assert num_splits(100_000, 8, 131072) == 1


# -- the ring of stages ----------------------------------------------------------------------


HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.mark.parametrize(("gpu", "kind"), [
    (HOPPER, dict(dim=128)),
    (HOPPER, dict(dim=256, dtype=jnp.float16)),
    (HOPPER, dict(dim=256, scale_dtype=jnp.float32)),
    (BLACKWELL, dict(dim=128)),
    (BLACKWELL, dict(dim=256, scale_dtype=jnp.bfloat16)),
], ids=["hopper", "hopper-f16", "hopper-int8", "blackwell", "blackwell-int8"])  # fmt: skip
def test_decode_fills_each_stage_of_its_ring_again(gpu, kind, request):
    check_ring(gpu, paged([1, 700, 330], block=64, heads=2, **kind), request)


@pytest.mark.parametrize(("gpu", "kind", "queries"), [
    (HOPPER, dict(dim=128), 130),  # two warpgroups, 64 queries each
    (HOPPER, dict(dim=256, dtype=jnp.float16), 30),  # two warpgroups, half of the columns each
    (BLACKWELL, dict(dim=128), 30),
], ids=["hopper", "hopper-f16", "blackwell"])  # fmt: skip
def test_prefill_fills_each_stage_of_its_ring_again(gpu, kind, queries, request):
    check_ring(gpu, paged([400], [queries], block=64, heads=1, **kind), request)


def check_ring(gpu, case, request):
    """`check`, on contexts that go round the ring more than twice."""
    if gpu == BLACKWELL:
        request.getfixturevalue("blackwell")
    with target.compile_for("gpu", gpu) as pipelines:
        check(case)
    (pipeline,) = pipelines
    assert max(case.lens) > 2 * pipeline.stages * TILE
