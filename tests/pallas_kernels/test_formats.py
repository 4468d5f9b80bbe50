"""Page formats: one table, read by the configuration, the state, kernels and writes."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import CacheConfig, ConfigError, init_state
from jaxkv.pallas_kernels.formats import FORMATS, check_scales, dequantise, format_of, quantise

SIZES: dict[str, Any] = dict(num_layers=2, num_kv_heads=3, head_dim=8, num_blocks=4, block_size=16)


@pytest.mark.parametrize("name", FORMATS)
def test_a_dtype_has_one_format_under_any_name(name):
    page_format = FORMATS[name]
    assert format_of(page_format.dtype) is format_of(name) is format_of(jnp.dtype(name))


@pytest.mark.parametrize("dtype", ["int4", np.float64, jnp.float8_e4m3fn])
def test_other_dtypes_are_rejected_by_name(dtype):
    with pytest.raises(ValueError, match="must be one of float32, bfloat16, float16, int8"):
        format_of(dtype)
    with pytest.raises(ConfigError, match="must be one of float32"):
        CacheConfig(**SIZES, dtype=str(np.dtype(dtype)) if dtype != "int4" else "int4")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_a_state_takes_the_bytes_that_its_config_counts(name, scale_dtype):
    config = CacheConfig(**SIZES, dtype=name, scale_dtype=scale_dtype)
    state = init_state(config)
    scales = 0 if state.kv_scales is None else state.kv_scales.nbytes
    assert state.kv_pages.nbytes + scales == config.pool_bytes
    assert (scales > 0) == FORMATS[name].quantised
    check_scales(state.kv_pages, state.kv_scales)
    if state.kv_scales is not None:
        assert state.kv_scales.dtype == jnp.dtype(scale_dtype)


def test_scales_of_another_dtype_are_rejected():
    with pytest.raises(
        ConfigError, match="scale_dtype must be one of float32, bfloat16, got 'float16'"
    ):
        CacheConfig(**SIZES, dtype="int8", scale_dtype="float16")


def test_a_round_trip_has_an_error_of_at_most_half_a_scale(rng):
    x = rng.normal(size=(40, 64)).astype(np.float32)
    codes, scales = quantise(jnp.asarray(x))
    off = np.abs(np.asarray(dequantise(codes, scales)) - x)
    assert (off <= np.asarray(scales)[:, None] * 0.5001).all()
    assert np.abs(np.asarray(codes)).max() == 127
