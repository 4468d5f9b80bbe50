"""A request, its samples, and what the user hears of them. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import Any, Literal

import numpy as np

from jaxkv.engine.search import Beam
from jaxkv.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token, before penalties, temperature and limits.

    Attributes:
      token: its id.
      logprob: natural log of its probability.
      top: the likeliest tokens there, {id: logprob}, likeliest first.
    """

    token: int
    logprob: float
    top: dict[int, float]


@dataclasses.dataclass(slots=True)
class Timings:
    """Seconds of the engine's clock.

    Attributes:
      submitted: when the request came.
      scheduled: when it first got blocks.
      first_token: when its first token was there.
      finished: when it ended.
    """

    submitted: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Status(enum.Enum):
    """Where a sequence is."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """What was submitted.

    Attributes:
      id: the user's or the engine's name for it.
      prompt: token ids.
      params: as submitted.
      namespace: of its blocks in the prefix cache.
      order: (-priority, number of arrival): who goes first, and who is preempted last.
      stop_ids: tokens that end it.
      end: length at which it ends.
      seed: of its keys.
      timings: see there.
      samples: its sequences; there are more to come while the prompt is being computed.
      unforked: samples that will be forked off the first one when its prompt is computed.
      num_cached_tokens: prompt tokens found in the cache when it first got blocks.
      prompt_logprobs: so far.
      processor: index of its logits processor, or -1.
      beam: the state of its beam search, if it is one.
      logprobs: likeliest tokens to report; 0: the token's own alone; -1: no log-probabilities.
    """

    id: Hashable
    prompt: list[int]
    params: SamplingParams
    namespace: Any
    order: tuple[int, int]
    stop_ids: frozenset[int]
    end: int
    seed: int
    timings: Timings
    samples: list[Sequence] = dataclasses.field(default_factory=list)
    unforked: int = 0
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    processor: int = -1
    logprobs: int = -1
    beam: Beam | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still missing."""
        have = -1 if self.prompt_logprobs is None else len(self.prompt_logprobs)
        return self.params.prompt_logprobs and have < len(self.prompt) - 1


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request.

    Attributes:
      key: its name in the block manager.
      request: whose.
      sample: its number; part of the keys of its random draws.
      tokens: prompt and output, as far as the host knows them. Outputs hold the list: tokens are
        appended to it, and a list of its own takes its place where some are taken back.
      status: see there.
      row: of the block table and of the sampler; -1 without blocks.
      awaited: tokens that were still on their way when it lost its row.
      finish_reason: None while it goes on.
      error: what went wrong.
      told: leading tokens that outputs have given, or that are the prompt.
      text: as far as it is known.
      decoded: tokens that it comes from, the prompt counted.
      searched: characters of it in which no stop text ends.
      text_is_over: whether a stop text was found.
      shown: characters of it that outputs have given.
      detokenizer: of its output, or None.
      logprobs: of its output tokens, if kept.
      cumulative_logprob: their sum.
      num_preemptions: how often it lost its blocks.
      processor_state: of its logits processor while it has no row.
      hashes: of its leading blocks, as far as they were needed.
      waits_for: hash of the block that another computes and that it needs.
      candidates: (ids, log-probabilities) of its likeliest next tokens, until its beam search has
        those of all its hypotheses.
    """

    key: int
    request: Request
    sample: int
    tokens: list[int]
    told: int
    status: Status = Status.NEW
    row: int = -1
    awaited: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    text: str = ""
    decoded: int = 0
    searched: int = 0
    text_is_over: bool = False
    shown: int = 0
    detokenizer: Any = None
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_preemptions: int = 0
    processor_state: Any = None
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    waits_for: bytes = b""
    candidates: tuple[np.ndarray, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """What an output has beside token ids; see `RequestOutput`."""

    new_text: str = ""
    text: str = ""
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


NO_EXTRAS = Extras()


@dataclasses.dataclass(eq=False, slots=True)
class RequestOutput:
    """What a step brought for one sample of a request.

    There is one for each sequence and step, and making them is a large part of what a step costs
    the host: what does not change from step to step is looked up when somebody asks.

    Attributes:
      finish_reason: None while it goes on; "stop" (an end token or a stop text), "length"
        (max_tokens or the cache's longest sequence), "abort", or "error".
    """

    finish_reason: FinishReason | None
    _sequence: Sequence
    _tokens: list[int]  # of the sequence, which goes on growing
    _begin: int  # of the new ones
    _end: int
    _extras: Extras = NO_EXTRAS

    @property
    def request_id(self) -> Hashable:
        """The request."""
        return self._sequence.request.id

    @property
    def sample(self) -> int:
        """Which of its samples."""
        return self._sequence.sample

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return self._sequence.request.prompt

    @property
    def new_token_ids(self) -> list[int]:
        """Tokens of this step."""
        return self._tokens[self._begin : self._end]

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, the end token included."""
        return self._tokens[len(self.prompt_ids) : self._end]

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return self._end - len(self.prompt_ids)

    @property
    def new_text(self) -> str:
        """The text that the new tokens complete; "" without a tokenizer."""
        return self._extras.new_text

    @property
    def text(self) -> str:
        """All text so far, up to a stop text."""
        return self._extras.text

    @property
    def finished(self) -> bool:
        """Whether this is the sample's last output."""
        return self.finish_reason is not None

    @property
    def error(self) -> str | None:
        """What went wrong, if something did."""
        return self._extras.error

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of the new tokens, if asked for."""
        return self._extras.logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Of the prompt from its second token on, if asked for; with the first output."""
        return self._extras.prompt_logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all tokens so far, if log-probabilities are kept."""
        return self._extras.cumulative_logprob

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in the cache."""
        return self._sequence.request.num_cached_tokens or 0

    @property
    def num_preemptions(self) -> int:
        """How often the sample has lost its blocks by now."""
        return self._sequence.num_preemptions

    @property
    def timings(self) -> Timings:
        """Of the request, as far as they are known by now."""
        return self._sequence.request.timings

    def __repr__(self) -> str:
        names = ("request_id", "sample", "new_token_ids", "new_text", "num_tokens", "finish_reason",
                 "error", "num_cached_tokens")  # fmt: skip
        return f"RequestOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
