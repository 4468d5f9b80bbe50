"""Records that the block manager returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Literal, Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class Plan:
    """Changes of the device's tables that follow the manager. NumPy, sizes not padded.

    Attributes:
      copies: i32[C, 2]; (source, destination) of block copies, which run before all else.
      cells: i32[E, 3]; (row, column, block) of changed table cells.
      lengths: i32[R, 2]; (row, length) of rows whose length is set.
    """

    copies: np.ndarray
    cells: np.ndarray
    lengths: np.ndarray

    @classmethod
    def empty(cls) -> Self:
        """A plan without changes."""
        return cls(
            np.zeros((0, 2), np.int32), np.zeros((0, 3), np.int32), np.zeros((0, 2), np.int32)
        )


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Result of `BlockManager.allocate`.

    Attributes:
      row: row of the sequence in the block table.
      num_cached_tokens: leading tokens whose KV is already in the pool.
    """

    row: int
    num_cached_tokens: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """Verdict on a prompt, and the numbers behind it.

    Attributes:
      verdict: "now", "later" (when blocks or a row are freed) or "never" (in this pool).
      needed: available blocks that the prompt would take; a hit on an idle cached block counts as
        one.
      available: free blocks, and cached blocks that can be evicted.
      watermark: blocks kept back for the running sequences.
      free_rows: free rows of the block table.
      num_cached_tokens: leading tokens of the prompt that are cached.
      longest: tokens of the longest sequence that can ever fit.
    """

    verdict: Literal["now", "later", "never"]
    needed: int
    available: int
    watermark: int
    free_rows: int
    num_cached_tokens: int
    longest: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Blocks of the pool by use; `active + cached + free` is the number of usable blocks.

    Attributes:
      active: blocks referenced by live sequences or held by queued copies.
      cached: blocks that no live sequence references but a prefix lookup would find.
      free: unused blocks.
      pinned: pinned blocks, referenced or cached.
      peak_active: most blocks that were active at once.
      used_slots: tokens of the live sequences.
      allocated_slots: slots of the blocks in their tables; a shared block counts once per table.
      num_seqs: live sequences.
    """

    active: int
    cached: int
    free: int
    pinned: int
    peak_active: int
    used_slots: int
    allocated_slots: int
    num_seqs: int


@dataclasses.dataclass(frozen=True)
class BlockInfo:
    """State of one block, for snapshots.

    Attributes:
      block: block id.
      ref_count: table cells that name the block.
      last_access: time of its last access on the manager's clock, seconds; None: never stored.
      access_count: prefix hits since it was stored.
      hash: block hash, hex; None: not visible to lookups.
      sequences: ids of the sequences that have it in their tables.
      tier: tier that holds the block.
    """

    block: int
    ref_count: int
    last_access: float | None
    access_count: int
    hash: str | None
    sequences: tuple[Hashable, ...]
    tier: str = "device"
