"""The two-level block table: from sequence id to row, from position to block.

The state of the live sequences is in arrays with one entry per row, so that a step over thousands
of sequences is a few NumPy calls. The table also records the cells that the device does not have
yet.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.errors import ConfigError, JaxkvError, UnknownSequenceError
from jaxkv.manager.records import TableView

NULL_BLOCK = 0  # never allocated; padding points at it, and reads of it are masked
_VERSIONS = itertools.count()  # no two tables share one: `Rows` of another are checked again
_NO_CELLS, _NO_LENGTHS = np.zeros((0, 3), np.int32), np.zeros((0, 2), np.int32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of distinct live sequences, checked once; valid until a sequence starts or ends.

    Attributes:
      seq_ids: ids of the sequences.
      rows: i64[n]; their rows.
      index: the rows as an index into the table's columns; a slice for adjacent rows.
      version: version of the table when the rows were checked.
    """

    seq_ids: tuple[Hashable, ...]
    rows: np.ndarray
    index: np.ndarray | slice
    version: int

    def to_plain(self) -> list[Hashable]:
        """The sequences' ids, for logs."""
        return list(self.seq_ids)


@dataclasses.dataclass
class Origin:
    """Origin of a sequence's block keys, and retention of its cached blocks.

    Attributes:
      namespace: namespace given by the caller.
      root: start of its chain of hashes.
      media: key parts of blocks with media placeholders, by block index.
      hashes: hashes of the leading full blocks, computed at allocation.
      publishes: whether its blocks enter the prefix index.
      priority: priority of its cached blocks; higher priorities are evicted later.
      expires: time on the manager's clock at which the priority ends; None: never.
    """

    namespace: object
    root: bytes
    media: Mapping[int, bytes]
    hashes: list[bytes]
    publishes: bool = True
    priority: int = 0
    expires: float | None = None

    def copy(self) -> Origin:
        """A copy with its own list of hashes."""
        return dataclasses.replace(self, hashes=list(self.hashes))


