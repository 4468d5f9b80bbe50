"""Llama weights from GGUF files: tensors renamed, dequantised and reordered."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from jaxkv.models.config import LlamaConfig
from jaxkv.models.gguf_config import ROPE_FREQS, read_gguf_config
from jaxkv.models.gguf_file import GGUFFile, GGUFTensor, can_read, read_tensor
from jaxkv.models.llama import Llama
from jaxkv.models.weights import StoredTensor, build

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Frequencies: the config holds the first; old files have the others, which llama.cpp ignores.
_IGNORED = re.compile(rf"{ROPE_FREQS}|blk\.\d+\.attn_rot_embd(\.weight)?")


def load_gguf(file: GGUFFile, *, dtype: Any, progress: bool = False) -> Llama:
    """Loads the model of a GGUF file; dequantises its tensors.

    Raises:
      CheckpointError: missing or unexpected tensors, an unsupported quantisation, or weights that
        do not fit the memory.
      ConfigError: an unsupported config.
    """
    config = read_gguf_config(file)
    tensors = {
        _hf_name(name): _stored(tensor, config)
        for name, tensor in file.tensors.items()
        if not _IGNORED.fullmatch(name)
    }
    tensors = _zero_biases(config) | tensors
    return build(config, tensors, dtype=dtype, source=str(file.path), progress=progress)


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")  # blk.<layer>.<module>.<weight | bias>
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return name  # reported as unexpected


def _stored(tensor: GGUFTensor, config: LlamaConfig) -> StoredTensor:
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    rotated = next((count for key, count in heads.items() if f".{key}." in tensor.name), None)

    def read() -> np.ndarray:
        value = read_tensor(tensor)
        return value if rotated is None else _halves(value, rotated)

    unsupported = "" if can_read(tensor.kind) else f"quantisation {tensor.kind.name}"
    return StoredTensor(tensor.shape, read, unsupported)


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows of q or k for another pairing in RoPE.

    GGUF's llama rotates neighbours (2i, 2i + 1), this model halves (i, i + head_dim / 2).
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _zero_biases(config: LlamaConfig) -> dict[str, StoredTensor]:
    """Biases of all modules that can have one: a file may have some of them, of some layers."""
    c = config
    attention = {
        "self_attn.q_proj": c.num_heads * c.head_dim,
        "self_attn.k_proj": c.num_kv_heads * c.head_dim,
        "self_attn.v_proj": c.num_kv_heads * c.head_dim,
        "self_attn.o_proj": c.hidden_size,
    }
    mlp = {
        "mlp.gate_proj": c.intermediate_size,
        "mlp.up_proj": c.intermediate_size,
        "mlp.down_proj": c.hidden_size,
    }
    sizes = (attention if c.attention_bias else {}) | (mlp if c.mlp_bias else {})
    return {
        f"model.layers.{layer}.{module}.bias": StoredTensor(
            (size,), lambda size=size: np.zeros(size, np.float32)
        )
        for layer in range(c.num_layers)
        for module, size in sizes.items()
    }
