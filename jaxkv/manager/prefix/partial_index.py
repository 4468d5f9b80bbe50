"""The cached block that shares the most leading tokens with a given one, below a given parent.

Children of a block are kept in the order of their tokens; the longest common prefix is then with
the neighbour on the left or on the right, so that a match costs O(log n) among n children.
"""

from __future__ import annotations

import numpy as np
from sortedcontainers import SortedList

from jaxkv.manager.prefix.keys import BlockKeys
from jaxkv.manager.prefix.tree import ROOT


class PartialIndex:
    """Blocks without media, by parent (or root of the namespace) and tokens."""

    def __init__(self) -> None:
        self._children: dict[int | bytes, SortedList] = {}
        self._entries: dict[int, tuple[int | bytes, bytes]] = {}

    def add(self, keys: BlockKeys, index: int, parent: int, block: int) -> None:
        """Block number `index` of `keys` is cached as `block`."""
        if keys.first + index in keys.media:
            return
        below = keys.root if parent == ROOT else parent
        tokens = _sortable(keys.tokens[index])
        self._children.setdefault(below, SortedList()).add((tokens, block))
        self._entries[block] = below, tokens

    def remove(self, block: int) -> None:
        """The block is cached no more."""
        if block in self._entries:
            below, tokens = self._entries.pop(block)
            self._children[below].remove((tokens, block))
            if not self._children[below]:
                del self._children[below]

    def clear(self) -> None:
        """Forgets everything."""
        self._children.clear()
        self._entries.clear()

    def best(self, root: bytes, parent: int, tokens: np.ndarray) -> tuple[int, int]:
        """(block, leading tokens it shares with i32[n] `tokens`); the count is 0 if none does."""
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
    """Big-endian: bytes compare as the tokens do."""
    return tokens.astype(">u4").tobytes()
