"""The interface of prefix indexes: the cached blocks of a prompt's leading tokens.

The hash table and the radix tree behind it give the same answer to the same question. A block is in
the index only while its parent is (descendants are removed first), so that whatever is found can be
reached. With a sliding window a block may outlive its parent and is found behind the gap.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxkv.manager.prefix.keys import BlockKeys


class PrefixIndex(Protocol):
    """Where blocks are found by content."""

    def match(self, keys: BlockKeys, parent: int) -> np.ndarray:
        """i64: the indexed blocks with the content of `keys`, behind `parent`, up to the last one.

        0 in the place of one that is not there, which happens only where blocks outlive parents.
        """
        ...

    def add(self, keys: BlockKeys, start: int, parent: int, blocks: list[int]) -> int:
        """Enters `blocks` as the content of `keys` from `start` on, none of which is there, behind
        the block `parent`.

        Returns how many were entered: fewer than asked where a key is taken by other content.
        """
        ...

    def remove(self, block: int, block_hash: bytes) -> None:
        """Takes out a block; its descendants, if there are any, are found without it."""
        ...

    def clear(self) -> None:
        """Takes out everything."""
        ...

    def __len__(self) -> int: ...

    @property
    def adds_leaves(self) -> bool:
        """Whether `add_leaves` and `in` work, which need a table from hash to block."""
        ...

    def add_leaves(self, hashes: list[bytes], blocks: list[int]) -> None:
        """`add` of one block each, with hashes that are not there, behind indexed blocks."""
        ...

    def __contains__(self, key: bytes) -> bool: ...
