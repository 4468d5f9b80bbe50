"""The pool of blocks: reference counts, holds, contents and free blocks.

A block is active (a sequence references it), cached (no sequence does, but a prefix lookup would
find it) or free (unused). The token ids of a block are stored beside its KV, so that content can be
compared, hashed and forked without its sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from jaxkv.errors import JaxkvError
from jaxkv.manager import events
from jaxkv.manager.eviction.retention import Retention
from jaxkv.manager.eviction.run_queue import NONE
from jaxkv.manager.journal import Journal
from jaxkv.manager.prefix.base import PrefixIndex
from jaxkv.manager.prefix.keys import BlockKeys
from jaxkv.manager.prefix.partial_index import PartialIndex
from jaxkv.manager.prefix.tree import GONE, ROOT, BlockTree
from jaxkv.manager.prefix.window import longest_hit

HoldReason = Literal["copy", "pin", "transfer"]
_ONE = np.ones((), np.int32)  # faster in NumPy than a Python integer


def all_zero(array: np.ndarray) -> bool:
    """Whether all bits are 0; several times as fast as `any` on a few hundred numbers."""
    return array.tobytes() == bytes(array.nbytes)


class BlockPool:
    """Reference counts, contents and free blocks.

    Block ids are i64 where they are used as indices: NumPy converts other types at each use, which
    made its calls three times as slow.

    Args:
      num_blocks: blocks in the pool, the null block included.
      block_size: tokens per block.
      index: makes the prefix index, from the pool's tokens and parents; None: no prefix cache.
      policy: chooses the cached block to evict when no block is free.
      partial: index of partly matching blocks; None: whole blocks only.
      window: tokens that a query sees; None: all. With a window, blocks are found without their
        predecessors.
      journal: clock, and receiver of events.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        index: Callable[[np.ndarray, np.ndarray], PrefixIndex] | None,
        policy: Retention,
        partial: PartialIndex | None,
        window: int | None,
        journal: Journal,
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.policy, self.partial = policy, partial
        self._window = window
        self.leaf_first = window is None  # True: no block is cached without its parent
        self._journal = journal
        self.ref_counts = np.zeros(num_blocks, np.int32)  # table cells that name the block
        self.tokens = np.zeros((num_blocks, block_size), "<i4")
        self.slots = self.tokens.reshape(-1)  # a view: token ids by slot
        self.indexed = np.zeros(num_blocks, bool)  # visible to lookups
        self.hashes: list[bytes] = [b""] * num_blocks  # hashes of indexed blocks
        self.tree = BlockTree(num_blocks)
        self.index = index(self.tokens, self.tree.parents) if index is not None else None
        self.stored_at = np.zeros(num_blocks)
        self.last_access = np.full(num_blocks, np.nan)
        self.access_counts = np.zeros(num_blocks, np.int64)
        # References beside those of the tables, by block: in all, by reason, and those that keep
        # the content from being rewritten (a queued copy need not: it runs before later writes).
        self.holds: dict[int, int] = {}
        self.held_for: dict[HoldReason, dict[int, int]] = {"copy": {}, "pin": {}, "transfer": {}}
        self.kept: dict[int, int] = {}
        # A stack: the block freed last is taken first, since it is most likely in a CPU cache.
        self._free = np.arange(num_blocks - 1, -1, -1)
        self._num_free = num_blocks - 1
        self.num_cached = 0  # unreferenced and indexed, held blocks included
        self.num_held_idle = 0  # held blocks among them
        # Victims with cached descendants: they are evicted after their last child.
        self._waiting: dict[int, None] = {}
        self._next_victims: dict[int, None] = {}
        self.peak_active = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes a copy whole: its slots are a view of its own tokens."""
        self.__dict__.update(state)
        self.slots = self.tokens.reshape(-1)

    # -- counts ------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return self._num_free

    @property
    def num_available(self) -> int:
        """Number of blocks that `take` could return: free blocks, and cached ones without holds."""
        return self._num_free + self.num_cached - self.num_held_idle

    def counts_of(self, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Ref counts of these blocks, and the number of available blocks, for events."""
        return tuple(self.ref_counts[list(blocks)].tolist()), self.num_available

    def free_blocks(self) -> np.ndarray:
        """i64; the free blocks, the next to be taken last."""
        return self._free[: self._num_free]

    # -- references --------------------------------------------------------------------------

    def take(self, count: int) -> np.ndarray:
        """Takes `count` blocks, one reference each, contents undefined. The caller has checked
        `num_available`."""
        while self._num_free < count:
            self._evict_one()
        top = self._num_free
        self._num_free = top - count
        blocks = self._free[top - count : top][::-1].copy()
        self.ref_counts[blocks] = 1
        active = self.num_blocks - 1 - self._num_free - self.num_cached
        if active > self.peak_active:
            self.peak_active = active
        return blocks

    def touch(self, blocks: np.ndarray, *, hit: bool) -> None:
        """Adds a reference to each block, for a prefix hit or a fork."""
        counts = self.ref_counts[blocks]
        if all_zero(counts):  # the common case, in one pass
            self.ref_counts[blocks] = 1
            self._leave_cache(blocks)
        else:
            idle = blocks[counts == 0]
            counts += 1
            self.ref_counts[blocks] = counts
            if len(idle):
                self._leave_cache(idle)
        if hit:
            now = self._journal.now()
            self.policy.hit(blocks, now)
            self.last_access[blocks] = now
            self.access_counts[blocks] += 1
        active = self.num_blocks - 1 - self._num_free - self.num_cached
        self.peak_active = max(self.peak_active, active)

    def release(self, blocks: np.ndarray) -> None:
        """Removes a reference from each of distinct blocks, given in eviction order."""
        counts = self.ref_counts[blocks]
        np.subtract(counts, _ONE, counts)
        self.ref_counts[blocks] = counts
        if not all_zero(counts):
            blocks = blocks[counts == 0]
            if not len(blocks):
                return
        if self.holds:
            held = np.array([b in self.holds for b in blocks.tolist()])
            if held.any():
                kept = blocks[held & self.indexed[blocks]]
                self.num_cached += len(kept)
                self.num_held_idle += len(kept)
                blocks = blocks[~held]
        self._retire(blocks)

    def _retire(self, blocks: np.ndarray) -> None:
        """Makes unreferenced blocks cached, if they are visible to lookups, or free."""
        found = self.indexed[blocks]
        if b"\0" not in found.tobytes():
            cached, free = blocks, blocks[:0]
        else:
            cached, free = blocks[found], blocks[~found]
        if len(cached):
            self.num_cached += len(cached)
            self.policy.idle(cached)
        if len(free):
            # The stack is read from its end, so that the first block goes last.
            self._free[self._num_free : self._num_free + len(free)] = free[::-1]
            self._num_free += len(free)

    def _leave_cache(self, blocks: np.ndarray) -> None:
        """Removes blocks from the eviction candidates: they are referenced, held or withdrawn."""
        self.num_cached -= len(blocks)
        self.policy.busy(blocks)
        if self.holds:
            self.num_held_idle -= sum(b in self.holds for b in blocks.tolist())
        if self._waiting or self._next_victims:
            for block in blocks.tolist():
                self._waiting.pop(block, None)
                self._next_victims.pop(block, None)

    def hold(self, blocks: Iterable[int], reason: HoldReason) -> None:
        """Holds blocks without a table cell, until `unhold` with the same reason."""
        for block in blocks:
            if block not in self.holds and self.ref_counts[block] == 0:
                self._leave_cache(np.array([block]))
                self.num_cached += 1
                self.num_held_idle += 1
            for counts in self._counts(reason):
                counts[block] = counts.get(block, 0) + 1

    def unhold(self, blocks: Iterable[int], reason: HoldReason) -> None:
        """Ends holds."""
        for block in blocks:
            for counts in self._counts(reason):
                counts[block] -= 1
                if counts[block] == 0:
                    del counts[block]
            if block not in self.holds and self.ref_counts[block] == 0:
                if self.indexed[block]:
                    self.num_cached -= 1
                    self.num_held_idle -= 1
                self._retire(np.array([block]))

    def _counts(self, reason: HoldReason) -> tuple[dict[int, int], ...]:
        if reason == "copy":
            return self.holds, self.held_for["copy"]
        return self.holds, self.held_for[reason], self.kept

    # -- contents ----------------------------------------------------------------------------

    def match(self, keys: BlockKeys, at_most: int | None = None) -> np.ndarray:
        """i64; cached blocks of the leading blocks of `keys`, at most `at_most`.

        With a sliding window, those of the longest prefix that can be continued, 0 behind it.
        """
        if self.index is None:
            return np.zeros(0, np.int64)
        found = self.index.match(keys, ROOT)[:at_most]
        return found if self._window is None else longest_hit(found, self._window, self.block_size)

    def publish(
        self, keys: BlockKeys, parent: int, blocks: np.ndarray, namespace: Any
    ) -> np.ndarray:
        """Makes full, computed blocks visible to lookups.

        Returns:
          i64[len(blocks)]; the block to use for each content. For content that is cached already,
          that is the older block; the caller switches to it and releases its own.
        """
        index = self.index
        assert index is not None
        old = index.match(keys, parent)
        blocks = np.concatenate([np.where(old > 0, old, blocks[: len(old)]), blocks[len(old) :]])
        missing = np.flatnonzero(old == 0).tolist() if not self.leaf_first else []
        missing += range(len(old), len(keys))
        while missing:  # one run at the end, unless a window has left gaps
            start = missing[0]
            stop = start + next((i for i, m in enumerate(missing) if m != start + i), len(missing))
            before = int(blocks[start - 1]) if start else parent
            added = index.add(keys, start, before, blocks[start:stop].tolist())
            if added:
                self._enter(keys, start, before, blocks[start : start + added], namespace)
            if added < stop - start:
                break
            if stop < len(keys):
                self._adopt(int(blocks[stop]), int(blocks[stop - 1]))
            del missing[: stop - start]
        return blocks

    def _adopt(self, block: int, parent: int) -> None:
        """Gives a parent to a block that had outlived its own."""
        if self.tree.parents[block] == GONE:
            self.tree.attach(block, parent)

    def _enter(
        self, keys: BlockKeys, start: int, parent: int, blocks: np.ndarray, namespace: Any
    ) -> None:
        hashes = keys.hashes()[start : start + len(blocks)]
        self.tree.add(blocks, parent)
        self._store(blocks, hashes)
        if self.partial is not None:
            for i, block in enumerate(blocks.tolist()):
                self.partial.add(keys, start + i, parent if i == 0 else int(blocks[i - 1]), block)
        if self._journal.listening:
            previous = self.hashes[parent] if parent != ROOT else None
            for block, key, row in zip(blocks.tolist(), hashes, self.tokens[blocks], strict=True):
                self._journal.emit(
                    events.STORED, blocks=(block,), hash=key.hex(),
                    parent_hash=previous.hex() if previous else None,
                    token_ids=row.tolist(), namespace=namespace,
                )  # fmt: skip
                previous = key

    def _store(self, blocks: np.ndarray, hashes: list[bytes]) -> None:
        now = self._journal.now()
        self.indexed[blocks] = True
        for block, key in zip(blocks.tolist(), hashes, strict=True):
            self.hashes[block] = key
        self.stored_at[blocks] = self.last_access[blocks] = now
        self.access_counts[blocks] = 0
        self.policy.stored(blocks, hashes, now)

    @property
    def publishes_leaves(self) -> bool:
        """Whether `publish_leaves` can take the place of `publish`."""
        if self.index is None or self.partial is not None or self._journal.listening:
            return False
        return self.leaf_first and self.index.adds_leaves

    def publish_leaves(self, parents: np.ndarray, blocks: np.ndarray, hashes: list[bytes]) -> None:
        """Publishes one block below each of these parents; the hashes are not in the index."""
        assert self.index is not None
        self.index.add_leaves(hashes, blocks.tolist())
        self.tree.add_leaves(blocks, parents)
        self._store(blocks, hashes)

    def withdraw(self, block: int, reason: str) -> None:
        """Hides a block from lookups, with the descendants that are found only through it."""
        for each in self.tree.subtree(block) if self.leaf_first else [block]:
            idle = self.ref_counts[each] == 0
            if idle:
                self._leave_cache(np.array([each]))  # first: policies drop removed blocks
            self._remove(each, reason)
            if idle and each not in self.holds:
                self._retire(np.array([each]))

    def _remove(self, block: int, reason: str) -> None:
        """Removes a block from the index."""
        assert self.index is not None
        parent = self.tree.parents.item(block)
        self.index.remove(block, self.hashes[block])
        orphans = self.tree.remove(block)
        if self.partial is not None:
            for each in (block, *orphans):  # they are indexed by their parents
                self.partial.remove(each)
        if parent in self._waiting and not self.tree.has_children(parent):
            del self._waiting[parent]
            self._next_victims[parent] = None
        block_hash, self.hashes[block] = self.hashes[block], b""
        self.indexed[block] = False
        self.policy.removed(block, block_hash)
        if self._journal.listening:
            self._journal.emit(
                events.REMOVED, blocks=(block,), hash=block_hash.hex(), reason=reason
            )

    def clear(self) -> int:
        """Hides all blocks from lookups; returns their number."""
        blocks = np.flatnonzero(self.indexed)
        if self.index is None or not len(blocks):
            return 0
        idle = blocks[self.ref_counts[blocks] == 0]
        loose = idle[[b not in self.holds for b in idle.tolist()]]
        self.index.clear()
        if self.partial is not None:
            self.partial.clear()
        self.policy.busy(loose)
        for block in blocks.tolist():
            self.policy.removed(block, self.hashes[block])
            self.hashes[block] = b""
        self.indexed[blocks] = False
        self.tree.clear()
        self._waiting.clear()
        self._next_victims.clear()
        self.num_cached = self.num_held_idle = 0
        self._retire(loose)
        return len(blocks)

    def keep(self, blocks: np.ndarray, priority: int, expires: float | None, *, new: bool) -> None:
        """Gives content a priority; content that is not new keeps the higher priority."""
        self.policy.keep(blocks, priority, expires, new=new)

    def copied(self, source: int, destination: int) -> None:
        """Emits the event of a queued copy."""
        if self._journal.listening:
            self._journal.emit(events.COPY, blocks=(source, destination))

    # -- eviction ----------------------------------------------------------------------------

    def _evict_one(self) -> None:
        """Evicts the block that the policy chooses; of a prefix, the deepest first."""
        block = self._victim()
        if self.leaf_first and self.tree.has_children(block):
            self.withdraw(block, "evicted")
        else:  # a victim has no holds and is no longer a candidate
            self._remove(block, "evicted")
            self.num_cached -= 1
            self._free[self._num_free] = block
            self._num_free += 1
        if self._journal.listening:
            now = self._journal.now()
            self._journal.emit(
                events.EVICT, blocks=(block,), age=now - self.stored_at.item(block),
                idle=now - self.last_access.item(block),
            )  # fmt: skip

    def _victim(self) -> int:
        if self._next_victims:
            return self._next_victims.popitem()[0]
        while (block := self.policy.victim()) != NONE:
            if not self.leaf_first or not self.tree.has_children(block):
                return block
            self._waiting[block] = None
        # The remaining candidates have held descendants, such as the source of a copy.
        block, _ = self._waiting.popitem()
        while (child := next((c for c in self.tree.children(block) if c in self._waiting), 0)) != 0:
            self._waiting[block] = None
            block = child
            del self._waiting[block]
        return block

    def _is_idle(self, block: int) -> bool:
        return bool(self.indexed[block]) and not self.ref_counts[block] and block not in self.holds

    def require_content(self, blocks: Iterable[int]) -> None:
        """Raises JaxkvError unless a sequence references each block, or a lookup finds it."""
        last = self.num_blocks - 1
        for block in blocks:
            if not 0 < block <= last:
                raise JaxkvError(f"block {block} is not in the pool, whose blocks are 1 to {last}")
            if not (self.ref_counts[block] or self.indexed[block]):
                raise JaxkvError(f"block {block} is free: it holds no content")

    def evict(self, blocks: Iterable[int]) -> None:
        """Evicts given cached blocks, and blocks that are found only through them.

        Raises:
          JaxkvError: a block is referenced, held, or not cached; nothing was changed.
        """
        blocks = list(blocks)
        for block in blocks:
            if not 0 < block < self.num_blocks or not self._is_idle(block):
                raise JaxkvError(
                    f"block {block} cannot be evicted: "
                    + (
                        f"the blocks of the pool are 1 to {self.num_blocks - 1}"
                        if not 0 < block < self.num_blocks
                        else f"ref count {self.ref_counts[block]}, "
                        f"{self.holds.get(block, 0)} holds, "
                        f"{'cached' if self.indexed[block] else 'not cached'}"
                    )
                )
        for block in blocks:
            if self.indexed[block]:  # not yet evicted with a parent
                self.withdraw(block, "evicted by hand")
