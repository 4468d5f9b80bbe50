"""The Llama family's configuration, read from Hugging Face's `config.json`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxkv._util import require_positive
from jaxkv.errors import ConfigError
from jaxkv.models.hf_config import read_hf_config


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

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _require_number(name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(f"high_freq_factor={self.high_freq_factor} must exceed "
                              f"low_freq_factor={self.low_freq_factor}")  # fmt: skip
        require_positive(original_max_position_embeddings=self.original_max_position_embeddings)


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
            require_positive(**{name: getattr(self, name)})
            object.__setattr__(self, name, int(getattr(self, name)))  # JSON has no NumPy integers
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        for token in self.eos_token_ids:
            if type(token) is not int or token < 0:
                raise ConfigError(f"eos_token_ids={self.eos_token_ids!r} must be token ids")
        _require_number("rope_theta", self.rope_theta)
        _require_number("rms_norm_eps", self.rms_norm_eps, zero=True)
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
        for divisor in self.rope_divisors or ():
            _require_number("rope_divisors", divisor)

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, generation: dict[str, Any] | None = None):
        """Makes a config from the contents of `config.json` and `generation_config.json`, if given.

        Raises:
          ConfigError: an unsupported, unknown, missing or mistyped field; the error names it.
        """
        fields = read_hf_config(config, generation or {})
        if (scaling := fields["rope_scaling"]) is not None:
            fields["rope_scaling"] = Llama3Scaling(**scaling)
        return cls(**fields)

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


def _require_number(name: str, value: Any, *, zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{name}={value!r} must be a {'finite' if zero else 'positive'} number")
