"""Agreement with Hugging Face's LlamaForCausalLM, through the safetensors loader."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import CASES, state_dict, tokens
from safetensors.numpy import save_file

from jaxkv.models.config import Llama3Scaling
from jaxkv.models.hf_loader import load_hf
from jaxkv.models.rope import inverse_frequencies

DATA = Path(__file__).parent.parent / "data"
EXPECTED = np.load(DATA / "hf_logits.npz")


def write_folder(folder: Path, config: dict, weights: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / "model.safetensors"
    )


@pytest.mark.parametrize(("name", "config", "seed"), CASES, ids=[case[0] for case in CASES])
def test_logits_agree_with_hugging_face(tmp_path, name, config, seed):
    write_folder(tmp_path / name, config, state_dict(config, seed))
    model = load_hf(tmp_path / name, dtype=jnp.float32)
    got = np.asarray(model.dense(jnp.asarray(tokens(config, seed))))
    want = EXPECTED[name]
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_every_expected_case_is_run():
    assert set(EXPECTED.files) == {case[0] for case in CASES}


@pytest.mark.parametrize(
    ("head_dim", "factor", "bands"), [(64, 32, (15, 3, 14)), (128, 8, (29, 6, 29))]
)
def test_llama3_rope_scaling_has_three_bands(head_dim, factor, bands):
    scaled = inverse_frequencies(head_dim, 500000.0, Llama3Scaling(factor, 1, 4, 8192))
    plain = inverse_frequencies(head_dim, 500000.0)
    ratio = plain / scaled
    same, divided = np.isclose(ratio, 1), np.isclose(ratio, factor)
    assert (same.sum(), (~same & ~divided).sum(), divided.sum()) == bands
    assert np.isclose(ratio[-1], factor)
