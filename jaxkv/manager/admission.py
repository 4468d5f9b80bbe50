"""Admission: match a prompt against the cache, count the blocks it needs, decide.

One path for `allocate`, `can_allocate`, `lookup` and `pin`, so that they agree on what a prompt
finds and what it costs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from jaxkv._util import ceil_div
from jaxkv.manager.limits import Limits
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.prefix.keys import BlockKeys, HashFunction
from jaxkv.manager.prefix.tree import ROOT
from jaxkv.manager.records import Admission
from jaxkv.manager.table import NULL_BLOCK, Origin, SequenceTable
from jaxkv.manager.writes import Writes


class PrefixMatch(NamedTuple):
    """The cached blocks of a prompt.

    Attributes:
      hits: i64[n]; blocks that hold the leading full blocks; null ones behind a sliding window.
      seen: i64; the hits that a query still sees.
      source: block whose first `num_partial` tokens continue the prompt behind the hits.
      num_partial: tokens to take from `source` by a copy; 0: none.
      num_tokens: cached tokens in all.
    """

    hits: np.ndarray
    seen: np.ndarray
    source: int
    num_partial: int
    num_tokens: int


class BlockCount(NamedTuple):
    """The blocks that a prompt needs.

    Attributes:
      match: the part of the match that is used; without its partial block where that one is needed
        for itself.
      total: blocks of the whole sequence, lookahead included.
      new: blocks to take.
      needed: new blocks, and hits that leave the available ones because no sequence references
        them.
    """

    match: PrefixMatch
    total: int
    new: int
    needed: int


class AdmissionControl:
    """Admits prompts to a pool and its table.

    Args:
      watermark_blocks: blocks kept back from new sequences, for the running ones.
      hash_function: hash function of the block keys.
    """

    def __init__(
        self, pool: BlockPool, table: SequenceTable, limits: Limits, writes: Writes,
        *, watermark_blocks: int, hash_function: HashFunction,
    ):  # fmt: skip
        self._pool, self._table, self._limits, self._writes = pool, table, limits, writes
        self._watermark_blocks, self._hash = watermark_blocks, hash_function
        self._size = pool.block_size

    def keys(self, tokens: np.ndarray, origin: Origin) -> BlockKeys:
        """Keys of the full blocks of a prompt; computed hashes stay with the origin."""
        whole = len(tokens) // self._size
        return BlockKeys(
            origin.root,
            tokens[: whole * self._size].reshape(whole, self._size),
            media=origin.media,
            hash_function=self._hash,
            hashes=origin.hashes,
        )

    def match(self, tokens: np.ndarray, origin: Origin, *, end: int) -> PrefixMatch:
        """The cached blocks of the first `end` tokens."""
        keys = self.keys(tokens, origin)
        hits = self._pool.match(keys, end // self._size)
        source, extra = 0, 0
        start = len(hits) * self._size
        if self._pool.partial is not None and start < end and len(hits) not in keys.media:
            parent = int(hits[-1]) if len(hits) else ROOT
            wanted = tokens[start : min(start + self._size, end)]
            source, extra = self._pool.partial.best(keys.root, parent, wanted)
        seen = hits if self._pool.leaf_first else hits[hits != NULL_BLOCK]
        return PrefixMatch(hits, seen, source, extra, start + extra)

    def count(self, match: PrefixMatch, total: int, kept_back: int) -> BlockCount:
        """Counts the blocks that a sequence of `total` blocks needs behind a match.

        Args:
          kept_back: available blocks that the sequence must leave.
        """
        new = total - len(match.hits)
        needed = new + self._limits.num_idle(match.seen)
        if match.num_partial:
            with_source = needed + self._limits.num_idle(np.array([match.source]))
            if with_source + kept_back <= self._limits.available():
                needed = with_source
            else:  # the source itself is needed: compute these tokens instead
                cached = match.num_tokens - match.num_partial
                match = PrefixMatch(match.hits, match.seen, 0, 0, cached)
        return BlockCount(match, total, new, needed)

    def verdict(self, tokens: np.ndarray, origin: Origin, lookahead: int) -> Admission:
        """Whether a prompt fits now, later or never, the watermark kept."""
        match = self.match(tokens, origin, end=max(0, len(tokens) - 1))
        total = ceil_div(len(tokens) + lookahead, self._size)
        count = self.count(match, total, self._watermark_blocks)
        available, free_rows = self._limits.available(), self._table.num_free_rows
        longest = self._limits.longest(self._watermark_blocks)
        if count.total > longest or not len(tokens):
            verdict = "never"
        elif count.needed + self._watermark_blocks > available or not free_rows:
            verdict = "later"
        else:
            verdict = "now"
        return Admission(
            verdict=verdict,
            needed=count.needed,
            available=available,
            watermark=self._watermark_blocks,
            free_rows=free_rows,
            num_cached_tokens=count.match.num_tokens,
            longest=longest * self._size,
        )

    def require(
        self, seq_id: Hashable, tokens: np.ndarray, origin: Origin, *,
        lookahead: int, skip_prefix_cache: bool, keep_watermark: bool,
    ) -> BlockCount:  # fmt: skip
        """The blocks that a new sequence will take.

        Raises:
          OutOfBlocksError: too few blocks, or no free row.
          JaxkvError: the sequence never fits.
        """
        length, limits = len(tokens), self._limits
        total = ceil_div(length + lookahead, self._size)
        kept_back = self._watermark_blocks if keep_watermark else 0
        limits.require_columns(seq_id, length + lookahead)
        limits.require_row(total)
        match = self.match(tokens, origin, end=0 if skip_prefix_cache else length - 1)
        count = self.count(match, total, kept_back)
        what = f"sequence {seq_id!r} of {length} tokens"
        limits.require_blocks(count.needed, what, kept_back=kept_back)
        return count

    def admit(
        self, seq_id: Hashable, tokens: np.ndarray, origin: Origin, count: BlockCount,
        lookahead: int,
    ) -> int:  # fmt: skip
        """Takes the blocks that `require` has counted; returns the sequence's row."""
        pool, table, match = self._pool, self._table, count.match
        hits, seen, num_hits = match.hits, match.seen, len(match.hits)
        # Hits first, so that the blocks taken for the rest cannot be among them.
        if len(seen):
            pool.touch(seen, hit=True)
            if origin.priority or pool.policy.keeps:
                pool.keep(seen, origin.priority, origin.expires, new=False)
        if match.num_partial:
            pool.hold([match.source], "copy")
        new = pool.take(count.new)
        if match.num_partial:
            self._writes.copy(match.source, int(new[0]))
            pool.unhold([match.source], "copy")
        self._writes.fill(new, tokens[num_hits * self._size :])
        row = table.open(seq_id, origin)
        table.extend(row, np.concatenate([hits, new]) if num_hits else new)
        table.lengths[row] = len(tokens)
        table.dropped[row] = num_hits - len(seen)
        table.computed[row] = match.num_tokens
        table.published[row] = num_hits
        table.lookahead[row] = lookahead
        self._writes.refresh_cursor(row)
        return row
