"""Growth of sequences: slots for their next tokens, and copy-on-write.

The one rule behind it: a slot is written by one sequence only. A sequence about to write into a
block that another table names, or whose content is kept, gets a copy first.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxkv.manager.limits import Limits
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.table import Rows, SequenceTable


class Writes:
    """Writes token ids into slots, and takes blocks for them.

    Attributes:
      copies: destination -> source of each block copy that is not in a plan yet.
    """

    def __init__(self, pool: BlockPool, table: SequenceTable):
        self._pool, self._table = pool, table
        self._size = pool.block_size
        self.copies: dict[int, int] = {}

    def fill(self, blocks: np.ndarray, tokens: np.ndarray) -> None:
        """Writes tokens into new blocks, from the first slot on."""
        whole, rest = divmod(len(tokens), self._size)
        self._pool.tokens[blocks[:whole]] = tokens[: whole * self._size].reshape(-1, self._size)
        if rest:
            self._pool.tokens[blocks[whole], :rest] = tokens[whole * self._size :]

    def append(self, selected: Rows, tokens: np.ndarray, limits: Limits) -> None:
        """Appends one token to each row: a few array operations, unless a block begins."""
        table, at = self._table, selected.index
        slots = table.next_slot[at]  # a view where the rows are neighbours
        full = slots >= table.slot_end[at]
        if np.count_nonzero(full):
            self._make_room(selected.rows[full], limits)
            slots = table.next_slot[at]
        self._pool.slots[slots] = tokens
        table.advance_cursor(at, slots)

    def extend(
        self, selected: Rows, tokens: np.ndarray, counts: np.ndarray, limits: Limits
    ) -> None:
        """Appends several tokens to each row; the tokens of one row are adjacent in `tokens`."""
        self.reserve(selected, counts, limits)
        table, rows = self._table, selected.rows
        lengths = table.lengths[rows]
        # Position of token i: the row's length, plus its index within the row's tokens.
        first = lengths - (np.cumsum(counts) - counts)
        columns, offsets = table.split(np.arange(len(tokens)) + np.repeat(first, counts))
        blocks = table.blocks[np.repeat(rows, counts), columns]
        self._pool.slots[blocks * self._size + offsets] = tokens
        table.lengths[rows] = lengths = lengths + counts
        columns, offsets = table.split(lengths)
        inside = columns < table.used[rows]
        table.clear_cursor(rows[~inside])
        rows, columns, offsets = rows[inside], columns[inside], offsets[inside]
        table.set_cursor(rows, table.blocks[rows, columns], offsets)

    def reserve(self, selected: Rows, num_slots: np.ndarray, limits: Limits) -> None:
        """Reserves slots for further tokens of each row, which only the row writes."""
        table, at = self._table, selected.index
        short = table.next_slot[at] + num_slots > table.slot_end[at]
        if np.count_nonzero(short):
            self._make_room(selected.rows[short], limits, num_slots[short])

    def _make_room(self, rows: np.ndarray, limits: Limits, num_slots: int | np.ndarray = 1) -> None:
        """Takes the blocks for the next tokens of rows, and copies blocks shared with others."""
        table, pool = self._table, self._pool
        limits.available()  # expired pins do not prevent writes
        lengths = table.lengths[rows]
        columns, offsets = table.split(lengths)
        last, _ = table.split(lengths + (num_slots - 1))
        if last.max() >= table.max_blocks_per_seq:
            i = int(last.argmax())
            needed = int((lengths + num_slots)[i])
            limits.require_columns(table.ids[int(rows[i])], needed)
        used = table.used[rows]
        missing = np.maximum(last + 1 - used, 0)
        begun = columns < used
        count = int(missing.sum())
        written = self._not_its_own(rows[begun], columns[begun])
        limits.require_blocks(
            count + self._copies_for(written), f"appending to {len(rows)} sequences"
        )
        if count and missing.max() == 1:
            table.extend_many(rows[missing > 0], pool.take(count))
        elif count:
            taken = np.split(pool.take(count), np.cumsum(missing)[:-1])
            for row, blocks in zip(rows.tolist(), taken, strict=True):
                table.extend(row, blocks)
        for row, column in written:
            block = int(table.blocks[row, column])
            if pool.ref_counts[block] > 1 or block in pool.kept:
                self._copy_on_write(row, column)
            elif pool.indexed[block]:
                pool.withdraw(block, "rewritten")
        table.set_cursor(rows, table.blocks[rows, columns], offsets)
        table.lookahead[rows] = table.used[rows] * self._size - lengths

    def _not_its_own(self, rows: np.ndarray, columns: np.ndarray) -> list[tuple[int, int]]:
        """Cells whose block is shared, visible to lookups, or kept by a pin or a transfer."""
        pool, blocks = self._pool, self._table.blocks[rows, columns]
        others = (pool.ref_counts[blocks] > 1) | pool.indexed[blocks]
        if pool.kept:
            others |= np.array([block in pool.kept for block in blocks.tolist()], bool)
        return list(zip(rows[others].tolist(), columns[others].tolist(), strict=True))

    def _copies_for(self, cells: list[tuple[int, int]]) -> int:
        """Number of blocks that copy-on-write of these (row, column) cells takes."""
        pool = self._pool
        writers = Counter(int(self._table.blocks[cell]) for cell in cells)
        # The last writer of a shared block keeps it, unless its content is kept.
        return sum(
            n if block in pool.kept else min(n, int(pool.ref_counts[block]) - 1)
            for block, n in writers.items()
        )

    def _copy_on_write(self, row: int, column: int) -> None:
        old = int(self._table.blocks[row, column])
        new = self._pool.take(1)
        self.copy(old, int(new[0]))
        self._table.replace(row, column, int(new[0]))
        self._pool.release(np.array([old]))

    def copy(self, source: int, destination: int) -> None:
        """Queues a block copy for the next plan, and holds both blocks until then."""
        self._pool.tokens[destination] = self._pool.tokens[source]
        # The content of a source whose own copy is queued is still in that copy's source.
        self.copies[destination] = source = self.copies.get(source, source)
        self._pool.hold((source, destination), "copy")
        self._pool.copied(source, destination)

    def take_copies(self) -> np.ndarray:
        """i32[C, 2]; the queued (source, destination) copies, for a plan that runs them first.

        The device runs plans in order, and a plan's copies before all else: whatever is written to
        these blocks from now on is written after they were copied. So the holds end here.
        """
        copies = np.array([(s, d) for d, s in self.copies.items()], np.int32).reshape(-1, 2)
        self._pool.unhold(copies.reshape(-1).tolist(), "copy")
        self.copies.clear()
        return copies

    def refresh_cursor(self, row: int) -> None:
        """Finds the slot of the row's next token, if the row may write one."""
        table, pool = self._table, self._pool
        column, offset = divmod(table.lengths.item(row), self._size)
        if column < table.used.item(row):
            block = table.blocks.item(row, column)
            if pool.ref_counts.item(block) == 1 and not pool.indexed.item(block):
                table.set_cursor(row, block, offset)
                return
        table.clear_cursor(row)
