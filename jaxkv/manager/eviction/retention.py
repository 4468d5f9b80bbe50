"""Priorities with a time to live, on top of any eviction policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxkv.manager.eviction.policies import EvictionPolicy
from jaxkv.manager.eviction.run_queue import NONE, RunQueue

_RUNS_AT_ONCE = 64  # runs of expired blocks that one time of the clock gives back


class Retention:
    """Evicts blocks of negative priority before all others, those of positive priority after them.

    Within a priority the least recently used block is evicted first. A priority ends with its time
    to live, or when the block's content is removed; after that the policy underneath decides. When
    the priorities of very many requests end at the same time, the policy gets their blocks over
    several calls, so that no call pays for all of them.

    Source: the per-request retention priorities of TensorRT-LLM.

    Args:
      policy: policy of the blocks without priority.
      num_blocks: blocks in the pool.
      clock: monotonic clock, seconds.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, clock: Callable[[], float]):
        self.policy, self._num_blocks, self._clock = policy, num_blocks, clock
        self._num_kept = 0  # blocks with a priority
        self._now = -np.inf  # time up to which priorities were ended last
        self._queues: tuple[RunQueue, RunQueue] | None = None  # made for the first priority

    @property
    def keeps(self) -> bool:
        """Whether any block has a priority."""
        return self._num_kept > 0

    def _levels_and_ends(self) -> tuple[RunQueue, RunQueue]:
        """Idle blocks by priority (score 0: none), and blocks by the end of their priority."""
        if self._queues is None:
            self._queues = RunQueue(self._num_blocks), RunQueue(self._num_blocks)
        return self._queues

    def keep(self, blocks: np.ndarray, priority: int, expires: float | None, *, new: bool) -> None:
        """Gives busy blocks a priority; content that is not new keeps the higher priority."""
        if not priority and not self._num_kept:
            return
        self._expire()
        levels, ends = self._levels_and_ends()
        if not new:
            blocks = blocks[levels.score[blocks] <= priority]
        self._forget(blocks)
        if priority and len(blocks):
            levels.score[blocks] = priority
            self._num_kept += len(blocks)
            if expires is not None:
                ends.score[blocks] = expires
                ends.push(blocks[::-1].copy())  # deepest first, as they would become idle

    def _forget(self, blocks: np.ndarray) -> None:
        """Ends the priorities of blocks that are not queued by priority."""
        levels, ends = self._levels_and_ends()
        self._num_kept -= int(np.count_nonzero(levels.score[blocks]))
        levels.score[blocks] = 0
        ends.discard(blocks)

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        self.policy.stored(blocks, hashes, now)

    def hit(self, blocks: np.ndarray, now: float) -> None:
        self.policy.hit(blocks, now)

    def idle(self, blocks: np.ndarray) -> None:
        if self._num_kept:
            levels, _ = self._levels_and_ends()
            scores = levels.score[blocks]
            for priority in sorted(set(scores.tolist()) - {0.0}):
                levels.push(blocks[scores == priority])
            blocks = blocks[scores == 0]
        if len(blocks):
            self.policy.idle(blocks)

    def busy(self, blocks: np.ndarray) -> None:
        if self._num_kept:
            self._levels_and_ends()[0].discard(blocks)
        self.policy.busy(blocks)

    def victim(self) -> int:
        if not self._num_kept:
            return self.policy.victim()
        self._expire()
        levels, _ = self._levels_and_ends()
        if levels.lowest() < 0:
            return levels.pop()
        block = self.policy.victim()
        return levels.pop() if block == NONE else block

    def removed(self, block: int, block_hash: bytes) -> None:
        if self._num_kept:
            self._forget(np.array([block]))
        self.policy.removed(block, block_hash)

    def clear(self) -> None:
        """Ends all priorities."""
        if self._queues is not None:
            levels, _ = self._queues
            while len(levels):
                self.policy.idle(levels.pop_run())
            self._queues, self._num_kept = None, 0

    def _expire(self) -> None:
        """Gives expired blocks to the policy; a clock that stands still does so run by run."""
        now = self._clock()
        levels, ends = self._levels_and_ends()
        at_most, self._now = 1 if now == self._now else _RUNS_AT_ONCE, now
        while at_most and ends.lowest() <= now:
            blocks = ends.pop_run()
            idle = blocks[levels.discard(blocks)]
            self._forget(blocks)
            if len(idle):
                self.policy.idle(idle)
            at_most -= 1
