"""A table from hash to block in many parts, so that no insertion rebuilds much of it."""

from __future__ import annotations

from collections.abc import Iterable

_PARTS = 256


class HashTable:
    """A dict from hash to block, divided by the last byte of the hash.

    A dict of a million entries is rebuilt, in tens of milliseconds, each time that its insertions
    have used up its room, deleted entries included. A part of it takes a 256th of that.

    Example:
      >>> table = HashTable()
      >>> table.update([b"key", b"other"], [7, 8])
      >>> table.find([b"key", b"missing"]), b"other" in table, len(table)
      ([7, None], True, 2)
    """

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, key: bytes) -> bool:
        return key in self._parts[key[-1]]

    def find(self, keys: list[bytes]) -> list[int | None]:
        """The block of each key."""
        parts = self._parts
        return [parts[key[-1]].get(key) for key in keys]

    def find_leading(self, keys: list[bytes]) -> list[int]:
        """The blocks of the leading keys, up to the first one that is missing."""
        parts = self._parts
        try:
            return [parts[key[-1]][key] for key in keys]
        except KeyError:
            pass
        found: list[int] = []
        for key in keys:
            if (block := parts[key[-1]].get(key)) is None:
                break
            found.append(block)
        return found

    def update(self, keys: Iterable[bytes], blocks: Iterable[int]) -> None:
        """Adds keys that are not in the table."""
        parts = self._parts
        for key, block in zip(keys, blocks, strict=True):
            parts[key[-1]][key] = block

    def remove(self, key: bytes) -> None:
        """Removes a key that is in the table."""
        del self._parts[key[-1]][key]

    def clear(self) -> None:
        """Removes all keys."""
        self.__init__()
