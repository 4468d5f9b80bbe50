"""Hugging Face's `config.json`: each field is read, harmless, or refused by its name.

The lists are closed. A field that is unknown here may change the computation, so that it is refused
unless it is null; what transformers itself writes into a Llama's config is listed.
"""

from __future__ import annotations

import math
from typing import Any

from jaxkv.errors import ConfigError

_READ = {
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "rope_divisors",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "eos_token_id", "sliding_window",
    "use_sliding_window", "layer_types",
}  # fmt: skip
# Fields of training, of bookkeeping, and of other classes of transformers: none changes the logits.
_HARMLESS = {
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset",
    "_attn_implementation_internal", "_flash_attn_2_enabled", "attn_implementation",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "resid_pdrop",
    "initializer_range", "use_cache",
    "pretraining_tp",  # slices the same products
    "max_window_layers",  # which layers have the sliding window; there is none
    "bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "bos_token", "eos_token", "pad_token", "unk_token", "tokenizer_class", "model_max_length",
    "max_sequence_length", "torch_dtype", "dtype", "transformers_version", "transformers.js_config",
    "unsloth_version", "unsloth_fixed", "is_llama_config", "is_decoder", "gradient_checkpointing",
    "neftune_noise_alpha", "return_dict", "use_return_dict", "output_attentions",
    "output_hidden_states", "output_scores", "return_dict_in_generate", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "id2label", "label2id",
    "num_labels", "problem_type", "finetuning_task", "task_specific_params", "prefix",
    "name_or_path", "keys_to_ignore_at_inference",
    # choices of a generation, which are the caller's here
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff",
    "eta_cutoff", "repetition_penalty", "length_penalty", "diversity_penalty", "early_stopping",
    "num_beams", "num_beam_groups", "num_return_sequences", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "max_length", "min_length", "max_new_tokens",
    "min_new_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
    "remove_invalid_values",
}  # fmt: skip
# Fields that change the computation, and the values of each that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),  # two names of one function
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "bias": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),
    "quantization_config": (),
}
_ARCHITECTURES = ("LlamaForCausalLM", "LLaMAForCausalLM")


