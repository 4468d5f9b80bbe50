"""Records that the block manager returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Literal, Self

import numpy as np

from jaxkv.manager.plans import PlanChain


@dataclasses.dataclass(frozen=True)
class Plan:
    """Changes of the device's tables that follow the manager. NumPy, sizes not padded.

    Attributes:
      copies: i32[C, 2]; (source, destination) of block copies, which run before all else.
      cells: i32[E, 3]; (row, column, block) of changed table cells.
      lengths: i32[R, 2]; (row, length) of rows whose length is set.
      order: its place among the plans of its manager, which `apply_plan` checks; None: a plan made
        by hand, which is not checked.
    """

    copies: np.ndarray
    cells: np.ndarray
    lengths: np.ndarray
    order: PlanOrder | None = None

    @classmethod
    def empty(cls) -> Self:
        """A plan without changes."""
        return cls(
            np.zeros((0, 2), np.int32), np.zeros((0, 3), np.int32), np.zeros((0, 2), np.int32)
        )

    def to_plain(self) -> dict[str, Any]:
        """The changes as plain data, for logs."""
        return {name: getattr(self, name).tolist() for name in ("copies", "cells", "lengths")}


@dataclasses.dataclass(frozen=True)
class PlanOrder:
    """The place of a plan among those of its manager.

    Attributes:
      chain: the manager's plans.
      number: number of the plan, from 1; a plan without changes has that of the one before.
      before: number of the plan that it follows; its own without changes.
      settled: number of the last plan before it that did more than clear cells.
      begins: whether an empty state may begin with it.
    """

    chain: PlanChain
    number: int
    before: int
    settled: int
    begins: bool


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
class TableView:
    """The block table and the lengths that a state on the device should have.

    Attributes:
      seq_ids: id of the sequence in each of the R rows; None: the row is free.
      block_tables: i32[R, C]; a copy of the table.
      computed: i64[R]; leading tokens whose KV is committed.
      writable: i64[R]; leading positions that the row may write: its tokens and reserved slots.
    """

    seq_ids: tuple[Hashable, ...]
    block_tables: np.ndarray
    computed: np.ndarray
    writable: np.ndarray


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
