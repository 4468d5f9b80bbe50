"""Sampling parameters of a request. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxkv.sampling.checks import (
    INT32_MAX,
    Bias,
    Check,
    Flag,
    Float,
    Instance,
    Integer,
    Optional,
    Texts,
    TokenIds,
    require,
)

MAX_STOP_TOKENS = (
    16  # most ids that end a request, the model's own included: a step compares with all
)
MAX_LOGIT_BIAS = 64
MAX_SAMPLES = 1 << 16


class LogitsProcessor(NamedTuple):
    """A user's function on the logits, with its own state.

    Requests that use the same processor should share the object: steps are compiled once for each.

    Attributes:
      init: () -> state, a PyTree of arrays: the state at the start of a request.
      apply: (logits f32[vocab_size], state, token_ids i32[max_len], length i32[]) ->
        (logits, state). A pure JAX function of one sequence; `token_ids[:length]` are its tokens,
        the prompt included. It runs after bias and penalties, before temperature and limits.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv import LogitsProcessor
      >>> only_even = LogitsProcessor(
      ...     init=lambda: (),
      ...     apply=lambda logits, state, tokens, length: (
      ...         jnp.where(jnp.arange(len(logits)) % 2 == 0, logits, -jnp.inf), state),
      ... )
    """

    init: Callable[[], Any]
    apply: Callable[[Any, Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling the tokens of a request.

    They apply in this order: bias, min_tokens, penalties, logits processor, temperature, min-p,
    top-k, top-p.

    Attributes:
      temperature: divisor of the logits; 0 is greedy.
      top_k: sample from the k most likely tokens; 0 is off.
      top_p: sample from the fewest most likely tokens whose probabilities sum to p; 1 is off.
      min_p: sample from tokens with at least this share of the highest probability; 0 is off.
      repetition_penalty: divisor of positive, factor of negative logits of tokens that the prompt
        or the output contains; 1 is off (CTRL, https://arxiv.org/abs/1909.05858).
      presence_penalty: subtracted from the logits of tokens that the output contains; 0 is off.
      frequency_penalty: subtracted once for each occurrence in the output; 0 is off.
      logit_bias: {token id: addend to its logit}, at most 64 entries.
      seed: seed of the request's PRNG keys. A token depends on seed, sample and position, not on
        the batch, nor on preemption. None: the engine draws one for each request.
      n: number of samples; the prompt is computed once.
      best_of: number of samples to draw; the `n` with the highest mean log-probability are
        returned. None: n.
      max_tokens: most tokens to generate.
      min_tokens: tokens before which no stop token is sampled.
      stop_token_ids: token ids that end the request, beside the model's own end tokens; the token
        is part of the output.
      stop: texts that end the request; the output text ends before them.
      ignore_eos: continue past the model's end tokens (not past `stop_token_ids`).
      detokenize: return text beside token ids, if the engine has a tokenizer.
      logprobs: number of most likely tokens to report at each position, beside the log-probability
        of the sampled token; the model's own, before all of the above. None: no log-probabilities.
      prompt_logprobs: also report log-probabilities of the prompt tokens. Such a prompt is computed
        whole, since a cached prefix has no logits.
      logits_processor: a user's function on the logits.

    Raises:
      ConfigError: a value out of range, by name.

    Example:
      >>> from jaxkv import SamplingParams
      >>> SamplingParams(top_k=-1)
      Traceback (most recent call last):
      jaxkv.errors.ConfigError: top_k=-1 must be an integer from 0 to 2147483647 (0 is off)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    max_tokens: int = 64
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: bool = False
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        for name, check in _SAMPLING.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        require(self.best_of is None or self.best_of >= self.n,
                "best_of", self.best_of, f"None or at least n={self.n}")  # fmt: skip
        require(self.min_tokens <= self.max_tokens,
                "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")  # fmt: skip

    @property
    def num_samples(self) -> int:
        """Number of samples to draw."""
        return self.best_of or self.n


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search for the most likely continuations.

    Attributes:
      width: number of hypotheses kept at every step, and returned at the end.
      max_tokens: most tokens of a hypothesis.
      length_penalty: exponent e of the ranking by log-probability / generated tokens ** e.
      early_stopping: True: end when `width` hypotheses have ended; False: end when no live
        hypothesis can still beat the worst of these.
      stop_token_ids: token ids that end a hypothesis, beside the model's own end tokens.
      ignore_eos: continue past the model's end tokens.
      detokenize: return text beside token ids, if the engine has a tokenizer.

    Raises:
      ConfigError: a value out of range, by name.
    """

    width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, check in _BEAM_SEARCH.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @property
    def num_samples(self) -> int:
        """Number of hypotheses kept."""
        return self.width


# One table of every parameter: its type, and the range that its array on the device holds.
_SAMPLING: dict[str, Check] = {
    "temperature": Float(0, hint="0 is greedy"),
    "top_k": Integer(0, INT32_MAX, hint="0 is off"),
    "top_p": Float(0, 1, open_low=True, hint="1 is off"),
    "min_p": Float(0, 1, hint="0 is off"),
    "repetition_penalty": Float(0, open_low=True, hint="1 is off"),
    "presence_penalty": Float(hint="0 is off"),
    "frequency_penalty": Float(hint="0 is off"),
    "logit_bias": Bias(MAX_LOGIT_BIAS),
    "seed": Optional(Integer(0, 2**32 - 1)),
    "n": Integer(1, MAX_SAMPLES),
    "best_of": Optional(Integer(1, MAX_SAMPLES)),
    "max_tokens": Integer(0, INT32_MAX),
    "min_tokens": Integer(0, INT32_MAX),
    "stop_token_ids": TokenIds(),
    "stop": Texts(),
    "ignore_eos": Flag(),
    "detokenize": Flag(),
    "logprobs": Optional(Integer(0, 64)),
    "prompt_logprobs": Flag(),
    "logits_processor": Optional(Instance(LogitsProcessor)),
}
_BEAM_SEARCH: dict[str, Check] = {
    "width": Integer(1, 32),
    "max_tokens": Integer(1, INT32_MAX),
    # Scores are powers of a length: these stay finite for every length of 32 bits.
    "length_penalty": Float(-16, 16),
    "early_stopping": Flag(),
    "stop_token_ids": TokenIds(),
    "ignore_eos": Flag(),
    "detokenize": Flag(),
}
