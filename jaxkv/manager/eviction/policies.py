"""Eviction policies: one interface, and five implementations.

A policy is notified when blocks become visible to lookups, are hit, fall idle (no sequence
references them) or become busy again, and chooses victims among the idle blocks. A sequence that
ends leaves a run of idle blocks, deepest first. A run is queued as one entry, and its blocks are
crossed out by number, so that ending a sequence needs no loop and removing a block from the middle
costs nothing.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from jaxkv.errors import ConfigError

NONE = -1


class EvictionPolicy(Protocol):
    """Chooses victims. Arrays of blocks have no duplicates; times are in seconds."""

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        """The blocks became visible to lookups."""
        ...

    def hit(self, blocks: np.ndarray, now: float) -> None:
        """A request hit the blocks."""
        ...

    def idle(self, blocks: np.ndarray) -> None:
        """Their reference count fell to zero. Given in eviction order."""
        ...

    def busy(self, blocks: np.ndarray) -> None:
        """The blocks are no longer candidates: referenced again, or hidden from lookups."""
        ...

    def victim(self) -> int:
        """Returns the next victim, which is no longer a candidate; NONE without candidates."""
        ...

    def removed(self, block: int, block_hash: bytes) -> None:
        """The content of the block was removed."""
        ...


class Scored:
    """Evicts the idle block with the lowest score: the base of LRU, FIFO and decayed counts.

    A subclass updates `score`; a block's score must not fall while it is idle.
    """

    def __init__(self, num_blocks: int):
        self.score = np.zeros(num_blocks, np.float64)
        # Number of the run in which a block is idle.
        self._run_of = np.full(num_blocks, NONE, np.int64)
        self._runs: list[tuple[float, int, np.ndarray, int]] = []  # heap: score, number, blocks, at
        self._next_number = 0
        self._queued = 0  # blocks in runs, crossed-out ones included

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        raise NotImplementedError

    def hit(self, blocks: np.ndarray, now: float) -> None:
        raise NotImplementedError

    def idle(self, blocks: np.ndarray) -> None:
        number = self._next_number
        self._next_number += 1
        self._run_of[blocks] = number
        heapq.heappush(self._runs, (self.score.item(blocks.item(0)), number, blocks, 0))
        self._queued += len(blocks)
        if self._queued > 4 * len(self.score):
            self._compact()

    def busy(self, blocks: np.ndarray) -> None:
        self._run_of[blocks] = NONE

    def victim(self) -> int:
        while self._runs:
            key, number, blocks, at = self._runs[0]
            while at < len(blocks) and self._run_of[blocks[at]] != number:
                at += 1
            if at == len(blocks):
                heapq.heappop(self._runs)
                self._queued -= len(blocks)
                continue
            block = int(blocks[at])
            score = self.score[block]
            if score > key:  # the run's next block has a higher score than its last
                heapq.heapreplace(self._runs, (score, number, blocks, at))
                continue
            heapq.heapreplace(self._runs, (key, number, blocks, at + 1))
            self._run_of[block] = NONE
            return block
        return NONE

    def removed(self, block: int, block_hash: bytes) -> None:
        pass

    def _compact(self) -> None:
        """Drops crossed-out blocks; the cost is amortised over the blocks crossed out."""
        runs: list[tuple[float, int, np.ndarray, int]] = []
        for key, number, blocks, at in self._runs:
            rest = blocks[at:]
            if len(rest := rest[self._run_of[rest] == number]):
                runs.append((key, number, rest, 0))
        heapq.heapify(runs)
        self._runs, self._queued = runs, sum(len(r[2]) for r in runs)


class Lru(Scored):
    """Least recently used: runs are evicted in the order in which they became idle.

    All scores are equal.

    Example:
      >>> import numpy as np
      >>> policy = Lru(4)
      >>> policy.idle(np.array([2, 1]))  # a sequence ended: deepest block first
      >>> policy.idle(np.array([3]))
      >>> policy.victim(), policy.victim(), policy.victim(), policy.victim()
      (2, 1, 3, -1)
    """

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        pass

    def hit(self, blocks: np.ndarray, now: float) -> None:
        pass


class Fifo(Scored):
    """First in, first out: evicts the oldest content, regardless of hits."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self._tick = 0

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        self._tick += 1
        self.score[blocks] = self._tick

    def hit(self, blocks: np.ndarray, now: float) -> None:
        pass


