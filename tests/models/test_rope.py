from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.config import Llama3Scaling
from jaxkv.models.rope import inverse_frequencies, rope_phases

EXPECTED = np.load(Path(__file__).parent.parent / "data" / "hf_rope.npz")


@pytest.mark.parametrize("position", [257, 4095, 15962])
@pytest.mark.parametrize("kind", [jnp.int32, jnp.uint32, jnp.int16])
def test_phases_are_float32_whatever_the_integer(position, kind):
    inv = inverse_frequencies(128, 10000.0)
    cos, sin = rope_phases(jnp.asarray([position], kind), inv)
    angle = np.float64(position) * inv.astype(np.float64)
    assert cos.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(cos)[0, 0], np.cos(angle), atol=1e-3)
    np.testing.assert_allclose(np.asarray(sin)[0, 0], np.sin(angle), atol=1e-3)


def test_float_positions_are_rejected():
    with pytest.raises(ValueError, match="integers"):
        rope_phases(jnp.asarray([257.0], jnp.bfloat16), inverse_frequencies(64, 10000.0))


@pytest.mark.parametrize("name", list(EXPECTED.files))
def test_frequencies_equal_hugging_face(name):
    head_dim = int(name.split("_")[0].removeprefix("head"))
    factor = int(name.split("factor")[1]) if "factor" in name else None
    scaling = factor and Llama3Scaling(factor, 1, 4, 8192)
    got = inverse_frequencies(head_dim, 500000.0, scaling)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(got, EXPECTED[name], rtol=1e-6)
