"""The block manager: which sequence owns which blocks. It plans; the device applies.

Pure Python and NumPy (no JAX), single-threaded by contract: the step loop owns it. Every call
refuses before it changes anything.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np

from jaxkv._util import INT64_MAX, as_int, ceil_div
from jaxkv.config import CacheConfig
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.manager import events
from jaxkv.manager.admission import AdmissionControl
from jaxkv.manager.arguments import as_int64, as_integers, as_number
from jaxkv.manager.branching import Branching
from jaxkv.manager.eviction.policies import make_policy
from jaxkv.manager.eviction.retention import Retention
from jaxkv.manager.invariants import check_manager
from jaxkv.manager.journal import Journal, fresh_start, operation, query
from jaxkv.manager.limits import Limits
from jaxkv.manager.pins import Pins
from jaxkv.manager.plans import PlanChain
from jaxkv.manager.pool import BlockPool
from jaxkv.manager.prefix.hash_index import HashIndex
from jaxkv.manager.prefix.keys import (
    HashFunction,
    Media,
    as_tokens,
    digest,
    media_of_blocks,
    root_of,
)
from jaxkv.manager.prefix.partial_index import PartialIndex
from jaxkv.manager.prefix.radix_index import RadixIndex
from jaxkv.manager.publish import Publisher
from jaxkv.manager.records import (
    Admission,
    Allocation,
    BlockInfo,
    Plan,
    PlanOrder,
    Stats,
    TableView,
)
from jaxkv.manager.report import blocks_of, stats_of
from jaxkv.manager.table import Origin, Rows, SequenceTable
from jaxkv.manager.writes import Writes

_INDEXES = {"hash": HashIndex, "radix": RadixIndex}
_DEFAULT_ROOT = root_of(None, 0)
_INT32_MAX = 2**31 - 1  # plans number blocks, rows and columns in 32 bits
_PRIORITIES = -(2**31), _INT32_MAX


class BlockManager:
    """Block tables, reference counts, prefix cache and free blocks of one pool.

    Args:
      num_blocks: blocks in the pool, the null block included.
      block_size: tokens per block.
      max_seqs: rows of the block table.
      max_blocks_per_seq: columns of the block table.
      prefix_index: index of the cached blocks: "hash" (chained block hashes), "radix" (a tree of
        token runs) or None (no prefix cache). Both find the same blocks.
      eviction: eviction policy, one of `jaxkv.manager.eviction.policies.POLICIES`.
      copy_on_partial_reuse: whether a prompt that diverges from a cached prefix inside a block
        reuses the equal tokens, by a copy of the block.
      watermark: share of the pool kept back from new sequences, for the running ones; see
        `can_allocate` and `allocate`.
      sliding_window: tokens that a query sees, itself included. Blocks behind the window are freed,
        and a prefix hit needs only the blocks that its next query sees. None: all tokens.
      weight_version: version of the model's weights, part of every key; see `set_weight_version`.
      clock: monotonic clock, seconds, of pins, times to live, decay and events.
      debug: whether `take_plan` verifies the whole bookkeeping each time.
      hash_function: hash function of the block keys, from bytes to 16 bytes.

    Copies: `copy.deepcopy` and `pickle` make a manager that goes on by itself. It has the clock of
    the original (pickle needs one that it can name, as the default; times to live are compared
    with the clock of the process that loads it) and no listeners. `copy.copy` is refused.

    Example:
      >>> from jaxkv import BlockManager
      >>> manager = BlockManager(num_blocks=8, block_size=4, max_seqs=3, max_blocks_per_seq=4)
      >>> manager.allocate("a", [1, 2, 3, 4, 5, 6]).num_cached_tokens
      0
      >>> manager.commit("a", 6)       # KV is computed: the first block is visible to lookups
      >>> manager.allocate("b", [1, 2, 3, 4, 9]).num_cached_tokens
      4
      >>> manager.fork("a", "c")       # shares all blocks
      >>> manager.append("c", 7)       # copy-on-write of the partly filled block
      >>> manager.block_table("a").tolist(), manager.block_table("c").tolist()
      ([1, 2], [1, 4])
      >>> manager.take_plan().copies.tolist()
      [[2, 4]]
    """

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
        num_blocks = as_int("num_blocks", num_blocks, 2, _INT32_MAX)  # block 0 is the null block
        block_size = as_int("block_size", block_size, 1, _INT32_MAX)
        max_seqs = as_int("max_seqs", max_seqs, 1, _INT32_MAX)
        max_blocks_per_seq = as_int("max_blocks_per_seq", max_blocks_per_seq, 1, _INT32_MAX)
        if prefix_index is not None and prefix_index not in tuple(_INDEXES):
            raise ConfigError(
                f"prefix_index must be one of {', '.join(_INDEXES)} or None, got {prefix_index!r}"
            )
        watermark = as_number("watermark", watermark)
        if watermark >= 1:
            raise ConfigError(f"{watermark=} must be in [0, 1)")
        if sliding_window is not None:
            sliding_window = as_int("sliding_window", sliding_window, 1)
        if not callable(clock):
            raise ConfigError(f"{clock=} must be a function without arguments, in seconds")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_seqs, self.max_blocks_per_seq = max_seqs, max_blocks_per_seq
        self.sliding_window = sliding_window
        self._weight_version = _as_version(weight_version)
        self.prefix_index = prefix_index
        self.debug = debug
        self._options: dict[str, Any] = dict(
            eviction=eviction, watermark=watermark, copy_on_partial_reuse=copy_on_partial_reuse
        )
        self.journal = Journal(clock)
        self._hash_function = hash_function
        self._next_transfer = 0
        self._build(eviction, watermark, copy_on_partial_reuse)

    def _build(self, eviction: str, watermark: float, copy_on_partial_reuse: bool) -> None:
        """Makes all records anew: no sequence, and every block is free."""
        num_blocks, block_size, prefix_index = self.num_blocks, self.block_size, self.prefix_index
        journal, window, hash_function = self.journal, self.sliding_window, self._hash_function
        self._retention = Retention(make_policy(eviction, num_blocks), num_blocks, journal.now)
        index = None
        if prefix_index is not None:
            index = functools.partial(_INDEXES[prefix_index], gaps=window is not None)
        self._pool = pool = BlockPool(
            num_blocks,
            block_size,
            index=index,
            policy=self._retention,
            partial=PartialIndex() if prefix_index and copy_on_partial_reuse else None,
            window=window,
            journal=journal,
        )
        journal.counts = pool.counts_of
        self._table = table = SequenceTable(self.max_seqs, self.max_blocks_per_seq, block_size)
        self._pins = Pins(pool)
        self._limits = limits = Limits(pool, table, self._expire_pins)
        self._writes = Writes(pool, table)
        self._publisher = Publisher(pool, table, window, hash_function)
        self._branching = Branching(pool, table, self._writes)
        self._admission = AdmissionControl(
            pool, table, limits, self._writes,
            watermark_blocks=math.ceil(watermark * (num_blocks - 1)), hash_function=hash_function,
        )  # fmt: skip
        self._plans = PlanChain()
        self._transfers: dict[int, list[int]] = {}  # blocks held by transfers in flight

    @classmethod
    def for_config(cls, config: CacheConfig, **options: Any) -> Self:
        """Makes the manager for a cache of this configuration; options as in the constructor."""
        return cls(
            config.num_blocks,
            config.block_size,
            max_seqs=config.max_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
            **options,
        )

    def to_dict(self) -> dict[str, Any]:
        """Constructor arguments as plain data, without clock and hash function."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "max_seqs": self.max_seqs,
            "max_blocks_per_seq": self.max_blocks_per_seq,
            "sliding_window": self.sliding_window,
            "weight_version": self.weight_version,
            "debug": self.debug,
            "prefix_index": self.prefix_index,
            **self._options,
        }

    def __copy__(self) -> Self:
        raise JaxkvError(
            "a shallow copy of a BlockManager would share its blocks; use copy.deepcopy"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self.journal.running:
            raise JaxkvError("a BlockManager cannot be copied while a call changes it")
        return self.__dict__

    @property
    def clock(self) -> Callable[[], float]:
        """The manager's clock, seconds."""
        return self.journal.clock

    @property
    def weight_version(self) -> int | str:
        """Version of the model's weights; see `set_weight_version`."""
        return self._weight_version

    # -- listeners ---------------------------------------------------------------------------

    def subscribe(self, listener: events.Listener) -> None:
        """Sends every event from now on to `listener`, within the call that causes it.

        The events of a call are sent when its change is complete, so a listener may call the
        manager. A listener that raises is unsubscribed, with a RuntimeWarning; the manager and
        the other listeners go on.
        """
        self.journal.subscribe(listener)

    def unsubscribe(self, listener: events.Listener) -> None:
        """Ends a subscription; no effect if there is none."""
        self.journal.unsubscribe(listener)

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
        keep_watermark: bool = False,
    ) -> Allocation:
        """Reserves a row, and blocks for `token_ids`, cached blocks where possible. All or nothing.

        At least the last token is left to compute, since its logits are needed.

        Args:
          seq_id: id of the sequence.
          token_ids: token ids of the prompt.
          namespace: further inputs of the KV (adapter, tenant's salt); kinds never collide, as in
            `{"adapter": "x"}` and `{"salt": "x"}`.
          media: ranges of placeholder tokens, and the media that they stand for.
          skip_prefix_cache: compute all tokens; the blocks are still cached for others.
          lookahead: slots to reserve past the prompt.
          priority: priority of the cached blocks, 32 bits; higher priorities are evicted later.
          ttl: seconds, at least 0, after which the priority ends; None: never.
          keep_watermark: refuse where `can_allocate` says "later" because of the watermark.

        Raises:
          OutOfBlocksError: too few blocks, or no free row; nothing was changed.
          ConfigError: a number of another type or range than its argument has.
          JaxkvError: the id is live, the prompt is empty, or it can never fit a table row.
        """
        tokens, lookahead = as_tokens(token_ids), as_int("lookahead", lookahead)
        priority = as_int("priority", priority, *_PRIORITIES)
        length, expires = len(tokens), self._end(ttl)
        origin = self._origin(namespace, media)
        origin.priority, origin.expires = priority, expires
        self._table.require_new(seq_id)
        if length == 0:
            raise JaxkvError(f"sequence {seq_id!r}: expected a token or more, got 0 tokens")
        self._expire_pins()
        count = self._admission.require(
            seq_id, tokens, origin, lookahead=lookahead, skip_prefix_cache=skip_prefix_cache,
            keep_watermark=keep_watermark,
        )  # fmt: skip
        row = self._admission.admit(seq_id, tokens, origin, count, lookahead)
        cached = count.match.num_tokens
        if self.journal.listening:
            if cached:
                self.journal.emit(
                    events.HIT, seq=seq_id, blocks=count.match.seen, num_tokens=cached,
                    queried_tokens=length,
                )  # fmt: skip
            self.journal.emit(
                events.ALLOCATE, seq=seq_id, blocks=self._table.live_blocks(row),
                num_tokens=length, num_cached_tokens=cached, num_new_blocks=count.new,
                skip_prefix_cache=skip_prefix_cache,
            )  # fmt: skip
        return Allocation(row=row, num_cached_tokens=cached)

    @operation
    def commit(self, seq_id: Hashable, num_tokens: int) -> None:
        """Marks the KV of the next `num_tokens` tokens as computed; publishes full blocks.

        Raises:
          JaxkvError: more tokens than the sequence has left to compute.
        """
        count = as_int("num_tokens", num_tokens)
        self._publisher.commit(np.array([self.row(seq_id)]), np.array([count]))

    @operation
    def commit_batch(
        self, seq_ids: Sequence[Hashable] | Rows, num_tokens: Sequence[int] | np.ndarray
    ) -> None:
        """Commits tokens of several sequences; see `commit`. All or nothing.

        Raises:
          JaxkvError: more tokens than a sequence has left to compute, or an id given twice.
        """
        selected = self._table.select(seq_ids)
        counts = as_int64("num_tokens", num_tokens, len(selected.rows))
        self._publisher.commit(selected.rows, counts)

    @operation
    def append(self, seq_id: Hashable, token_id: int) -> None:
        """Appends one token and reserves its slot; see `append_batch`."""
        self._writes.append(self._table.select([seq_id]), as_tokens([token_id]), self._limits)

    @operation
    def append_batch(
        self,
        seq_ids: Sequence[Hashable] | Rows,
        token_ids: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Appends tokens to several sequences and reserves their slots. All or nothing.

        Args:
          seq_ids: distinct live sequences, or the result of `select`, which is faster.
          token_ids: i32[sum(counts)]; the tokens of one sequence are adjacent.
          counts: i64[len(seq_ids)]; tokens of each sequence, at least 1; None: one each.

        Raises:
          OutOfBlocksError: too few blocks for new blocks and copies.
          JaxkvError: an id given twice, a sequence that would exceed its maximum length, or a
            number of tokens other than the sum of the counts.
        """
        selected, token_ids = self._table.select(seq_ids), as_tokens(token_ids)
        if counts is None:
            if len(token_ids) != len(selected.rows):
                raise JaxkvError(
                    f"expected {len(selected.rows)} tokens, one per sequence, got {len(token_ids)}"
                )
            self._writes.append(selected, token_ids, self._limits)
            return
        counts = self._slot_counts(selected, counts)
        if len(token_ids) != counts.sum():
            raise JaxkvError(
                f"expected {counts.sum()} tokens, the sum of the counts, got {len(token_ids)}"
            )
        self._writes.extend(selected, token_ids, counts, self._limits)

    @operation
    def reserve(
        self, seq_ids: Sequence[Hashable] | Rows, num_slots: int | Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Reserves slots for the next `num_slots` tokens of each sequence. All or nothing.

        For tokens that the device samples before the host has them: `append` puts them into these
        slots, and `truncate` to the present length frees the unused ones.

        Returns:
          i64[n]; slots past the length of each sequence, to the end of a block. Only the
          sequence may write them, until it is forked, reordered or truncated.

        Raises:
          OutOfBlocksError: too few blocks for new blocks and copies.
          JaxkvError: an id given twice, a sequence that would exceed its maximum length, or a
            count below 1.
        """
        table = self._table
        selected = table.select(seq_ids)
        self._writes.reserve(selected, self._slot_counts(selected, num_slots), self._limits)
        return table.used[selected.rows] * self.block_size - table.lengths[selected.rows]

    def _slot_counts(self, selected: Rows, counts: int | Sequence[int] | np.ndarray) -> np.ndarray:
        """i64[n]; checked slot counts of the selected sequences."""
        n, longest = len(selected.rows), self.max_blocks_per_seq * self.block_size
        if not np.ndim(counts):
            return np.full(n, as_int("num_slots", counts, 1, longest))
        return as_int64("counts", counts, n, 1, longest)

    @operation
    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Creates a sequence with the same tokens, sharing all blocks until one is written.

        Raises:
          OutOfBlocksError: no free row; nothing was changed.
          JaxkvError: the child's id is live.
        """
        parent = self.row(parent_id)
        self._table.require_new(child_id)
        self._limits.require_row(0)
        self._branching.fork(parent, child_id)

    @operation
    def reorder(self, seq_ids: Sequence[Hashable], parents: Sequence[int]) -> None:
        """Performs a beam step: sequence i continues from what sequence `parents[i]` was.

        Tables move, blocks do not; no new block is needed.

        Raises:
          JaxkvError: another number of parents than sequences, or a parent out of range.
        """
        rows = self._table.select(seq_ids).rows
        sources = rows[as_int64("parents", parents, len(rows), 0, len(rows) - 1)]
        self._branching.reorder(rows.tolist(), sources.tolist())

    @operation
    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Removes all tokens after the first `length`, and frees reserved slots.

        Raises:
          JaxkvError: a length that is negative, above the sequence's, or inside the part that a
            sliding window has freed; nothing was changed.
        """
        row, length = self.row(seq_id), as_int("length", length, -INT64_MAX)
        table, size = self._table, self.block_size
        # The next query must not read what the window has freed.
        gone = int(table.dropped[row]) * size
        least = gone + (self.sliding_window or 1) - 1 if gone else 0
        if not least <= length <= table.lengths[row]:
            raise JaxkvError(
                f"sequence {seq_id!r}: cannot truncate to {length}: it has {table.lengths[row]} "
                f"tokens, and at least {least} must stay, since the window has freed the first "
                f"{gone}"
            )
        self._branching.truncate(row, length)

    @operation
    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence. Blocks without other references become cached, or free."""
        row = self.row(seq_id)
        blocks = self._table.live_blocks(row)[::-1].copy()
        self._table.close(row)
        # Reverse order: the tail of a sequence is the least likely to be shared.
        if len(blocks):
            self._pool.release(blocks)
        if self.journal.listening:
            self.journal.emit(events.FREE, seq=seq_id, blocks=blocks)

    @operation
    def pin(
        self, token_ids: Sequence[int] | np.ndarray, *, ttl: float | None = None,
        namespace: Any = None,
    ) -> int:  # fmt: skip
        """Pins the cached blocks of a prefix, so that they are not evicted.

        Pinning the same prefix again renews the pin.

        Args:
          token_ids: token ids of the prefix; its full blocks are pinned as far as they are cached.
          ttl: seconds, at least 0, after which the pin ends; None: until `unpin`.
          namespace: namespace of the prefix, as in `allocate`.

        Returns:
          Number of tokens in the pinned blocks; 0: nothing is cached, and no pin is kept.
        """
        tokens, origin, ends = as_tokens(token_ids), self._origin(namespace, ()), self._end(ttl)
        self._expire_pins()
        whole = len(tokens) // self.block_size * self.block_size
        match = self._admission.match(tokens[:whole], origin, end=whole)
        keys = self._admission.keys(tokens, origin)
        self._pins.set(keys, match.seen.tolist(), ends)
        return len(match.hits) * self.block_size

    @operation
    def unpin(self, token_ids: Sequence[int] | np.ndarray, *, namespace: Any = None) -> None:
        """Ends a pin.

        Raises:
          JaxkvError: the prefix is not pinned.
        """
        tokens, origin = as_tokens(token_ids), self._origin(namespace, ())
        self._pins.drop(self._admission.keys(tokens, origin))

    @operation
    def end_pins(self) -> None:
        """Ends expired pins. Other calls do so by themselves."""
        self._pins.expire(self.journal.now())

    @operation
    def begin_transfer(self, blocks: Sequence[int]) -> int:
        """Holds blocks while a copy of their content runs beside the steps.

        Until `complete_transfer` they are neither evicted nor rewritten: a sequence that would
        write into one gets a copy. (The copies of a plan need no such hold: they run before all
        else in the step that takes the plan.)

        Returns:
          The transfer's number.

        Raises:
          JaxkvError: a block holds no content; nothing was changed.
        """
        blocks = as_int64("blocks", blocks, low=-INT64_MAX).tolist()
        self._pool.require_content(blocks)
        self._pool.hold(blocks, "transfer")
        number = self._next_transfer
        self._next_transfer, self._transfers[number] = number + 1, blocks
        return number

    @operation
    def complete_transfer(self, transfer: int) -> None:
        """Ends the holds of a transfer, after its copy has run or was cancelled.

        Raises:
          JaxkvError: no such transfer is in flight.
        """
        transfer = as_int("transfer", transfer)
        if transfer not in self._transfers:
            raise JaxkvError(
                f"transfer {transfer!r} is not in flight; {len(self._transfers)} transfers are"
            )
        self._pool.unhold(self._transfers.pop(transfer), "transfer")

    @operation
    def evict(self, blocks: Sequence[int]) -> None:
        """Evicts given cached blocks, and the blocks that are found only through them.

        Raises:
          JaxkvError: a block is referenced, held, or not cached; nothing was changed.
        """
        blocks = as_int64("blocks", blocks, low=-INT64_MAX).tolist()
        self._expire_pins()
        self._pool.evict(blocks)

    @operation
    def set_weight_version(self, version: int | str) -> None:
        """Sets the version of the weights: new sequences neither hit nor share older blocks.

        Blocks of running sequences come from the old weights and stay under the old version. Pins
        and priorities of another version end, since they would keep what no new sequence can hit.
        """
        version = _as_version(version)
        if version == self._weight_version:
            return
        self._weight_version = version
        self._pins.clear()
        self._retention.clear()
        for row in self._table.rows.values():
            origin = self._table.origin(row)
            origin.priority, origin.expires = 0, None

    @operation
    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Drops all cached content. Returns False, with nothing changed, while sequences are live.

        With `force` running sequences keep their blocks, which are never published: their content
        may predate the reset.
        """
        if self._table.rows and not force:
            return False
        self._pins.clear()
        self._pool.clear()
        if not self._table.rows:
            self._plans.restart()
        for row in self._table.rows.values():
            self._table.origin(row).publishes = False
        if self.journal.listening:
            self.journal.emit(events.CLEARED)
        return True

    @fresh_start
    @operation
    def reset(self) -> None:
        """Drops everything: sequences, cached content, pins, transfers, changes that no plan has
        brought to the device. Listeners stay.

        It works in any state, and so is the way on after an interrupt inside another call. The
        device's state must be made anew with `init_state`.
        """
        self._build(**self._options)
        if self.journal.listening:
            self.journal.emit(events.CLEARED)

    @operation
    def note(self, kind: str, seq_id: Hashable, detail: dict[str, Any]) -> None:
        """Emits an event of the caller, such as a preemption and its reason.

        Raises:
          ConfigError: a detail with the name of one of the event's own fields.
        """
        if taken := {"self", "kind", "seq", "blocks"}.intersection(detail):
            raise ConfigError(f"detail must not name fields of the event, got {sorted(taken)}")
        if self.journal.listening:
            self.journal.emit(kind, seq=seq_id, **detail)

    @operation
    def take_plan(self) -> Plan:
        """Returns the changes since the last plan, for the device.

        `apply_plan` checks that each plan is applied once, in order, to the state of this manager.
        """
        cells, lengths = self._table.drain()
        copies = self._writes.take_copies()
        if self.debug:
            self.check()
        return Plan(copies, cells, lengths, self._order_of(copies, cells, lengths))

    # -- queries -----------------------------------------------------------------------------

    def row(self, seq_id: Hashable) -> int:
        """The sequence's row in the block table."""
        return self._table.row(seq_id)

    def select(self, seq_ids: Sequence[Hashable]) -> Rows:
        """Rows of several sequences, checked once, for repeated calls with the same ones.

        Raises:
          JaxkvError: an id given twice.
        """
        return self._table.select(seq_ids)

    def length(self, seq_id: Hashable) -> int:
        """Number of tokens of the sequence, KV computed or not."""
        return int(self._table.lengths[self.row(seq_id)])

    def num_computed_tokens(self, seq_id: Hashable) -> int:
        """Number of leading tokens whose KV is computed."""
        return int(self._table.computed[self.row(seq_id)])

    def token_ids(self, seq_id: Hashable) -> np.ndarray:
        """i32[n]; the sequence's token ids, without those behind a sliding window."""
        row = self.row(seq_id)
        first = self._table.dropped[row] * self.block_size
        tokens = self._pool.tokens[self._table.live_blocks(row)].reshape(-1)
        return tokens[: self._table.lengths[row] - first].copy()

    def block_table(self, seq_id: Hashable) -> np.ndarray:
        """i32[n]; a copy of the sequence's block table; null blocks behind a sliding window."""
        row = self.row(seq_id)
        return self._table.blocks[row, : self._table.used[row]].copy()

    def locate(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and offsets, i32[n] each, of (row, position) pairs. Positions are not checked."""
        rows, positions = as_integers("rows", rows), as_integers("positions", positions)
        columns, offsets = self._table.split(positions)
        flat = rows * self.max_blocks_per_seq + columns
        return np.take(self._table.blocks, flat), offsets

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return ceil_div(as_int("num_tokens", num_tokens), self.block_size)

    def lookup(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: Any = None,
        media: Iterable[Media] = (),
    ) -> int:  # fmt: skip
        """Number of leading tokens that are cached. Changes nothing, not even their age."""
        tokens = as_tokens(token_ids)
        origin = self._origin(namespace, media)
        return self._admission.match(tokens, origin, end=len(tokens)).num_tokens

    def block_hashes(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: Any = None
    ) -> list[bytes]:
        """Chained hashes of the full blocks of a prompt; equal for equal prefixes."""
        tokens, origin = as_tokens(token_ids), self._origin(namespace, ())
        return self._admission.keys(tokens, origin).hashes()

    @query
    def can_allocate(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: Any = None,
        media: Iterable[Media] = (), lookahead: int = 0,
    ) -> Admission:  # fmt: skip
        """Reports whether a prompt fits now, later or never, the watermark kept."""
        tokens, lookahead = as_tokens(token_ids), as_int("lookahead", lookahead)
        origin = self._origin(namespace, media)
        self._expire_pins()
        return self._admission.verdict(tokens, origin, lookahead)

    @query
    def stats(self) -> Stats:
        """Counts of blocks by use."""
        self._expire_pins()
        return stats_of(self._pool, self._table)

    def blocks(self) -> Iterator[BlockInfo]:
        """Every block but the null block."""
        return blocks_of(self._pool, self._table)

    def check(self) -> None:
        """Verifies the whole bookkeeping.

        Raises:
          InvariantError: naming the block, the sequence and the counts.
        """
        check_manager(self._pool, self._table, self._pins, self._writes.copies, self._transfers)

    def table_view(self) -> TableView:
        """Copies of the block table and the lengths, to compare a state with; see `check_state`."""
        return self._table.view()

    # -- inside ------------------------------------------------------------------------------

    def _expire_pins(self) -> None:
        """Ends expired pins, as an operation of the log: queries do it too."""
        if self._pins.due(self.journal.now()):
            self.end_pins()

    def _end(self, ttl: float | None) -> float | None:
        """Time at which a time to live ends."""
        return None if ttl is None else self.journal.now() + as_number("ttl", ttl)

    def _order_of(self, copies: np.ndarray, cells: np.ndarray, lengths: np.ndarray) -> PlanOrder:
        """Numbers a plan."""
        plans = self._plans
        before, settled, begins = plans.taken, plans.settled, plans.start == plans.taken
        plans.take(
            changes=bool(len(copies) or len(cells) or len(lengths)),
            clears=not (len(copies) or cells[:, 2].any() or lengths[:, 1].any()),
        )
        if not self._table.rows and not self._pool.num_cached:
            plans.restart()
        return PlanOrder(plans, plans.taken, before, settled, begins)

    def _origin(self, namespace: Any, media: Iterable[Media]) -> Origin:
        if namespace is None and self.weight_version == 0:
            root = _DEFAULT_ROOT
        else:
            root = root_of(namespace, self.weight_version)
        return Origin(namespace, root, self._media(media), [])

    def _media(self, media: Iterable[Media]) -> dict[int, bytes]:
        longest = self.max_blocks_per_seq * self.block_size
        return media_of_blocks(media, self.block_size, longest)


def _as_version(version: int | str) -> int | str:
    if isinstance(version, str):
        return version
    try:
        return as_int("weight_version", version, -INT64_MAX)
    except ConfigError as error:
        raise ConfigError(f"{error}, or text") from None
