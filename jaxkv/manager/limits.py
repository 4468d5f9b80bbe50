"""Capacity checks. Each error states what was requested, what is available, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from jaxkv.errors import JaxkvError, OutOfBlocksError
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.table import SequenceTable


class Limits:
    """Capacity of a pool and its table, now and at most."""

    def __init__(self, pool: BlockPool, table: SequenceTable, expire_pins: Callable[[], None]):
        self._pool, self._table, self._expire_pins = pool, table, expire_pins

    def available(self) -> int:
        """Number of blocks that can be taken: free blocks, and cached ones without holds."""
        self._expire_pins()
        return self._pool.num_available

    def num_idle(self, blocks: np.ndarray) -> int:
        """Number of these cached blocks that count as available."""
        idle = blocks[self._pool.ref_counts[blocks] == 0]
        holds = self._pool.holds
        return len(idle) - sum(b in holds for b in idle.tolist()) if holds else len(idle)

    def longest(self, kept_back: int = 0) -> int:
        """Blocks of the longest sequence that ever fits."""
        return min(self._table.max_blocks_per_seq, self._pool.num_blocks - 1 - kept_back)

    def require_blocks(self, needed: int, what: str, *, kept_back: int = 0) -> None:
        """Raises OutOfBlocksError unless `needed` blocks are available.

        Args:
          kept_back: available blocks that must be left.
        """
        wanted = needed + kept_back
        # Expired pins matter only when blocks are short.
        if wanted <= self._pool.num_available or wanted <= (available := self.available()):
            return
        pool, size = self._pool, self._pool.block_size
        available = max(0, available - kept_back)
        raise OutOfBlocksError(
            f"{what} needs {needed} blocks of {size} tokens, but {available} of "
            f"{pool.num_blocks - 1} are free ({pool.num_cached} cached; the longest sequence that "
            f"fits now has {available * size} tokens); free a sequence or raise num_blocks",
            asked=needed,
            free=available,
        )

    def require_columns(self, seq_id: Hashable, length: int) -> None:
        """Raises JaxkvError if a sequence of this length can never fit."""
        pool, width = self._pool, self._table.max_blocks_per_seq
        longest = self.longest() * pool.block_size
        if length > longest:
            raise JaxkvError(
                f"sequence {seq_id!r} of {length} tokens never fits: the longest is {longest} "
                f"({width} table columns, {pool.num_blocks - 1} usable blocks of "
                f"{pool.block_size} tokens)"
            )

    def require_row(self, needed: int) -> None:
        """Raises OutOfBlocksError if all rows of the block table are taken."""
        if not self._table.num_free_rows:
            raise OutOfBlocksError(
                f"all {self._table.max_seqs} rows of the block table are taken; free a sequence or "
                "raise max_seqs",
                asked=needed,
                free=self.available(),
            )
