"""The config of a GGUF file: each field of its architecture is read, harmless, or refused."""

from __future__ import annotations

import re
from typing import Any

from jaxkv.errors import ConfigError
from jaxkv.models.config import LlamaConfig
from jaxkv.models.errors import CheckpointError
from jaxkv.models.gguf_file import GGUFFile, brief, can_read, read_tensor
from jaxkv.models.gguf_vocabulary import PREFIX, read_end_tokens

ROPE_FREQS = "rope_freqs.weight"

# Fields of the architecture that are read below, or that do not affect the computation.
_KNOWN = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count",
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout",
    "attention.layer_norm_epsilon", "expert_count",
}  # fmt: skip
# Fields that change the computation, and the values of each that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "hidden_activation": ("silu", "swish"),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "use_parallel_residual": (False,),
}


def read_gguf_config(file: GGUFFile) -> LlamaConfig:
    """The config of a GGUF file.

    Raises:
      CheckpointError: fields or tensors that are missing or contradict each other.
      ConfigError: an unsupported architecture or field; the error names it.
    """
    kind = file.get("general.type", str, "model")
    if kind != "model":
        raise ConfigError(f"{file.path}: general.type={kind!r}; only a 'model' can be loaded")
    architecture = file.need("general.architecture", str)
    if architecture != "llama":
        raise ConfigError(f"{file.path}: general.architecture={architecture!r}; only 'llama' is "
                          "supported")  # fmt: skip
    _refuse_unknown(file)
    _refuse_scaled_rope(file)
    layers = file.need("llama.block_count", int)
    heads = _per_layer(file, "llama.attention.head_count", layers)
    hidden = file.need("llama.embedding_length", int)
    head_dim = _head_dim(file, hidden, heads)
    vocab = file.tensors.get("token_embd.weight")
    if vocab is None:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight")
    rows = vocab.shape[0] if vocab.shape else 0
    try:
        return LlamaConfig(
            vocab_size=rows,
            hidden_size=hidden,
            intermediate_size=_per_layer(file, "llama.feed_forward_length", layers),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_per_layer(file, "llama.attention.head_count_kv", layers, heads),
            head_dim=head_dim,
            max_position_embeddings=file.need("llama.context_length", int),
            rms_norm_eps=file.need("llama.attention.layer_norm_rms_epsilon", float),
            rope_theta=file.get("llama.rope.freq_base", float, 10000.0),
            rope_divisors=_divisors(file),
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias=_has_bias(file, r"attn_(q|k|v|output)"),
            mlp_bias=_has_bias(file, r"ffn_(gate|up|down)"),
            eos_token_ids=_end_tokens(file, rows),
        )
    except ConfigError as error:  # it names the config's fields
        raise ConfigError(f"{file.path}: {error}") from None


def _refuse_unknown(file: GGUFFile) -> None:
    # Keys outside the architecture's namespace are not read by anything that computes.
    dense = file.get("llama.expert_count", int, 0) == 0
    if not dense:
        raise ConfigError(f"{file.path}: llama.expert_count={file.fields['llama.expert_count']}: "
                          "mixtures of experts are not supported")  # fmt: skip
    for key, value in sorted(file.fields.items()):
        field = key.removeprefix("llama.")
        if field == key or field in _KNOWN or field.startswith("expert_"):
            continue
        if field not in _NEUTRAL:
            raise ConfigError(f"{file.path}: the field {key}={brief(value)} is not supported")
        if value not in _NEUTRAL[field]:
            allowed = " and ".join(repr(x) for x in _NEUTRAL[field])
            raise ConfigError(f"{file.path}: {key}={brief(value)} is not supported; only {allowed} "
                              "can be loaded")  # fmt: skip


def _refuse_scaled_rope(file: GGUFFile) -> None:
    """Frequencies are as the file's base says, or divided by its `rope_freqs` tensor."""
    key = "llama.rope.scaling.type"
    kind = file.get(key, str, "linear")  # what a factor without a type means
    if kind == "none":
        return
    old = "llama.rope.scale_linear"
    name = "llama.rope.scaling.factor" if "llama.rope.scaling.factor" in file.fields else old
    factor = file.get(name, float, 0)
    if kind != "linear":
        raise ConfigError(f"{file.path}: {key}={kind!r} is not supported; only 'none' is")
    if factor not in (0, 1):
        given = "" if key in file.fields else f" (which a missing {key} means)"
        raise ConfigError(f"{file.path}: {name}={factor} with linear scaling of RoPE{given} is not "
                          "supported; only a factor of 1 is")  # fmt: skip


def _head_dim(file: GGUFFile, hidden: int, heads: int) -> int:
    head_dim = file.get("llama.attention.key_length", int)
    if head_dim is None:
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"{file.path}: llama.embedding_length={hidden} must be a multiple of "
                f"llama.attention.head_count={heads}, as llama.attention.key_length is missing"
            )
        head_dim = hidden // heads
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (value := file.get(key, int, head_dim)) != head_dim:
            raise ConfigError(f"{file.path}: {key}={value} differs from the head dimension "
                              f"{head_dim}")  # fmt: skip
    return head_dim


def _divisors(file: GGUFFile) -> tuple[float, ...] | None:
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    if not can_read(tensor.kind):
        raise CheckpointError(f"{file.path}: {ROPE_FREQS} is stored with quantisation "
                              f"{tensor.kind.name}, which is not supported")  # fmt: skip
    return tuple(read_tensor(tensor).ravel().tolist())


def _per_layer(file: GGUFFile, key: str, layers: int, default: int | None = None) -> int:
    """An integer, which the file may give once or for each layer."""
    value = file.fields.get(key)
    if not isinstance(value, list):
        return file.need(key, int) if default is None else file.get(key, int, default)
    if len(value) != layers:
        raise CheckpointError(f"{file.path}: {key}={brief(value)} must have an integer for each of "
                              f"{layers} layers")  # fmt: skip
    if len(set(value)) != 1 or type(value[0]) is not int:
        raise ConfigError(f"{file.path}: {key}={brief(value)}: layers of different sizes are not "
                          "supported")  # fmt: skip
    return value[0]


def _has_bias(file: GGUFFile, modules: str) -> bool:
    pattern = re.compile(rf"blk\.\d+\.{modules}\.bias")
    return any(pattern.fullmatch(name) for name in file.tensors)


def _end_tokens(file: GGUFFile, rows: int) -> tuple[int, ...]:
    key = PREFIX + "tokens"
    if key not in file.fields:  # a file of weights alone
        return ()
    if (count := len(file.need(key, list))) != rows:
        raise CheckpointError(f"{file.path}: {key} has {count} texts, and token_embd.weight has "
                              f"{rows} rows")  # fmt: skip
    return read_end_tokens(file)
