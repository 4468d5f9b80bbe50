"""How the tokens of one request are chosen. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxkv.errors import ConfigError

MAX_STOP_TOKENS = 16  # ids that end a request, the model's own among them: the device looks for all
MAX_LOGIT_BIAS = 64


class LogitsProcessor(NamedTuple):
    """A user's change of the logits, with a state of its own.

    One object for all requests that share it: steps are compiled for each object anew.

    Attributes:
      init: () -> state, a PyTree of arrays: where a request starts.
      apply: (logits f32[vocab_size], state, token_ids i32[max_len], length i32[]) ->
        (logits, state). A pure JAX function, for one sequence; `token_ids[:length]` are its tokens,
        the prompt included. Comes after bias and penalties, before temperature and limits.

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
    """How the tokens of one request are chosen.

    In this order: bias, min_tokens, penalties, logits processor, temperature, min-p, top-k, top-p.

    Attributes:
      temperature: 0 is greedy; logits are divided by it otherwise.
      top_k: only the k most likely tokens; 0 for all.
      top_p: only the most likely tokens whose probabilities reach p together; 1 for all.
      min_p: only tokens at least so likely, relative to the likeliest; 0 for all.
      repetition_penalty: logits of tokens that prompt or output hold are divided by it where
        positive, multiplied where negative; 1 is off (CTRL, https://arxiv.org/abs/1909.05858).
      presence_penalty: taken from the logits of tokens that the output holds; 0 is off.
      frequency_penalty: likewise, once for each time; 0 is off.
      logit_bias: {token id: what is added to its logit}, at most 64.
      seed: of the request's keys: a token depends on seed, sample and position, not on what else
        is in the batch, nor on preemption. None: one of the engine's own for each request.
      n: samples of the prompt, which is computed once.
      best_of: samples to draw, of which the `n` with the highest mean log-probability are given;
        None: n.
      max_tokens: most tokens to generate.
      min_tokens: no stop token before so many.
      stop_token_ids: end the request as the model's own end tokens do; the token is given out.
      stop: texts that end the request; given out is the text before.
      ignore_eos: go on past the model's end tokens (not past `stop_token_ids`).
      detokenize: give text beside token ids, if the engine has a tokenizer.
      logprobs: give each token's log-probability, and those of so many likeliest ones; the model's
        own, before all of the above. None: no.
      prompt_logprobs: give the prompt tokens' log-probabilities too. Such a prompt is computed
        whole: a cached prefix has no logits.
      logits_processor: a user's own change of the logits.

    Raises:
      ConfigError: a value out of range, by name.

    Example:
      >>> from jaxkv import SamplingParams
      >>> SamplingParams(temperature=-1)
      Traceback (most recent call last):
      jaxkv.errors.ConfigError: temperature=-1 must be finite and at least 0 (0 is greedy)
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
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        finite = math.isfinite
        checks = (
            ("temperature", finite(self.temperature) and self.temperature >= 0,
             "finite and at least 0 (0 is greedy)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1 (0 is off)"),
            ("repetition_penalty", finite(self.repetition_penalty) and self.repetition_penalty > 0,
             "finite and above 0 (1 is off)"),
            ("presence_penalty", finite(self.presence_penalty), "finite (0 is off)"),
            ("frequency_penalty", finite(self.frequency_penalty), "finite (0 is off)"),
            ("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIAS
             and all(map(finite, self.logit_bias.values())),
             f"finite numbers for at most {MAX_LOGIT_BIAS} tokens"),
            ("seed", self.seed is None or 0 <= self.seed < 2**32, "None, or below 2**32 and not "
             "negative"),
            ("n", self.n >= 1, "at least 1"),
            ("best_of", self.best_of is None or self.best_of >= self.n,
             f"None or at least n={self.n}"),
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens,
             f"between 0 and max_tokens={self.max_tokens}"),
            ("stop", all(self.stop), "texts that are not empty"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 64, "None or 0 to 64"),
        )  # fmt: skip
        for name, good, wanted in checks:
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {wanted}")

    @property
    def num_samples(self) -> int:
        """Samples that are drawn."""
        return self.best_of or self.n


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """A search for the likeliest continuations, `width` at a time.

    Attributes:
      width: hypotheses that are kept at every step, and that are given in the end.
      max_tokens: most tokens of a hypothesis.
      length_penalty: hypotheses are ranked by log-probability / generated tokens ** this.
      early_stopping: True: end when `width` hypotheses have ended; False: when no running one can
        still get better than the worst of these.
      stop_token_ids: end a hypothesis as the model's own end tokens do.
      ignore_eos: go on past the model's end tokens.
      detokenize: give text beside token ids, if the engine has a tokenizer.

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
        checks = (
            ("width", 1 <= self.width <= 32, "between 1 and 32"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("length_penalty", math.isfinite(self.length_penalty), "finite"),
        )
        for name, good, wanted in checks:
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {wanted}")

    @property
    def num_samples(self) -> int:
        """Hypotheses that are kept."""
        return self.width
