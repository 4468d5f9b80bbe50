"""Pinned prefixes: cached until they are unpinned, or for a time."""

from __future__ import annotations

from typing import Protocol, cast

from sortedcontainers import SortedList  # pyright: ignore[reportMissingTypeStubs]

from jaxkv.errors import JaxkvError
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.prefix.keys import BlockKeys


class _Ends(Protocol):
    """The methods used of a SortedList of (end, name), which has no types."""

    def add(self, value: tuple[float, bytes], /) -> None: ...
    def remove(self, value: tuple[float, bytes], /) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[float, bytes]: ...


class Pins:
    """Pins of cached blocks, by prefix."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._pins: dict[bytes, tuple[list[int], float | None]] = {}
        self._ends = cast(_Ends, SortedList())

    def held(self) -> list[int]:
        """Blocks of all pins, each once per pin."""
        return [block for blocks, _ in self._pins.values() for block in blocks]

    def set(self, keys: BlockKeys, blocks: list[int], expires: float | None) -> None:
        """Pins the cached blocks of a prefix; replaces an earlier pin of the same prefix."""
        name = _name(keys)
        self._pool.hold(blocks, "pin")
        if name in self._pins:
            self._end(name)
        if not blocks:
            return
        self._pins[name] = list(blocks), expires
        if expires is not None:
            self._ends.add((expires, name))

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
        self._end(name)

    def due(self, now: float) -> bool:
        """Whether a pin has expired."""
        return bool(self._ends) and self._ends[0][0] <= now

    def expire(self, now: float) -> None:
        """Ends expired pins."""
        while self.due(now):
            self._end(self._ends[0][1])

    def clear(self) -> None:
        """Ends all pins."""
        for name in list(self._pins):
            self._end(name)

    def _end(self, name: bytes) -> None:
        blocks, expires = self._pins.pop(name)
        if expires is not None:
            self._ends.remove((expires, name))
        self._pool.unhold(blocks[::-1], "pin")


def _name(keys: BlockKeys) -> bytes:
    return keys.root + keys.tokens.tobytes()
