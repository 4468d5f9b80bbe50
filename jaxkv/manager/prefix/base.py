"""The interface of prefix indexes, which find the cached blocks of a prompt.

The hash table and the radix tree behind it find the same blocks. A block is in the index only while
its parent is (descendants are removed first), so that every indexed block can be reached. With a
sliding window a block may outlive its parent; it is found behind the gap.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxkv.manager.prefix.keys import BlockKeys


class PrefixIndex(Protocol):
    """Finds blocks by content."""

    def match(self, keys: BlockKeys, parent: int) -> np.ndarray:
        """i64; the indexed blocks with the content of `keys`, behind `parent`, up to the last one.

        0 for missing blocks before it, which occur only if blocks outlive their parents.
        """
        ...

    def add(self, keys: BlockKeys, start: int, parent: int, blocks: list[int]) -> int:
        """Adds `blocks` as the content of `keys` from `start` on, behind the block `parent`.

        None of the contents is in the index.

        Returns:
          Number of added blocks: fewer than given if a key belongs to other content.
        """
        ...

    def remove(self, block: int, block_hash: bytes) -> None:
        """Removes a block. Descendants that remain are found without it."""
        ...

    def clear(self) -> None:
        """Removes all blocks."""
        ...

    def __len__(self) -> int: ...

    @property
    def adds_leaves(self) -> bool:
        """Whether `add_leaves` and `in` are supported; they need a table from hash to block."""
        ...

    def add_leaves(self, hashes: list[bytes], blocks: list[int]) -> None:
        """Adds one block behind each of several indexed blocks; the hashes are not in the index."""
        ...

    def __contains__(self, key: bytes) -> bool: ...
