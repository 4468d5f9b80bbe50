"""The Llama family's configuration, read from Hugging Face's `config.json`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxkv.errors import ConfigError

# Fields that change the computation, and the only value of each that this model supports.
_ONLY = {
    "model_type": "llama",
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "sliding_window": None,
    "quantization_config": None,
    "logit_scale": None,
    "embedding_multiplier": None,
    "residual_multiplier": None,
    "attention_multiplier": None,
}


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's frequency scaling: long wavelengths are stretched by `factor`.

    Attributes:
      factor: factor by which the longest wavelengths are stretched.
      low_freq_factor: wavelengths above original / low_freq_factor are stretched in full.
      high_freq_factor: wavelengths below original / high_freq_factor are not stretched.
      original_max_position_embeddings: context length before scaling, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a Llama.

    Attributes:
      vocab_size: rows of the embedding.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: transformer layers.
      num_heads: query heads.
      num_kv_heads: key/value heads; divides num_heads.
      head_dim: elements of one head; need not be hidden_size / num_heads.
      max_position_embeddings: context length in tokens.
      rms_norm_eps: epsilon of the RMS norms.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama 3's frequency scaling, or None.
      rope_divisors: explicit frequency divisors (head_dim // 2), as GGUF files carry them.
      tie_word_embeddings: whether the head is the embedding.
      attention_bias: whether q, k, v and o projections have biases.
      mlp_bias: whether gate, up and down projections have biases.
      eos_token_ids: tokens that end a generation.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    rope_divisors: tuple[float, ...] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                 "num_kv_heads", "head_dim", "max_position_embeddings")  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.rope_divisors is not None and len(self.rope_divisors) != self.head_dim // 2:
            raise ConfigError(
                f"rope_divisors must have head_dim // 2 = {self.head_dim // 2} entries, got "
                f"{len(self.rope_divisors)}"
            )

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, generation: dict[str, Any] | None = None):
        """Makes a config from the contents of `config.json` and `generation_config.json`, if given.

        Raises:
          ConfigError: an unsupported or missing field; the error names it.
        """
        for field, wanted in _ONLY.items():
            value = config.get(field, wanted)
            if value != wanted and value is not None:
                raise ConfigError(f"{field}={value!r} is not supported; only {wanted!r} is")

        def need(field: str) -> Any:
            if config.get(field) is None:
                raise ConfigError(f"{field} is missing from the model's config")
            return config[field]

        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        heads = need("num_attention_heads")
        return cls(
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or need("hidden_size") // heads,
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope),
            rope_divisors=tuple(config["rope_divisors"]) if "rope_divisors" in config else None,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=_end_tokens(config, generation or {}),
        )

    def to_hf(self) -> dict[str, Any]:
        """The contents of `config.json`; the inverse of `from_hf`."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        out = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "eos_token_id": list(self.eos_token_ids),
        }
        if self.rope_divisors is not None:
            out["rope_divisors"] = list(self.rope_divisors)
        return out


def _rope_scaling(rope: dict[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(
            f"rope_scaling type {kind!r} is not supported; 'default' and 'llama3' are"
        )
    fields = [field.name for field in dataclasses.fields(Llama3Scaling)]
    missing = [name for name in fields if name not in rope]
    if missing:
        raise ConfigError(f"rope_scaling of type 'llama3' lacks {', '.join(missing)}")
    return Llama3Scaling(**{name: rope[name] for name in fields})


def _end_tokens(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """All end tokens of both files; for chat models each may lack some of the other's."""
    ids: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if token not in ids:
                ids.append(token)
    return tuple(ids)
