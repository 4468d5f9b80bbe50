"""Priorities with a time to live, on top of any eviction policy."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from jaxkv.manager.eviction.policies import NONE, EvictionPolicy


class Retention:
    """Evicts blocks of negative priority before all others, those of positive priority after them.

    Within a priority the least recently used block is evicted first. A priority ends with its time
    to live, or when the block's content is removed; after that the policy underneath decides.

    Source: the per-request retention priorities of TensorRT-LLM.
    """

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float]):
        self.policy, self._clock = policy, clock
        self._kept: dict[int, tuple[int, float | None]] = {}  # block: priority, end time
        self._idle: dict[int, OrderedDict[int, None]] = {}  # by priority
        self._ends: list[tuple[float, int]] = []  # heap of (time, block)

    @property
    def keeps(self) -> bool:
        """Whether any block has a priority."""
        return bool(self._kept)

    def keep(self, blocks: np.ndarray, priority: int, expires: float | None, *, new: bool) -> None:
        """Gives busy blocks a priority; content that is not new keeps the higher priority."""
        if not priority and not self._kept:
            return
        self._expire()
        for block in blocks.tolist():
            if new or priority >= self._kept.get(block, (0, None))[0]:
                self._kept.pop(block, None)
                if not priority:
                    continue  # without a priority: left to the policy
                self._kept[block] = priority, expires
                if expires is not None:
                    heapq.heappush(self._ends, (expires, block))
        if len(self._ends) > 2 * len(self._kept) + 64:  # most entries are of removed contents
            self._ends = [(e, b) for b, (_, e) in self._kept.items() if e is not None]
            heapq.heapify(self._ends)

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        self.policy.stored(blocks, hashes, now)

    def hit(self, blocks: np.ndarray, now: float) -> None:
        self.policy.hit(blocks, now)

    def idle(self, blocks: np.ndarray) -> None:
        if self._kept:
            kept = np.array([b in self._kept for b in blocks.tolist()])
            for block in blocks[kept].tolist():
                self._idle.setdefault(self._kept[block][0], OrderedDict())[block] = None
            blocks = blocks[~kept]
        if len(blocks):
            self.policy.idle(blocks)

    def busy(self, blocks: np.ndarray) -> None:
        if self._kept:
            for block in blocks.tolist():
                if block in self._kept:
                    self._idle.get(self._kept[block][0], OrderedDict()).pop(block, None)
        self.policy.busy(blocks)

    def victim(self) -> int:
        if not self._kept:
            return self.policy.victim()
        self._expire()
        levels = sorted(level for level, blocks in self._idle.items() if blocks)
        for level in levels:
            if level < 0:
                return self._idle[level].popitem(last=False)[0]
        if (block := self.policy.victim()) != NONE or not levels:
            return block
        return self._idle[levels[0]].popitem(last=False)[0]

    def removed(self, block: int, block_hash: bytes) -> None:
        self._kept.pop(block, None)
        self.policy.removed(block, block_hash)

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            end, block = heapq.heappop(self._ends)
            priority, expires = self._kept.get(block, (0, None))
            if expires != end:
                continue  # its priority was replaced
            del self._kept[block]
            if block in self._idle.get(priority, ()):
                del self._idle[priority][block]
                self.policy.idle(np.array([block]))
