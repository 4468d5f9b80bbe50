"""Pinned prefixes: cached until they are unpinned, or for a time."""

from __future__ import annotations

import heapq

from jaxkv.errors import JaxkvError
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.prefix.keys import BlockKeys


class Pins:
    """Pins of cached blocks, by prefix."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._pins: dict[bytes, tuple[list[int], float | None]] = {}
        self._ends: list[tuple[float, bytes]] = []  # heap

    def held(self) -> list[int]:
        """Blocks of all pins, each once per pin."""
        return [block for blocks, _ in self._pins.values() for block in blocks]

    def set(self, keys: BlockKeys, blocks: list[int], expires: float | None) -> None:
        """Pins the cached blocks of a prefix; replaces an earlier pin of the same prefix."""
        name = _name(keys)
        self._pool.hold(blocks, "pin")
        if name in self._pins:
            self._pool.unhold(self._pins[name][0], "pin")
        self._pins[name] = list(blocks), expires
        if expires is not None:
            heapq.heappush(self._ends, (expires, name))
        if len(self._ends) > 2 * len(self._pins) + 64:  # most are of renewed or dropped pins
            self._ends = [(e, n) for n, (_, e) in self._pins.items() if e is not None]
            heapq.heapify(self._ends)

    def drop(self, keys: BlockKeys) -> None:
        """Ends a pin.

        Raises:
          JaxkvError: the prefix is not pinned.
        """
        name = _name(keys)
        if name not in self._pins:
            raise JaxkvError(
                f"these {keys.tokens.size} tokens are not pinned; {len(self._pins)} prefixes are"
            )
        blocks, _ = self._pins.pop(name)
        self._pool.unhold(blocks[::-1], "pin")

    def due(self, now: float) -> bool:
        """Whether a pin may have expired."""
        return bool(self._ends) and self._ends[0][0] <= now

    def expire(self, now: float) -> None:
        """Ends expired pins."""
        while self._ends and self._ends[0][0] <= now:
            end, name = heapq.heappop(self._ends)
            if name in self._pins and self._pins[name][1] == end:
                blocks, _ = self._pins.pop(name)
                self._pool.unhold(blocks[::-1], "pin")

    def clear(self) -> None:
        """Ends all pins."""
        for blocks, _ in self._pins.values():
            self._pool.unhold(blocks[::-1], "pin")
        self._pins.clear()
        self._ends.clear()


def _name(keys: BlockKeys) -> bytes:
    return keys.root + keys.tokens.tobytes()
