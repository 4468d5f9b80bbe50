"""Beam search: selection of hypotheses. Host code: imports no JAX.

Each step ranks the `2 * width` most likely continuations of all hypotheses together. Those among
the first `width` that end are put aside; the first `width` that do not end are kept, so that an end
token never takes the place of a live hypothesis (as in Hugging Face transformers).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxkv.sampling.params import BeamSearchParams


@dataclasses.dataclass(order=True)
class Hypothesis:
    """A hypothesis that has ended.

    Attributes:
      score: score by which it is ranked.
      logprob: sum of the log-probabilities of its output tokens.
      tokens: prompt and output.
      reason: reason of its end, "stop" or "length".
    """

    score: float
    logprob: float = dataclasses.field(compare=False)
    tokens: list[int] = dataclasses.field(compare=False)
    reason: Literal["stop", "length"] = dataclasses.field(compare=False)


class Continuation(NamedTuple):
    """The next state of a live hypothesis.

    Attributes:
      parent: index of the hypothesis that it continues.
      token: next token.
      logprob: sum of the log-probabilities with that token.
    """

    parent: int
    token: int
    logprob: float


class Beam:
    """State of one beam search.

    Args:
      params: parameters of the search.
      num_prompt: tokens of the prompt.
      stop_ids: tokens that end a hypothesis.
      end: length at which all end.

    Attributes:
      ended: best hypotheses that have ended, `width` at most.
      is_over: whether no hypothesis is live.
    """

    def __init__(
        self, params: BeamSearchParams, num_prompt: int, stop_ids: frozenset[int], end: int
    ):
        self._params, self._num_prompt, self._stop_ids, self._end = (
            params,
            num_prompt,
            stop_ids,
            end,
        )
        self.ended: list[Hypothesis] = []
        self.is_over = False

    def advance(
        self,
        hypotheses: Sequence[list[int]],
        totals: Sequence[float],
        ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
    ) -> list[Continuation]:
        """Performs one step; returns the live continuations, none when the search is over.

        Args:
          hypotheses: tokens of the live hypotheses, prompt included.
          totals: sums of the log-probabilities of their outputs.
          ids: most likely next tokens of each, at least `2 * width` or the whole vocabulary.
          logprobs: log-probabilities of these tokens.
        """
        width = self._params.width
        candidates = [
            (totals[i] + logprob, i, token)
            for i, (tokens, values) in enumerate(zip(ids, logprobs, strict=True))
            for token, logprob in zip(tokens, values, strict=True)
        ]
        # Ties keep the order of the candidates, so that the result does not depend on the heap.
        best = heapq.nsmallest(2 * width, candidates, key=lambda c: (-c[0], c[1], c[2]))
        last = len(hypotheses[0]) + 1 >= self._end
        live: list[Continuation] = []
        for rank, (total, i, token) in enumerate(best):
            stops = token in self._stop_ids
            if stops or last:
                if rank < width:
                    self._put_aside(total, [*hypotheses[i], token], "stop" if stops else "length")
            elif len(live) < width:
                live.append(Continuation(i, token, total))
        self.is_over = self._is_over(live, len(hypotheses[0]) + 1)
        return [] if self.is_over else live

    def _put_aside(
        self, logprob: float, tokens: list[int], reason: Literal["stop", "length"]
    ) -> None:
        score = self._score(logprob, len(tokens))
        heapq.heappush(self.ended, Hypothesis(score, logprob, tokens, reason))
        if len(self.ended) > self._params.width:
            heapq.heappop(self.ended)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / (length - self._num_prompt) ** self._params.length_penalty

    def _is_over(self, live: list[Continuation], length: int) -> bool:
        if not live:
            return True
        if len(self.ended) < self._params.width:
            return False
        if self._params.early_stopping:
            return True
        # Log-probabilities only fall: a hypothesis is best now, or, where length is rewarded, last.
        longest = length if self._params.length_penalty <= 0 else self._end
        return self._score(live[0].logprob, longest) <= self.ended[0].score

    def results(self) -> list[Hypothesis]:
        """The best hypotheses, best first; none before the search is over."""
        return sorted(self.ended, reverse=True) if self.is_over else []
