"""Recovery: an engine whose call was interrupted, or whose step failed, goes on from its tokens.

An interrupt can come between any two lines, with the block manager, the rows and the device in the
middle of a change. None of them is repaired. What a request has is its tokens: with them, its seed
and the states of its logits processor everything else is made again, and since a token depends on
nothing else, the outputs are those of a run without the interrupt.

Two records are written in one assignment, so that they are never half done: a token with the state
of its logits processor, and a step of a beam search.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from jaxkv.engine.requests import Request, Sequence, Status

if TYPE_CHECKING:
    from jaxkv.engine.loop import StepLoop


class Recovery:
    """Guard of calls that change several records: `with whole: ...`.

    A guarded call that does not come to its end leaves the engine torn, and the next one first
    restores it. Guards are not nested.

    Attributes:
      torn: whether a guarded call is running, or did not come to its end.
    """

    def __init__(self, loop: StepLoop):
        self._loop = loop
        self.torn = False

    def __enter__(self) -> None:
        if self.torn:
            self.restore()
        self.torn = True  # before the change, so that no interrupt comes between

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        if kind is None:
            self.torn = False

    def restore(self) -> None:
        """Makes everything but the requests again; cached content and pins are lost.

        Interrupted, it can be called again.
        """
        loop = self._loop
        loop.in_flight.clear()
        loop.manager.reset()
        loop.scheduler.clear()
        loop.device.processors.recount(loop.requests.values())
        loop.device.reset()
        loop.searching = [r for r in loop.requests.values() if r.beam is not None]
        for request in list(loop.requests.values()):
            self._restore(request)
        self.torn = False

    def _restore(self, request: Request) -> None:
        loop = self._loop
        for sequence in request.samples:
            if sequence.status is Status.RUNNING:
                sequence.num_preemptions += 1
                loop.scheduler.num_preemptions += 1
            sequence.status, sequence.row, sequence.num_in_flight = Status.NEW, -1, 0
            sequence.candidates, sequence.hashes, sequence.waits_for = None, [], b""
            _settle(sequence)
        failed = next((s for s in request.samples if s.finish_reason in ("abort", "error")), None)
        if failed is not None and failed.finish_reason is not None:  # its other samples end with it
            loop.end(request, failed.finish_reason, failed.error)
        elif request.beam is not None:
            self._restore_search(request)
        else:
            self._restore_samples(request)
        for sequence in request.samples:
            if sequence.finish_reason is None:
                loop.finish_if_over(sequence)
            if sequence.has_news:
                loop.outputs.note(sequence)
        if request.is_over:
            if loop.requests.get(request.id) is request:
                loop.close(request)
            return
        for sequence in request.samples:
            if sequence.finish_reason is None:
                loop.scheduler.add(sequence)
            else:
                sequence.status = Status.FINISHED

    def _restore_samples(self, request: Request) -> None:
        """Makes the samples that were being forked off."""
        samples, missing = request.samples, request.params.num_samples - len(request.samples)
        if len(samples) > 1 or len(samples[0].tokens) > len(request.prompt):
            for _ in range(missing):
                self._loop.scheduler.sequence(request, request.prompt)
            missing = 0
        request.unforked = missing

    def _restore_search(self, request: Request) -> None:
        """Follows the last whole step of a beam search."""
        assert request.beam is not None
        state, scheduler = request.beam.state, self._loop.scheduler
        going_on = [s for s in request.samples if s.finish_reason is None]
        while len(going_on) < len(state.live):
            going_on.append(scheduler.sequence(request, request.prompt))
        for sequence, live in zip(going_on, state.live, strict=False):
            sequence.tokens, sequence.cumulative_logprob = list(live.tokens), live.logprob
        self._loop.settle_search(request, going_on[len(state.live) :])


def _settle(sequence: Sequence) -> None:
    """Completes, or takes back, a token of which only a part was taken in."""
    state, request = sequence.processor_state, sequence.request
    if state is not None and state.length == len(sequence.tokens) + 1:
        sequence.tokens.append(state.token)
    if request.beam is None and request.logprobs >= 0:
        generated = min(len(sequence.tokens) - len(request.prompt), len(sequence.logprobs))
        del sequence.logprobs[generated:]
        if len(sequence.tokens) > len(request.prompt) + generated:
            sequence.tokens = sequence.tokens[: len(request.prompt) + generated]
        sequence.cumulative_logprob = sum(one.logprob for one in sequence.logprobs)
    sequence.num_reported = min(sequence.num_reported, len(sequence.tokens))
