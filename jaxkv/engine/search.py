"""Beam search: selection of hypotheses. Host code: imports no JAX.

Each step ranks the most likely continuations of all hypotheses together. Those among the first
`width` that end are put aside; the first `width` that do not end are kept. There are
`width * max(2, 1 + number of end tokens)` candidates, so that end tokens never take the place of a
live hypothesis (the rule of Hugging Face transformers).
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


class Live(NamedTuple):
    """A hypothesis that goes on.

    Attributes:
      tokens: prompt and output.
      logprob: sum of the log-probabilities of its output tokens.
    """

    tokens: list[int]
    logprob: float


class SearchState(NamedTuple):
    """Result of the steps up to now. Each step makes a new one, so that none is half done.

    Attributes:
      ended: heap of the best hypotheses that have ended, `width` at most.
      live: hypotheses that go on; none when the search is over.
      is_over: whether no hypothesis is live.
    """

    ended: list[Hypothesis]
    live: list[Live]
    is_over: bool


class Beam:
    """One beam search.

    Args:
      params: parameters of the search.
      prompt: tokens of the prompt.
      stop_ids: tokens that end a hypothesis.
      end: length at which all end.

    Attributes:
      num_candidates: most likely next tokens that a step needs of each hypothesis.
      state: result of the steps up to now.
    """

    def __init__(
        self, params: BeamSearchParams, prompt: list[int], stop_ids: frozenset[int], end: int
    ):
        self._params, self._num_prompt = params, len(prompt)
        self._stop_ids, self._end = stop_ids, end
        self.num_candidates = params.width * max(2, 1 + len(stop_ids))
        self.state = SearchState([], [Live(list(prompt), 0.0)], False)

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
          ids: most likely next tokens of each, at least `num_candidates` or the whole vocabulary.
          logprobs: log-probabilities of these tokens.
        """
        width = self._params.width
        candidates = [
            (totals[i] + logprob, i, token)
            for i, (tokens, values) in enumerate(zip(ids, logprobs, strict=True))
            for token, logprob in zip(tokens, values, strict=True)
        ]
        # Ties keep the order of the candidates, so that the result does not depend on the heap.
        best = heapq.nsmallest(self.num_candidates, candidates, key=lambda c: (-c[0], c[1], c[2]))
        length = len(hypotheses[0]) + 1
        ended, live = list(self.state.ended), list[Continuation]()
        for rank, (total, i, token) in enumerate(best):
            stops = token in self._stop_ids
            if stops or length >= self._end:
                if rank < width:
                    score, reason = self._score(total, length), "stop" if stops else "length"
                    heapq.heappush(ended, Hypothesis(score, total, [*hypotheses[i], token], reason))
                    if len(ended) > width:
                        heapq.heappop(ended)
            elif len(live) < width:
                live.append(Continuation(i, token, total))
        if self._is_over(ended, live, length):
            live = []
        going_on = [Live([*hypotheses[c.parent], c.token], c.logprob) for c in live]
        self.state = SearchState(ended, going_on, not live)
        return live

    def _score(self, logprob: float, length: int) -> float:
        return logprob / (length - self._num_prompt) ** self._params.length_penalty

    def _is_over(self, ended: list[Hypothesis], live: list[Continuation], length: int) -> bool:
        if not live:
            return True
        if len(ended) < self._params.width:
            return False
        if self._params.early_stopping:
            return True
        # Log-probabilities only fall: a hypothesis is best now, or, where length is rewarded, last.
        longest = length if self._params.length_penalty <= 0 else self._end
        return self._score(live[0].logprob, longest) <= ended[0].score

    def results(self) -> list[Hypothesis]:
        """The best hypotheses, best first; none before the search is over."""
        return sorted(self.state.ended, reverse=True) if self.state.is_over else []
