"""Sizes of caches against known models and brute force; the block size against its own table."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.config import DTYPES, CacheConfig
from jaxkv.errors import ConfigError
from jaxkv.planning.sizing import BLOCK_SIZES, Shape, cache_size, suggest_block_size

KIB, MIB, GIB = 2**10, 2**20, 2**30
LLAMA2_7B = Shape(num_layers=32, num_kv_heads=32, head_dim=128)
LLAMA3_8B = Shape(num_layers=32, num_kv_heads=8, head_dim=128)
TINY = Shape(num_layers=2, num_kv_heads=3, head_dim=4)

sizes = st.integers(1, 40)
lengths_lists = st.lists(st.integers(1, 600), min_size=1, max_size=12)


def suggest(lengths, model=LLAMA3_8B, dtype="float16", **kwargs):
    return suggest_block_size(lengths, **dataclasses.asdict(model), dtype=dtype, **kwargs)


# -- bytes and concurrency -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "per_token", "per_4096"),
    [(LLAMA2_7B, 512 * KIB, 2 * GIB), (LLAMA3_8B, 128 * KIB, 512 * MIB)],
)
def test_known_models_in_float16(model, per_token, per_4096):
    size = cache_size(model, memory_bytes=16 * GIB, max_len=4096, dtype="float16")
    assert size.config.bytes_per_token == per_token
    assert size.config.block_bytes == 16 * per_token
    assert size.contiguous_bytes == size.paged_bytes == per_4096


def test_a_block_of_32_tokens_holds_all_layers():
    size = cache_size(LLAMA2_7B, memory_bytes=GIB, max_len=64, block_size=32, dtype="float16")
    assert size.config.block_bytes == 16 * MIB


def test_the_null_block_costs_a_sequence_where_the_budget_is_exact():
    size = cache_size(LLAMA2_7B, memory_bytes=16 * GIB, max_len=4096, dtype="float16")
    assert size.config.num_blocks == 2048
    assert (size.paged_concurrency, size.contiguous_concurrency) == (7, 8)
    block = size.config.block_bytes
    more = cache_size(LLAMA2_7B, memory_bytes=16 * GIB + block, max_len=4096, dtype="float16")
    assert (more.paged_concurrency, more.contiguous_concurrency) == (8, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_by_its_itemsize(dtype):
    size = cache_size(TINY, memory_bytes=MIB, max_len=100, length=33, dtype=dtype)
    token = 2 * 2 * 3 * 4 * DTYPES[dtype].itemsize
    assert size.config.dtype == dtype
    assert size.config.bytes_per_token == token
    assert size.paged_bytes == 48 * token  # 33 tokens in blocks of 16
    assert size.contiguous_bytes == 100 * token
    assert size.to_dict()["paged_bytes"] == size.paged_bytes


@given(sizes, sizes, sizes, sizes, sizes, st.sampled_from(list(DTYPES)), st.data())
def test_the_pool_fills_the_budget_and_no_more(
    layers, heads, dim, block_size, max_len, dtype, data
):
    model = Shape(layers, heads, dim)
    block = 2 * layers * heads * dim * DTYPES[dtype].itemsize * block_size
    memory = data.draw(st.integers(2 * block, 500 * block))
    length = data.draw(st.integers(1, max_len))
    size = cache_size(
        model, memory_bytes=memory, max_len=max_len, length=length,
        block_size=block_size, dtype=dtype,
    )  # fmt: skip
    config = size.config
    assert config.pool_bytes <= memory < config.pool_bytes + block
    assert config.max_len >= max_len
    each, n = math.ceil(length / block_size), size.paged_concurrency
    assert 1 + n * each <= config.num_blocks < 1 + (n + 1) * each
    assert size.paged_bytes == each * block
    held = size.contiguous_concurrency * size.contiguous_bytes
    assert held <= memory < held + size.contiguous_bytes
    assert config.max_seqs == max(1, n)
    assert size.table_bytes == 4 * config.max_seqs * math.ceil(max_len / block_size)


def test_the_config_is_ready_to_use():
    config = cache_size(TINY, memory_bytes=64 * KIB, max_len=64, length=20).config
    assert isinstance(config, CacheConfig)
    assert config.max_seqs * config.blocks_for(20) < config.num_blocks


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory_bytes": 2 * 16 * 192 - 1}, r"memory_bytes=6143 is less than two blocks of 3072"),
        ({"memory_bytes": 0}, "memory_bytes=0 must be a positive integer"),
        ({"memory_bytes": 1e6}, "memory_bytes=1000000.0 must be a positive integer"),
        ({"max_len": -4}, "max_len=-4 must be a positive integer"),
        ({"length": 0}, "length=0 must be a positive integer"),
        ({"length": 101}, "length=101 is above max_len=100; raise max_len"),
        ({"block_size": 0}, "block_size=0 must be a positive integer"),
        ({"block_size": True}, "block_size=True must be a positive integer"),
        ({"dtype": "int3"}, "dtype must be one of float32"),
        ({"model": Shape(0, 1, 1)}, "num_layers=0 must be a positive integer"),
    ],
)
def test_bad_sizes_are_named(changed, message):
    asked = {"model": TINY, "memory_bytes": MIB, "max_len": 100} | changed
    with pytest.raises(ConfigError, match=message):
        cache_size(asked.pop("model"), **asked)


def test_two_blocks_are_enough():
    size = cache_size(TINY, memory_bytes=2 * 16 * 192, max_len=100, length=16)
    assert (size.config.num_blocks, size.paged_concurrency) == (2, 1)


# -- block size ------------------------------------------------------------------------------


@given(lengths_lists, st.sampled_from(list(DTYPES)), st.floats(0, 1e4), st.integers(0, 900))
def test_suggestion_is_the_argmin_of_its_table(lengths, dtype, copy_cost, spare):
    max_len = max(lengths) + spare
    found = suggest(lengths, TINY, dtype, max_len=max_len, copy_cost=copy_cost)
    assert [c.block_size for c in found.costs] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    totals = {c.block_size: c.total_bytes for c in found.costs}
    assert found.block_size == min(totals, key=lambda b: (totals[b], b))
    for c in found.costs:
        assert c.total_bytes == c.waste_bytes + c.table_bytes + c.kernel_bytes


@given(lengths_lists, st.integers(0, 900))
def test_costs_by_brute_force(lengths, spare):
    max_len, itemsize = max(lengths) + spare, 2
    found = suggest(lengths, TINY, max_len=max_len, copy_cost=10)
    for cost in found.costs:
        empty = pages = 0
        for length in lengths:
            slots = 0
            while slots < length:
                slots += cost.block_size
                pages += 1
            empty += slots - length
        n, table = len(lengths), len(range(0, max_len, cost.block_size))
        pieces = [(k, layer, head) for k in "kv" for layer in range(2) for head in range(3)]
        assert cost.empty_slots == pytest.approx(empty / n)
        assert cost.waste_bytes == pytest.approx(empty / n * len(pieces) * 4 * itemsize)
        assert cost.table_bytes == 4 * table
        assert cost.copies == pytest.approx(pages / n * len(pieces))
        assert cost.copy_bytes == cost.block_size * 4 * itemsize
        assert cost.kernel_bytes == pytest.approx(10 * cost.copies)


def test_effect_of_each_cost():
    lengths = range(1000, 2000)
    assert suggest(lengths, copy_cost=0).block_size == 1  # waste outweighs tables
    assert suggest(lengths, copy_cost=1e6).block_size == 256
    best = [suggest(lengths, copy_cost=2.0**i).block_size for i in range(16)]
    assert best == sorted(best)
    # 4 bytes per token: here a table entry costs as much as a slot.
    thin = Shape(num_layers=1, num_kv_heads=1, head_dim=1)
    assert suggest(lengths, thin, max_len=10**6, copy_cost=0).block_size > 64
    # Longer sequences have more pages per tail block.
    short, long = (suggest(range(n, 2 * n)).block_size for n in (100, 10_000))
    assert short < long


def test_lengths_that_fill_their_blocks_waste_nothing():
    found = suggest([256, 512, 768])
    assert [c.empty_slots for c in found.costs] == [0] * len(BLOCK_SIZES)
    assert found.block_size == 256


def test_equal_costs_take_the_smaller_block():
    model = Shape(num_layers=1, num_kv_heads=1, head_dim=1)
    found = suggest([3], model, "float32", max_len=4, copy_cost=0)
    assert [c.total_bytes for c in found.costs][:3] == [16, 16, 12]
    found = suggest([2], model, "float32", max_len=3, copy_cost=0)
    assert [c.total_bytes for c in found.costs][:3] == [12, 8, 20]
    found = suggest([1], model, "float16", max_len=2, copy_cost=0)
    assert [c.total_bytes for c in found.costs][:2] == [8, 8]
    assert found.block_size == 1


def test_rule_of_thumb():
    found = suggest([900, 1100], concurrency=36)
    assert found.rule_of_thumb == pytest.approx(math.sqrt(1000 * 36) / 6)
    assert found.mean_length == 1000
    assert found.block_size == suggest([900, 1100], concurrency=1).block_size


def test_max_len_is_the_longest_by_default():
    assert suggest([5, 70, 8]).max_len == 70
    assert [c.table_bytes for c in suggest([5, 70, 8]).costs][:2] == [280, 140]


def test_any_container_of_integers():
    reference = suggest([3, 200, 41])
    assert suggest((3, 200, 41)) == reference
    for dtype in (np.int64, np.int32, np.uint16):
        assert suggest(np.array([3, 200, 41], dtype)) == reference


def test_to_dict_has_every_cost():
    found = suggest([3, 200, 41])
    as_dict = found.to_dict()
    assert as_dict["block_size"] == found.block_size
    assert [c["total_bytes"] for c in as_dict["costs"]] == [c.total_bytes for c in found.costs]


@pytest.mark.parametrize(
    ("lengths", "changed", "message"),
    [
        ([], {}, "no lengths: 0 sequences"),
        (np.zeros(0, int), {}, "no lengths"),
        ([4, 0, -2], {}, r"lengths\[1\]=0: 2 of 3 are below 1"),
        ([1.5], {}, r"must be a list of integers, one per sequence, got .* type float64"),
        ([[1, 2]], {}, r"shape \(1, 2\)"),
        ([10, 90], {"max_len": 80}, "a length of 90 is above max_len=80; raise max_len"),
        ([10], {"max_len": 0}, "max_len=0 must be"),
        ([10], {"concurrency": 0}, "concurrency=0 must be"),
        ([10], {"copy_cost": -1}, "copy_cost=-1 must be"),
        ([10], {"copy_cost": math.nan}, "copy_cost=nan must be"),
        ([10], {"dtype": "int3"}, "dtype must be one of"),
        ([10], {"model": Shape(1, 0, 8)}, "num_kv_heads=0 must be"),
    ],
)
def test_bad_lengths_are_named(lengths, changed, message):
    with pytest.raises(ConfigError, match=message):
        suggest(lengths, **changed)
