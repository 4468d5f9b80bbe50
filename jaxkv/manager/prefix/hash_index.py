"""The hash table behind `PrefixIndex`: from chained block hash to block."""

from __future__ import annotations

import numpy as np

from jaxkv.manager.prefix.hash_table import HashTable
from jaxkv.manager.prefix.keys import BlockKeys
from jaxkv.manager.prefix.tree import GONE, ROOT

_NOTHING = np.zeros(0, np.int64)


class HashIndex:
    """A table from chained hash to block; content and parent are compared on every hit.

    For a block that has outlived its parent, the hash alone vouches for its predecessors.

    Source: the prefix cache of vLLM (block hash with parent hash), which relies on a cryptographic
    hash instead of the comparison.

    Args:
      tokens: i32[num_blocks, block_size]; token ids of the pool's blocks, constant while indexed.
      parents: i64[num_blocks]; parents of the pool's blocks.
      gaps: whether blocks outlive their parents.
    """

    def __init__(self, tokens: np.ndarray, parents: np.ndarray, *, gaps: bool):
        self._tokens, self._parents, self._gaps = tokens, parents, gaps
        self._blocks = HashTable()
        self._roots: dict[int, bytes] = {}  # roots of blocks whose parent is ROOT
        self._media: dict[int, bytes] = {}  # key parts of blocks with media

    adds_leaves = True

    def match(self, keys: BlockKeys, parent: int) -> np.ndarray:
        if self._gaps:
            found = [block or 0 for block in self._blocks.find(keys.hashes())]
        else:
            found = self._blocks.find_leading(keys.hashes())
        if not found:
            return _NOTHING
        blocks = np.fromiter(found, np.int64, len(found))
        tokens, before = self._tokens.take(blocks, axis=0), self._parents[blocks]
        wanted = keys.tokens[: len(blocks)]
        if (  # the common case: comparing bytes is faster than a few array calls
            tokens.tobytes() == wanted.tobytes()
            and before[1:].tobytes() == blocks[:-1].tobytes()
            and before.item(0) == parent
            and (parent != ROOT or self._roots.get(blocks.item(0)) == keys.root)
            and not (self._media or keys.media)
        ):
            return blocks
        same = (tokens == wanted).all(axis=1) & (blocks > 0)
        same[1:] &= (before[1:] == blocks[:-1]) | (before[1:] == GONE)
        same[0] &= before[0] == parent or (before[0] == GONE and parent != ROOT)
        if parent == ROOT:
            same[0] &= self._roots.get(int(blocks[0])) == keys.root
        if self._media or keys.media:
            for i, block in enumerate(blocks.tolist()):
                same[i] &= self._media.get(block) == keys.media.get(keys.first + i)
        if not self._gaps:
            return blocks[: len(same) if same.all() else same.argmin()]
        return np.trim_zeros(np.where(same, blocks, 0), "b")

    def add(self, keys: BlockKeys, start: int, parent: int, blocks: list[int]) -> int:
        hashes = keys.hashes()[start : start + len(blocks)]
        count = len(blocks)
        if self._blocks.find(hashes).count(None) < count or len(set(hashes)) < count:
            seen: set[bytes] = set()  # a collision, within the chain or with the index
            for count, key in enumerate(hashes):  # noqa: B007 (the count where it stops)
                if key in self._blocks or key in seen:
                    break
                seen.add(key)
            hashes, blocks = hashes[:count], blocks[:count]
            if not blocks:
                return 0
        self._blocks.update(hashes, blocks)
        if parent == ROOT:
            self._roots[blocks[0]] = keys.root
        for i, block in enumerate(blocks) if keys.media else ():
            if (media := keys.media.get(keys.first + start + i)) is not None:
                self._media[block] = media
        return count

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def add_leaves(self, hashes: list[bytes], blocks: list[int]) -> None:
        self._blocks.update(hashes, blocks)

    def remove(self, block: int, block_hash: bytes) -> None:
        self._blocks.remove(block_hash)
        self._roots.pop(block, None)
        self._media.pop(block, None)

    def clear(self) -> None:
        self._blocks.clear()
        self._roots.clear()
        self._media.clear()

    def __len__(self) -> int:
        return len(self._blocks)
