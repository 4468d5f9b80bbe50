"""Reports on a pool and its table: blocks by use, and each block by itself."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

from jaxkv.manager.pool import BlockPool
from jaxkv.manager.records import BlockInfo, Stats
from jaxkv.manager.table import SequenceTable


def stats_of(pool: BlockPool, table: SequenceTable) -> Stats:
    """Counts of blocks by use."""
    rows = list(table.rows.values())
    dropped = int(table.dropped[rows].sum())
    return Stats(
        active=int(pool.num_blocks - 1 - pool.num_free - pool.num_cached),
        cached=int(pool.num_cached),
        free=int(pool.num_free),
        pinned=len(pool.held_for["pin"]),
        peak_active=int(pool.peak_active),
        used_slots=int(table.lengths[rows].sum()) - dropped * pool.block_size,
        allocated_slots=(int(table.used[rows].sum()) - dropped) * pool.block_size,
        num_seqs=len(rows),
    )


def blocks_of(pool: BlockPool, table: SequenceTable) -> Iterator[BlockInfo]:
    """Every block but the null block."""
    owners: dict[int, list[Hashable]] = {}
    for seq_id, row in table.rows.items():
        for block in table.live_blocks(row).tolist():
            owners.setdefault(block, []).append(seq_id)
    for block in range(1, pool.num_blocks):
        last = float(pool.last_access[block])
        yield BlockInfo(
            block=block,
            ref_count=int(pool.ref_counts[block]),
            last_access=None if math.isnan(last) else last,
            access_count=int(pool.access_counts[block]),
            hash=pool.hashes[block].hex() or None,
            sequences=tuple(owners.get(block, ())),
        )
