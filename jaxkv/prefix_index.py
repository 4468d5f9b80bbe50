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
_NOTHING = np.zeros(0, np.int64)


class PrefixIndex(Protocol):
    """Where blocks are found by content."""

    def match(self, keys: BlockKeys, parent: int) -> np.ndarray:
        """i64: the longest run of indexed blocks with the content of `keys`, behind `parent`."""
        ...

    def add(self, keys: BlockKeys, start: int, parent: int, blocks: list[int]) -> int:
        """Enters `blocks` as the content of `keys` from `start` on, none of which is there.

        Returns how many were entered: fewer than asked where a key is taken by other content.
        """
        ...

    def remove(self, block: int, block_hash: bytes) -> None:
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

    Args:
      tokens: i32[num_blocks, block_size], the pool's: those of an indexed block do not change.
      parents: i64[num_blocks], the pool's.
    """

    def __init__(self, tokens: np.ndarray, parents: np.ndarray):
        self._tokens, self._parents = tokens, parents
        self._blocks: dict[bytes, int] = {}
        self._roots: dict[int, bytes] = {}  # of the blocks whose parent is ROOT
        self._media: dict[int, bytes] = {}  # of the blocks that hold any

    def match(self, keys: BlockKeys, parent: int) -> np.ndarray:
        found: list[int | None] = list(map(self._blocks.get, keys.hashes()))
        if None in found:
            del found[found.index(None) :]
        if not found:
            return _NOTHING
        blocks = np.array(found, np.int64)
        tokens, before = self._tokens[blocks], self._parents[blocks]
        wanted = keys.tokens[: len(blocks)]
        if (  # the common case: bytes compare faster than a few arrays do
            tokens.tobytes() == wanted.tobytes()
            and before[1:].tobytes() == blocks[:-1].tobytes()
            and before.item(0) == parent
            and (parent != ROOT or self._roots.get(found[0]) == keys.root)
            and not (self._media or keys.media)
        ):
            return blocks
        same = (tokens == wanted).all(axis=1)
        same[1:] &= before[1:] == blocks[:-1]
        same[0] &= before[0] == parent
        if parent == ROOT:
            same[0] &= self._roots.get(int(blocks[0])) == keys.root
        if self._media or keys.media:
            for i, block in enumerate(blocks.tolist()):
                same[i] &= self._media.get(block) == keys.media.get(keys.first + i)
        return blocks if np.count_nonzero(same) == len(same) else blocks[: same.argmin()]

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
        if parent == ROOT:
            self._roots[blocks[0]] = keys.root
        for i, block in enumerate(blocks) if keys.media else ():
            if (media := keys.media.get(keys.first + start + i)) is not None:
                self._media[block] = media
        return count

    def remove(self, block: int, block_hash: bytes) -> None:
        del self._blocks[block_hash]
        self._roots.pop(block, None)
        self._media.pop(block, None)

    def clear(self) -> None:
        self._blocks.clear()
        self._roots.clear()
        self._media.clear()

    def __len__(self) -> int:
        return len(self._blocks)
