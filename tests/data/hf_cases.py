"""Small Llama models, made from a seed, for comparing logits with Hugging Face transformers.

NumPy only: both the maker of the references (make_hf_logits.py, in its own environment) and the
project's tests import this file, so both sides build the very same weights and tokens.

Usage::

    from hf_cases import CASES, state_dict, tokens

    for name, config, seed in CASES:
        weights = state_dict(config, seed)  # Hugging Face key names, float32
        ids = tokens(config, seed)  # int32 [2, 40]
        expected = np.load("hf_logits.npz")[name]  # float32 [2, 40, vocab]
"""

from __future__ import annotations

from typing import Any

import numpy as np

Config = dict[str, Any]

BATCH, LENGTH = 2, 40
VOCAB = 97


def _llama3(factor: float, original: int = 8192) -> Config:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def _config(hidden: int, heads: int, kv_heads: int, **changes: Any) -> Config:
    """A config.json as published Llama checkpoints have it (the form of transformers 4)."""
    config: Config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return config | changes


def _new_rope_form(config: Config) -> Config:
    """The same config as transformers 5 writes it: one "rope_parameters" for the two old keys."""
    config = dict(config)
    theta = config.pop("rope_theta")
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    return config | {"rope_parameters": {"rope_theta": theta, **scaling}}


CASES: list[tuple[str, Config, int]] = [
    ("mha", _config(64, 4, 4), 101),
    ("mha_tied_eps6", _config(48, 4, 4, tie_word_embeddings=True, rms_norm_eps=1e-6), 102),
    ("gqa_9_3", _config(144, 9, 3, tie_word_embeddings=True, rope_theta=100000.0), 103),
    ("gqa_9_3_head64", _config(72, 9, 3, head_dim=64, tie_word_embeddings=True), 104),
    ("gqa_32_8", _config(256, 32, 8, rope_theta=500000.0), 105),
    ("gqa_32_8_head64", _config(64, 32, 8, head_dim=64, rope_theta=500000.0), 106),
    ("mqa", _config(64, 4, 1), 107),
    ("head16_not_hidden_over_heads", _config(64, 8, 2, head_dim=16), 108),
    ("head64", _config(128, 2, 2, head_dim=64, rms_norm_eps=1e-6), 109),
    ("head80", _config(160, 2, 1), 110),
    ("head96", _config(80, 4, 2, head_dim=96), 111),
    ("head128", _config(96, 2, 1, head_dim=128, rope_theta=500000.0), 112),
    ("head256", _config(96, 2, 1, head_dim=256, tie_word_embeddings=True), 113),
    ("attention_bias", _config(64, 4, 2, attention_bias=True), 114),
    ("mlp_bias", _config(64, 4, 2, mlp_bias=True), 115),
    (
        "both_biases_tied",
        _config(80, 5, 5, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        116,
    ),
    (
        "llama3_factor32_head64",
        _config(
            64, 4, 1, head_dim=64, rope_theta=500000.0, rope_scaling=_llama3(32.0),
            max_position_embeddings=131072, tie_word_embeddings=True,
        ),
        117,
    ),
    (
        "llama3_factor8_head128",
        _config(
            96, 2, 1, head_dim=128, rope_theta=500000.0, rope_scaling=_llama3(8.0),
            max_position_embeddings=131072,
        ),
        118,
    ),
    # Wavelengths reach past 32 positions, so all three bands of the scaling change these logits.
    (
        "llama3_small_original",
        _config(64, 4, 2, head_dim=64, rope_scaling=_llama3(8.0, original=32)),
        119,
    ),
    (
        "llama3_rope_parameters",
        _new_rope_form(
            _config(64, 4, 2, head_dim=32, rope_theta=500000.0, rope_scaling=_llama3(32.0, 16))
        ),
        120,
    ),
    ("plain_rope_parameters", _new_rope_form(_config(64, 4, 2, rope_theta=500000.0)), 121),
]  # fmt: skip

# Arrays of hf_rope.npz: the rotary inverse frequencies that transformers makes for these.
ROPE_CASES: dict[str, Config] = {
    "head64_theta500000": _config(64, 1, 1, head_dim=64, rope_theta=500000.0),
    "head64_theta500000_llama3_factor32": _config(
        64, 1, 1, head_dim=64, rope_theta=500000.0, rope_scaling=_llama3(32.0),
        max_position_embeddings=131072,
    ),
    "head128_theta500000": _config(64, 1, 1, head_dim=128, rope_theta=500000.0),
    "head128_theta500000_llama3_factor8": _config(
        64, 1, 1, head_dim=128, rope_theta=500000.0, rope_scaling=_llama3(8.0),
        max_position_embeddings=131072,
    ),
}  # fmt: skip


def head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def state_dict(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights under Hugging Face key names; no "lm_head.weight" when it is tied."""
    rng = np.random.RandomState(seed)  # its stream is frozen, unlike default_rng's
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * head_dim(config)
    kv_size = config["num_key_value_heads"] * head_dim(config)
    out: dict[str, np.ndarray] = {}

    def draw(*shape: int, mean: float = 0.0, std: float = 1.0) -> np.ndarray:
        return (mean + std * rng.standard_normal(shape)).astype(np.float32)

    def linear(name: str, rows: int, columns: int, gain: float, bias: bool) -> None:
        out[f"{name}.weight"] = draw(rows, columns, std=gain / columns**0.5)
        if bias:
            out[f"{name}.bias"] = draw(rows, std=0.3)

    # Small enough that rms_norm_eps matters in layer 0; tied, it also has to make good logits.
    tied = config["tie_word_embeddings"]
    out["model.embed_tokens.weight"] = draw(
        config["vocab_size"], hidden, std=hidden**-0.5 if tied else 0.05
    )
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        bias = config["attention_bias"]
        out[f"{prefix}.input_layernorm.weight"] = draw(hidden, mean=1.0, std=0.2)
        # The gain on q and k spreads the attention scores, so that positions matter.
        linear(f"{prefix}.self_attn.q_proj", q_size, hidden, 1.4, bias)
        linear(f"{prefix}.self_attn.k_proj", kv_size, hidden, 1.4, bias)
        linear(f"{prefix}.self_attn.v_proj", kv_size, hidden, 1.0, bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, q_size, 1.0, bias)
        bias = config["mlp_bias"]
        out[f"{prefix}.post_attention_layernorm.weight"] = draw(hidden, mean=1.0, std=0.2)
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, 1.0, bias)
        linear(f"{prefix}.mlp.up_proj", inner, hidden, 1.0, bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, 1.5, bias)
    out["model.norm.weight"] = draw(hidden, mean=1.0, std=0.2)
    if not tied:
        linear("lm_head", config["vocab_size"], hidden, 1.0, False)
    return out


def tokens(config: Config, seed: int) -> np.ndarray:
    """Int32 token ids [2, 40]."""
    rng = np.random.RandomState(seed + 1_000_000)
    return rng.randint(0, config["vocab_size"], size=(BATCH, LENGTH)).astype(np.int32)
