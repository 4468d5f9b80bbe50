"""What the next step computes: decodes and prompt chunks under a token budget.

All that grows in the block manager grows here, so that there is one place that can run out of
blocks, and one that preempts. Host code: imports no JAX.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

import numpy as np

from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.prefixes import PrefixesUnderWay
from jaxkv.engine.progress import Progress
from jaxkv.engine.requests import Request, Sequence, Status
from jaxkv.engine.search import Continuation
from jaxkv.engine.work import Chunk, Decodes, Work
from jaxkv.errors import OutOfBlocksError
from jaxkv.manager.block_manager import BlockManager

# Steps whose slots are asked for together with those that are needed now, where there are blocks:
# fewer and larger calls, for a block that a sequence gets so many steps too early.
LOOKAHEAD = 3


class Scheduler:
    """Waiting and running sequences, and whose turn it is.

    Args:
      manager: the pool's.
      config: see there.
      forked: called with (parent, child) when a child got its row.
      preempted: called with (victim, reason) before it loses its row.
    """

    def __init__(
        self,
        manager: BlockManager,
        config: SchedulerConfig,
        *,
        forked: Callable[[Sequence, Sequence], None],
        preempted: Callable[[Sequence, str], None],
    ):
        self.manager, self.config = manager, config
        self._forked, self._preempted = forked, preempted
        self.waiting: list[Sequence] = []  # by order
        self.running: list[Sequence] = []  # by order
        self.at = Progress(manager.max_seqs)
        self._in_order: np.ndarray | None = None  # rows of the running ones, until they change
        self._prefixes = PrefixesUnderWay(manager, enabled=config.defer_shared_prefixes)
        self._untold = 0  # decode steps since the manager was told of their tokens
        self._keys = itertools.count()

    # -- coming and going --------------------------------------------------------------------

    def sequence(self, request: Request, tokens: list[int]) -> Sequence:
        """One more sample of a request."""
        number, told = len(request.samples), len(request.prompt)
        sequence = Sequence(next(self._keys), request, number, list(tokens), told)
        request.samples.append(sequence)
        return sequence

    def add(self, sequence: Sequence) -> None:
        """A sequence that waits for its blocks, in its place."""
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that has ended, wherever it is; its full blocks stay in the prefix cache."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._release(sequence)
        sequence.status = Status.FINISHED

    def _runs(self, sequence: Sequence, row: int, *, scheduled: int, appended: int) -> None:
        """A sequence has got blocks and a row."""
        bisect.insort(self.running, sequence, key=_order)
        sequence.status, self._in_order = Status.RUNNING, None
        self.at.open(sequence, row, scheduled=scheduled, appended=appended)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._in_order = None
        if sequence.error is None:
            self._sync(np.array([sequence.row]))
        self.manager.free(sequence.key)
        self._prefixes.end(sequence)
        self.at.close(sequence)

    def take(self, sequence: Sequence, token: int) -> None:
        """A token has come to the host, whether the sequence still has its row or not."""
        sequence.tokens.append(token)
        if sequence.status is Status.RUNNING:
            self.at.known[sequence.row] += 1
        else:
            sequence.awaited -= 1

    def preempt(self, sequence: Sequence, reason: str) -> None:
        """Takes a sequence's blocks; what it had computed may be found again when it resumes.

        The hypotheses of a beam search step together, and so they lose their blocks together.
        """
        group = [s for s in sequence.request.samples if s.status is Status.RUNNING]
        for victim in group if sequence.request.beam else [sequence]:
            self._preempted(victim, reason)
            self._release(victim)
            victim.candidates = None
            victim.num_preemptions += 1
            self.add(victim)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> Work | None:
        """The next step; None if there is nothing that can be done before tokens come back."""
        at, rows = self.at, self._rows()
        if self._untold >= self.manager.block_size:
            self._sync(rows)
            self._untold = 0
        scheduled = at.scheduled[rows]
        prefilling = scheduled < at.appended[rows]
        decoding = scheduled + 1 < at.end[rows]  # tokens in flight are not the last
        decoding &= ~prefilling
        decoding &= (at.known[rows] > scheduled) | ~at.stepwise[rows]
        begun = rows[prefilling].tolist()
        rows = self._reserve(rows if decoding.all() else rows[decoding])
        budget = self.config.max_tokens_per_step
        chunks: list[Chunk] = []
        for row in begun:
            if budget and at.keys[row] >= 0:  # it may have been preempted
                chunks.append(self._chunk(row, budget))
                budget -= chunks[-1].count
        admitted: list[Sequence] = []
        budget = self._admit(chunks, admitted, budget)
        decodes, num_steps = at.decodes(rows), 1
        alone = not chunks and not decodes.stepwise
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
        at, rows = self.at, decodes.rows
        positions, tokens = at.scheduled[rows], None
        unsent = at.unsent[rows]
        if unsent.any():
            tokens = np.full(len(rows), -1, np.int64)
            for i in np.flatnonzero(unsent).tolist():
                tokens[i] = decodes.sequences[i].tokens[positions[i]]
        return Work(
            decodes, positions, tokens, np.minimum(at.end[rows] - positions - 1, num_steps),
            chunks, num_steps, admitted,
            max([decodes.logprobs, *(chunk.sequence.request.logprobs for chunk in chunks)]),
        )  # fmt: skip

    def dispatched(self, work: Work) -> None:
        """The step is on its way: the KV of its positions counts as computed."""
        self._untold += work.num_steps
        self.at.scheduled[work.decodes.rows] += work.counts
        self.at.unsent[work.decodes.rows] = False
        keys, counts = [], []
        for chunk in work.chunks:
            for sequence in (chunk.sequence, *chunk.children):
                self.at.scheduled[sequence.row] = chunk.start + chunk.count
                keys.append(sequence.key)
                counts.append(chunk.count)
            self._prefixes.computed(chunk.sequence, chunk.start, chunk.start + chunk.count)
        if keys:
            self.manager.commit_batch(keys, counts)

    def _rows(self) -> np.ndarray:
        """Rows of the running sequences, in order."""
        if self._in_order is None:
            self._in_order = np.array([s.row for s in self.running], np.int64)
        return self._in_order

    # -- blocks ------------------------------------------------------------------------------

    def _reserve(self, rows: np.ndarray, num_steps: int = 1) -> np.ndarray:
        """Slots for what these sequences write next; who still has blocks afterwards.

        The last to come loses its blocks first. The first to come can always go on: everything
        else can be taken from the others, and what never fits was refused when it came.
        """
        at = self.at
        while np.count_nonzero(self._ends(rows, num_steps) > at.slots[rows]):
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
                reason = f"{error.asked} blocks were asked for, {error.free} were free"
                self.preempt(self.running[-1], reason)
                rows = rows[at.keys[rows] >= 0]
        return rows

    def _ends(self, rows: np.ndarray, num_steps: int) -> np.ndarray:
        """How long these sequences are after so many steps more."""
        return np.minimum(self.at.scheduled[rows] + num_steps, self.at.end[rows] - 1)

    def _ask(self, rows: np.ndarray, num_steps: int) -> None:
        """Slots for so many steps, from the manager, for those that have too few."""
        at, ends = self.at, self._ends(rows, num_steps)
        short = ends > at.slots[rows]
        rows, ends = rows[short], ends[short]
        appended = at.appended[rows]
        at.slots[rows] = appended + self.manager.reserve(self._keys_of(rows), ends - appended)

    def _reserve_ahead(self, rows: np.ndarray) -> int:
        """More slots for several steps at once, if there are blocks for it; for how many."""
        num_steps = self.config.decode_steps_per_dispatch
        try:
            self._reserve(rows, num_steps)
        except OutOfBlocksError:
            return 1
        return num_steps

    def num_untold(self) -> int:
        """Tokens in slots of which the manager has not been told yet."""
        at, rows = self.at, self._rows()
        known = np.minimum(at.known[rows], at.scheduled[rows])
        return int(np.maximum(known - at.appended[rows], 0).sum())

    def _sync(self, rows: np.ndarray) -> None:
        """Tells the manager the tokens that have come, for positions that have been computed.

        Steps run in the order in which they are sent off: whoever finds a block that is full now
        reads it later.
        """
        at = self.at
        known = np.minimum(at.known[rows], at.scheduled[rows])
        behind = known > at.appended[rows]
        rows, known = rows[behind], known[behind]
        if not len(rows):
            return
        old = at.appended[rows]
        spans = zip(rows.tolist(), old.tolist(), known.tolist(), strict=True)
        runs = itertools.chain.from_iterable(at.tokens(row, a, b) for row, a, b in spans)
        tokens = np.fromiter(runs, np.int32, int((known - old).sum()))
        selected = self.manager.select(self._keys_of(rows))
        self.manager.append_batch(selected, tokens, known - old)
        self.manager.commit_batch(selected, known - old)
        at.appended[rows] = known

    def _keys_of(self, rows: np.ndarray) -> list[int]:
        """Names of the sequences in these rows."""
        return self.at.keys[rows].tolist()

    # -- what a user takes back or guesses ---------------------------------------------------

    def cut(self, sequence: Sequence) -> None:
        """Some of the sequence's last tokens are no more."""
        self._prefixes.cut(sequence, len(sequence.tokens))
        if sequence.status is not Status.RUNNING:
            return
        at, row, length = self.at, sequence.row, len(sequence.tokens)
        at.known[row], at.slots[row] = length, 0
        # The last token is computed again, since its logits are wanted.
        at.scheduled[row] = min(at.scheduled[row], length - 1)
        at.appended[row] = min(at.appended[row], length)
        if at.appended[row] > at.scheduled[row] >= length - 1:
            at.appended[row] = at.scheduled[row]
        self.manager.truncate(sequence.key, int(at.appended[row]))

    def reserve_for(self, sequence: Sequence, count: int) -> int:
        """Slots for the next tokens of one sequence: `count`, or 1 if there are not so many."""
        at, rows = self.at, np.array([sequence.row])
        slots = int(at.scheduled[sequence.row]) + count - int(at.appended[sequence.row])
        try:
            self.manager.reserve([sequence.key], slots)
        except OutOfBlocksError:
            self._reserve(rows)
            return 1
        self._sync(rows)
        return count

    def verified(self, sequence: Sequence) -> None:
        """All but the last of its tokens are computed; slots of a wrong draft go back."""
        row = sequence.row
        self.at.scheduled[row] = len(sequence.tokens) - 1
        self._sync(np.array([row]))
        self.manager.truncate(sequence.key, int(self.at.appended[row]))
        self.at.slots[row], self.at.unsent[row] = 0, True

    # -- admission ---------------------------------------------------------------------------

    def _admit(self, chunks: list[Chunk], admitted: list[Sequence], budget: int) -> int:
        """Gives blocks to waiting sequences, in order, while there are some; the budget left."""
        deferred = 0
        while budget and deferred < len(self.waiting):
            sequence = self.waiting[deferred]
            request = sequence.request
            if sequence.awaited:  # preempted so lately that its last token has not come yet
                break
            if self._prefixes.must_wait(sequence):
                deferred += 1
                continue
            try:
                allocation = self.manager.allocate(
                    sequence.key, sequence.tokens, namespace=request.namespace,
                    skip_prefix_cache=request.wants_prompt_logprobs,
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
        return budget

    def _chunk(self, row: int, budget: int) -> Chunk:
        start, end = int(self.at.scheduled[row]), int(self.at.appended[row])
        sequence = self.at.sequences[row]
        assert sequence is not None
        return Chunk(sequence, start, min(end - start, budget))

    def _fork_all(self, parent: Sequence) -> list[Sequence]:
        """The other samples of a request; those for which there is no row wait for their own."""
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
        """The child runs from where its parent is; False, and nothing done, without a free row."""
        self._sync(np.array([parent.row]))
        try:
            self.manager.fork(parent.key, child.key)
        except OutOfBlocksError:
            return False
        scheduled, appended = (int(x[parent.row]) for x in (self.at.scheduled, self.at.appended))
        row, self.at.slots[parent.row] = self.manager.row(child.key), 0
        self._runs(child, row, scheduled=scheduled, appended=appended)
        self.at.unsent[row] = self.at.unsent[parent.row]
        self._forked(parent, child)
        return True

    # -- beam search -------------------------------------------------------------------------

    def branch(
        self, request: Request, live: list[Sequence], chosen: list[Continuation]
    ) -> list[Sequence]:
        """The hypotheses of a beam search become these: tables move, blocks do not.

        Returns:
          The sequences that are not needed any more.
        """
        self._sync(np.array([s.row for s in live]))
        tokens = [s.tokens for s in live]
        # A hypothesis that lives on stays in its row, once; its other continuations move.
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
                self._make_row(request)
                child = self.sequence(request, tokens[one.parent])
                self.fork(live[one.parent], child)
                sequences.append(child)
            else:
                sequences.append(live[row])
        if parents != list(range(len(live))):
            self.manager.reorder([s.key for s in live], parents)
        for sequence, one in zip(sequences, chosen, strict=True):
            sequence.tokens = [*tokens[one.parent], one.token]
            self._prefixes.cut(sequence, len(request.prompt))
            self.at.known[sequence.row], self.at.slots[sequence.row] = len(sequence.tokens), 0
            self.at.unsent[sequence.row] = True
            sequence.cumulative_logprob = one.logprob
        return [live[row] for row in spare]

    def _make_row(self, request: Request) -> None:
        """A free row, from the last to come of the others if need be."""
        others = [s for s in self.running if s.request is not request]
        if len(self.running) == self.manager.max_seqs:
            self.preempt(others[-1], "a beam search needs a row for each hypothesis")


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return (*sequence.request.order, sequence.sample)
