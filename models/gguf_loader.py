"""GGUF files of the llama architecture: config, tensors (dequantised), tokenizer fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from jaxkv.errors import ConfigError
from jaxkv.models.config import LlamaConfig
from jaxkv.models.llama import Llama
from jaxkv.models.weights import CheckpointError, Reader, build

# Keys of the architecture that shape the computation and are read here, or say nothing about it.
_KNOWN = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "tensor_data_layout",
}  # fmt: skip

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


class GGUFFile:
    """An opened GGUF file.

    Raises:
      CheckpointError: not a GGUF file, cut short, or a tensor named twice.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = GGUFReader(path)
        except FileNotFoundError:
            raise CheckpointError(f"no such file: {path}") from None
        except Exception as error:  # the reader raises whatever the damage trips
            raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from None
        self.fields: dict[str, Any] = {}
        for key, field in reader.fields.items():
            if not key.startswith("GGUF."):
                self.fields[key] = field.contents()
        self.tensors: dict[str, ReaderTensor] = {t.name: t for t in reader.tensors}
        if len(self.tensors) != len(reader.tensors):
            raise CheckpointError(f"{path} names a tensor twice")

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(key, default)

    def need(self, key: str) -> Any:
        if key not in self.fields:
            raise CheckpointError(f"{self.path} lacks the field {key}")
        return self.fields[key]


def read_gguf_config(file: GGUFFile) -> LlamaConfig:
    """The file's config.

    Raises:
      ConfigError: another architecture, or a field that the model cannot honour, by name.
    """
    architecture = file.need("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{file.path}: general.architecture={architecture!r}; only 'llama' is "
                          "supported")  # fmt: skip
    prefix = "llama."
    unknown = [key for key in file.fields if key.startswith(prefix)
               and key.removeprefix(prefix) not in _KNOWN]  # fmt: skip
    if unknown:
        raise ConfigError(f"{file.path}: cannot honour {', '.join(sorted(unknown))}")
    scaling = file.get(prefix + "rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(f"{file.path}: {prefix}rope.scaling.type={scaling!r} is not supported")
    heads = file.need(prefix + "attention.head_count")
    hidden = file.need(prefix + "embedding_length")
    head_dim = file.get(prefix + "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(prefix + key, head_dim) != head_dim:
            raise ConfigError(f"{file.path}: {prefix}{key}={file.get(prefix + key)} differs from "
                              f"the head dimension {head_dim}")  # fmt: skip
    divisors = file.tensors.get("rope_freqs.weight")
    vocab = file.tensors.get("token_embd.weight")
    if vocab is None:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight")
    return LlamaConfig(
        vocab_size=int(vocab.shape[-1]),
        hidden_size=hidden,
        intermediate_size=file.need(prefix + "feed_forward_length"),
        num_layers=file.need(prefix + "block_count"),
        num_heads=heads,
        num_kv_heads=file.get(prefix + "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=file.need(prefix + "context_length"),
        rms_norm_eps=file.need(prefix + "attention.layer_norm_rms_epsilon"),
        rope_theta=file.get(prefix + "rope.freq_base", 10000.0),
        rope_divisors=None if divisors is None else tuple(_read(divisors).ravel().tolist()),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        eos_token_ids=_end_tokens(file),
    )


def load_gguf(file: GGUFFile, *, dtype: Any, progress: bool = False) -> Llama:
    """The model of a GGUF file, its tensors dequantised.

    Raises:
      CheckpointError: tensors missing, unexpected, or of an unknown quantisation.
      ConfigError: a config that the model cannot honour.
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
        value = _read(tensor)
        return value if rotated is None else _halves(value, rotated)

    return read


def _read(tensor: ReaderTensor) -> np.ndarray:
    try:
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError:
        raise CheckpointError(
            f"tensor {tensor.name}: cannot dequantise {tensor.tensor_type.name}"
        ) from None


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k reordered from rotating neighbours (2i, 2i + 1), as GGUF's llama does, to
    rotating halves (i, i + head_dim / 2), as this model does."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _end_tokens(file: GGUFFile) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id")  # fmt: skip
    found = (file.get(key) for key in keys)
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))
