"""What happens to tables and blocks when sequences grow, fork, move and shrink.

The one rule that all of it serves: a slot is written by one sequence only. A sequence that is to
write into a block which another table names, or which a pin keeps, gets a copy first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np

from jaxkv.manager.limits import Limits
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.prefix.hash_index import HashIndex
from jaxkv.manager.prefix.keys import BlockKeys, HashFunction, canonical
from jaxkv.manager.prefix.tree import ROOT
from jaxkv.manager.prefix.window import blocks_behind
from jaxkv.manager.table import NULL_BLOCK, Origin, Rows, SequenceTable


class Sequences:
    """Transitions of the live sequences. The caller has checked what can be refused, except where a
    method takes `limits`."""

    def __init__(
        self, pool: BlockPool, table: SequenceTable, window: int | None, hash_function: HashFunction
    ):
        self._pool, self._table, self._window = pool, table, window
        self._hash = hash_function
        self._size = pool.block_size
        self._slots = pool.tokens.reshape(-1)  # token ids by slot
        self.copies: dict[int, int] = {}  # destination: source, not yet planned

    def origin(self, row: int) -> Origin:
        """Of a live row."""
        origin = self._table.origins[row]
        assert origin is not None
        return origin

    # -- growing -----------------------------------------------------------------------------

    def fill(self, blocks: np.ndarray, tokens: np.ndarray) -> None:
        """Tokens into new blocks, from the first slot on."""
        whole, rest = divmod(len(tokens), self._size)
        self._pool.tokens[blocks[:whole]] = tokens[: whole * self._size].reshape(-1, self._size)
        if rest:
            self._pool.tokens[blocks[whole], :rest] = tokens[whole * self._size :]

    def append(self, selected: Rows, tokens: np.ndarray, limits: Limits) -> None:
        """One more token for each row: a few array operations, but where a block begins."""
        table, at = self._table, selected.index
        slots = table.next_slot[at]  # a view where the rows are neighbours
        full = slots >= table.slot_end[at]
        if np.count_nonzero(full):
            self._make_room(selected.rows[full], limits)
            slots = table.next_slot[at]
        self._slots[slots] = tokens
        slots += 1
        if slots.base is None:
            table.next_slot[at] = slots
        table.lengths[at] += 1

    def extend(
        self, selected: Rows, tokens: np.ndarray, counts: np.ndarray, limits: Limits
    ) -> None:
        """Several more tokens for each row; those of one row follow each other in `tokens`."""
        self.reserve(selected, counts, limits)
        table, rows = self._table, selected.rows
        lengths = table.lengths[rows]
        # Of token i: its index among all, less that of its row's first, from the row's length on.
        first = lengths - (np.cumsum(counts) - counts)
        columns, offsets = table.split(np.arange(len(tokens)) + np.repeat(first, counts))
        blocks = table.blocks[np.repeat(rows, counts), columns]
        self._slots[blocks * self._size + offsets] = tokens
        table.lengths[rows] = lengths = lengths + counts
        columns, offsets = table.split(lengths)
        inside = columns < table.used[rows]
        begin = table.blocks[rows, np.where(inside, columns, 0)] * self._size
        table.next_slot[rows] = begin + offsets
        table.slot_end[rows] = np.where(inside, begin + self._size, 0)

    def reserve(self, selected: Rows, num_slots: np.ndarray, limits: Limits) -> None:
        """Slots for that many further tokens of each row; the row alone writes them."""
        table, at = self._table, selected.index
        short = table.next_slot[at] + num_slots > table.slot_end[at]
        if np.count_nonzero(short):
            self._make_room(selected.rows[short], limits, num_slots[short])

    def _make_room(self, rows: np.ndarray, limits: Limits, num_slots: int | np.ndarray = 1) -> None:
        """Slots that only the row itself writes, for the next tokens of each."""
        table, pool = self._table, self._pool
        limits.available()  # pins that are over keep nothing from being written
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
            if pool.ref_counts[block] > 1 or block in pool.pins:
                self._copy_on_write(row, column)
            elif pool.indexed[block]:
                pool.withdraw(block, "rewritten")
        first = table.blocks[rows, columns] * self._size
        table.next_slot[rows] = first + offsets
        table.slot_end[rows] = first + self._size
        table.lookahead[rows] = table.used[rows] * self._size - lengths

    def _not_its_own(self, rows: np.ndarray, columns: np.ndarray) -> list[tuple[int, int]]:
        """Those of these cells whose block others name, or find, or a pin keeps."""
        pool, blocks = self._pool, self._table.blocks[rows, columns]
        others = (pool.ref_counts[blocks] > 1) | pool.indexed[blocks]
        if pool.pins:
            others |= np.isin(blocks, list(pool.pins))
        return list(zip(rows[others].tolist(), columns[others].tolist(), strict=True))

    def _copies_for(self, cells: list[tuple[int, int]]) -> int:
        """Blocks that writing into these (row, column) cells takes."""
        pool = self._pool
        writers = Counter(int(self._table.blocks[cell]) for cell in cells)
        # The last to write a shared block may keep it, but not if it is pinned.
        return sum(
            n if block in pool.pins else min(n, int(pool.ref_counts[block]) - 1)
            for block, n in writers.items()
        )

    def _copy_on_write(self, row: int, column: int) -> None:
        old = int(self._table.blocks[row, column])
        new = self._pool.take(1)
        self.copy(old, int(new[0]))
        self._table.replace(row, column, int(new[0]))
        self._pool.release(np.array([old]))

    def copy(self, source: int, destination: int) -> None:
        """Queues a copy of a block for the next plan. Both ends stay as they are until then."""
        self._pool.tokens[destination] = self._pool.tokens[source]
        # A source that is itself still to be copied has its content elsewhere.
        self.copies[destination] = source = self.copies.get(source, source)
        self._pool.hold([source, destination])
        self._pool.copied(source, destination)

    def refresh_next_slot(self, row: int) -> None:
        """Where the row's next token goes, if there is a slot that it may write."""
        table, pool = self._table, self._pool
        column, offset = divmod(int(table.lengths[row]), self._size)
        table.slot_end[row] = 0
        if column < table.used[row]:
            block = int(table.blocks[row, column])
            if pool.ref_counts[block] == 1 and not pool.indexed[block]:
                table.next_slot[row] = block * self._size + offset
                table.slot_end[row] = (block + 1) * self._size

    # -- what others may find ----------------------------------------------------------------

    def publish_all(self, rows: np.ndarray) -> None:
        """`publish` of each row; those that have filled one block more, as in a decode step, at
        once."""
        index = self._pool.leaf_index() if len(rows) > 1 else None
        rest = rows.tolist() if index is None else self._publish_leaves(rows, index)
        for row in rest:
            self.publish(row)

    def _publish_leaves(self, rows: np.ndarray, index: HashIndex) -> list[int]:
        """Publishes the rows that hang one new block below a published one; the other rows."""
        table, pool = self._table, self._pool
        columns = table.published[rows]
        blocks, parents = table.blocks[rows, columns], table.blocks[rows, columns - 1]
        one = (table.split(table.computed[rows])[0] == columns + 1) & (columns > 0)
        one &= pool.indexed[parents]
        contents = BlockKeys(b"", pool.tokens[blocks]).contents()
        leaves: dict[bytes, int] = {}  # hash: index in `rows`
        rest = []
        for i, (row, column, parent) in enumerate(
            zip(rows.tolist(), columns.tolist(), parents.tolist(), strict=True)
        ):
            origin = self.origin(row)
            plain = origin.publishes and not origin.priority and column not in origin.media
            if plain and one[i] and not pool.policy.keeps:
                known = column < len(origin.hashes)
                key = (
                    origin.hashes[column]
                    if known
                    else self._hash(pool.hashes[parent] + contents[i])
                )
                if key not in index and leaves.setdefault(key, i) == i:
                    continue
            rest.append(row)
        if leaves:
            at = np.fromiter(leaves.values(), np.int64, len(leaves))
            pool.publish_leaves(parents[at], blocks[at], list(leaves))
            table.published[rows[at]] = columns[at] + 1
        return rest

    def publish(self, row: int) -> None:
        """The row's computed full blocks enter the prefix index; where a content is there already,
        the row goes over to that block."""
        table, pool, origin = self._table, self._pool, self.origin(row)
        first, last = int(table.published[row]), int(table.computed[row]) // self._size
        if last <= first or pool.index is None or not origin.publishes:
            return
        parent = int(table.blocks[row, first - 1]) if first else ROOT
        if first and (parent == NULL_BLOCK or not pool.indexed[parent]):
            origin.publishes = False  # nothing could reach it
            return
        blocks = table.blocks[row, first:last].copy()
        keys = BlockKeys(
            origin.root,
            pool.tokens[blocks],
            first=first,
            parent_hash=pool.hashes[parent] if first else None,
            media=origin.media,
            hash_function=self._hash,
            hashes=origin.hashes[first:last],
        )
        canonical = pool.publish(keys, parent, blocks, origin.namespace)
        table.published[row] = last
        other = np.flatnonzero(canonical != blocks)
        if len(other):
            pool.touch(canonical[other], hit=False)
            for i in other.tolist():
                table.replace(row, first + i, int(canonical[i]))
            pool.release(blocks[other][::-1])
        if origin.priority or pool.policy.keeps:
            found, own = canonical[other], blocks[(canonical == blocks) & pool.indexed[blocks]]
            pool.keep(found, origin.priority, origin.expires, new=False)
            pool.keep(own, origin.priority, origin.expires, new=True)

    def drop_behind_window(self, row: int) -> None:
        """Blocks that no later query sees go back; null blocks take their places.

        Steps under way may still read them: whoever gets them writes them in a later step.
        """
        assert self._window is not None
        table, old = self._table, int(self._table.dropped[row])
        dropped = blocks_behind(int(table.computed[row]), self._window, self._size)
        if self._pool.index is not None and self.origin(row).publishes:
            dropped = min(dropped, int(table.published[row]) - 1)  # the next hangs below the last
        if dropped > old:
            gone = table.blocks[row, old:dropped][::-1].copy()
            table.drop_front(row, dropped)
            self._pool.release(gone)

    # -- forking, moving, shrinking ----------------------------------------------------------

    def fork(self, parent: int, child_id: Hashable) -> None:
        """A row that shares all the parent's blocks."""
        table = self._table
        child = table.open(child_id, self.origin(parent).copy())
        dropped, used = int(table.dropped[parent]), self._written_columns(parent)
        blocks = table.blocks[parent, :used].copy()
        table.extend(child, blocks)
        for column in (table.lengths, table.computed, table.published, table.dropped):
            column[child] = column[parent]
        if used > dropped:
            self._pool.touch(blocks[dropped:], hit=False)
        table.slot_end[parent] = 0

    def _written_columns(self, row: int) -> int:
        """Columns that hold tokens; slots reserved past the length stay the row's own."""
        table = self._table
        return max(int(table.dropped[row]), -(-int(table.lengths[row]) // self._size))

    def reorder(self, rows: list[int], sources: list[int]) -> None:
        """Row i becomes what row `sources[i]` was."""
        table = self._table
        columns = (table.lengths, table.computed, table.published, table.dropped)
        old = {
            row: (
                self.origin(row),
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
        table.slot_end[rows] = 0

    def truncate(self, row: int, length: int) -> None:
        """Takes back the tokens after the first `length`, and reserved slots."""
        table, pool, origin = self._table, self._pool, self.origin(row)
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
            if pool.indexed[block] and pool.ref_counts[block] == 1 and block not in pool.pins:
                pool.withdraw(block, "truncated")  # its end is about to be written anew
        self.refresh_next_slot(row)
