"""What the block manager hands out: plain records."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Literal, Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the device must do to its tables to follow the manager. NumPy, sizes not padded.

    Attributes:
      copies: i32[C, 2] (source, destination) blocks, to be copied before anything else.
      cells: i32[E, 3] (row, column, block) entries of the block table.
      lengths: i32[R, 2] (row, length) rows whose length is set.
    """

    copies: np.ndarray
    cells: np.ndarray
    lengths: np.ndarray

    @classmethod
    def empty(cls) -> Self:
        """Nothing to do."""
        return cls(
            np.zeros((0, 2), np.int32), np.zeros((0, 3), np.int32), np.zeros((0, 2), np.int32)
        )


@dataclasses.dataclass(frozen=True)
class Allocation:
    """What `BlockManager.allocate` gave a sequence.

    Attributes:
      row: the sequence's row in the block table.
      num_cached_tokens: leading tokens whose KV is already in the pool.
    """

    row: int
    num_cached_tokens: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """Whether a prompt fits, and the numbers behind the answer.

    Attributes:
      verdict: "now"; "later", when blocks or a row come back; "never" in this pool.
      needed: blocks it would take out of what is available; a hit on an idle cached block is one.
      available: free blocks, and cached ones that may be evicted.
      watermark: blocks that are kept back for the running sequences.
      free_rows: rows of the block table that are free.
      num_cached_tokens: of the prompt.
      longest: tokens of the longest sequence that ever fits.
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
      active: blocks that a live sequence references, or a copy that is under way.
      cached: blocks that no live sequence references but a prefix lookup would find.
      free: blocks that hold nothing.
      pinned: blocks that a pin keeps, referenced or cached.
      peak_active: most blocks that were ever active at once.
      used_slots: tokens that the live sequences hold.
      allocated_slots: slots of the blocks in their tables, a shared block counted for each.
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
    """One block, as a snapshot shows it.

    Attributes:
      block: its id.
      ref_count: table entries that name it.
      last_access: seconds of the manager's clock; None: never stored.
      access_count: prefix hits since it was stored.
      hash: of its content, hex; None: no lookup finds it.
      sequences: that have it in their tables.
      tier: where it is.
    """

    block: int
    ref_count: int
    last_access: float | None
    access_count: int
    hash: str | None
    sequences: tuple[Hashable, ...]
    tier: str = "device"
