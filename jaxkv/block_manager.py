"""The host's view of the pool: which sequence owns which blocks. Plans; the device applies.

Pure Python and NumPy (no JAX), single-threaded by contract: whoever runs the step loop owns it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Self

import numpy as np

from jaxkv.config import CacheConfig
from jaxkv.errors import ConfigError, InvariantError, JaxkvError, OutOfBlocksError
from jaxkv.errors import UnknownSequenceError as UnknownSequence

NULL_BLOCK = 0  # never allocated: padding points at it, reads of it are masked


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
class Stats:
    """Blocks of the pool by use; `active + cached + free` is the number of usable blocks.

    Attributes:
      active: blocks that a live sequence references.
      cached: blocks that no live sequence references but a prefix lookup would find.
      free: blocks that hold nothing.
      peak_active: most blocks that were ever active at once.
      used_slots: tokens that the live sequences hold.
      num_seqs: live sequences.
    """

    active: int
    cached: int
    free: int
    peak_active: int
    used_slots: int
    num_seqs: int


class BlockManager:
    """Block tables, reference counts and free blocks of one pool.

    Args:
      num_blocks: blocks in the pool, the null block included.
      block_size: tokens per block.
      max_seqs: rows of the block table.
      max_blocks_per_seq: columns of the block table.

    Example:
      >>> from jaxkv import BlockManager
      >>> manager = BlockManager(num_blocks=5, block_size=4, max_seqs=2, max_blocks_per_seq=4)
      >>> manager.allocate("a", [1, 2, 3, 4, 5]).num_cached_tokens
      0
      >>> manager.block_table("a").tolist()
      [1, 2]
      >>> manager.commit("a", 5)       # their KV is computed
      >>> manager.append("a", 6)       # one more slot
      >>> manager.length("a"), manager.stats().free
      (6, 2)
      >>> manager.free("a")
      >>> manager.stats().active
      0
    """

    def __init__(self, num_blocks: int, block_size: int, *, max_seqs: int, max_blocks_per_seq: int):
        if num_blocks < 2 or min(block_size, max_seqs, max_blocks_per_seq) < 1:
            raise ConfigError(
                f"{num_blocks=} must be at least 2 (block 0 is the null block) and {block_size=}, "
                f"{max_seqs=}, {max_blocks_per_seq=} positive"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_seqs = max_seqs
        self.max_blocks_per_seq = max_blocks_per_seq
        self._tables = np.zeros((max_seqs, max_blocks_per_seq), np.int32)
        self._lengths = np.zeros(max_seqs, np.int32)  # tokens known, KV written or not
        self._computed = np.zeros(max_seqs, np.int32)  # leading tokens whose KV is written
        self._num_blocks_of = np.zeros(max_seqs, np.int32)  # table entries in use
        self._ref_counts = np.zeros(num_blocks, np.int32)
        self._free_blocks: deque[int] = deque(range(1, num_blocks))
        self._free_rows: list[int] = list(range(max_seqs - 1, -1, -1))
        self._rows: dict[Hashable, int] = {}
        self._dirty_cells: list[np.ndarray] = []  # flat table indices the device has not seen
        self._dirty_rows: set[int] = set()  # rows whose length the device has not seen
        self._peak_active = 0

    @classmethod
    def for_config(cls, config: CacheConfig) -> Self:
        """The manager of a pool of this shape."""
        return cls(
            config.num_blocks,
            config.block_size,
            max_seqs=config.max_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
        )

    # -- questions ---------------------------------------------------------------------------

    def row(self, seq_id: Hashable) -> int:
        """The sequence's row in the block table."""
        try:
            return self._rows[seq_id]
        except KeyError:
            raise UnknownSequence(
                f"no live sequence {seq_id!r}; {len(self._rows)} are live"
            ) from None

    def length(self, seq_id: Hashable) -> int:
        """Tokens of the sequence, KV written or not."""
        return int(self._lengths[self.row(seq_id)])

    def num_computed_tokens(self, seq_id: Hashable) -> int:
        """Leading tokens whose KV is written."""
        return int(self._computed[self.row(seq_id)])

    def block_table(self, seq_id: Hashable) -> np.ndarray:
        """i32[num_blocks of the sequence], a copy."""
        row = self.row(seq_id)
        return self._tables[row, : self._num_blocks_of[row]].copy()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def stats(self) -> Stats:
        """Counts of blocks by use."""
        free = len(self._free_blocks)
        rows = list(self._rows.values())
        return Stats(
            active=self.num_blocks - 1 - free,
            cached=0,
            free=free,
            peak_active=self._peak_active,
            used_slots=int(self._lengths[rows].sum()),
            num_seqs=len(rows),
        )

    # -- transitions: each refuses before it changes anything --------------------------------

    def allocate(self, seq_id: Hashable, token_ids: Sequence[int] | np.ndarray) -> Allocation:
        """Reserves a row and the blocks of `token_ids`. All or nothing.

        Raises:
          OutOfBlocksError: too few free blocks, or no free row; nothing was changed.
          JaxkvError: the id is live, there are no tokens, or they can never fit a table row.
        """
        if seq_id in self._rows:
            raise JaxkvError(f"sequence {seq_id!r} is live already; free it first")
        length = len(token_ids)
        if length == 0:
            raise JaxkvError(f"sequence {seq_id!r} has no tokens; give at least one")
        needed = self.blocks_for(length)
        self._require_columns(seq_id, length)
        if not self._free_rows:
            raise OutOfBlocksError(
                f"all {self.max_seqs} rows of the block table are taken; free a sequence or raise "
                "max_seqs",
                asked=needed,
                free=len(self._free_blocks),
            )
        self._require_blocks(needed, f"sequence {seq_id!r} of {length} tokens")
        row = self._free_rows.pop()
        self._rows[seq_id] = row
        self._set_blocks(np.full(needed, row), np.arange(needed), self._take(needed))
        self._num_blocks_of[row] = needed
        self._lengths[row] = length
        self._computed[row] = 0
        self._dirty_rows.add(row)
        return Allocation(row=row, num_cached_tokens=0)

    def commit(self, seq_id: Hashable, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens is written."""
        row = self.row(seq_id)
        computed = int(self._computed[row]) + num_tokens
        if num_tokens < 0 or computed > self._lengths[row]:
            raise JaxkvError(
                f"sequence {seq_id!r}: cannot commit {num_tokens} tokens after "
                f"{self._computed[row]} of {self._lengths[row]}"
            )
        self._computed[row] = computed

    def append(self, seq_id: Hashable, token_id: int) -> None:
        """One more token: reserves its slot. See `append_batch`."""
        self.append_batch([seq_id], np.array([token_id]))

    def append_batch(self, seq_ids: Sequence[Hashable], token_ids: np.ndarray) -> None:
        """One more token for each of several sequences: reserves their slots. All or nothing.

        Args:
          seq_ids: distinct live sequences.
          token_ids: i32[len(seq_ids)].

        Raises:
          OutOfBlocksError: fewer free blocks than sequences at a block boundary.
          JaxkvError: an id given twice, or a sequence at its longest.
        """
        rows = np.array([self.row(seq_id) for seq_id in seq_ids], np.int32)
        if len(token_ids) != len(rows):
            raise JaxkvError(f"{len(rows)} sequences but {len(token_ids)} tokens")
        if len(set(seq_ids)) != len(rows):
            raise JaxkvError("a sequence is named twice in one append_batch; append in two calls")
        lengths = self._lengths[rows]
        crossing = rows[lengths == self._num_blocks_of[rows] * self.block_size]
        if len(crossing):
            columns = self._num_blocks_of[crossing]
            if columns.max() >= self.max_blocks_per_seq:
                seq_id = seq_ids[int(lengths.argmax())]
                self._require_columns(seq_id, int(lengths.max()) + 1)
            self._require_blocks(len(crossing), f"appending to {len(rows)} sequences")
            self._set_blocks(crossing, columns, self._take(len(crossing)))
            self._num_blocks_of[crossing] += 1
        self._lengths[rows] += 1

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence: its row and the blocks that nobody else references are free again."""
        row = self.row(seq_id)
        used = int(self._num_blocks_of[row])
        blocks = self._tables[row, :used].copy()
        del self._rows[seq_id]
        self._ref_counts[blocks] -= 1
        # Reverse order: the tail of a sequence is worth least to whoever shares its prefix.
        self._free_blocks.extend(blocks[self._ref_counts[blocks] == 0][::-1].tolist())
        self._mark(np.full(used, row), np.arange(used))
        self._tables[row, :used] = NULL_BLOCK
        self._num_blocks_of[row] = self._lengths[row] = self._computed[row] = 0
        self._dirty_rows.add(row)
        self._free_rows.append(row)

    # -- towards the device ------------------------------------------------------------------

    def take_plan(self) -> Plan:
        """Everything the device has not been told yet; the next call starts afresh."""
        flat = np.unique(np.concatenate(self._dirty_cells)) if self._dirty_cells else np.array([])
        rows, columns = np.divmod(flat.astype(np.int64), self.max_blocks_per_seq)
        cells = np.stack([rows, columns, self._tables[rows, columns]], 1).astype(np.int32)
        changed = np.array(sorted(self._dirty_rows), np.int32)
        lengths = np.stack([changed, self._computed[changed]], 1).astype(np.int32)
        self._dirty_cells = []
        self._dirty_rows = set()
        return Plan(copies=np.zeros((0, 2), np.int32), cells=cells, lengths=lengths)

    # -- the invariant -----------------------------------------------------------------------

    def check(self) -> None:
        """Verifies the whole bookkeeping.

        Raises:
          InvariantError: naming the block, the sequence and the counts.
        """
        counts = np.zeros(self.num_blocks, np.int64)
        for seq_id, row in self._rows.items():
            used = int(self._num_blocks_of[row])
            blocks = self._tables[row, :used]
            if (blocks == NULL_BLOCK).any() or (self._tables[row, used:] != NULL_BLOCK).any():
                raise InvariantError(
                    f"sequence {seq_id!r}: null block inside, or block after, "
                    f"its {used} blocks: {self._tables[row].tolist()}"
                )
            if used != self.blocks_for(int(self._lengths[row])):
                raise InvariantError(
                    f"sequence {seq_id!r}: {self._lengths[row]} tokens in {used} "
                    f"blocks of {self.block_size}"
                )
            if self._computed[row] > self._lengths[row]:
                raise InvariantError(
                    f"sequence {seq_id!r}: {self._computed[row]} tokens computed "
                    f"of {self._lengths[row]}"
                )
            np.add.at(counts, blocks, 1)
        for block in np.flatnonzero(counts != self._ref_counts).tolist():
            raise InvariantError(
                f"block {block}: ref count {self._ref_counts[block]}, but "
                f"{counts[block]} table entries; owners {self._owners(block)}"
            )
        free = list(self._free_blocks)
        if len(set(free)) != len(free):
            raise InvariantError(f"a block is free twice: {sorted(free)}")
        for block in free:
            if block == NULL_BLOCK or self._ref_counts[block]:
                raise InvariantError(
                    f"block {block} is free with ref count "
                    f"{self._ref_counts[block]}; owners {self._owners(block)}"
                )
        leaked = self.num_blocks - 1 - len(free) - int((self._ref_counts > 0).sum())
        if leaked:
            raise InvariantError(f"{leaked} blocks are neither free nor referenced")
        if len(self._free_rows) + len(self._rows) != self.max_seqs:
            raise InvariantError(
                f"{len(self._free_rows)} free rows and {len(self._rows)} "
                f"sequences, of {self.max_seqs} rows"
            )

    # -- inside ------------------------------------------------------------------------------

    def _owners(self, block: int) -> list[Hashable]:
        return [s for s, row in self._rows.items() if (self._tables[row] == block).any()]

    def _require_columns(self, seq_id: Hashable, length: int) -> None:
        longest = min(self.max_blocks_per_seq, self.num_blocks - 1) * self.block_size
        if length > longest:
            raise JaxkvError(
                f"sequence {seq_id!r} of {length} tokens never fits: the longest is {longest} "
                f"({self.max_blocks_per_seq} table columns, {self.num_blocks - 1} usable blocks of "
                f"{self.block_size} tokens)"
            )

    def _require_blocks(self, needed: int, what: str) -> None:
        free = len(self._free_blocks)
        if needed > free:
            raise OutOfBlocksError(
                f"{what} needs {needed} blocks of {self.block_size} tokens, but {free} of "
                f"{self.num_blocks - 1} are free (the longest sequence that fits now has "
                f"{free * self.block_size} tokens); free a sequence or raise num_blocks",
                asked=needed,
                free=free,
            )

    def _take(self, count: int) -> np.ndarray:
        blocks = np.fromiter((self._free_blocks.popleft() for _ in range(count)), np.int32, count)
        self._ref_counts[blocks] = 1
        self._peak_active = max(self._peak_active, self.num_blocks - 1 - len(self._free_blocks))
        return blocks

    def _set_blocks(self, rows: np.ndarray, columns: np.ndarray, blocks: np.ndarray) -> None:
        self._tables[rows, columns] = blocks
        self._mark(rows, columns)

    def _mark(self, rows: np.ndarray, columns: np.ndarray) -> None:
        self._dirty_cells.append(rows.astype(np.int64) * self.max_blocks_per_seq + columns)
