"""Finding the cached blocks of a prefix: one interface, a hash table and a radix tree behind it.

Both answer the same question with the same answer: which blocks hold the KV of these tokens. A
block is in the index only while its parent is (whoever removes a block removes its descendants
first), so that whatever is found can be reached.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxkv.block_keys import BlockKeys

ROOT = -1  # the parent of a sequence's first block


class PrefixIndex(Protocol):
    """Where blocks are found by content."""

    def match(self, keys: BlockKeys, start: int, parent: int) -> list[int]:
        """The longest run of indexed blocks with the content of `keys` from `start` on.

        `start` counts from the first of `keys`; `parent` is the block before it, or ROOT.
        """
        ...

    def add(self, keys: BlockKeys, start: int, parent: int, blocks: list[int]) -> int:
        """Enters `blocks` as the content of `keys` from `start` on, none of which is there.

        Returns how many were entered: fewer than asked where a key is taken by other content.
        """
        ...

    def remove(self, block: int) -> None:
        """Takes out a block without children."""
        ...

    def clear(self) -> None:
        """Takes out everything."""
        ...

    def __len__(self) -> int: ...


class HashIndex:
    """A table from chained hash to block; content and parent are compared on every hit.

    Source: the prefix cache of vLLM (block hash with parent hash), with the comparison that it
    leaves to a cryptographic hash.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self._blocks: dict[bytes, int] = {}
        self._hashes: list[bytes] = [b""] * num_blocks
        self._tokens = np.zeros((num_blocks, block_size), "<i4")
        self._parents = np.full(num_blocks, ROOT, np.int32)
        self._roots: dict[int, bytes] = {}  # of the blocks whose parent is ROOT
        self._media: dict[int, bytes] = {}  # of the blocks that hold any

    def match(self, keys: BlockKeys, start: int, parent: int) -> list[int]:
        found: list[int] = []
        get = self._blocks.get
        for key in keys.hashes()[start:] if start else keys.hashes():
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found[: self._verified(keys, start, parent, found)] if found else found

    def _verified(self, keys: BlockKeys, start: int, parent: int, found: list[int]) -> int:
        """How many of `found` hold what they are taken for."""
        blocks = np.array(found)
        same = (self._tokens[blocks] == keys.tokens[start : start + len(found)]).all(axis=1)
        same[0] &= self._parents[blocks[0]] == parent
        same[1:] &= self._parents[blocks[1:]] == blocks[:-1]
        if parent == ROOT:
            same[0] &= self._roots.get(found[0]) == keys.root
        if self._media or keys.media:
            first = keys.first + start
            for i, block in enumerate(found):
                same[i] &= self._media.get(block) == keys.media.get(first + i)
        return len(found) if same.all() else int(same.argmin())

    def add(self, keys: BlockKeys, start: int, parent: int, blocks: list[int]) -> int:
        hashes = keys.hashes()[start : start + len(blocks)]
        count = len(blocks)
        if not self._blocks.keys().isdisjoint(hashes) or len(set(hashes)) < count:
            seen: set[bytes] = set()  # a collision, within the chain or with what is there
            for count, key in enumerate(hashes):  # noqa: B007 (the count where it stops)
                if key in self._blocks or key in seen:
                    break
                seen.add(key)
            hashes, blocks = hashes[:count], blocks[:count]
            if not blocks:
                return 0
        self._blocks.update(zip(hashes, blocks, strict=True))
        for block, key in zip(blocks, hashes, strict=True):
            self._hashes[block] = key
        at = np.array(blocks)
        self._tokens[at] = keys.tokens[start : start + count]
        self._parents[at[0]] = parent
        self._parents[at[1:]] = at[:-1]
        if parent == ROOT:
            self._roots[blocks[0]] = keys.root
        for i, block in enumerate(blocks) if keys.media else ():
            if (media := keys.media.get(keys.first + start + i)) is not None:
                self._media[block] = media
        return count

    def remove(self, block: int) -> None:
        del self._blocks[self._hashes[block]]
        self._hashes[block] = b""
        self._roots.pop(block, None)
        self._media.pop(block, None)

    def clear(self) -> None:
        self._blocks.clear()
        self._roots.clear()
        self._media.clear()

    def __len__(self) -> int:
        return len(self._blocks)
