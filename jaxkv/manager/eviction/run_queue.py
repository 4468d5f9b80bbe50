"""A priority queue of blocks that are entered and removed in runs, at a bounded cost per call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, cast

import numpy as np
from sortedcontainers import SortedList  # pyright: ignore[reportMissingTypeStubs]

NONE = -1
_LONGEST = 4096  # blocks of a run: no removal looks at more
_NOTHING = np.zeros(0, np.int64)

_Entry = tuple[float, int, int]  # score of the run's next block, number, slot


class _Entries(Protocol):
    """The methods used of a SortedList of entries, which has no types."""

    def add(self, value: _Entry, /) -> None: ...
    def remove(self, value: _Entry, /) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> _Entry: ...


class RunQueue:
    """Blocks by score; those of equal score in the order in which they were entered.

    A sequence that ends leaves a run of blocks, deepest first. A run is one entry, and its blocks
    are crossed out by number. Once the queue holds as many crossed-out blocks as the pool has, a
    run is copied without them whenever more are crossed out. So a call costs what its own runs
    cost, whatever else is queued, and an empty queue holds nothing.

    Args:
      num_blocks: blocks in the pool.

    Attributes:
      score: f64[num_blocks]; scores, written by the owner. The score of a queued block must not
        fall.

    Example:
      >>> queue = RunQueue(8)
      >>> queue.push(np.array([5, 4, 3]))
      >>> queue.push(np.array([2]))
      >>> _ = queue.discard(np.array([4, 2]))
      >>> len(queue), queue.pop(), queue.pop(), queue.pop()
      (2, 5, 3, -1)
    """

    def __init__(self, num_blocks: int):
        self.score = np.zeros(num_blocks, np.float64)
        self._slot_of = np.zeros(num_blocks, np.int64)  # slot of a queued block's run; 0: none
        self._order = cast(_Entries, SortedList())
        self._front: _Entry | None = None  # the first of them
        self._size = self._next_number = 0
        self._held = 0  # blocks in runs, crossed-out ones included
        # By slot; slot 0 is not used.
        self._entries: list[_Entry] = [(0.0, 0, 0)]
        self._runs: list[np.ndarray] = [_NOTHING]
        self._at = [0]  # blocks before it have left the run
        self._left = [0]  # number of blocks that are not crossed out
        self._free: list[int] = []  # slots

    def __len__(self) -> int:
        return self._size

    def push(self, blocks: np.ndarray) -> None:
        """Enters a run of blocks that are not queued."""
        for start in range(0, len(blocks), _LONGEST):
            self._push(blocks[start : start + _LONGEST])

    def _push(self, run: np.ndarray) -> None:
        if not self._free:
            self._free.append(len(self._runs))
            self._entries.append(self._entries[0])
            self._runs.append(_NOTHING)
            self._at.append(0)
            self._left.append(0)
        slot, self._next_number = self._free.pop(), self._next_number + 1
        entry = self.score.item(run.item(0)), self._next_number, slot
        self._entries[slot], self._runs[slot] = entry, run
        self._at[slot], self._left[slot] = 0, len(run)
        self._slot_of[run] = slot
        self._size += len(run)
        self._held += len(run)
        self._order.add(entry)
        if self._front is None or entry < self._front:
            self._front = entry

    def discard(self, blocks: np.ndarray) -> np.ndarray:
        """Removes blocks; returns bool[n]: whether each was queued."""
        slots = self._slot_of[blocks]
        self._slot_of[blocks] = 0
        listed = cast(list[int], slots.tolist())
        if listed and listed.count(listed[0]) == len(listed):  # as most often
            counts: Iterable[tuple[int, int]] = ((listed[0], len(listed)),)
        else:
            counts = Counter(listed).items()
        for slot, count in counts:
            if slot:
                self._leave(slot, count)
        return slots > 0

    def _leave(self, slot: int, count: int) -> None:
        """Counts blocks that were crossed out of a run."""
        self._size -= count
        left = self._left[slot] = self._left[slot] - count
        run, at = self._runs[slot], self._at[slot]
        if not left:
            self._end(slot)
        elif self._held > self._size + len(self._slot_of):
            rest = run[at:]
            self._runs[slot], self._at[slot] = rest[self._slot_of[rest] == slot], 0
            self._held -= len(rest) - left

    def _end(self, slot: int) -> None:
        """Removes a run without blocks."""
        self._order.remove(self._entries[slot])
        self._front = self._order[0] if len(self._order) else None
        self._held -= len(self._runs[slot]) - self._at[slot]
        self._runs[slot], self._at[slot] = _NOTHING, 0
        self._free.append(slot)

    def lowest(self) -> float:
        """A bound below all scores; infinite without blocks."""
        return self._front[0] if self._front is not None else math.inf

    def pop(self) -> int:
        """Removes the block of the lowest score and returns it; NONE without blocks."""
        while (entry := self._front) is not None:
            key, number, slot = entry
            run, at = self._runs[slot], self._at[slot]
            while self._slot_of.item(run.item(at)) != slot:
                at += 1
            self._held -= at - self._at[slot]
            block = run.item(at)
            score = self.score.item(block)
            if score > key:  # the run's next block has a higher score than its last
                self._order.remove(entry)
                self._entries[slot], self._at[slot] = (score, number, slot), at
                self._order.add(self._entries[slot])
                self._front = self._order[0]
                continue
            self._at[slot] = at + 1
            self._slot_of[block] = 0
            self._held -= 1
            self._size -= 1
            self._left[slot] -= 1
            if not self._left[slot]:
                self._end(slot)
            return block
        return NONE

    def pop_run(self) -> np.ndarray:
        """Removes the first run, whose blocks have one score, and returns its blocks."""
        assert self._front is not None
        slot = self._front[2]
        rest = self._runs[slot][self._at[slot] :]
        blocks = rest[self._slot_of[rest] == slot]
        self.discard(blocks)
        return blocks
