"""Verification of the whole bookkeeping of a block manager, from first principles."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping

import numpy as np

from jaxkv._util import ceil_div
from jaxkv.errors import InvariantError
from jaxkv.manager.pins import Pins
from jaxkv.manager.pool import BlockPool, HoldReason
from jaxkv.manager.prefix.tree import GONE
from jaxkv.manager.table import NULL_BLOCK, SequenceTable


def check_manager(
    pool: BlockPool,
    table: SequenceTable,
    pins: Pins,
    copies: Mapping[int, int],
    transfers: Mapping[int, list[int]],
) -> None:
    """Raises InvariantError, naming block, sequence and counts, unless all records agree."""
    _check_rows(pool, table)
    _check_counts(pool, table)
    _check_holds(pool, pins, copies, transfers)
    _check_places(pool, table)
    _check_index(pool)


def _check_holds(
    pool: BlockPool, pins: Pins, copies: Mapping[int, int], transfers: Mapping[int, list[int]]
) -> None:
    holders: dict[HoldReason, Counter[int]] = {
        "copy": Counter(copies.keys()) + Counter(copies.values()),
        "pin": Counter(pins.held()),
        "transfer": Counter(itertools.chain.from_iterable(transfers.values())),
    }
    for reason, expected in holders.items():
        if dict(expected) != pool.held_for[reason]:
            raise InvariantError(
                f"holds by {reason}: the pool counts {pool.held_for[reason]}, their owners "
                f"{dict(expected)}"
            )
    kept = holders["pin"] + holders["transfer"]
    if (dict(kept + holders["copy"]), dict(kept)) != (pool.holds, pool.kept):
        raise InvariantError(
            f"blocks are held {pool.holds} and kept {pool.kept}; by reasons {dict(kept)} and "
            f"copies {dict(holders['copy'])}"
        )


def _owners(table: SequenceTable, block: int) -> list[Hashable]:
    return [s for s, row in table.rows.items() if (table.blocks[row] == block).any()]


def _check_rows(pool: BlockPool, table: SequenceTable) -> None:
    size = pool.block_size
    for seq_id, row in table.rows.items():
        used, dropped = int(table.used[row]), int(table.dropped[row])
        length, computed = int(table.lengths[row]), int(table.computed[row])
        blocks = table.blocks[row]
        if (
            (blocks[dropped:used] == NULL_BLOCK).any()
            or blocks[:dropped].any()
            or blocks[used:].any()
        ):
            raise InvariantError(
                f"sequence {seq_id!r}: null block inside, or block outside, columns {dropped} to "
                f"{used}: {blocks.tolist()}"
            )
        needed = ceil_div(length, size)
        most = ceil_div(length + int(table.lookahead[row]), size)
        if not needed <= used <= most or dropped > used:
            raise InvariantError(
                f"sequence {seq_id!r}: {length} tokens and {table.lookahead[row]} lookahead slots "
                f"in {used} blocks of {size}"
            )
        if not 0 <= table.published[row] * size <= computed <= length:
            raise InvariantError(
                f"sequence {seq_id!r}: {table.published[row]} blocks of {size} published, "
                f"{computed} tokens computed of {length}"
            )
        slot, end = int(table.next_slot[row]), int(table.slot_end[row])
        if slot < end:
            block, column = blocks[min(length // size, len(blocks) - 1)], length // size
            if column >= used or slot != block * size + length % size:
                raise InvariantError(f"sequence {seq_id!r}: next slot {slot} at length {length}")
            if pool.ref_counts[block] != 1 or pool.indexed[block]:
                raise InvariantError(
                    f"sequence {seq_id!r} would write block {block} in place: ref count "
                    f"{pool.ref_counts[block]}, indexed {pool.indexed[block]}"
                )
    if table.num_free_rows + len(table.rows) != table.max_seqs:
        raise InvariantError(
            f"{table.num_free_rows} free rows and {len(table.rows)} sequences, of "
            f"{table.max_seqs} rows"
        )


def _check_counts(pool: BlockPool, table: SequenceTable) -> None:
    counts = np.zeros(pool.num_blocks, np.int64)
    for row in table.rows.values():
        np.add.at(counts, table.live_blocks(row), 1)
    for block in np.flatnonzero(counts != pool.ref_counts).tolist():
        raise InvariantError(
            f"block {block}: ref count {pool.ref_counts[block]}, but {counts[block]} table "
            f"entries; owners {_owners(table, block)}"
        )


def _check_places(pool: BlockPool, table: SequenceTable) -> None:
    """Every block is in exactly one place: referenced or held, cached, or free."""
    free = pool.free_blocks().tolist()
    if len(set(free)) != len(free):
        raise InvariantError(f"a block is free twice: {sorted(free)}")
    is_free = np.zeros(pool.num_blocks, bool)
    is_free[free] = True
    held = np.zeros(pool.num_blocks, bool)
    held[list(pool.holds)] = True
    for block in free:
        if block == NULL_BLOCK or pool.ref_counts[block] or pool.indexed[block] or held[block]:
            raise InvariantError(
                f"block {block} is free with ref count {pool.ref_counts[block]}, "
                f"{pool.holds.get(block, 0)} holds, indexed {pool.indexed[block]}; owners "
                f"{_owners(table, block)}"
            )
    cached = pool.indexed & (pool.ref_counts == 0)
    lost = np.flatnonzero(~(is_free | cached | held | (pool.ref_counts > 0)))[1:].tolist()
    if lost:
        raise InvariantError(f"blocks {lost} are neither free, cached nor referenced")
    if (int(cached.sum()), int((cached & held).sum())) != (pool.num_cached, pool.num_held_idle):
        raise InvariantError(
            f"{cached.sum()} blocks are cached, {(cached & held).sum()} of them held; counted are "
            f"{pool.num_cached} and {pool.num_held_idle}"
        )


def _check_index(pool: BlockPool) -> None:
    """Every indexed block is a child of its parent, which is indexed except behind a window."""
    tree, indexed = pool.tree, pool.indexed
    blocks = np.flatnonzero(indexed)
    if pool.index is not None and len(pool.index) != len(blocks):
        raise InvariantError(f"the index has {len(pool.index)} entries, for {len(blocks)} blocks")
    parents = tree.parents[blocks]
    if pool.leaf_first and (parents == GONE).any():
        block = int(blocks[(parents == GONE).argmax()])
        raise InvariantError(f"block {block} is indexed, its parent is not")
    linked = np.zeros(pool.num_blocks, bool)
    for parent, child in tree.edges():
        if tree.parents.item(child) != parent or not indexed.item(child):
            raise InvariantError(f"block {child} is a child of {parent}, not of its parent")
        linked[child] = True
    below = blocks[parents >= 0]
    wrong = below[~(linked[below] & indexed[tree.parents[below]])]
    if len(wrong):
        block = int(wrong[0])
        raise InvariantError(
            f"block {block} is indexed below {tree.parents[block]}, but is not among its children"
        )
