"""Branching: fork, reorder (beam search) and truncate. Tables move, blocks do not."""

from __future__ import annotations

from collections.abc import Hashable

from jaxkv.manager.pool import BlockPool
from jaxkv.manager.prefix.keys import canonical
from jaxkv.manager.table import NULL_BLOCK, SequenceTable
from jaxkv.manager.writes import Writes


class Branching:
    """Moves of table rows. The caller has checked the arguments."""

    def __init__(self, pool: BlockPool, table: SequenceTable, writes: Writes):
        self._pool, self._table, self._writes = pool, table, writes
        self._size = pool.block_size

    def fork(self, parent: int, child_id: Hashable) -> None:
        """Opens a row that shares all blocks of its parent."""
        table = self._table
        child = table.open(child_id, self._table.origin(parent).copy())
        dropped, used = int(table.dropped[parent]), self._written_columns(parent)
        blocks = table.blocks[parent, :used].copy()
        table.extend(child, blocks)
        for column in (table.lengths, table.computed, table.published, table.dropped):
            column[child] = column[parent]
        if used > dropped:
            self._pool.touch(blocks[dropped:], hit=False)
        table.clear_cursor(parent)

    def _written_columns(self, row: int) -> int:
        """Columns that hold tokens, without those of reserved slots."""
        table = self._table
        return max(int(table.dropped[row]), -(-int(table.lengths[row]) // self._size))

    def reorder(self, rows: list[int], sources: list[int]) -> None:
        """Makes row i what row `sources[i]` was."""
        table = self._table
        columns = (table.lengths, table.computed, table.published, table.dropped)
        old = {
            row: (
                self._table.origin(row),
                table.blocks[row, : self._written_columns(row)].copy(),
                [int(column[row]) for column in columns],
            )
            for row in rows
        }
        moves = [(row, old[source]) for row, source in zip(rows, sources, strict=True)
                 if row != source]  # fmt: skip
        released = [table.blocks[row, : table.used[row]].copy() for row, _ in moves]
        for _, (_, blocks, _) in moves:
            self._pool.touch(blocks[blocks != NULL_BLOCK], hit=False)
        for row, (origin, blocks, values) in moves:
            table.shrink(row, 0)
            table.extend(row, blocks)
            table.origins[row] = origin.copy()
            for column, value in zip(columns, values, strict=True):
                column[row] = value
            table.lookahead[row] = 0
            table.length_changed(row)
        for blocks in released:
            if len(blocks := blocks[blocks != NULL_BLOCK]):
                self._pool.release(blocks[::-1])
        table.clear_cursor(rows)

    def truncate(self, row: int, length: int) -> None:
        """Removes the tokens after the first `length`, and reserved slots."""
        table, pool = self._table, self._pool
        origin = table.origin(row)
        keep = -(-length // self._size)
        gone = table.blocks[row, keep : table.used[row]][::-1].copy()
        table.shrink(row, keep)
        if len(gone):
            pool.release(gone)
        table.lengths[row] = length
        table.computed[row] = min(int(table.computed[row]), length)
        table.published[row] = min(int(table.published[row]), length // self._size)
        table.lookahead[row] = 0
        table.length_changed(row)
        del origin.hashes[length // self._size :]
        media = {i: m for i, m in origin.media.items() if i < keep}
        if length % self._size and keep - 1 in media:  # its placeholders may end here
            media[keep - 1] = canonical(("cut", media[keep - 1], length))
        origin.media = media
        if length % self._size:
            block = int(table.blocks[row, keep - 1])
            if pool.indexed[block] and pool.ref_counts[block] == 1 and block not in pool.kept:
                pool.withdraw(block, "truncated")  # its end will be rewritten
        self._writes.refresh_cursor(row)
