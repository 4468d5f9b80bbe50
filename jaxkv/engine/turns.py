"""Turns: logits processors that may have failed a step run in steps of their own. Host code."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxkv.engine.requests import Sequence

SHARED = -1  # the turn of all sequences without an isolated processor


class Turns:
    """Isolated processors, and the one whose sequences the next step may hold.

    Attributes:
      isolated: slots of logits processors that share no step with anything else, since a step that
        they shared has failed, and one of them may be the cause.
      now: the isolated slot of this step, or `SHARED`.
    """

    def __init__(self) -> None:
        self.isolated: set[int] = set()
        self.now = SHARED

    def of(self, sequence: Sequence) -> int:
        """The turn of a sequence."""
        slot = sequence.request.processor
        return slot if slot in self.isolated else SHARED

    def order(self, sequences: Iterable[Sequence]) -> list[int]:
        """Turns of these sequences, in the order in which they may have the next step."""
        if not self.isolated:
            return [SHARED]
        live = sorted({self.of(sequence) for sequence in sequences})
        return [*(t for t in live if t > self.now), *(t for t in live if t <= self.now)]

    def put_first(self, sequence: Sequence) -> None:
        """Gives the next step to a sequence's turn."""
        self.now = self.of(sequence) - 1

    def may_run(self, slots: np.ndarray) -> np.ndarray:
        """bool[n]; whether sequences with these processors may be in this step."""
        if self.now == SHARED:
            return ~np.isin(slots, list(self.isolated))
        return slots == self.now
