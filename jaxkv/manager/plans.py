"""The order of a manager's plans, and the states that follow them.

A plan has the changes since the one before, so that one left out, applied twice, or applied to the
cache of another manager makes tables silently wrong. The order is checked on the host, by what is
remembered here: a number in the state would have to be read back from the device, which waits for
the step before, and a static one would compile every step again.

Steps return new state objects, so a state is not known by its identity for long. What is counted
instead is how many states are at each plan: a plan moves one of them on.
"""

from __future__ import annotations

import itertools
from collections import Counter

from jaxkv.errors import StateError

_numbers = itertools.count(1)


class PlanChain:
    """Numbers of one manager's plans, and how many states are at each.

    Attributes:
      name: name of the manager in errors.
      taken: number of the last plan with changes; plans without changes have its number.
      settled: number of the last plan that did more than clear cells of ended sequences.
      start: number of the last plan after which an empty state may begin: 0, or one at which the
        manager had no sequence and no cached block.
    """

    def __init__(self) -> None:
        self.name = f"manager {next(_numbers)}"
        self.taken = self.settled = self.start = 0
        self._states: Counter[int] = Counter()

    def take(self, *, changes: bool, clears: bool) -> None:
        """Numbers the next plan.

        Args:
          changes: whether it has any.
          clears: whether it only clears cells.
        """
        self.taken += changes
        if changes and not clears:
            self.settled = self.taken

    def restart(self) -> None:
        """Lets an empty state begin with the next plan."""
        self.start = self.taken

    def has(self, number: int) -> bool:
        """Whether a state is at this plan."""
        return self._states[number] > 0

    def begin(self, number: int) -> None:
        """Adds a state that is at this plan."""
        self._states[number] += 1

    def move(self, before: int, number: int) -> None:
        """Moves a state from one plan to the next."""
        if before != number:
            self._states[before] -= 1
            self._states += Counter()  # drops counts of 0
            self._states[number] += 1

    def refuse(self, number: int, before: int, at: str) -> StateError:
        """The error for a plan on a state where it does not follow.

        Args:
          number: number of the plan.
          before: number of the plan that it follows.
          at: what the state is at instead.
        """
        return StateError(
            f"plan {number} of {self.name} follows its plan {before}, but {at}. Apply each plan "
            "of take_plan() once, in order, to the state of this manager. To begin with an empty "
            "state, free all sequences and call reset_prefix_cache() before the plan is taken."
        )

    def missing(self, number: int, before: int) -> StateError:
        """The error for a plan when no state is where it follows."""
        at = max(self._states, default=0)
        return self.refuse(
            number, before, f"the last one applied is plan {at}" if at else "none was applied"
        )
