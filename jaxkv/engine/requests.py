"""Requests and their samples. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxkv.engine.marked_text import MarkedText
from jaxkv.engine.protocols import TextStream
from jaxkv.engine.search import Beam
from jaxkv.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the model's own, before penalties, temperature and limits.

    Attributes:
      token: token id.
      logprob: natural log of the token's probability.
      top: most likely tokens at the position, {id: logprob}, most likely first.
    """

    token: int
    logprob: float
    top: dict[int, float]


@dataclasses.dataclass(slots=True)
class Timings:
    """Times of a request, in seconds of the engine's clock.

    Attributes:
      submitted: time of submission.
      scheduled: time when it first got blocks.
      first_token: time of its first token.
      finished: time of its end.
    """

    submitted: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Status(enum.Enum):
    """Life cycle of a sequence."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class ProcessorState(NamedTuple):
    """State of a logits processor, on the host.

    Attributes:
      length: tokens of the sequence, the last included.
      token: the token after which it is the state.
      state: PyTree of arrays.
    """

    length: int
    token: int
    state: Any


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """A submitted request.

    Attributes:
      id: request id, the user's or a number.
      prompt: token ids of the prompt.
      params: sampling parameters, as submitted.
      namespace: namespace of its blocks in the prefix cache.
      order: (-priority, arrival number); smaller is admitted first and preempted last.
      stop_ids: tokens that end it.
      end: length, in tokens, at which it ends.
      seed: seed of the request's PRNG keys.
      timings: times of the request.
      samples: sequences of the request; more follow while the prompt is being computed.
      unforked: samples still to be forked off the first one, when its prompt is computed.
      num_cached_tokens: prompt tokens found in the cache when it first got blocks.
      prompt_logprobs: log-probabilities of the prompt computed up to now.
      processor: index of its logits processor; -1: none.
      beam: state of the beam search; None: not a beam search.
      logprobs: most likely tokens to report; 0: the chosen token alone; -1: none.
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
    def is_over(self) -> bool:
        """Whether all of its samples have ended."""
        return not self.unforked and all(s.finish_reason is not None for s in self.samples)

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
      num_decoded: tokens already decoded, the prompt included.
      num_searched: leading characters in which no stop text ends.
      num_shown: leading characters that outputs have reported.
      stopped: whether a stop text was found.
      marked: the text with special tokens, where a stop text contains one; `num_searched` counts
        in it.
      decoding: whether a call of the detokenizer is running, or did not come to its end.
      detokenizer: streaming detokenizer; None before the first token is decoded.
    """

    value: str = ""
    num_decoded: int = 0
    num_searched: int = 0
    num_shown: int = 0
    stopped: bool = False
    decoding: bool = False
    marked: MarkedText | None = None
    detokenizer: TextStream | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request.

    Attributes:
      key: sequence id in the block manager.
      request: the request.
      sample: number of the sample; part of the PRNG keys of its draws.
      tokens: prompt and output, as far as the host has them. Outputs hold the list: tokens are
        appended to it, and a list of its own takes its place where some are taken back.
      status: stage of the life cycle.
      row: row of the block table and of the sampler; -1 without blocks.
      num_in_flight: sampled tokens that had not arrived when the sequence lost its row.
      finish_reason: reason of its end; None while it runs.
      error: the error, after a failure.
      num_reported: leading tokens that outputs have reported, the prompt included.
      end_reported: whether an output has reported the end.
      text: text of the output; written by `Outputs` alone.
      logprobs: log-probabilities of the output tokens, if kept.
      cumulative_logprob: sum of the output tokens' log-probabilities.
      num_preemptions: number of preemptions.
      processor_state: state of its logits processor after the last token; None: the first state.
      hashes: hashes of its leading blocks, as far as they were needed.
      waits_for: hash of the missing block that another sequence is computing.
      candidates: (ids, log-probabilities) of its most likely next tokens, until its beam search has
        those of all its hypotheses.
    """

    key: int
    request: Request
    sample: int
    tokens: list[int]
    num_reported: int
    end_reported: bool = False
    status: Status = Status.NEW
    row: int = -1
    num_in_flight: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    text: TextState = dataclasses.field(default_factory=lambda: TextState())
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_preemptions: int = 0
    processor_state: ProcessorState | None = None
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    waits_for: bytes = b""
    candidates: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def has_news(self) -> bool:
        """Whether there is something that no output has reported."""
        ended = self.finish_reason is not None
        return len(self.tokens) > self.num_reported or ended > self.end_reported


class SequenceError(Exception):
    """Something failed for one sequence: its row could not be filled, or its output not be made.

    Attributes:
      sequence: the sequence.
      error: what went wrong.
    """

    def __init__(self, sequence: Sequence, error: Exception):
        super().__init__(str(error))
        self.sequence, self.error = sequence, error
