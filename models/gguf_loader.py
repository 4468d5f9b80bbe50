"""Llama weights from GGUF files: tensors renamed, dequantised and reordered."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import ReaderTensor

from jaxkv.models.config import LlamaConfig
from jaxkv.models.files import GGUFFile, read_gguf_config, read_tensor
from jaxkv.models.llama import Llama
from jaxkv.models.weights import Reader, build

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


def load_gguf(file: GGUFFile, *, dtype: Any, progress: bool = False) -> Llama:
    """Loads the model of a GGUF file; dequantises its tensors.

    Raises:
      CheckpointError: missing or unexpected tensors, or an unsupported quantisation.
      ConfigError: an unsupported config.
    """
    config = read_gguf_config(file)
    tensors: dict[str, Reader] = {}
    for name, tensor in file.tensors.items():
        if name != "rope_freqs.weight":
            tensors[_hf_name(name)] = _reader(tensor, config, name)
    return build(config, tensors, dtype=dtype, source=str(file.path), progress=progress)


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")  # blk.<layer>.<module>.<weight | bias>
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return name  # reported as unexpected


def _reader(tensor: ReaderTensor, config: LlamaConfig, name: str) -> Reader:
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    rotated = next((count for key, count in heads.items() if f".{key}." in name), None)

    def read() -> np.ndarray:
        value = read_tensor(tensor)
        return value if rotated is None else _halves(value, rotated)

    return read


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows of q or k for another pairing in RoPE.

    GGUF's llama rotates neighbours (2i, 2i + 1), this model halves (i, i + head_dim / 2).
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)
