"""What can be asked of a block manager, and what it is made of."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from jaxkv.errors import ConfigError
from jaxkv.manager.eviction.policies import make_policy
from jaxkv.manager.eviction.retention import Retention
from jaxkv.manager.invariants import check_manager
from jaxkv.manager.journal import Observed, operation
from jaxkv.manager.limits import Limits
from jaxkv.manager.pins import Pins
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.prefix.hash_index import HashIndex
from jaxkv.manager.prefix.keys import (
    BlockKeys,
    HashFunction,
    Media,
    as_tokens,
    digest,
    media_of_blocks,
    root_of,
)
from jaxkv.manager.prefix.partial_index import PartialIndex
from jaxkv.manager.prefix.radix_index import RadixIndex
from jaxkv.manager.prefix.tree import ROOT
from jaxkv.manager.records import Admission, BlockInfo, Stats
from jaxkv.manager.sequences import Sequences
from jaxkv.manager.table import NULL_BLOCK, Origin, Rows, SequenceTable

_INDEXES = {"hash": HashIndex, "radix": RadixIndex}
_DEFAULT_ROOT = root_of(None, 0)


class ManagerView(Observed):
    """The questions; `BlockManager` adds the calls that change something."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_seqs: int,
        max_blocks_per_seq: int,
        prefix_index: Literal["hash", "radix"] | None = "hash",
        eviction: str = "lru",
        copy_on_partial_reuse: bool = False,
        watermark: float = 0.0,
        sliding_window: int | None = None,
        weight_version: int | str = 0,
        clock: Callable[[], float] = time.monotonic,
        debug: bool = False,
        hash_function: HashFunction = digest,
    ):
        super().__init__(clock)
        if num_blocks < 2 or min(block_size, max_seqs, max_blocks_per_seq) < 1:
            raise ConfigError(
                f"{num_blocks=} must be at least 2 (block 0 is the null block) and {block_size=}, "
                f"{max_seqs=}, {max_blocks_per_seq=} positive"
            )
        if prefix_index is not None and prefix_index not in _INDEXES:
            raise ConfigError(f"{prefix_index=} is not one of {', '.join(_INDEXES)} and None")
        if not 0 <= watermark < 1 or (sliding_window is not None and sliding_window < 1):
            raise ConfigError(
                f"{watermark=} must be in [0, 1), {sliding_window=} at least 1 or None"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_seqs, self.max_blocks_per_seq = max_seqs, max_blocks_per_seq
        self.sliding_window = sliding_window
        self.weight_version = weight_version
        self.prefix_index = prefix_index
        self.debug = debug
        self._options = dict(
            prefix_index=prefix_index, eviction=eviction, watermark=watermark,
            copy_on_partial_reuse=copy_on_partial_reuse,
        )  # fmt: skip
        self._watermark_blocks = math.ceil(watermark * (num_blocks - 1))
        self._hash = hash_function
        self._retention = Retention(make_policy(eviction, num_blocks), self._now)
        self._pool = BlockPool(
            num_blocks,
            block_size,
            index=functools.partial(_INDEXES[prefix_index], gaps=sliding_window is not None)
            if prefix_index
            else None,
            policy=self._retention,
            partial=PartialIndex() if prefix_index and copy_on_partial_reuse else None,
            window=sliding_window,
            clock=self._now,
            emit=self._emit,
        )
        self._table = SequenceTable(max_seqs, max_blocks_per_seq, block_size)
        self._sequences = Sequences(self._pool, self._table, sliding_window, hash_function)
        self._pins = Pins(self._pool)
        self._limits = Limits(self._pool, self._table, self._expire_pins)

    def config_dict(self) -> dict[str, Any]:
        """The constructor's arguments as plain data, without clock and hash function."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "max_seqs": self.max_seqs,
            "max_blocks_per_seq": self.max_blocks_per_seq,
            "sliding_window": self.sliding_window,
            "weight_version": self.weight_version,
            "debug": self.debug,
            **self._options,
        }

    # -- questions ---------------------------------------------------------------------------

    def row(self, seq_id: Hashable) -> int:
        """The sequence's row in the block table."""
        return self._table.row(seq_id)

    def select(self, seq_ids: Sequence[Hashable]) -> Rows:
        """Rows of several sequences, for calls that are repeated with the same ones.

        Raises:
          JaxkvError: a sequence named twice.
        """
        return self._table.select(seq_ids)

    def length(self, seq_id: Hashable) -> int:
        """Tokens of the sequence, KV written or not."""
        return int(self._table.lengths[self.row(seq_id)])

    def num_computed_tokens(self, seq_id: Hashable) -> int:
        """Leading tokens whose KV is written."""
        return int(self._table.computed[self.row(seq_id)])

    def token_ids(self, seq_id: Hashable) -> np.ndarray:
        """i32[n]: the sequence's tokens, without those behind a sliding window."""
        row = self.row(seq_id)
        first = self._table.dropped[row] * self.block_size
        tokens = self._pool.tokens[self._table.live_blocks(row)].reshape(-1)
        return tokens[: self._table.lengths[row] - first].copy()

    def block_table(self, seq_id: Hashable) -> np.ndarray:
        """i32[blocks of the sequence], a copy; null blocks behind a sliding window."""
        row = self.row(seq_id)
        return self._table.blocks[row, : self._table.used[row]].copy()

    def locate(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and offsets of (row, position) pairs, i32[n] each. Positions are not checked."""
        columns, offsets = self._table.split(positions)
        flat = rows * self.max_blocks_per_seq + columns
        return np.take(self._table.blocks, flat), offsets

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: Any = None,
        media: Iterable[Media] = (),
    ) -> int:  # fmt: skip
        """How many leading tokens are cached. Changes nothing, not even their age."""
        tokens = as_tokens(token_ids)
        keys = self._keys(tokens, self._origin(namespace, media))
        hits = self._pool.match(keys)
        _, extra = self._best_partial(keys, hits, tokens, len(tokens))
        return len(hits) * self.block_size + extra

    def block_hashes(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: Any = None
    ) -> list[bytes]:
        """Chained hashes of the full blocks of a prompt: equal where the prefixes are."""
        return self._keys(as_tokens(token_ids), self._origin(namespace, ())).hashes()

    def can_allocate(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: Any = None,
        media: Iterable[Media] = (), lookahead: int = 0,
    ) -> Admission:  # fmt: skip
        """Whether `allocate` would give these tokens their blocks now, later or never."""
        self._expire_pins()
        tokens = as_tokens(token_ids)
        keys = self._keys(tokens, self._origin(namespace, media))
        hits = self._pool.match(keys, max(0, len(tokens) - 1) // self.block_size)
        total = self.blocks_for(len(tokens) + lookahead)
        needed = total - len(hits) + self._limits.num_idle(hits[hits != NULL_BLOCK])
        available = self._limits.available()
        longest = min(self.max_blocks_per_seq, self.num_blocks - 1 - self._watermark_blocks)
        if total > longest or not len(tokens):
            verdict = "never"
        elif needed + self._watermark_blocks > available or not self._table.num_free_rows:
            verdict = "later"
        else:
            verdict = "now"
        return Admission(
            verdict=verdict,
            needed=needed,
            available=available,
            watermark=self._watermark_blocks,
            free_rows=self._table.num_free_rows,
            num_cached_tokens=len(hits) * self.block_size,
            longest=longest * self.block_size,
        )

    def stats(self) -> Stats:
        """Counts of blocks by use."""
        self._expire_pins()
        pool, table = self._pool, self._table
        rows = list(table.rows.values())
        dropped = int(table.dropped[rows].sum())
        return Stats(
            active=int(self.num_blocks - 1 - pool.num_free - pool.num_cached),
            cached=int(pool.num_cached),
            free=int(pool.num_free),
            pinned=self._pins.num_blocks,
            peak_active=int(pool.peak_active),
            used_slots=int(table.lengths[rows].sum()) - dropped * self.block_size,
            allocated_slots=(int(table.used[rows].sum()) - dropped) * self.block_size,
            num_seqs=len(rows),
        )

    def blocks(self) -> Iterator[BlockInfo]:
        """Every block but the null block."""
        owners: dict[int, list[Hashable]] = {}
        for seq_id, row in self._table.rows.items():
            for block in self._table.live_blocks(row).tolist():
                owners.setdefault(block, []).append(seq_id)
        pool = self._pool
        for block in range(1, self.num_blocks):
            last = float(pool.last_access[block])
            yield BlockInfo(
                block=block,
                ref_count=int(pool.ref_counts[block]),
                last_access=None if math.isnan(last) else last,
                access_count=int(pool.access_counts[block]),
                hash=pool.hashes[block].hex() or None,
                sequences=tuple(owners.get(block, ())),
            )

    def check(self) -> None:
        """Verifies the whole bookkeeping.

        Raises:
          InvariantError: naming the block, the sequence and the counts.
        """
        check_manager(self._pool, self._table, self._pins, self._sequences.copies)

    # -- inside ------------------------------------------------------------------------------

    def _expire_pins(self) -> None:
        """Ends the pins whose time is over. Questions do it too: it counts as an operation."""
        if self._pins.due(self._now()):
            self.end_pins()

    @operation
    def end_pins(self) -> None:
        """Ends the pins whose time is over; every call does that by itself."""
        self._pins.expire(self._now())

    def _listening_changed(self, listening: bool) -> None:
        self._pool.listening = listening

    def _ref_counts_of(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._pool.ref_counts[list(blocks)].tolist())

    def _free_count(self) -> int:
        return self._pool.num_available

    def _origin(self, namespace: Any, media: Iterable[Media]) -> Origin:
        if namespace is None and self.weight_version == 0:
            root = _DEFAULT_ROOT
        else:
            root = root_of(namespace, self.weight_version)
        return Origin(namespace, root, media_of_blocks(media, self.block_size), [])

    def _keys(self, tokens: np.ndarray, origin: Origin) -> BlockKeys:
        """Of the full blocks of a prompt; their hashes, if computed, stay with the origin."""
        whole = len(tokens) // self.block_size
        return BlockKeys(
            origin.root,
            tokens[: whole * self.block_size].reshape(whole, self.block_size),
            media=origin.media,
            hash_function=self._hash,
            hashes=origin.hashes,
        )

    def _best_partial(
        self, keys: BlockKeys, hits: np.ndarray, tokens: np.ndarray, limit: int
    ) -> tuple[int, int]:
        """A cached block, and how many of the tokens behind the hits it has."""
        start = len(hits) * self.block_size
        if self._pool.partial is None or start >= limit or len(hits) in keys.media:
            return 0, 0
        wanted = tokens[start : min(start + self.block_size, limit)]
        return self._pool.partial.best(keys.root, int(hits[-1]) if len(hits) else ROOT, wanted)
