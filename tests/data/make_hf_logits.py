"""Make hf_logits.npz and hf_rope.npz with Hugging Face transformers.

Its own environment needs: torch (a CPU build is enough), transformers, safetensors, numpy.

Usage::

    python tests/data/make_hf_logits.py

Each case of hf_cases.py is written out as a checkpoint folder (config.json and model.safetensors),
loaded with LlamaForCausalLM.from_pretrained, and run in float32 with eager attention. The logits
go into hf_logits.npz under the case's name; hf_rope.npz has the inverse frequencies of ROPE_CASES.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from hf_cases import CASES, ROPE_CASES, Config, head_dim, state_dict, tokens
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).resolve().parent


def check_config(loaded: LlamaConfig, config: Config) -> None:
    """Assert that transformers read the keys as we mean them, whichever rope form it keeps."""
    old_form = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    wanted = config.get("rope_parameters") or old_form
    read = getattr(loaded, "rope_parameters", None)
    if read is None:  # transformers 4
        read = {"rope_theta": loaded.rope_theta, **(loaded.rope_scaling or {})}
    for key, value in wanted.items():
        assert read[key] == value, (key, read)
    assert read.get("rope_type", "default") == wanted.get("rope_type", "default"), read
    for key in ("rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings"):
        assert getattr(loaded, key) == config[key], key


def load(config: Config, seed: int, folder: Path) -> LlamaForCausalLM:
    """Write the case as a checkpoint and load it, asserting that every key found its place."""
    weights = state_dict(config, seed)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info.get(kind), (kind, info[kind])
    model.eval()
    check_config(model.config, config)
    assert model.config._attn_implementation == "eager"
    # from_pretrained's own report is not proof of the values, so compare them as well.
    state = model.state_dict()
    assert set(state) - set(weights) <= {"lm_head.weight"}, set(state) ^ set(weights)
    for key, value in weights.items():
        assert state[key].dtype == torch.float32
        np.testing.assert_array_equal(state[key].numpy(), value, err_msg=key)
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == config["tie_word_embeddings"]
    return model


def main() -> None:
    print("python", sys.version.split()[0], "torch", torch.__version__, end=" ")
    print("transformers", transformers.__version__, "numpy", np.__version__)
    torch.manual_seed(0)

    logits: dict[str, np.ndarray] = {}
    for name, config, seed in CASES:
        with tempfile.TemporaryDirectory() as folder:
            model = load(config, seed, Path(folder))
        ids = torch.from_numpy(tokens(config, seed).astype(np.int64))
        with torch.inference_mode():
            logits[name] = model(input_ids=ids, use_cache=False).logits.numpy()
        assert logits[name].dtype == np.float32
        print(f"{name:30s} head_dim {head_dim(config):3d}  std {logits[name].std():.3f}")
    np.savez_compressed(HERE / "hf_logits.npz", **logits)

    rope: dict[str, np.ndarray] = {}
    for name, config in ROPE_CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            loaded = LlamaConfig.from_pretrained(folder)
        check_config(loaded, config)
        rope[name] = LlamaRotaryEmbedding(loaded).inv_freq.numpy().astype(np.float32)
    np.savez_compressed(HERE / "hf_rope.npz", **rope)
    for path in ("hf_logits.npz", "hf_rope.npz"):
        print("wrote", path, (HERE / path).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
