"""The step loop of an engine: dispatches steps, takes their tokens in, ends requests."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np

from jaxkv.cache.check import check_state
from jaxkv.engine.compilation import num_compiled
from jaxkv.engine.device import Device, InFlightStep
from jaxkv.engine.model_call import ModelRaised
from jaxkv.engine.outputs import Outputs
from jaxkv.engine.recovery import Recovery
from jaxkv.engine.requests import (
    FinishReason,
    ProcessorState,
    Request,
    Sequence,
    SequenceError,
    Status,
    Timings,
    TokenLogprobs,
)
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.statistics import EngineStats
from jaxkv.engine.work import Work
from jaxkv.errors import JaxkvError
from jaxkv.manager.block_manager import BlockManager
from jaxkv.sampling.params import SamplingParams
from jaxkv.sampling.sampler import NO_TOKEN, ProcessorError


class StepLoop:
    """Requests from their submission to their last token.

    Args:
      manager: block manager.
      scheduler: chooses the work of each step.
      device: runs the steps.
      outputs: collects the outputs.
      clock: monotonic clock of the manager, seconds.
      seed: seed for the seeds of requests without one.

    Attributes:
      requests: unfinished requests by id.
      in_flight: dispatched steps, oldest first.
      searching: beam searches, whose hypotheses step together.
      stats: counters.
      whole: guard of calls that change several records; see `Recovery`.
    """

    def __init__(
        self, manager: BlockManager, scheduler: Scheduler, device: Device, outputs: Outputs, *,
        clock: Callable[[], float], seed: int,
    ):  # fmt: skip
        self.manager, self.scheduler, self.device = manager, scheduler, device
        self.outputs, self._clock = outputs, clock
        self.requests: dict[Hashable, Request] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.searching: list[Request] = []
        self.stats = EngineStats()
        self.whole = Recovery(self)
        self._numbers = itertools.count()
        self._seeds = np.random.default_rng(seed)
        self._last_decode: float | None = None  # when the tokens of a decode step last came

    def new_id(self) -> int:
        """A number that no request has as its id."""
        number = next(self._numbers)
        while number in self.requests:  # taken by a user's id
            number = next(self._numbers)
        return number

    def new_request(
        self, request_id: Hashable, prompt: list[int], params: SamplingParams, priority: int,
        namespace: Any, stop_ids: frozenset[int], end: int, unforked: int = 0,
    ) -> Request:  # fmt: skip
        """Makes a request; `open` registers it.

        Args:
          request_id: its id; None: a number.
          unforked: samples to fork off the first when its prompt is computed.
        """
        if request_id is None:
            request_id = self.new_id()
        first_in = -priority if self.scheduler.config.policy == "priority" else 0
        seed = int(self._seeds.integers(2**32)) if params.seed is None else params.seed
        return Request(
            request_id, prompt, params, namespace, (first_in, next(self._numbers)), stop_ids, end,
            seed, Timings(self._clock()), unforked=unforked, logprobs=_logprobs_kept(params),
            processor=self.device.use_processor(params.logits_processor),
        )  # fmt: skip

    def open(self, request: Request) -> None:
        """Registers a request. From here on it has an end, whatever is interrupted."""
        self.requests[request.id] = request
        if request.beam is not None:
            self.searching.append(request)

    # -- steps -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for all steps in flight and takes their tokens in."""
        while self.in_flight:
            self.collect()

    def send(self) -> bool | None:
        """Schedules and dispatches one step; whether that worked. None: there is no work."""
        with self.whole:
            began = time.perf_counter()
            work = self.scheduler.schedule()
            scheduled = time.perf_counter()
            if work is None:
                return None
            plan, now = self.manager.take_plan(), self._clock()
            for sequence in work.admitted:
                if sequence.request.timings.scheduled is None:
                    sequence.request.timings.scheduled = now
            planned, compiled = time.perf_counter(), num_compiled()
            try:
                self.device.fill_rows(self.scheduler.take_unfilled())
                step = self.device.send(work, plan)
            except Exception as error:
                self._fail_dispatch(work, error)
                return False
            if self.scheduler.config.check_state:
                check_state(self.device.state, self.manager)
            self.scheduler.dispatched(work)
            self.in_flight.append(step)
            host, ended = self.stats.host, time.perf_counter()
            host.schedule += scheduled - began
            host.plan += planned - scheduled
            if num_compiled() > compiled:
                self.stats.compile_seconds += ended - planned
                self._last_decode = None
            else:
                host.dispatch += ended - planned
            self.stats.steps += 1
            self.stats.decode_steps += not work.chunks
            self.stats.prompt_tokens += sum(chunk.count for chunk in work.chunks)
            self.stats.peak_running = max(self.stats.peak_running, len(self.scheduler.running))
            return True

    def collect(self) -> None:
        """Takes in the tokens of the oldest step in flight; waits for them if necessary.

        Most of an engine's time is spent in the wait: an interrupt there changes nothing.
        """
        with self.whole:
            step = self.in_flight[0] if self.in_flight else None
        if step is None:
            return
        began = time.perf_counter()
        try:
            sampled = jax.tree.map(np.asarray, step.sampled)
        except Exception as error:
            with self.whole:
                self.fail(step.work, error)
            return
        came = time.perf_counter()
        with self.whole:
            self.in_flight.popleft()
            self._take(step, sampled)
            stats = self.stats
            stats.host.wait += came - began
            stats.host.process += time.perf_counter() - came

    def _take(self, step: InFlightStep, sampled: Any) -> None:
        """Takes in the tokens of a step, which have arrived."""
        came, stats = time.perf_counter(), self.stats
        for chunk, first in step.inputs.prompts:
            request = chunk.sequence.request
            targets = chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
            assert request.prompt_logprobs is not None
            request.prompt_logprobs += [
                _token_logprobs(sampled, first + i, token, request.logprobs)
                for i, token in enumerate(targets)
            ]
        now, before = self._clock(), stats.generated_tokens
        for i in range(step.work.num_steps):
            self._take_decoded(step, sampled, i, now)
        for sequence, place in step.inputs.places:
            self._take_token(sequence, sampled, place, place, now)
        for request in list(self.searching):
            self._advance_search(request, now)
        decoding = not step.work.chunks
        if decoding and self._last_decode is not None:
            stats.decode_tokens += stats.generated_tokens - before
            stats.decode_seconds += came - self._last_decode
        self._last_decode = came if decoding else None

    def _take_decoded(self, step: InFlightStep, sampled: Any, number: int, now: float) -> None:
        """Takes in the tokens of one decode step of a dispatch."""
        work, first = step.work, number * step.inputs.stride
        decodes = work.decodes
        tokens = sampled.tokens[first : first + len(decodes)]
        for i in np.flatnonzero((tokens == NO_TOKEN) & (work.counts > number)).tolist():
            self._end_without_token(decodes.sequences[i])
        taken = self.scheduler.rows.take(decodes, work.counts, number, tokens)
        self.stats.generated_tokens += len(taken.sequences)
        self.outputs.note_all(taken.sequences)
        for sequence, token in taken.ended:
            self.finish(sequence, "stop" if token in sequence.request.stop_ids else "length")
        for i in taken.rest:
            self._take_token(decodes.sequences[i], sampled, first + i, i, now)

    def verify(self, sequence: Sequence, draft: list[int]) -> None:
        """Computes a draft in one step; keeps the tokens that the sequence would have sampled."""
        fits = self.scheduler.reserve_for(sequence, 1 + len(draft))
        if sequence.status is not Status.RUNNING:
            return  # no slot even for the next token: it was preempted
        self.device.fill_rows(self.scheduler.take_unfilled())
        start = int(self.scheduler.rows.scheduled[sequence.row])
        tokens, plan = [*sequence.tokens[start:], *draft][:fits], self.manager.take_plan()
        try:
            logprobs = sequence.request.logprobs
            with self._counting_compilation():
                brought = self.device.send_draft(
                    sequence.row, start, tokens, plan, logprobs=logprobs
                )
            sampled = jax.tree.map(np.asarray, brought)
        except Exception as error:
            self.end(sequence.request, "error", _cause(error))
            self.whole.restore()
            if isinstance(error, ModelRaised):
                raise error.error from None
            return
        now = self._clock()
        for i, token in enumerate(sampled.tokens.tolist()[: len(tokens)]):
            self._take_token(sequence, sampled, i, i, now)
            right = i + 1 < len(tokens) and tokens[i + 1] == token
            if sequence.finish_reason is not None or not right:
                break
        if sequence.finish_reason is None:
            self.scheduler.verified(sequence)
        self.stats.steps += 1

    def _take_token(
        self, sequence: Sequence, sampled: Any, place: int, state_place: int, now: float
    ) -> None:
        """Takes in one token of a sequence, with all that comes with it."""
        request, token = sequence.request, int(sampled.tokens[place])
        if sequence.finish_reason is not None:
            return
        if len(sequence.tokens) >= request.end:  # the prompt alone was to be computed
            self.finish(sequence, "length")
            return
        if token == NO_TOKEN:
            self._end_without_token(sequence)
            return
        if request.beam is not None:
            if sequence.status is Status.RUNNING:
                sequence.candidates = sampled.top_ids[place], sampled.top_logprobs[place]
            else:
                sequence.num_in_flight = 0
            return
        if request.logprobs >= 0:
            logprobs = _token_logprobs(sampled, place, token, request.logprobs)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs.logprob
        if request.processor >= 0:
            states = sampled.processor_states[request.processor]
            state = jax.tree.map(lambda x: x[state_place], states)
            sequence.processor_state = ProcessorState(len(sequence.tokens) + 1, token, state)
        if request.timings.first_token is None:
            request.timings.first_token = now
        self.scheduler.take(sequence, token)
        self.stats.generated_tokens += 1
        self.outputs.note(sequence)
        self.finish_if_over(sequence)

    def finish_if_over(self, sequence: Sequence) -> None:
        """Ends a sequence whose last token is its last."""
        request, tokens = sequence.request, sequence.tokens
        if len(tokens) > len(request.prompt):
            if tokens[-1] in request.stop_ids:
                self.finish(sequence, "stop")
            elif request.params.stop:
                try:
                    if self.outputs.finds_stop_text(sequence):
                        self.finish(sequence, "stop")
                except Exception as error:  # the user's tokenizer
                    self.end(request, "error", error)
        if len(tokens) >= request.end:
            self.finish(sequence, "length")

    def _end_without_token(self, sequence: Sequence) -> None:
        """Ends a sequence whose logits allow no token; in a beam search, all hypotheses."""
        message = (
            f"no token can follow the {len(sequence.tokens)} of this sequence: of its logits, "
            "after bias and logits processor, all are -inf or one is NaN"
        )
        if sequence.request.beam is not None:
            self.end(sequence.request, "error", JaxkvError(message))
        else:
            self.finish(sequence, "error", JaxkvError(message))

    def _advance_search(self, request: Request, now: float) -> None:
        """One step of a beam search, when the candidates of all its hypotheses have arrived."""
        beam, live = request.beam, [s for s in request.samples if s.finish_reason is None]
        if beam is None or any(s.candidates is None for s in live):
            return
        if request.timings.first_token is None:
            request.timings.first_token = now
        ids, logprobs = zip(*(s.candidates for s in live if s.candidates is not None), strict=True)
        chosen = beam.advance(
            [s.tokens for s in live],
            [s.cumulative_logprob for s in live],
            [x.tolist() for x in ids],
            [x.tolist() for x in logprobs],
        )
        self.stats.generated_tokens += len(live)
        for sequence in live:
            sequence.candidates = None
        self.settle_search(request, self.scheduler.branch(request, live, chosen))

    def settle_search(self, request: Request, spare: list[Sequence]) -> None:
        """Ends the samples that a beam search no longer needs."""
        assert request.beam is not None
        # More hypotheses may have ended than there are samples: after one token, all but one.
        more = len(request.beam.results()) - len(request.samples)
        spare += [self.scheduler.sequence(request, request.prompt) for _ in range(more)]
        for sequence in spare:
            self.finish(sequence, "stop")

    # -- ends --------------------------------------------------------------------------------

    def finish(
        self, sequence: Sequence, reason: FinishReason, error: Exception | None = None
    ) -> None:
        """Ends a sequence, and its request if all its samples have ended."""
        if sequence.finish_reason is not None:
            return
        sequence.error, sequence.finish_reason = error, reason
        self.scheduler.remove(sequence)
        self.outputs.note(sequence)
        if sequence.request.is_over:
            self.close(sequence.request)

    def close(self, request: Request) -> None:
        """Follows the end of all samples of a request."""
        request.timings.finished = self._clock()
        self.outputs.choose(request)
        if request in self.searching:
            self.searching.remove(request)
        if self.requests.pop(request.id, None) is not None:
            self.device.release_processor(request.processor)
            if not self.device.processors.in_use(request.processor):
                self.scheduler.turns.isolated.discard(request.processor)

    def end(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """Ends a request, with all its samples."""
        request.unforked = 0
        for sequence in list(request.samples):
            self.finish(sequence, reason, error)

    def refuse(self, request: Request) -> None:
        """Ends a request that does not fit though nothing runs: pins leave too few blocks."""
        sequence = next(s for s in request.samples if s.status is Status.WAITING)
        a = self.manager.can_allocate(sequence.tokens, namespace=request.namespace)
        message = (
            f"out of cache: {len(sequence.tokens)} tokens need {a.needed} blocks, {a.available} "
            "are available though nothing runs; unpin prefixes or raise num_blocks"
        )
        self.end(request, "error", JaxkvError(message))

    @contextlib.contextmanager
    def _counting_compilation(self) -> Iterator[None]:
        """Counts the time of work outside of `send` in which something compiles."""
        began, compiled = time.perf_counter(), num_compiled()
        yield
        if num_compiled() > compiled:
            self.stats.compile_seconds += time.perf_counter() - began
            self._last_decode = None

    # -- failures ----------------------------------------------------------------------------

    def _fail_dispatch(self, work: Work, error: Exception) -> None:
        """Follows a step that could not be dispatched."""
        for step in self.in_flight:  # one of these may have failed, and with it all after it
            try:
                jax.block_until_ready(step.sampled)
            except Exception as earlier:
                work, error = step.work, earlier
                break
        self.fail(work, error)

    def fail_output(self, sequence: Sequence, error: Exception) -> None:
        """Ends the request of an output that cannot be made."""
        self.end(sequence.request, "error", error)
        # It may have ended before, or be one of several samples of which others are not read yet.
        sequence.error, sequence.finish_reason = error, "error"
        self.outputs.note(sequence)

    def fail(self, work: Work, error: Exception) -> None:
        """Ends the requests to which a failed step is due; the others are computed again.

        A row that cannot be filled, or a logits processor that raises, ends its own requests. Where
        a step fails on the device, a processor in it may be the cause: from then on each of them
        runs in steps of its own, and the next failure tells.

        Raises:
          Exception: the model's own error, after the requests of its step were ended with it.
        """
        requests = list(dict.fromkeys(s.request for s in work.sequences))
        guilty, slots = requests, {r.processor for r in requests}
        if isinstance(error, SequenceError):
            guilty = [error.sequence.request]
        elif isinstance(error, ProcessorError):
            slot = self.device.processors.slot_of(error.processor)
            guilty = [r for r in self.requests.values() if r.processor == slot]
        elif len(slots) > 1 and not isinstance(error, ModelRaised):
            guilty = []
            self.scheduler.turns.isolated |= slots - {-1}
        for request in guilty:
            self.end(request, "error", _cause(error))
        self.whole.restore()
        if isinstance(error, ModelRaised):
            raise error.error


def _cause(error: Exception) -> Exception:
    """The error of a user's code that another one carries."""
    return error.error if isinstance(error, ModelRaised | SequenceError) else error


def _logprobs_kept(params: SamplingParams) -> int:
    """Most likely tokens to keep for each token; 0: the chosen token alone; -1: none."""
    if params.logprobs is not None:
        return params.logprobs
    ranked = params.num_samples > params.n
    return 0 if ranked or params.prompt_logprobs else -1


def _token_logprobs(sampled: Any, place: int, token: int, count: int) -> TokenLogprobs:
    ids, logprobs = sampled.top_ids[place, :count], sampled.top_logprobs[place, :count]
    top = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return TokenLogprobs(token, float(sampled.logprobs[place]), top)
