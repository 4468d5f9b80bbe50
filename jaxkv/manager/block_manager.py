"""The host's view of the pool: which sequence owns which blocks. Plans; the device applies.

Pure Python and NumPy (no JAX), single-threaded by contract: whoever runs the step loop owns it.
Every call refuses before it changes anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Self

import numpy as np

from jaxkv.config import CacheConfig
from jaxkv.errors import JaxkvError
from jaxkv.manager import events
from jaxkv.manager.journal import operation
from jaxkv.manager.manager_view import ManagerView
from jaxkv.manager.prefix.keys import Media, as_tokens
from jaxkv.manager.records import Allocation, Plan
from jaxkv.manager.table import NULL_BLOCK, Rows


class BlockManager(ManagerView):
    """Block tables, reference counts, prefix cache and free blocks of one pool.

    Args:
      num_blocks: blocks in the pool, the null block included.
      block_size: tokens per block.
      max_seqs: rows of the block table.
      max_blocks_per_seq: columns of the block table.
      prefix_index: how cached blocks are found: "hash" (chained block hashes), "radix" (a tree of
        token runs) or None (they are not). Both find the same.
      eviction: which cached block goes first: one of `jaxkv.manager.eviction.policies.POLICIES`.
      copy_on_partial_reuse: a prompt that leaves the cached prefixes inside a block takes the
        tokens that agree, by a copy of the block.
      watermark: share of the pool that `can_allocate` keeps for the running sequences.
      sliding_window: tokens that a query sees, itself included; blocks behind go back, and a prefix
        hit needs only the blocks that its next query sees. None: all.
      weight_version: part of every key, so that other weights never hit; see `set_weight_version`.
      clock: seconds, monotonic.
      debug: `take_plan` verifies the whole bookkeeping each time.
      hash_function: of the block keys, to 16 bytes.

    Example:
      >>> from jaxkv import BlockManager
      >>> manager = BlockManager(num_blocks=8, block_size=4, max_seqs=3, max_blocks_per_seq=4)
      >>> manager.allocate("a", [1, 2, 3, 4, 5, 6]).num_cached_tokens
      0
      >>> manager.commit("a", 6)       # their KV is computed: the first block can be found
      >>> manager.allocate("b", [1, 2, 3, 4, 9]).num_cached_tokens
      4
      >>> manager.fork("a", "c")       # shares all blocks
      >>> manager.append("c", 7)       # copy-on-write of the partly filled one
      >>> manager.block_table("a").tolist(), manager.block_table("c").tolist()
      ([1, 2], [1, 4])
      >>> manager.take_plan().copies.tolist()
      [[2, 4]]
    """

    @classmethod
    def for_config(cls, config: CacheConfig, **options: Any) -> Self:
        """The manager of a pool of this shape; options as in the constructor."""
        return cls(
            config.num_blocks,
            config.block_size,
            max_seqs=config.max_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
            **options,
        )

    # -- transitions -------------------------------------------------------------------------

    @operation
    def allocate(
        self,
        seq_id: Hashable,
        token_ids: Sequence[int] | np.ndarray,
        *,
        namespace: Any = None,
        media: Iterable[Media] = (),
        skip_prefix_cache: bool = False,
        lookahead: int = 0,
        priority: int = 0,
        ttl: float | None = None,
    ) -> Allocation:
        """Reserves a row, and blocks for `token_ids`: cached ones where there are. All or nothing.

        At least the last token is left to compute, since its logits are wanted.

        Args:
          seq_id: its name.
          token_ids: the prompt.
          namespace: what else its KV depends on (adapter, tenant's salt); kinds never collide, as
            in `{"adapter": "x"}` and `{"salt": "x"}`.
          media: ranges of placeholder tokens and what they stand for.
          skip_prefix_cache: compute everything; the blocks are cached all the same.
          lookahead: slots to reserve past the prompt.
          priority: of its cached blocks against eviction; higher ones go later.
          ttl: seconds after which the priority ends; None: never.

        Raises:
          OutOfBlocksError: too few blocks, or no free row; nothing was changed.
          JaxkvError: the id is live, there are no tokens, or they can never fit a table row.
        """
        tokens = as_tokens(token_ids)
        length = len(tokens)
        self._expire_pins()
        if seq_id in self._table.rows:
            raise JaxkvError(f"sequence {seq_id!r} is live already; free it first")
        if length == 0 or lookahead < 0:
            raise JaxkvError(
                f"sequence {seq_id!r}: {length} tokens and {lookahead=}; give at least one token "
                "and no negative lookahead"
            )
        self._limits.require_columns(seq_id, length + lookahead)
        self._limits.require_row(self.blocks_for(length + lookahead))
        origin = self._origin(namespace, media)
        origin.priority = priority
        origin.expires = None if ttl is None else self._now() + ttl
        keys = self._keys(tokens, origin)
        hits = self._pool.match(keys, 0 if skip_prefix_cache else (length - 1) // self.block_size)
        gone = 0 if self.sliding_window is None else int(np.count_nonzero(hits == NULL_BLOCK))
        seen = hits[gone:]
        source, extra = (
            (0, 0) if skip_prefix_cache else self._best_partial(keys, hits, tokens, length - 1)
        )
        needed = self.blocks_for(length + lookahead) - len(hits)
        idle = self._limits.num_idle(seen)
        if (
            extra
            and needed + idle + self._limits.num_idle(np.array([source])) > self._limits.available()
        ):
            source = extra = 0  # the copy's source is in the way: compute instead
        self._limits.require_blocks(needed + idle, f"sequence {seq_id!r} of {length} tokens")
        # Hits first, so that the blocks taken for the rest cannot be among them.
        if len(seen):
            self._pool.touch(seen, hit=True)
            if priority or self._retention.keeps:
                self._pool.keep(seen, priority, origin.expires, new=False)
        if extra:
            self._pool.hold([source])
        new = self._pool.take(needed)
        if extra:
            self._pool.unhold([source])
            self._sequences.copy(source, int(new[0]))
        self._sequences.fill(new, tokens[len(hits) * self.block_size :])
        row = self._table.open(seq_id, origin)
        self._table.extend(row, np.concatenate([hits, new]) if len(hits) else new)
        self._table.lengths[row] = length
        self._table.dropped[row] = gone
        self._table.computed[row] = cached = len(hits) * self.block_size + extra
        self._table.published[row] = len(hits)
        self._table.lookahead[row] = lookahead
        self._sequences.refresh_next_slot(row)
        if self._listeners:
            if cached:
                self._emit(
                    events.HIT, seq=seq_id, blocks=seen, num_tokens=cached, queried_tokens=length
                )
            self._emit(
                events.ALLOCATE, seq=seq_id, blocks=self._table.live_blocks(row),
                num_tokens=length, num_cached_tokens=cached,
                skip_prefix_cache=skip_prefix_cache,
            )  # fmt: skip
        return Allocation(row=row, num_cached_tokens=cached)

    @operation
    def commit(self, seq_id: Hashable, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens is computed: full blocks can be found from now on.

        Raises:
          JaxkvError: more tokens than the sequence has left to compute.
        """
        self._commit([self.row(seq_id)], [num_tokens])

    @operation
    def commit_batch(
        self, seq_ids: Sequence[Hashable] | Rows, num_tokens: Sequence[int] | np.ndarray
    ) -> None:
        """`commit` for several sequences. All or nothing.

        Raises:
          JaxkvError: more tokens than a sequence has left to compute, or an id given twice.
        """
        selected = self._table.select(seq_ids)
        if len(num_tokens) != len(selected.rows):
            raise JaxkvError(f"{len(selected.rows)} sequences but {len(num_tokens)} counts")
        self._commit(selected.rows, num_tokens)

    def _commit(self, rows: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray) -> None:
        rows, counts = np.asarray(rows, np.int64), np.asarray(counts, np.int64)
        table = self._table
        before = table.computed[rows]
        after = before + counts
        wrong = (counts < 0) | (after > table.lengths[rows])
        if np.count_nonzero(wrong):
            i = int(wrong.argmax())
            raise JaxkvError(
                f"sequence {table.ids[rows[i]]!r}: cannot commit {counts[i]} tokens after "
                f"{before[i]} of {table.lengths[rows[i]]}"
            )
        table.computed[rows] = after
        full = table.split(after)[0] > table.split(before)[0]
        if np.count_nonzero(full):
            self._sequences.publish_all(rows[full])
        if self.sliding_window is not None:
            for row in rows.tolist():
                self._sequences.drop_behind_window(row)

    @operation
    def append(self, seq_id: Hashable, token_id: int) -> None:
        """One more token: reserves its slot. See `append_batch`."""
        self._sequences.append(self._table.select([seq_id]), as_tokens([token_id]), self._limits)

    @operation
    def append_batch(
        self,
        seq_ids: Sequence[Hashable] | Rows,
        token_ids: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """More tokens for several sequences: reserves their slots. All or nothing.

        Args:
          seq_ids: distinct live sequences, or what `select` made of them, which is faster.
          token_ids: i32[sum(counts)]; those of one sequence follow each other.
          counts: i64[len(seq_ids)], at least 1 each; None: one each.

        Raises:
          OutOfBlocksError: fewer blocks than new ones and copies are needed.
          JaxkvError: an id given twice, a sequence that would pass its longest, or not as many
            tokens as the counts say.
        """
        selected, token_ids = self._table.select(seq_ids), as_tokens(token_ids)
        if counts is None:
            if len(token_ids) != len(selected.rows):
                raise JaxkvError(f"{len(selected.rows)} sequences but {len(token_ids)} tokens")
            self._sequences.append(selected, token_ids, self._limits)
            return
        counts = self._slot_counts(selected, counts)
        if len(token_ids) != counts.sum():
            raise JaxkvError(f"counts of {counts.sum()} tokens but {len(token_ids)} tokens")
        self._sequences.extend(selected, token_ids, counts, self._limits)

    @operation
    def reserve(
        self, seq_ids: Sequence[Hashable] | Rows, num_slots: int | Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Lookahead slots: room for the next `num_slots` tokens of each sequence. All or nothing.

        For tokens that the device makes before the host knows them: `append` finds their slots
        there, and `truncate` to the present length gives back what was not used.

        Returns:
          i64[n]: how many slots past its length each sequence has now, to the end of a block. They
          are its own until it is forked, reordered or truncated.

        Raises:
          OutOfBlocksError: fewer blocks than new ones and copies are needed.
          JaxkvError: an id given twice, a sequence that would pass its longest, or no slot asked.
        """
        table = self._table
        selected = table.select(seq_ids)
        self._sequences.reserve(selected, self._slot_counts(selected, num_slots), self._limits)
        return table.used[selected.rows] * self.block_size - table.lengths[selected.rows]

    def _slot_counts(self, selected: Rows, counts: int | Sequence[int] | np.ndarray) -> np.ndarray:
        """i64[n]: how many slots each of the selected sequences wants, at least one."""
        wanted, n = np.asarray(counts, np.int64), len(selected.rows)
        if wanted.ndim and wanted.shape != (n,):
            raise JaxkvError(f"{n} sequences but {wanted.size} counts")
        if wanted.size and wanted.min() < 1:
            raise JaxkvError(f"counts {wanted.tolist()}: at least one for each")
        return wanted if wanted.ndim else np.full(n, wanted)

    @operation
    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """A second sequence with the same tokens, which shares all blocks until one is written.

        Raises:
          OutOfBlocksError: no free row; nothing was changed.
          JaxkvError: the child's id is live.
        """
        parent = self.row(parent_id)
        if child_id in self._table.rows:
            raise JaxkvError(f"sequence {child_id!r} is live already; free it first")
        self._limits.require_row(0)
        self._sequences.fork(parent, child_id)

    @operation
    def reorder(self, seq_ids: Sequence[Hashable], parents: Sequence[int]) -> None:
        """A beam step: sequence i becomes a continuation of what sequence `parents[i]` was.

        Tables move, blocks do not; no block is needed.

        Raises:
          JaxkvError: not one parent per sequence, or one out of range.
        """
        rows = self._table.select(seq_ids).rows.tolist()
        if len(parents) != len(rows) or any(not 0 <= p < len(rows) for p in parents):
            raise JaxkvError(f"parents {list(parents)} are not {len(rows)} indices below it")
        self._sequences.reorder(rows, [rows[p] for p in parents])

    @operation
    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Takes back all tokens after the first `length`, and reserved slots with them.

        Raises:
          JaxkvError: a length that is negative, more than the sequence has, or before what a
            sliding window has kept; nothing was changed.
        """
        row = self.row(seq_id)
        table, size = self._table, self.block_size
        # The next query must not look for what the window has given back.
        gone = int(table.dropped[row]) * size
        least = gone + (self.sliding_window or 1) - 1 if gone else 0
        if not least <= length <= table.lengths[row]:
            raise JaxkvError(
                f"sequence {seq_id!r}: cannot truncate to {length}; it has {table.lengths[row]} "
                f"tokens, and at least {least} must stay, since the first {gone} are gone behind "
                "the window"
            )
        self._sequences.truncate(row, length)

    @operation
    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence. Blocks that nobody else references are cached, or free again."""
        row = self.row(seq_id)
        blocks = self._table.live_blocks(row)[::-1].copy()
        self._table.close(row)
        # Reverse order: the tail of a sequence is worth least to whoever shares its prefix.
        if len(blocks):
            self._pool.release(blocks)
        if self._listeners:
            self._emit(events.FREE, seq=seq_id, blocks=blocks)

    @operation
    def pin(
        self, token_ids: Sequence[int] | np.ndarray, *, ttl: float | None = None,
        namespace: Any = None,
    ) -> int:  # fmt: skip
        """Keeps the cached blocks of a prefix from eviction; returns how many tokens they hold.

        Pinning again renews. `ttl`: seconds after which the pin ends; None: until `unpin`.
        """
        keys = self._keys(as_tokens(token_ids), self._origin(namespace, ()))
        hits = self._pool.match(keys)
        ends = None if ttl is None else self._now() + ttl
        self._pins.set(keys, hits[hits != NULL_BLOCK].tolist(), ends)
        return len(hits) * self.block_size

    @operation
    def unpin(self, token_ids: Sequence[int] | np.ndarray, *, namespace: Any = None) -> None:
        """Ends a pin.

        Raises:
          JaxkvError: there is none of this prefix.
        """
        self._pins.drop(self._keys(as_tokens(token_ids), self._origin(namespace, ())))

    @operation
    def evict(self, blocks: Sequence[int]) -> None:
        """Drops given cached blocks, and those that are found only through them.

        Raises:
          JaxkvError: one is referenced, pinned, being copied, or not cached; nothing was changed.
        """
        self._expire_pins()
        self._pool.evict(blocks)

    @operation
    def set_weight_version(self, version: int | str) -> None:
        """The weights have changed: sequences from now on neither hit nor share what was before.

        What the running ones hold comes from the old weights and stays under their version.
        """
        self.weight_version = version

    @operation
    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forgets all cached content. False, and nothing changed, while sequences are live.

        With `force` running sequences keep their blocks, but none of what they hold is ever found:
        it may come from before the reset.
        """
        if self._table.rows and not force:
            return False
        self._pins.clear()
        self._pool.clear()
        for row in self._table.rows.values():
            self._sequences.origin(row).publishes = False
        if self._listeners:
            self._emit(events.CLEARED)
        return True

    @operation
    def note(self, kind: str, seq_id: Hashable, detail: dict[str, Any]) -> None:
        """Puts an event of the caller's into the log, such as a preemption and its reason."""
        if self._listeners:
            self._emit(kind, seq=seq_id, **detail)

    @operation
    def take_plan(self) -> Plan:
        """Everything the device has not been told yet; the next call starts afresh."""
        cells, lengths = self._table.drain()
        queued = self._sequences.copies
        copies = np.array([(s, d) for d, s in queued.items()], np.int32).reshape(-1, 2)
        # The device runs plans in order, and a plan's copies before all else: whatever is written
        # to these blocks from now on is written after they were copied.
        self._pool.unhold(copies.reshape(-1).tolist())
        queued.clear()
        if self.debug:
            self.check()
        return Plan(copies=copies, cells=cells, lengths=lengths)
