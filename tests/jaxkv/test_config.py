from typing import Any

import numpy as np
import pytest

from jaxkv import CacheConfig, init_state
from jaxkv.errors import ConfigError

BASE: dict[str, Any] = dict(num_layers=2, num_kv_heads=2, head_dim=8, num_blocks=5, block_size=4)


@pytest.mark.parametrize(("dtype", "block_bytes"), [("bfloat16", 512), ("float32", 1024)])
def test_bytes_are_those_of_the_real_arrays(dtype, block_bytes):
    config = CacheConfig(**BASE, dtype=dtype)
    assert config.block_bytes == block_bytes
    assert config.bytes_per_token == block_bytes // 4
    assert init_state(config).kv_pages.nbytes == config.pool_bytes == 5 * block_bytes


def test_llama_2_7b_and_grouped_queries():
    shape: dict[str, Any] = dict(num_layers=32, head_dim=128, num_blocks=2, dtype="float16")
    assert CacheConfig(**shape, num_kv_heads=32).bytes_per_token == 512 * 1024
    assert CacheConfig(**shape, num_kv_heads=8).bytes_per_token == 128 * 1024
    assert CacheConfig(**shape, num_kv_heads=32, block_size=32).block_bytes == 16 * 2**20


@pytest.mark.parametrize("field", [*BASE, "max_seqs", "max_blocks_per_seq"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_sizes_must_be_positive_integers(field, value):
    with pytest.raises(ConfigError, match=field):
        CacheConfig(**(BASE | {field: value}))


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64])
def test_sizes_from_numpy_do_not_wrap(dtype):
    """2 x 80 x 64 x 128 x 4 bytes a token, times 127 x 100 tokens, is above 2**32."""
    sizes: dict[str, Any] = dict(
        num_layers=80, num_kv_heads=64, head_dim=120, num_blocks=127, block_size=100
    )
    config = CacheConfig(**{name: dtype(size) for name, size in sizes.items()})
    assert config == CacheConfig(**sizes)
    assert config.pool_bytes == 2 * 80 * 64 * 120 * 4 * 127 * 100 > 2**32
    assert config.bytes_per_token == 2 * 80 * 64 * 120 * 4
    for size in (config.pool_bytes, config.max_len, config.blocks_for(dtype(101))):
        assert type(size) is int


def test_for_model_takes_numpy_numbers_and_refuses_floats():
    n: Any = np.int32
    config = CacheConfig.for_model(Shape(), max_len=n(2**30), max_seqs=n(2**4), block_size=n(2**7))
    assert config.num_blocks == 1 + 2**27
    budget = CacheConfig.for_model(Shape(), memory_bytes=n(2**31 - 1), block_size=n(4))
    assert budget == CacheConfig.for_model(Shape(), memory_bytes=2**31 - 1, block_size=4)
    for name in ("memory_bytes", "max_len", "max_seqs", "block_size", "num_blocks"):
        for value in (1.5, True, "8"):
            with pytest.raises(ConfigError, match=name):
                CacheConfig.for_model(Shape(), **{name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="num_tokens"):
        budget.blocks_for(1.5)  # pyright: ignore[reportArgumentType]


def test_other_refusals():
    with pytest.raises(ConfigError, match="float8"):
        CacheConfig(**BASE, dtype="float8")
    with pytest.raises(ConfigError, match="null block"):
        CacheConfig(**(BASE | {"num_blocks": 1}))  # pyright: ignore[reportArgumentType]


def test_pages_are_numbered_in_32_bits():
    shape: dict[str, Any] = dict(num_layers=32, num_kv_heads=8, head_dim=128)
    most = 2**31 // 512 - 2  # and one block more, where padding points
    largest = CacheConfig(**shape, num_blocks=most)
    assert largest.pool_bytes > 2**43
    with pytest.raises(ConfigError, match=f"num_blocks={most + 1} of 512 pages .*at most {most},"):
        CacheConfig(**shape, num_blocks=most + 1)
    with pytest.raises(ValueError, match=r"or raise block_size=1$"):
        CacheConfig.for_model(Shape(), memory_bytes=2**40, block_size=1)


class Shape:
    num_layers, num_kv_heads, head_dim = 2, 2, 8


def test_for_model_takes_the_largest_pool_in_the_budget():
    config = CacheConfig.for_model(Shape(), memory_bytes=10_000, block_size=4)
    assert config.pool_bytes <= 10_000 < config.pool_bytes + config.block_bytes
    with pytest.raises(ConfigError, match="less than two blocks of 1024 bytes"):
        CacheConfig.for_model(Shape(), memory_bytes=2047, block_size=4)
    with pytest.raises(ConfigError, match="not both"):
        CacheConfig.for_model(Shape(), memory_bytes=10_000, num_blocks=4)
    with pytest.raises(ConfigError, match="max_len"):
        CacheConfig.for_model(Shape(), max_len=0)


def test_for_model_without_a_budget_holds_every_row_at_its_longest():
    config = CacheConfig.for_model(Shape(), max_len=100, block_size=16, max_seqs=3)
    assert config.num_blocks == 1 + 3 * 7
    assert np.isclose(config.max_len, 112)
