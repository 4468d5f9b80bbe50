"""Requests and their samples. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import Any, Literal

import numpy as np

from jaxkv.engine.protocols import TextStream
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


@dataclasses.dataclass(slots=True)
class TextState:
    """Text of a sequence's output.

    Attributes:
      value: the text, as far as it is known.
      num_decoded: tokens that it comes from, the prompt counted.
      num_searched: characters of it in which no stop text ends.
      num_shown: characters of it that outputs have given.
      stopped: whether a stop text was found.
      detokenizer: streaming detokenizer; None before the first token is decoded.
    """

    value: str = ""
    num_decoded: int = 0
    num_searched: int = 0
    num_shown: int = 0
    stopped: bool = False
    detokenizer: TextStream | None = None


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
      num_in_flight: sampled tokens that were still to come when it lost its row.
      finish_reason: None while it goes on.
      error: what went wrong.
      num_reported: leading tokens that outputs have given, or that are the prompt.
      text: its text; `Outputs` alone writes it.
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
    num_reported: int
    status: Status = Status.NEW
    row: int = -1
    num_in_flight: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    text: TextState = dataclasses.field(default_factory=lambda: TextState())
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_preemptions: int = 0
    processor_state: Any = None
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    waits_for: bytes = b""
    candidates: tuple[np.ndarray, np.ndarray] | None = None
