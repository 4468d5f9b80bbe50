"""The scheduler: decodes and prompt chunks of the next step, under a token budget.

Everything that grows in the block manager grows here, so that one place can run out of blocks, and
one place preempts. Host code: imports no JAX.
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np

from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.prefixes import PrefixesInFlight
from jaxkv.engine.progress import Progress
from jaxkv.engine.requests import Request, Sequence, Status
from jaxkv.engine.search import Continuation
from jaxkv.engine.turns import Turns
from jaxkv.engine.work import Chunk, Decodes, Work
from jaxkv.errors import OutOfBlocksError
from jaxkv.manager import events
from jaxkv.manager.block_manager import BlockManager

# Steps whose slots are reserved together with those needed now, if there are blocks: fewer and
# larger calls, at the price of blocks taken a few steps early.
LOOKAHEAD = 3


class Scheduler:
    """Waiting and running sequences, and their order.

    Args:
      manager: the block manager; its rows are the sequences that can run at once.
      config: how steps are formed.

    Attributes:
      waiting: sequences without blocks, in order of admission.
      running: sequences with blocks, in order; the last is preempted first.
      rows: progress of the running sequences, by row.
      unfilled: sequences that got a row which the device has not filled yet.
      turns: logits processors that run in steps of their own.
      num_preemptions: preemptions up to now.
    """

    def __init__(self, manager: BlockManager, config: SchedulerConfig):
        self.manager, self.config = manager, config
        self.num_preemptions = 0
        self.turns = Turns()
        self._keys = itertools.count()
        self.clear()

    def clear(self) -> None:
        """Forgets all sequences and their rows; the manager has been reset too."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.unfilled: list[Sequence] = []
        self.rows = Progress(self.manager.max_seqs)
        # Rows of the running sequences, cached until they change.
        self._in_order: np.ndarray | None = None
        self._prefixes = PrefixesInFlight(self.manager, enabled=self.config.defer_shared_prefixes)
        self._steps_since_sync = 0  # decode steps whose tokens the manager may not have

    # -- coming and going --------------------------------------------------------------------

    def sequence(self, request: Request, tokens: list[int]) -> Sequence:
        """Creates one more sample of a request."""
        number, reported = len(request.samples), len(request.prompt)
        sequence = Sequence(next(self._keys), request, number, list(tokens), reported)
        request.samples.append(sequence)
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence into the waiting list, in order."""
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended; its full blocks stay in the prefix cache."""
        if sequence.status is Status.WAITING:
            _remove(self.waiting, sequence)
        elif sequence.status is Status.RUNNING:
            self._release(sequence)
        sequence.status = Status.FINISHED

    def _runs(self, sequence: Sequence, row: int, *, scheduled: int, appended: int) -> None:
        """Puts a sequence that got blocks and a row among the running ones."""
        bisect.insort(self.running, sequence, key=_order)
        sequence.status, self._in_order = Status.RUNNING, None
        self.rows.open(sequence, row, scheduled=scheduled, appended=appended)
        self.unfilled.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        _remove(self.running, sequence)
        if sequence in self.unfilled:
            self.unfilled.remove(sequence)
        self._in_order = None
        if sequence.error is None:
            self._sync(np.array([sequence.row]))
        self.manager.free(sequence.key)
        self._prefixes.end(sequence)
        self.rows.close(sequence)

    def take(self, sequence: Sequence, token: int) -> None:
        """Appends a token that arrived; the sequence may have lost its row meanwhile."""
        sequence.tokens.append(token)
        if sequence.status is Status.RUNNING:
            self.rows.known[sequence.row] += 1
        else:
            sequence.num_in_flight -= 1

    def take_unfilled(self) -> list[Sequence]:
        """Sequences whose rows the device must fill before the next step."""
        unfilled, self.unfilled = self.unfilled, []
        return unfilled

    def preempt(self, sequence: Sequence, reason: str) -> None:
        """Frees a sequence's blocks; what it had computed may be found again when it resumes.

        Hypotheses of a beam search step together, and are preempted together.
        """
        group = [s for s in sequence.request.samples if s.status is Status.RUNNING]
        for victim in group if sequence.request.beam else [sequence]:
            detail = {"reason": reason, "request": victim.request.id, "sample": victim.sample}
            self.manager.note(events.PREEMPT, victim.key, detail)
            self._release(victim)
            victim.candidates = None
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.add(victim)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> Work | None:
        """The next step; None if there is no work until tokens in flight arrive."""
        self._make_way()
        for turn in self.turns.order(itertools.chain(self.running, self.waiting)):
            self.turns.now = turn
            if (work := self._schedule_turn()) is not None:
                return work
        return None

    def _schedule_turn(self) -> Work | None:
        progress, rows = self.rows, self._running_rows()
        if self._steps_since_sync >= self.manager.block_size:
            self._sync(rows)
            self._steps_since_sync = 0
        scheduled = progress.scheduled[rows]
        prefilling = scheduled < progress.appended[rows]
        decoding = scheduled + 1 < progress.end[rows]  # the last token is not in flight
        decoding &= ~prefilling
        decoding &= (progress.known[rows] > scheduled) | ~progress.needs_sync[rows]
        if self.turns.isolated:
            may_run = self.turns.may_run(progress.processor[rows])
            decoding, prefilling = decoding & may_run, prefilling & may_run
        begun = rows[prefilling].tolist()
        rows = self._reserve(rows if decoding.all() else rows[decoding])
        budget = self.config.max_tokens_per_step
        chunks: list[Chunk] = []
        for row in begun:
            if budget and progress.keys[row] >= 0:  # not preempted meanwhile
                chunks.append(self._chunk(row, budget))
                budget -= chunks[-1].count
        admitted = self._admit(chunks, budget)
        decodes, num_steps = progress.decodes(rows), 1
        alone = not chunks and not decodes.needs_sync
        if len(rows) and alone and self.config.decode_steps_per_dispatch > 1:
            num_steps = self._reserve_ahead(rows)
        if not len(rows) and not chunks:
            return None
        for chunk in chunks:
            if chunk.last and chunk.sequence.request.unforked:
                chunk.children = self._fork_all(chunk.sequence)
        return self._work(decodes, chunks, num_steps, admitted)

    def _work(
        self, decodes: Decodes, chunks: list[Chunk], num_steps: int, admitted: list[Sequence]
    ) -> Work:
        progress, rows = self.rows, decodes.rows
        positions, tokens = progress.scheduled[rows], None
        unsent = progress.unsent[rows]
        if unsent.any():
            tokens = np.full(len(rows), -1, np.int64)
            for i in np.flatnonzero(unsent).tolist():
                tokens[i] = decodes.sequences[i].tokens[positions[i]]
        return Work(
            decodes, positions, tokens, np.minimum(progress.end[rows] - positions - 1, num_steps),
            chunks, num_steps, admitted,
            max([decodes.logprobs, *(chunk.sequence.request.logprobs for chunk in chunks)]),
        )  # fmt: skip

    def dispatched(self, work: Work) -> None:
        """Follows the dispatch of a step: the KV of its positions counts as computed."""
        self._steps_since_sync += work.num_steps
        self.rows.scheduled[work.decodes.rows] += work.counts
        self.rows.unsent[work.decodes.rows] = False
        keys, counts = [], []
        for chunk in work.chunks:
            for sequence in (chunk.sequence, *chunk.children):
                self.rows.scheduled[sequence.row] = chunk.start + chunk.count
                keys.append(sequence.key)
                counts.append(chunk.count)
            self._prefixes.computed(chunk.sequence, chunk.start, chunk.start + chunk.count)
        if keys:
            self.manager.commit_batch(keys, counts)

    def _running_rows(self) -> np.ndarray:
        """Rows of the running sequences, in order."""
        if self._in_order is None:
            self._in_order = np.array([s.row for s in self.running], np.int64)
        return self._in_order

    # -- blocks ------------------------------------------------------------------------------

    def _reserve(self, rows: np.ndarray, num_steps: int = 1) -> np.ndarray:
        """Reserves slots for the next writes of these rows; returns rows that still have blocks.

        The last in order is preempted first. The first in order can always go on: all others can be
        preempted for it, and a request that never fits was refused at submission.
        """
        progress = self.rows
        while np.count_nonzero(self._ends(rows, num_steps) > progress.slots[rows]):
            try:
                self._ask(rows, num_steps + LOOKAHEAD)
                break
            except OutOfBlocksError:
                pass
            try:
                self._ask(rows, num_steps)
            except OutOfBlocksError as error:
                if num_steps > 1:
                    raise
                reason = f"{error.asked} blocks needed, {error.free} available"
                self.preempt(self.running[-1], reason)
                rows = rows[progress.keys[rows] >= 0]
        return rows

    def _ends(self, rows: np.ndarray, num_steps: int) -> np.ndarray:
        """Lengths of these sequences after `num_steps` more steps."""
        return np.minimum(self.rows.scheduled[rows] + num_steps, self.rows.end[rows] - 1)

    def _ask(self, rows: np.ndarray, num_steps: int) -> None:
        """Reserves slots for `num_steps` steps in the manager, for the rows that have too few."""
        progress, ends = self.rows, self._ends(rows, num_steps)
        short = ends > progress.slots[rows]
        rows, ends = rows[short], ends[short]
        appended = progress.appended[rows]
        progress.slots[rows] = appended + self.manager.reserve(self._keys_of(rows), ends - appended)

    def _reserve_ahead(self, rows: np.ndarray) -> int:
        """Reserves slots for all steps of a dispatch, if there are blocks; the number of steps."""
        num_steps = self.config.decode_steps_per_dispatch
        try:
            self._reserve(rows, num_steps)
        except OutOfBlocksError:
            return 1
        return num_steps

    def num_unsynced(self) -> int:
        """Number of tokens on the host that the manager does not have yet."""
        progress, rows = self.rows, self._running_rows()
        known = np.minimum(progress.known[rows], progress.scheduled[rows])
        return int(np.maximum(known - progress.appended[rows], 0).sum())

    def _sync(self, rows: np.ndarray) -> None:
        """Appends arrived tokens in the manager, and commits positions whose KV is computed.

        Steps run in the order of their dispatch: a step that finds a block published here runs
        after the step that writes it.
        """
        progress = self.rows
        known = np.minimum(progress.known[rows], progress.scheduled[rows])
        behind = known > progress.appended[rows]
        rows, known = rows[behind], known[behind]
        if not len(rows):
            return
        old = progress.appended[rows]
        spans = zip(rows.tolist(), old.tolist(), known.tolist(), strict=True)
        runs = itertools.chain.from_iterable(progress.tokens(row, a, b) for row, a, b in spans)
        tokens = np.fromiter(runs, np.int32, int((known - old).sum()))
        selected = self.manager.select(self._keys_of(rows))
        self.manager.append_batch(selected, tokens, known - old)
        self.manager.commit_batch(selected, known - old)
        progress.appended[rows] = known

    def _keys_of(self, rows: np.ndarray) -> list[int]:
        """Keys of the sequences in these rows."""
        return self.rows.keys[rows].tolist()

    # -- rollback and drafts -----------------------------------------------------------------

    def cut(self, sequence: Sequence, length: int) -> None:
        """Rolls a sequence back to its first `length` tokens; its next step computes the last one
        again, since its logits are needed."""
        runs = sequence.status is Status.RUNNING
        if runs:  # first: computed blocks that the manager does not know would count as unused
            self._sync(np.array([sequence.row]))
        sequence.tokens = sequence.tokens[:length]
        self._prefixes.cut(sequence, length)
        if not runs:
            return
        progress, row = self.rows, sequence.row
        progress.known[row], progress.slots[row] = length, 0
        progress.scheduled[row] = min(progress.scheduled[row], length - 1)
        progress.appended[row] = min(progress.appended[row], length)
        if progress.appended[row] > progress.scheduled[row] >= length - 1:
            progress.appended[row] = progress.scheduled[row]
        self.manager.truncate(sequence.key, int(progress.appended[row]))

    def reserve_for(self, sequence: Sequence, count: int) -> int:
        """Reserves slots for the next `count` tokens of a sequence, or for 1 if blocks lack."""
        progress, rows = self.rows, np.array([sequence.row])
        slots = int(progress.scheduled[sequence.row]) + count - int(progress.appended[sequence.row])
        try:
            self.manager.reserve([sequence.key], slots)
        except OutOfBlocksError:
            self._reserve(rows)
            return 1
        self._sync(rows)
        return count

    def verified(self, sequence: Sequence) -> None:
        """Follows a verified draft: all tokens but the last are computed; spare slots are freed."""
        row = sequence.row
        self.rows.scheduled[row] = len(sequence.tokens) - 1
        self._sync(np.array([row]))
        self.manager.truncate(sequence.key, int(self.rows.appended[row]))
        self.rows.slots[row], self.rows.unsent[row] = 0, True

    # -- admission ---------------------------------------------------------------------------

    def _make_way(self) -> None:
        """Preempts running sequences of lower priority for the first that waits."""
        if self.config.policy != "priority" or not self.waiting:
            return
        first = self.waiting[0]
        while self.running and self.running[-1].request.order[0] > first.request.order[0]:
            if first.num_in_flight or self._prefixes.must_wait(first):
                return
            fits = self.manager.can_allocate(first.tokens, namespace=first.request.namespace)
            if fits.verdict == "now" and len(self.running) < self.manager.max_seqs:
                return
            reason = f"a request of priority {-first.request.order[0]} waits"
            self.preempt(self.running[-1], reason)

    def _admit(self, chunks: list[Chunk], budget: int) -> list[Sequence]:
        """Admits waiting sequences in order while budget and blocks last; adds their chunks."""
        deferred, admitted = 0, list[Sequence]()
        while budget and deferred < len(self.waiting):
            sequence = self.waiting[deferred]
            request = sequence.request
            if sequence.num_in_flight:  # preempted while tokens were in flight: wait for them
                break
            if self.turns.of(sequence) != self.turns.now or self._prefixes.must_wait(sequence):
                deferred += 1
                continue
            try:
                allocation = self.manager.allocate(
                    sequence.key, sequence.tokens, namespace=request.namespace,
                    skip_prefix_cache=request.wants_prompt_logprobs,
                    # For running sequences; when nothing runs, whatever fits is admitted.
                    keep_watermark=bool(self.running),
                )  # fmt: skip
            except OutOfBlocksError:
                break
            if request.wants_prompt_logprobs:
                request.prompt_logprobs = []
            del self.waiting[deferred]
            self._runs(
                sequence, allocation.row, scheduled=allocation.num_cached_tokens,
                appended=len(sequence.tokens),
            )  # fmt: skip
            if request.num_cached_tokens is None:
                request.num_cached_tokens = allocation.num_cached_tokens
            admitted.append(sequence)
            self._prefixes.begin(sequence, allocation.num_cached_tokens)
            chunks.append(self._chunk(allocation.row, budget))
            budget -= chunks[-1].count
        return admitted

    def resolve_stall(self) -> Request | None:
        """Follows a step without work while sequences wait and none is in flight.

        Hypotheses of a search step together: two searches of which each has a part of its rows
        would wait for each other for ever. The later one gives way. With nothing to preempt, the
        first that waits cannot be admitted at all.

        Returns:
          The request that does not fit; None: there is work now.
        """
        first = self.waiting[0]
        others = [s for s in self.running if s.request is not first.request]
        if not others:
            return first.request
        self.turns.put_first(first)
        self.preempt(others[-1], "an earlier request waits, and nothing can run")
        return None

    def _chunk(self, row: int, budget: int) -> Chunk:
        start, end = int(self.rows.scheduled[row]), int(self.rows.appended[row])
        sequence = self.rows.sequences[row]
        assert sequence is not None
        return Chunk(sequence, start, min(end - start, budget))

    def _fork_all(self, parent: Sequence) -> list[Sequence]:
        """Forks off the other samples of a request; samples without a free row wait."""
        request, children = parent.request, []
        while request.unforked:
            request.unforked -= 1
            child = self.sequence(request, parent.tokens)
            if self.fork(parent, child):
                children.append(child)
            else:
                self.add(child)
        return children

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Starts the child at its parent's position; False, with nothing changed, without a row."""
        self._sync(np.array([parent.row]))
        try:
            self.manager.fork(parent.key, child.key)
        except OutOfBlocksError:
            return False
        progress, row = self.rows, parent.row
        scheduled, appended = int(progress.scheduled[row]), int(progress.appended[row])
        progress.slots[row], row = 0, self.manager.row(child.key)
        self._runs(child, row, scheduled=scheduled, appended=appended)
        progress.unsent[row] = progress.unsent[parent.row]
        return True

    # -- beam search -------------------------------------------------------------------------

    def branch(
        self, request: Request, live: list[Sequence], chosen: list[Continuation]
    ) -> list[Sequence]:
        """Replaces the hypotheses of a beam search: tables move, blocks do not.

        Returns:
          The sequences that are no longer needed.
        """
        self._sync(np.array([s.row for s in live]))
        tokens = [s.tokens for s in live]
        # The first continuation of a hypothesis stays in its row; the others move.
        rows: list[int | None] = [None] * len(chosen)
        stays: dict[int, int] = {}
        for i, one in enumerate(chosen):
            if stays.setdefault(one.parent, i) == i:
                rows[i] = one.parent
        spare = [row for row in range(len(live)) if row not in stays]
        parents = list(range(len(live)))
        sequences = list[Sequence]()
        for i, one in enumerate(chosen):
            if (row := rows[i]) is None and spare:
                row = spare.pop(0)
                parents[row] = one.parent
            if row is None:  # more hypotheses than before
                child = self.sequence(request, tokens[one.parent])
                sequences.append(child)
                self._make_row(request)
                if not self.fork(live[one.parent], child):
                    self.add(child)
            else:
                sequences.append(live[row])
        if parents != list(range(len(live))):
            self.manager.reorder([s.key for s in live], parents)
        for sequence, one in zip(sequences, chosen, strict=True):
            sequence.tokens = [*tokens[one.parent], one.token]
            sequence.cumulative_logprob = one.logprob
            self._prefixes.cut(sequence, len(request.prompt))
            if (row := sequence.row) >= 0:
                self.rows.known[row], self.rows.slots[row] = len(sequence.tokens), 0
                self.rows.unsent[row] = True
        return [live[row] for row in spare]

    def _make_row(self, request: Request) -> None:
        """Frees a row if none is free, by preempting the last of the other requests."""
        others = [s for s in self.running if s.request is not request]
        if len(self.running) == self.manager.max_seqs:
            self.preempt(others[-1], "a beam search needs a row for each hypothesis")


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """Removes a sequence from a list that is in order, without a search through all of it."""
    at = bisect.bisect_left(sequences, _order(sequence), key=_order)
    assert sequences[at] is sequence
    del sequences[at]


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return (*sequence.request.order, sequence.sample)
