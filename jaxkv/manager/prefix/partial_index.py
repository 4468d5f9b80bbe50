"""Index of partly matching blocks: the child of a block with the longest common prefix.

Children of a block are sorted by their tokens, so that the longest common prefix is with the left
or the right neighbour, and a match costs O(log n) among n children.
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np
from sortedcontainers import SortedList  # pyright: ignore[reportMissingTypeStubs]

from jaxkv.manager.prefix.keys import BlockKeys
from jaxkv.manager.prefix.tree import ROOT


class _Children(Protocol):
    """The methods used of a SortedList of (sortable tokens, block), which has no types."""

    def add(self, value: tuple[bytes, int], /) -> None: ...
    def remove(self, value: tuple[bytes, int], /) -> None: ...
    def bisect_left(self, value: tuple[bytes, int], /) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> list[tuple[bytes, int]]: ...


class PartialIndex:
    """Cached blocks without media, by parent (or root of the namespace) and tokens."""

    def __init__(self) -> None:
        self._children: dict[int | bytes, _Children] = {}
        self._entries: dict[int, tuple[int | bytes, bytes]] = {}

    def add(self, keys: BlockKeys, index: int, parent: int, block: int) -> None:
        """Adds `block`, the block number `index` of `keys`."""
        if keys.first + index in keys.media:
            return
        below = keys.root if parent == ROOT else parent
        tokens = _sortable(keys.tokens[index])
        if below not in self._children:
            self._children[below] = cast(_Children, SortedList())
        self._children[below].add((tokens, block))
        self._entries[block] = below, tokens

    def remove(self, block: int) -> None:
        """Removes a block, if present."""
        if block in self._entries:
            below, tokens = self._entries.pop(block)
            self._children[below].remove((tokens, block))
            if not self._children[below]:
                del self._children[below]

    def clear(self) -> None:
        """Removes all blocks."""
        self._children.clear()
        self._entries.clear()

    def best(self, root: bytes, parent: int, tokens: np.ndarray) -> tuple[int, int]:
        """The block that shares most leading tokens with i32[n] `tokens`, and their number."""
        children = self._children.get(root if parent == ROOT else parent)
        if not children or not len(tokens):
            return 0, 0
        wanted = _sortable(tokens)
        at = children.bisect_left((wanted, 0))
        best, most = 0, 0
        for neighbour in children[max(0, at - 1) : at + 1]:
            have = np.frombuffer(neighbour[0], ">u4")[: len(tokens)]
            same = have == np.frombuffer(wanted, ">u4")[: len(have)]
            count = len(same) if same.all() else int(same.argmin())
            if count > most:
                best, most = neighbour[1], count
        return best, most


def _sortable(tokens: np.ndarray) -> bytes:
    """Big-endian bytes, which sort as the tokens do."""
    return tokens.astype(">u4").tobytes()