class SequenceTable:
    """Rows, block tables and lengths of the live sequences."""

    def __init__(self, max_seqs: int, max_blocks_per_seq: int, block_size: int):
        self.block_size = block_size
        self.max_seqs, self.max_blocks_per_seq = max_seqs, max_blocks_per_seq
        self.rows: dict[Hashable, int] = {}
        self.ids: list[Hashable] = [None] * max_seqs
        self.origins: list[Origin | None] = [None] * max_seqs
        # An index type, for the reason given at `BlockPool`.
        self.blocks = np.zeros((max_seqs, max_blocks_per_seq), np.int64)
        self._columns = np.zeros((8, max_seqs), np.int64)
        self._name_columns()
        self.version = next(_VERSIONS)  # changes when a sequence starts or ends
        self._free_rows = list(range(max_seqs - 1, -1, -1))
        self._dirty_cells: list[np.ndarray] = []  # flat indices
        self._dirty_ranges: list[tuple[int, int, int]] = []  # row, columns from and to
        self._dirty_rows: set[int] = set()  # rows whose length the device does not have

    def _name_columns(self) -> None:
        """One array, so that a row is cleared by one assignment; each name is a view of it."""
        (
            self.lengths,  # tokens, KV computed or not
            self.computed,  # leading tokens whose KV is computed
            self.published,  # leading blocks handed to the prefix index
            self.dropped,  # leading blocks behind the window: null
            self.used,  # columns in use, the dropped ones included
            self.lookahead,  # slots reserved past the length
            self.next_slot,  # block * block_size + offset of the next token,
            self.slot_end,  # if below this; else the row has no slot to write
        ) = self._columns

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes a copy whole: its names are views of its own array."""
        self.__dict__.update(state)
        self._name_columns()
        self.version = next(_VERSIONS)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def row(self, seq_id: Hashable) -> int:
        """The sequence's row."""
        try:
            return self.rows[seq_id]
        except KeyError:
            raise UnknownSequenceError(
                f"no live sequence {seq_id!r}; {len(self.rows)} are live"
            ) from None
        except TypeError:
            raise _not_hashable(seq_id) from None

    def require_new(self, seq_id: Hashable) -> None:
        """Raises JaxkvError unless the id can name a new sequence."""
        try:
            if seq_id in self.rows:
                raise JaxkvError(f"sequence {seq_id!r} is already live; free it first")
        except TypeError:
            raise _not_hashable(seq_id) from None

    def origin(self, row: int) -> Origin:
        """Origin of a live row's keys."""
        origin = self.origins[row]
        assert origin is not None
        return origin

    def select(self, seq_ids: Sequence[Hashable] | Rows) -> Rows:
        """Rows of distinct live sequences.

        Raises:
          JaxkvError: an id given twice.
          UnknownSequenceError: a sequence that is not live.
        """
        if isinstance(seq_ids, Rows):
            if seq_ids.version == self.version:
                return seq_ids
            seq_ids = seq_ids.seq_ids
        rows = np.array([self.row(seq_id) for seq_id in seq_ids], np.int64)
        if len(set(rows.tolist())) != len(rows):
            raise JaxkvError(
                f"sequence ids must be distinct, got {list(seq_ids)[:20]}; call twice instead"
            )
        index: np.ndarray | slice = rows
        first = rows.item(0) if len(rows) else 0
        if len(rows) and np.array_equal(rows, np.arange(first, first + len(rows))):
            index = slice(first, first + len(rows))
        return Rows(tuple(seq_ids), rows, index, self.version)

    def split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Columns and offsets of token positions."""
        size = self.block_size
        if size & (size - 1) == 0:  # several times as fast as a division
            return positions >> (size.bit_length() - 1), positions & (size - 1)
        return np.divmod(positions, size)

    def open(self, seq_id: Hashable, origin: Origin) -> int:
        """Assigns a row to a new sequence; the caller has checked that one is free."""
        row = self._free_rows.pop()
        self.rows[seq_id], self.ids[row], self.origins[row] = row, seq_id, origin
        self.version = next(_VERSIONS)
        self._dirty_rows.add(row)
        return row

    def close(self, row: int) -> None:
        """Frees a row; the caller releases its blocks."""
        del self.rows[self.ids[row]]
        self.shrink(row, 0)
        self.ids[row] = self.origins[row] = None
        self._columns[:, row] = 0
        self.version = next(_VERSIONS)
        self._dirty_rows.add(row)
        self._free_rows.append(row)

    # -- the write cursor: the slot of a row's next token, if the row may write one ---------------

    def set_cursor(self, rows: np.ndarray | int, blocks: np.ndarray | int,
                   offsets: np.ndarray | int) -> None:  # fmt: skip
        """Sets the slots of the next tokens: offsets in blocks that only these rows write."""
        first = blocks * self.block_size
        self.next_slot[rows] = first + offsets
        self.slot_end[rows] = first + self.block_size

    def clear_cursor(self, rows: np.ndarray | list[int] | int) -> None:
        """Marks rows that have no slot to write."""
        self.slot_end[rows] = 0

    def advance_cursor(self, at: np.ndarray | slice, slots: np.ndarray) -> None:
        """Follows one token per row, written to `slots`; the array is changed in place."""
        slots += 1
        if slots.base is None:  # not a view of the column
            self.next_slot[at] = slots
        self.lengths[at] += 1

    def live_blocks(self, row: int) -> np.ndarray:
        """i64; a view of the blocks of a row, without those behind the window."""
        return self.blocks[row, self.dropped.item(row) : self.used.item(row)]

    def extend(self, row: int, blocks: np.ndarray | list[int]) -> None:
        """Appends blocks to a row."""
        start = int(self.used[row])
        stop = start + len(blocks)
        self.blocks[row, start:stop] = blocks
        self.used[row] = stop
        self._dirty_ranges.append((row, start, stop))

    def extend_many(self, rows: np.ndarray, blocks: np.ndarray) -> None:
        """Appends one block to each of several rows."""
        columns = self.used[rows]
        self.blocks[rows, columns] = blocks
        self.used[rows] = columns + 1
        self._dirty_cells.append(rows.astype(np.int64) * self.max_blocks_per_seq + columns)

    def replace(self, row: int, column: int, block: int) -> None:
        """Replaces the block of a cell."""
        self.blocks[row, column] = block
        self._dirty_ranges.append((row, column, column + 1))

    def shrink(self, row: int, used: int) -> None:
        """Cuts a row to `used` columns."""
        old = self.used.item(row)
        self.blocks[row, used:old] = NULL_BLOCK
        self._dirty_ranges.append((row, used, old))
        self.used[row] = used

    def drop_front(self, row: int, dropped: int) -> None:
        """Sets the first `dropped` columns to the null block."""
        self.blocks[row, self.dropped[row] : dropped] = NULL_BLOCK
        self._dirty_ranges.append((row, int(self.dropped[row]), dropped))
        self.dropped[row] = dropped

    def length_changed(self, row: int) -> None:
        """Marks the row's computed length for the next plan."""
        self._dirty_rows.add(row)

    def drain(self) -> tuple[np.ndarray, np.ndarray]:
        """Changes since the last call, for a plan: cells i32[E, 3], lengths i32[R, 2]."""
        width = self.max_blocks_per_seq
        parts = [np.arange(row * width + a, row * width + b) for row, a, b in self._dirty_ranges]
        parts += self._dirty_cells
        cells, lengths = _NO_CELLS, _NO_LENGTHS  # as at most steps
        if parts:
            flat = parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))
            rows, columns = np.divmod(flat, width)
            cells = np.stack([rows, columns, self.blocks[rows, columns]], 1).astype(np.int32)
        if self._dirty_rows:
            changed = np.array(sorted(self._dirty_rows), np.int64)
            lengths = np.stack([changed, self.computed[changed]], 1).astype(np.int32)
        self._dirty_cells, self._dirty_ranges, self._dirty_rows = [], [], set()
        return cells, lengths

    def view(self) -> TableView:
        """Copies for a comparison with the device."""
        # A row that may not write its next slot, such as one just forked, ends at its length.
        own = (self.slot_end > self.next_slot) | (self.lengths % self.block_size == 0)
        return TableView(
            tuple(self.ids), self.blocks.astype(np.int32), self.computed.copy(),
            np.where(own, self.used * self.block_size, self.lengths),
        )  # fmt: skip


def _not_hashable(seq_id: object) -> ConfigError:
    return ConfigError(f"seq_id={seq_id!r} must be hashable, {type(seq_id).__name__} is not")
