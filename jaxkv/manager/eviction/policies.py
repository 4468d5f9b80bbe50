"""Eviction policies: one interface, and five implementations.

A policy is notified when blocks become visible to lookups, are hit, fall idle (no sequence
references them) or become busy again, and chooses victims among the idle blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from jaxkv.errors import ConfigError
from jaxkv.manager.eviction.run_queue import NONE, RunQueue


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


class Scored(RunQueue):
    """Evicts the idle block with the lowest score: the base of LRU, FIFO and decayed counts.

    A subclass updates `score`; a block's score must not fall while it is idle.
    """

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        raise NotImplementedError

    def hit(self, blocks: np.ndarray, now: float) -> None:
        raise NotImplementedError

    def idle(self, blocks: np.ndarray) -> None:
        self.push(blocks)

    def busy(self, blocks: np.ndarray) -> None:
        self.discard(blocks)

    def victim(self) -> int:
        return self.pop()

    def removed(self, block: int, block_hash: bytes) -> None:
        pass


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
        self._probation, self._protected = RunQueue(num_blocks), RunQueue(num_blocks)
        self._capacity = max(1, int(protected * num_blocks))

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        self._hits[blocks] = 0

    def hit(self, blocks: np.ndarray, now: float) -> None:
        self._hits[blocks] += 1

    def idle(self, blocks: np.ndarray) -> None:
        was_hit = self._hits[blocks] > 0
        self._protected.push(blocks[was_hit])
        self._probation.push(blocks[~was_hit])
        while len(self._protected) > self._capacity:
            demoted = np.array([self._protected.pop()])
            self._hits[demoted] = 0
            self._probation.push(demoted)

    def busy(self, blocks: np.ndarray) -> None:
        self._probation.discard(blocks)
        self._protected.discard(blocks)

    def victim(self) -> int:
        return (self._probation or self._protected).pop()

    def removed(self, block: int, block_hash: bytes) -> None:
        pass


class S3Fifo:
    """Three FIFO queues: small for new blocks, main for reused ones, and ghosts of small.

    Source: Yang et al., SOSP'23. Unlike there, a block that is hit leaves its queue while it is
    referenced and returns to the end, since the queues hold idle blocks only, and a search for a
    victim passes over 256 reused blocks at most.
    """

    def __init__(self, num_blocks: int, small: float = 0.1):
        self._uses = np.zeros(num_blocks, np.int64)
        self._in_main = np.zeros(num_blocks, bool)
        self._small, self._main = RunQueue(num_blocks), RunQueue(num_blocks)
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._num_blocks = num_blocks
        self._small_capacity = max(1, int(small * num_blocks))

    def stored(self, blocks: np.ndarray, hashes: list[bytes], now: float) -> None:
        self._uses[blocks] = 0
        self._in_main[blocks] = [h in self._ghosts for h in hashes]

    def hit(self, blocks: np.ndarray, now: float) -> None:
        self._uses[blocks] = np.minimum(self._uses[blocks] + 1, 3)

    def idle(self, blocks: np.ndarray) -> None:
        in_main = self._in_main[blocks]
        self._main.push(blocks[in_main])
        self._small.push(blocks[~in_main])

    def busy(self, blocks: np.ndarray) -> None:
        self._small.discard(blocks)
        self._main.discard(blocks)

    def victim(self) -> int:
        for _ in range(256):
            small = self._small and (len(self._small) > self._small_capacity or not self._main)
            block = (self._small if small else self._main).pop()
            if block == NONE or self._uses[block] == 0:
                return block
            self._uses[block] = 0 if small else self._uses[block] - 1
            self._in_main[block] = True
            self._main.push(np.array([block]))
        return self._main.pop()

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