def read_hf_config(config: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `LlamaConfig` out of `config.json` and `generation_config.json`.

    Raises:
      ConfigError: an unsupported, unknown, missing or mistyped field; the error names it.
    """
    _refuse_unknown(config)
    _refuse_windows(config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", 0)
    if not head_dim:
        if hidden % heads and not heads % kv_heads:  # LlamaConfig refuses the latter
            raise ConfigError(f"hidden_size={hidden} must be a multiple of num_attention_heads="
                              f"{heads}, as head_dim is missing")  # fmt: skip
        head_dim = hidden // heads
    vocab_size = _size(config, "vocab_size")
    theta, scaling = _rope(config)
    divisors = config.get("rope_divisors")
    return dict(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_size(config, "max_position_embeddings", 2048),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_divisors=None if divisors is None else _divisors(divisors),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
        eos_token_ids=_end_tokens(config, generation, vocab_size),
    )


def _refuse_unknown(config: dict[str, Any]) -> None:
    for field, value in config.items():
        if value is None or field in _READ or field in _HARMLESS:
            continue
        if field not in _NEUTRAL:
            raise ConfigError(f"{field}={value!r:.80} is not supported: the field is unknown, and "
                              "it may change what the model computes")  # fmt: skip
        if value not in _NEUTRAL[field]:
            only = " or ".join(repr(x) for x in _NEUTRAL[field]) or "null"
            raise ConfigError(f"{field}={value!r:.80} is not supported; only {only} is")
    named = config.get("architectures")
    if not isinstance(named, list | None):
        raise ConfigError(f"architectures={named!r:.80} must be a list of names")
    if named and not any(name in _ARCHITECTURES for name in named):
        raise ConfigError(f"architectures={named!r:.80} is not supported; only "
                          f"{_ARCHITECTURES[0]!r} is")  # fmt: skip
    if not named and config.get("model_type") is None:
        raise ConfigError("model_type is missing from the model's config")


def _refuse_windows(config: dict[str, Any]) -> None:
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False:
        raise ConfigError(f"sliding_window={window!r:.80} is not supported; only null is, or any "
                          "with use_sliding_window=False")  # fmt: skip
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or set(types) - {"full_attention"}):
        raise ConfigError(f"layer_types={types!r:.80} is not supported; only 'full_attention' is")


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base of the frequencies, and the fields of Llama 3's scaling."""
    given = {name: config.get(name) for name in ("rope_parameters", "rope_scaling")}
    for name, value in given.items():
        if not isinstance(value, dict | None):
            raise ConfigError(f"{name}={value!r:.80} must be an object with a rope_type, or null")
    name = "rope_parameters" if given["rope_parameters"] else "rope_scaling"
    rope = dict(given[name] or {})
    if given["rope_scaling"] and given["rope_scaling"] != (given["rope_parameters"] or given[name]):
        raise ConfigError(f"rope_scaling={given['rope_scaling']!r:.80} contradicts rope_parameters="
                          f"{given['rope_parameters']!r:.80}")  # fmt: skip
    bases = [x for x in (rope.get("rope_theta"), config.get("rope_theta")) if x is not None]
    if len(bases) == 2 and bases[0] != bases[1]:
        raise ConfigError(f"{name} has rope_theta={bases[0]!r}, which contradicts rope_theta="
                          f"{bases[1]!r} outside it")  # fmt: skip
    theta = _number({"rope_theta": bases[0]} if bases else {}, "rope_theta", 10000.0)
    return theta, _scaling(name, {k: v for k, v in rope.items() if v is not None})


def _scaling(name: str, rope: dict[str, Any]) -> dict[str, Any] | None:
    kinds = [rope.pop(key) for key in ("rope_type", "type") if key in rope]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ConfigError(f"{name}: rope_type={kinds[0]!r} contradicts type={kinds[1]!r}")
    kind = kinds[0] if kinds else "default"
    rope.pop("rope_theta", None)
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"{name}: partial_rotary_factor must be 1; others are not supported")
    if kind in ("default", "linear") and rope.get("factor", 1 if kind == "default" else 0) == 1:
        rope.pop("factor", None)
        kind = "default"
    fields = {"default": (), "llama3": _LLAMA3}.get(kind if isinstance(kind, str) else "")
    if fields is None:
        raise ConfigError(f"{name} of type {kind!r:.80} is not supported; 'default' and 'llama3' "
                          "are, and 'linear' with a factor of 1")  # fmt: skip
    if unknown := [key for key in rope if key not in fields]:
        value = f"{unknown[0]}={rope[unknown[0]]!r:.80}"
        given = f"in type {kind!r}" if kinds else "without a rope_type"
        raise ConfigError(f"{name}: {value} {given} is not supported")
    if missing := [key for key in fields if key not in rope]:
        raise ConfigError(f"{name} of type {kind!r} lacks {', '.join(missing)}")
    if not fields:
        return None
    for key in _LLAMA3[:3]:
        _number(rope, key, 0, where=f"{name}: ")
    _size(rope, _LLAMA3[3], where=f"{name}: ")
    return rope


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _size(config: dict[str, Any], field: str, default: int | None = None, where: str = "") -> int:
    value = config.get(field)
    if value is None and default is not None:
        return default
    if value is None:
        raise ConfigError(f"{field} is missing from the model's config")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}{field}={value!r:.80} must be a positive integer")
    return value


def _number(config: dict[str, Any], field: str, default: float, where: str = "") -> float:
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{where}{field}={value!r:.80} must be a finite number")
    return float(value)


def _flag(config: dict[str, Any], field: str) -> bool:
    value = config.get(field)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{field}={value!r:.80} must be true or false")
    return bool(value)


def _divisors(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"rope_divisors={value!r:.80} must be a list of numbers")
    return tuple(_number({"rope_divisors": x}, "rope_divisors", 0) for x in value)


def _end_tokens(
    config: dict[str, Any], generation: dict[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """All end tokens of both files; for chat models each may lack some of the other's.

    Ids outside the vocabulary are left out: no model produces them.
    """
    ids: dict[int, None] = {}
    for name, source in (("generation_config.json: ", generation), ("", config)):
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token in listed:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ConfigError(f"{name}eos_token_id={value!r:.80} must be a token id or a list "
                                  "of them")  # fmt: skip
            if 0 <= token < vocab_size:
                ids[token] = None
    return tuple(ids)
