"""Publication: computed full blocks enter the prefix index and become visible to lookups."""

from __future__ import annotations

import numpy as np

from jaxkv.errors import JaxkvError
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.prefix.keys import BlockKeys, HashFunction
from jaxkv.manager.prefix.tree import ROOT
from jaxkv.manager.prefix.window import blocks_behind
from jaxkv.manager.table import NULL_BLOCK, SequenceTable


class Publisher:
    """Publishes the blocks of live rows, and frees those behind a sliding window."""

    def __init__(
        self, pool: BlockPool, table: SequenceTable, window: int | None, hash_function: HashFunction
    ):
        self._pool, self._table, self._window = pool, table, window
        self._hash = hash_function
        self._size = pool.block_size

    def commit(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Marks the KV of the next `counts[i]` tokens of row i as computed; publishes full blocks.

        Args:
          rows: i64[n].
          counts: i64[n]; at least 0.

        Raises:
          JaxkvError: more tokens than a sequence has left to compute; nothing was changed.
        """
        table = self._table
        before = table.computed[rows]
        wrong = counts > table.lengths[rows] - before  # a sum could wrap
        if np.count_nonzero(wrong):
            i = int(wrong.argmax())
            raise JaxkvError(
                f"sequence {table.ids[rows[i]]!r}: cannot commit {counts[i]} tokens: {before[i]} "
                f"of {table.lengths[rows[i]]} are already computed"
            )
        table.computed[rows] = after = before + counts
        full = table.split(after)[0] > table.split(before)[0]
        if np.count_nonzero(full):
            self.publish_all(rows[full])
        if self._window is not None:
            for row in rows.tolist():
                self.drop_behind_window(row)

    def publish_all(self, rows: np.ndarray) -> None:
        """Publishes rows; rows that filled one more block, as in a decode step, all at once."""
        at_once = len(rows) > 1 and self._pool.publishes_leaves
        rest = self._publish_leaves(rows) if at_once else rows.tolist()
        for row in rest:
            self.publish(row)

    def _publish_leaves(self, rows: np.ndarray) -> list[int]:
        """Publishes rows with one new block below a published one; returns the other rows."""
        table, pool, index = self._table, self._pool, self._pool.index
        assert index is not None
        columns = table.published[rows]
        blocks, parents = table.blocks[rows, columns], table.blocks[rows, columns - 1]
        one = (table.split(table.computed[rows])[0] == columns + 1) & (columns > 0)
        one &= pool.indexed[parents]
        contents = BlockKeys(b"", pool.tokens[blocks]).contents()
        leaves: dict[bytes, int] = {}  # hash: index in `rows`
        rest: list[int] = []
        cells: list[tuple[int, int, int]] = list(
            zip(rows.tolist(), columns.tolist(), parents.tolist(), strict=True)
        )
        for i, (row, column, parent) in enumerate(cells):
            origin = self._table.origin(row)
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
        """Publishes the row's computed full blocks; for content that is cached already, the row
        switches to the cached block."""
        table, pool, origin = self._table, self._pool, self._table.origin(row)
        first, last = int(table.published[row]), int(table.computed[row]) // self._size
        if last <= first or pool.index is None or not origin.publishes:
            return
        parent = int(table.blocks[row, first - 1]) if first else ROOT
        if first and (parent == NULL_BLOCK or not pool.indexed[parent]):
            origin.publishes = False  # no lookup could reach it
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
        """Frees blocks that no later query sees; null blocks take their places.

        Steps in flight may still read them: their next owner writes them in a later step.
        """
        assert self._window is not None
        table, old = self._table, int(self._table.dropped[row])
        dropped = blocks_behind(int(table.computed[row]), self._window, self._size)
        if self._pool.index is not None and self._table.origin(row).publishes:
            # The last published block stays: the next one is published below it.
            dropped = min(dropped, int(table.published[row]) - 1)
        if dropped > old:
            gone = table.blocks[row, old:dropped][::-1].copy()
            table.drop_front(row, dropped)
            self._pool.release(gone)