class Decayed(Scored):
    """Exponentially decayed count of uses; evicts the block with the lowest count.

    The score is the logarithm of sum(2 ** (t_i / H)) over the uses t_i, which orders blocks as the
    decayed counts do at any later time, so that scores never need an update. Scores of evicted
    contents are kept for a while (ghosts): without them an eviction would reset the count, and most
    of the gain over LRU would be lost.

    Args:
      num_blocks: blocks in the pool.
      half_life: H, seconds.
      debounce: seconds within which further uses of a block count as one, so that a burst does not
        count as popularity.
      ghosts: evicted contents whose scores are kept, as a multiple of the pool.
    """

    def __init__(
        self, num_blocks: int, half_life: float = 300.0, debounce: float = 1.0, ghosts: float = 4.0
    ):
        super().__init__(num_blocks)
        self._half_life, self._debounce = half_life, debounce
        self._counted = np.full(num_blocks, -np.inf)  # time of the last counted use
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()
        self._max_ghosts = int(ghosts * num_blocks)

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        u = now / self._half_life
        known = [self._ghosts.pop(h, None) for h in hashes]
        old = np.array([-np.inf if p is None else p for p in known])
        self.score[blocks] = _count(old, u)
        self._counted[blocks] = now

    def hit(self, blocks: np.ndarray, now: float) -> None:
        due = blocks[now - self._counted[blocks] >= self._debounce]
        self.score[due] = _count(self.score[due], now / self._half_life)
        self._counted[due] = now

    def removed(self, block: int, block_hash: bytes) -> None:
        self._ghosts[block_hash] = float(self.score[block])
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)


def _count(score: np.ndarray, u: float) -> np.ndarray:
    """log2(2 ** score + 2 ** u), for a use at time u in half-lives."""
    return np.maximum(score, u) + np.log2(1 + np.exp2(-np.abs(score - u)))


class Slru:
    """Segmented LRU: blocks hit at least once are protected, up to a share of the pool."""

    def __init__(self, num_blocks: int, protected: float = 0.8):
        self._hits = np.zeros(num_blocks, np.int64)
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._capacity = max(1, int(protected * num_blocks))

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        self._hits[blocks] = 0

    def hit(self, blocks: np.ndarray, now: float) -> None:
        self._hits[blocks] += 1

    def idle(self, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            (self._protected if self._hits[block] else self._probation)[block] = None
        while len(self._protected) > self._capacity:
            block, _ = self._protected.popitem(last=False)
            self._hits[block] = 0
            self._probation[block] = None

    def busy(self, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            self._probation.pop(block, None)
            self._protected.pop(block, None)

    def victim(self) -> int:
        for segment in (self._probation, self._protected):
            if segment:
                return segment.popitem(last=False)[0]
        return NONE

    def removed(self, block: int, block_hash: bytes) -> None:
        pass


class S3Fifo:
    """Three FIFO queues: small for new blocks, main for reused ones, and ghosts of small.

    Source: Yang et al., SOSP'23. Unlike there, a block that is hit leaves its queue while it is
    referenced and returns to the end, since the queues hold idle blocks only.
    """

    def __init__(self, num_blocks: int, small: float = 0.1):
        self._uses = np.zeros(num_blocks, np.int64)
        self._in_main = np.zeros(num_blocks, bool)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._num_blocks = num_blocks
        self._small_capacity = max(1, int(small * num_blocks))

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        self._uses[blocks] = 0
        self._in_main[blocks] = [h in self._ghosts for h in hashes]

    def hit(self, blocks: np.ndarray, now: float) -> None:
        self._uses[blocks] = np.minimum(self._uses[blocks] + 1, 3)

    def idle(self, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            (self._main if self._in_main[block] else self._small)[block] = None

    def busy(self, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            self._small.pop(block, None)
            self._main.pop(block, None)

    def victim(self) -> int:
        while self._small or self._main:
            if self._small and (len(self._small) > self._small_capacity or not self._main):
                block, _ = self._small.popitem(last=False)
                if self._uses[block] == 0:
                    return block
                self._in_main[block] = True
                self._uses[block] = 0
                self._main[block] = None
            else:
                block, _ = self._main.popitem(last=False)
                if self._uses[block] == 0:
                    return block
                self._uses[block] -= 1
                self._main[block] = None
        return NONE

    def removed(self, block: int, block_hash: bytes) -> None:
        if not self._in_main[block]:
            self._ghosts[block_hash] = None
            if len(self._ghosts) > self._num_blocks:
                self._ghosts.popitem(last=False)


_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": Lru,
    "decayed": Decayed,
    "fifo": Fifo,
    "slru": Slru,
    "s3fifo": S3Fifo,
}
POLICIES = tuple(_POLICIES)


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """Makes the policy of this name.

    Raises:
      ConfigError: an unknown name.
    """
    if name not in POLICIES:
        raise ConfigError(f"eviction must be one of {', '.join(POLICIES)}, got {name!r}")
    return _POLICIES[name](num_blocks)
