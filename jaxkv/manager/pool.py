"""The blocks themselves: who references them, what they hold, which can be taken.

A block is active (a sequence references it), cached (no sequence does, but a prefix lookup would
find it) or free (holds nothing). The tokens of a block are kept beside its KV, so that content can
be compared, hashed and forked without asking the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from jaxkv.errors import JaxkvError
from jaxkv.manager import events
from jaxkv.manager.eviction.policies import NONE
from jaxkv.manager.eviction.retention import Retention
from jaxkv.manager.journal import Journal
from jaxkv.manager.prefix.base import PrefixIndex
from jaxkv.manager.prefix.keys import BlockKeys
from jaxkv.manager.prefix.partial_index import PartialIndex
from jaxkv.manager.prefix.tree import GONE, ROOT, BlockTree
from jaxkv.manager.prefix.window import longest_hit

HoldReason = Literal["copy", "pin", "transfer"]
_ONE = np.ones((), np.int32)  # NumPy takes longer over a Python integer


def all_zero(array: np.ndarray) -> bool:
    """Whether no bit is set: several times as fast as `any` on a few hundred numbers."""
    return array.tobytes() == bytes(array.nbytes)


class BlockPool:
    """Reference counts, contents and free blocks.

    Block ids are i64 where they are used as indices: NumPy converts other types at each use, which
    made its calls three times as slow.

    Args:
      num_blocks: the null block included.
      block_size: tokens per block.
      index: makes the index that finds blocks by content, from the pool's tokens and parents;
        None: no block is ever found.
      policy: chooses which cached block goes when the free ones are used up.
      partial: finds the best partly matching block; None: whole blocks only.
      window: tokens that a query sees; None: all. With one, blocks are found without those before.
      journal: clock, and the receiver of events.
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
        self.leaf_first = window is None  # no block outlives its parent's content
        self._journal = journal
        self.ref_counts = np.zeros(num_blocks, np.int32)  # table entries that name the block
        self.tokens = np.zeros((num_blocks, block_size), "<i4")
        self.indexed = np.zeros(num_blocks, bool)  # a lookup would find it
        self.hashes: list[bytes] = [b""] * num_blocks  # of the indexed ones
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
        # A stack: what was freed last is taken first, and is most likely still in a cache.
        self._free = np.arange(num_blocks - 1, -1, -1)
        self._num_free = num_blocks - 1
        self.num_cached = 0  # unreferenced and indexed, held ones included
        self.num_held_idle = 0  # of these, the held
        # Victims whose descendants are still cached: they follow when the last child has gone.
        self._waiting: dict[int, None] = {}
        self._next_victims: dict[int, None] = {}
        self.peak_active = 0

    # -- counts ------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._num_free

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give: free ones and cached ones that nobody holds."""
        return self._num_free + self.num_cached - self.num_held_idle

    def counts_of(self, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Ref counts of these blocks, and the number of available blocks, for events."""
        return tuple(self.ref_counts[list(blocks)].tolist()), self.num_available

    def free_blocks(self) -> np.ndarray:
        """i64, the free blocks, next to be taken last."""
        return self._free[: self._num_free]

    # -- references --------------------------------------------------------------------------

    def take(self, count: int) -> np.ndarray:
        """`count` blocks with one reference each, contents undefined. The caller has checked
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
        """One more reference to each, by a prefix hit or a fork."""
        counts = self.ref_counts[blocks]
        if all_zero(counts):  # the common case, without a pass for each of the two answers
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
        """One reference less to each: distinct blocks, in the order in which they should go."""
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
        """Blocks that nothing references: cached if a lookup finds them, else free."""
        found = self.indexed[blocks]
        if b"\0" not in found.tobytes():
            cached, free = blocks, blocks[:0]
        else:
            cached, free = blocks[found], blocks[~found]
        if len(cached):
            self.num_cached += len(cached)
            self.policy.idle(cached)
        if len(free):
            # The stack is read from its end, so that the first to go must come last.
            self._free[self._num_free : self._num_free + len(free)] = free[::-1]
            self._num_free += len(free)

    def _leave_cache(self, blocks: np.ndarray) -> None:
        """Idle cached blocks are referenced, held or withdrawn: no longer candidates."""
        self.num_cached -= len(blocks)
        self.policy.busy(blocks)
        if self.holds:
            self.num_held_idle -= sum(b in self.holds for b in blocks.tolist())
        if self._waiting or self._next_victims:
            for block in blocks.tolist():
                self._waiting.pop(block, None)
                self._next_victims.pop(block, None)

    def hold(self, blocks: Iterable[int], reason: HoldReason) -> None:
        """Keeps blocks as they are without a table entry, until `unhold` with the same reason."""
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
        """i64: blocks that hold the leading blocks of `keys`, at most so many.

        With a sliding window the longest prefix that can be continued: 0 for what is behind it.
        """
        if self.index is None:
            return np.zeros(0, np.int64)
        found = self.index.match(keys, ROOT)[:at_most]
        return found if self._window is None else longest_hit(found, self._window, self.block_size)

    def publish(
        self, keys: BlockKeys, parent: int, blocks: np.ndarray, namespace: Any
    ) -> np.ndarray:
        """The KV of full blocks is computed: a lookup finds them from now on.

        Returns:
          i64[len(blocks)]: the block to use for each content. Where a content is there already,
          that is the older block; the caller goes over to it and releases its own.
        """
        index = self.index
        assert index is not None
        old = index.match(keys, parent)
        blocks = np.concatenate([np.where(old > 0, old, blocks[: len(old)]), blocks[len(old) :]])
        missing = np.flatnonzero(old == 0).tolist() if not self.leaf_first else []
        missing += range(len(old), len(keys))
        while missing:  # one run at the end, but where a window has left gaps
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
        """A block that had outlived its parent's content has a parent again."""
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
        """`publish` of one block below each of these parents, whose hashes are not in the index."""
        assert self.index is not None
        self.index.add_leaves(hashes, blocks.tolist())
        self.tree.add_leaves(blocks, parents)
        self._store(blocks, hashes)

    def withdraw(self, block: int, reason: str) -> None:
        """No lookup finds the block any more, nor what nothing can reach without it."""
        for each in self.tree.subtree(block) if self.leaf_first else [block]:
            idle = self.ref_counts[each] == 0
            if idle:
                self._leave_cache(np.array([each]))  # first: a policy forgets what is removed
            self._remove(each, reason)
            if idle and each not in self.holds:
                self._retire(np.array([each]))

    def _remove(self, block: int, reason: str) -> None:
        """Out of the index."""
        assert self.index is not None
        parent = self.tree.parents.item(block)
        self.index.remove(block, self.hashes[block])
        orphans = self.tree.remove(block)
        if self.partial is not None:
            for each in (block, *orphans):  # which are looked for by their parents
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
        """Nothing is found any more; returns how many blocks were."""
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
        """Gives content a priority against eviction; what is not new keeps the higher one."""
        self.policy.keep(blocks, priority, expires, new=new)

    def copied(self, source: int, destination: int) -> None:
        """A copy was queued: for the log."""
        if self._journal.listening:
            self._journal.emit(events.COPY, blocks=(source, destination))

    # -- eviction ----------------------------------------------------------------------------

    def _evict_one(self) -> None:
        """Makes one cached block free: the policy's choice, the deepest of a prefix first."""
        block = self._victim()
        now = self._journal.now()
        age, idle = now - self.stored_at.item(block), now - self.last_access.item(block)
        if self.leaf_first and self.tree.has_children(block):
            self.withdraw(block, "evicted")
        else:  # nobody holds a victim, and the policy has let go of it
            self._remove(block, "evicted")
            self.num_cached -= 1
            self._free[self._num_free] = block
            self._num_free += 1
        if self._journal.listening:
            self._journal.emit(events.EVICT, blocks=(block,), age=age, idle=idle)

    def _victim(self) -> int:
        if self._next_victims:
            return self._next_victims.popitem()[0]
        while (block := self.policy.victim()) != NONE:
            if not self.leaf_first or not self.tree.has_children(block):
                return block
            self._waiting[block] = None
        # What is left has held descendants: the source of a copy under way.
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
        """Drops given cached blocks, and what only they lead to.

        Raises:
          JaxkvError: one is referenced, held, or not cached; nothing was changed.
        """
        blocks = list(blocks)
        for block in blocks:
            if not 0 < block < self.num_blocks or not self._is_idle(block):
                raise JaxkvError(
                    f"block {block} cannot be evicted: "
                    + (
                        f"it is none of the blocks 1 to {self.num_blocks - 1}"
                        if not 0 < block < self.num_blocks
                        else f"ref count {self.ref_counts[block]}, "
                        f"{self.holds.get(block, 0)} holds, "
                        f"{'cached' if self.indexed[block] else 'not cached'}"
                    )
                )
        for block in blocks:
            if self.indexed[block]:  # not yet gone with a parent
                self.withdraw(block, "evicted by hand")
