"""Products on the CPU read the weight in place, whatever the number of rows and the type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.linear import project


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64), (2, 64), (9, 64), (3, 7, 64)])
def test_products_agree_within_the_rounding_of_their_type(rng, dtype, shape):
    x = jnp.asarray(rng.normal(size=shape), dtype)
    weight = jnp.asarray(rng.normal(size=(48, 64)), dtype)
    got = project(x, weight)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    scale = np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64) / scale, want / scale,
                               atol=2.0**-8 if dtype == "bfloat16" else 1e-6)  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_a_few_rows_of_bfloat16_make_no_copy_of_the_weight(optimised, rows):
    """One row did: 6 GiB of float32 for a model of a billion parameters."""
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 512), (2048, 512)))
    memory = jax.jit(project).lower(x, weight).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2048 * 512
