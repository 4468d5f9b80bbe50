"""The step loop of an engine: dispatches steps, takes their tokens in, ends requests."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from jaxkv.engine.device import Device, InFlightStep
from jaxkv.engine.outputs import Outputs
from jaxkv.engine.requests import (
    FinishReason,
    Request,
    Sequence,
    Status,
    Timings,
    TokenLogprobs,
)
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.statistics import EngineStats
from jaxkv.engine.steps import trace_counts
from jaxkv.engine.work import Work
from jaxkv.manager.block_manager import BlockManager
from jaxkv.manager.records import Plan
from jaxkv.sampling.params import SamplingParams
from jaxkv.sampling.sampler import ProcessorError


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
        self._numbers = itertools.count()
        self._seeds = np.random.default_rng(seed)
        self._last_decode: float | None = None  # when the tokens of a decode step last came

    def new_request(
        self, request_id: Hashable, prompt: list[int], params: SamplingParams, priority: int,
        namespace: Any, stop_ids: frozenset[int], end: int, unforked: int = 0,
    ) -> Request:  # fmt: skip
        """Registers a request; its first sample is the caller's to add.

        Args:
          request_id: its id; None: a number.
          unforked: samples to fork off the first when its prompt is computed.
        """
        number = next(self._numbers)
        if request_id is None:
            while number in self.requests:  # taken by a user's id
                number = next(self._numbers)
            request_id = number
        first_in = -priority if self.scheduler.config.policy == "priority" else 0
        seed = int(self._seeds.integers(2**32)) if params.seed is None else params.seed
        request = Request(
            request_id, prompt, params, namespace, (first_in, number), stop_ids, end, seed,
            Timings(self._clock()), unforked=unforked, logprobs=_logprobs_kept(params),
            processor=self.device.use_processor(params.logits_processor),
        )  # fmt: skip
        self.requests[request_id] = request
        return request

    # -- steps -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for all steps in flight and takes their tokens in."""
        while self.in_flight:
            self.collect(self.in_flight.popleft())

    def send(self) -> bool | None:
        """Schedules and dispatches one step; whether that worked. None: there is no work."""
        began = time.perf_counter()
        work = self.scheduler.schedule()
        scheduled = time.perf_counter()
        if work is None:
            self.apply_changes()
            return None
        plan, now = self.manager.take_plan(), self._clock()
        for sequence in work.admitted:
            if sequence.request.timings.scheduled is None:
                sequence.request.timings.scheduled = now
        planned, traces = time.perf_counter(), trace_counts.total()
        try:
            changes = self.scheduler.take_changes()
            self._keep_processor_states(changes.preempted)
            self.device.fill_rows(work.admitted)
            self.device.copy_rows(changes.forks)
            step = self.device.send(work, plan)
        except Exception as error:
            self.fail(work.sequences, error, plan)
            return False
        self.scheduler.dispatched(work)
        self.in_flight.append(step)
        host, ended = self.stats.host, time.perf_counter()
        host.schedule += scheduled - began
        host.plan += planned - scheduled
        if trace_counts.total() > traces:
            self.stats.compile_seconds += ended - planned
            self._last_decode = None
        else:
            host.dispatch += ended - planned
        self.stats.steps += 1
        self.stats.decode_steps += not work.chunks
        self.stats.prompt_tokens += sum(chunk.count for chunk in work.chunks)
        self.stats.peak_running = max(self.stats.peak_running, len(self.scheduler.running))
        return True

    def collect(self, step: InFlightStep) -> None:
        """Takes in the tokens of a dispatched step; waits for them if necessary."""
        began = time.perf_counter()
        try:
            sampled = jax.tree.map(np.asarray, step.sampled)
        except Exception as error:
            self.in_flight.clear()  # later steps depend on it
            self.device.lose()
            self.fail(step.work.sequences, error)
            for sequence in self.scheduler.waiting:
                sequence.num_in_flight = 0
            return
        came = time.perf_counter()
        for chunk, first in step.inputs.prompts:
            request = chunk.sequence.request
            targets = chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
            assert request.prompt_logprobs is not None
            request.prompt_logprobs += [
                _token_logprobs(sampled, first + i, token, request.logprobs)
                for i, token in enumerate(targets)
            ]
        now, before = self._clock(), self.stats.generated_tokens
        for i in range(step.work.num_steps):
            self._take_decoded(step.work, sampled, i, i * step.inputs.stride, now)
        for sequence, place in step.inputs.places:
            self._take_token(sequence, sampled, place, now)
        for request in list(self.searching):
            self._advance_search(request, now)
        stats = self.stats
        stats.host.wait += came - began
        stats.host.process += time.perf_counter() - came
        decoding = not step.work.chunks
        if decoding and self._last_decode is not None:
            stats.decode_tokens += stats.generated_tokens - before
            stats.decode_seconds += came - self._last_decode
        self._last_decode = came if decoding else None

    def _take_decoded(self, work: Work, sampled: Any, step: int, first: int, now: float) -> None:
        """Takes in the tokens of one decode step, from place `first` on."""
        decodes = work.decodes
        tokens = sampled.tokens[first : first + len(decodes)]
        taken = self.scheduler.rows.take(decodes, work.counts, step, tokens)
        self.stats.generated_tokens += len(taken.sequences)
        self.outputs.note_all(taken.sequences)
        for sequence, token in taken.ended:
            self.finish(sequence, "stop" if token in sequence.request.stop_ids else "length")
        for i in taken.rest:
            self._take_token(decodes.sequences[i], sampled, first + i, now)

    def verify(self, sequence: Sequence, draft: list[int]) -> None:
        """Computes a draft in one step; keeps the tokens that the sequence would have sampled."""
        fits = self.scheduler.reserve_for(sequence, 1 + len(draft))
        self.apply_changes()
        if sequence.status is not Status.RUNNING:
            return  # no slot even for the next token: it was preempted
        start = int(self.scheduler.rows.scheduled[sequence.row])
        tokens, plan = [*sequence.tokens[start:], *draft][:fits], self.manager.take_plan()
        try:
            logprobs = sequence.request.logprobs
            brought = self.device.send_draft(sequence.row, start, tokens, plan, logprobs=logprobs)
            sampled = jax.tree.map(np.asarray, brought)
        except Exception as error:
            self.fail([sequence], error, plan)
            return
        now = self._clock()
        for i, token in enumerate(sampled.tokens.tolist()[: len(tokens)]):
            self._take_token(sequence, sampled, i, now)
            right = i + 1 < len(tokens) and tokens[i + 1] == token
            if sequence.finish_reason is not None or not right:
                break
        if sequence.finish_reason is None:
            self.scheduler.verified(sequence)
        self.stats.steps += 1

    def _take_token(self, sequence: Sequence, sampled: Any, place: int, now: float) -> None:
        request, token = sequence.request, int(sampled.tokens[place])
        if sequence.finish_reason is not None:
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
        if request.timings.first_token is None:
            request.timings.first_token = now
        self.scheduler.take(sequence, token)
        self.stats.generated_tokens += 1
        self.outputs.note(sequence)
        if token in request.stop_ids or (
            request.params.stop and self.outputs.finds_stop_text(sequence)
        ):
            self.finish(sequence, "stop")
        elif len(sequence.tokens) >= request.end:
            self.finish(sequence, "length")

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
        spare = self.scheduler.branch(request, live, chosen)
        # More hypotheses may have ended than there are samples: after one token, all but one.
        more = len(beam.results()) - len(request.samples)
        spare += [self.scheduler.sequence(request, request.prompt) for _ in range(more)]
        for sequence in spare:
            self.finish(sequence, "stop")
        self.apply_changes()

    # -- ends --------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a sequence, and its request if all its samples have ended."""
        if sequence.finish_reason is not None:
            return
        request = sequence.request
        sequence.finish_reason, sequence.error = reason, error
        self.scheduler.remove(sequence)
        self.outputs.note(sequence)
        if request.unforked or any(s.finish_reason is None for s in request.samples):
            return
        request.timings.finished = self._clock()
        self.outputs.choose(request)
        if request in self.searching:  # it ended before its search was over
            self.searching.remove(request)
        del self.requests[request.id]
        if not any(r.processor >= 0 for r in self.requests.values()):
            self.device.drop_processors()

    def fail(self, concerned: list[Sequence], error: Exception, plan: Plan | None = None) -> None:
        """Ends the requests of a failed step; others go on, recomputed from their tokens if needed.

        A failing logits processor ends its own requests only. The plan of a step that was not
        dispatched is applied by itself.
        """
        if plan is not None and not self.device.is_lost:
            self.device.apply(plan)
        if isinstance(error, ProcessorError):
            concerned = [s for s in concerned if s.request.processor == error.processor]
            self.device.disable_processor(error.processor)
        message = f"{type(error).__name__}: {error}"
        for sequence in concerned:
            sequence.request.unforked = 0
            self.finish(sequence, "error", message)
        if self.device.is_lost:
            for sequence in list(self.scheduler.running):
                self.scheduler.preempt(sequence, "the cache was lost with a step that failed")
            self.stats.preemptions += len(self.scheduler.take_changes().preempted)
            self.manager.take_plan()
            self.manager.reset_prefix_cache()
            self.device.reset()

    def refuse(self, sequence: Sequence) -> None:
        """Ends a request that does not fit though nothing runs: pins leave too few blocks."""
        a = self.manager.can_allocate(sequence.tokens, namespace=sequence.request.namespace)
        self.finish(
            sequence, "error",
            f"out of cache: {len(sequence.tokens)} tokens need {a.needed} blocks, {a.available} "
            "are available though nothing runs; unpin prefixes or raise num_blocks",
        )  # fmt: skip

    def apply_changes(self) -> None:
        """Applies the scheduler's row changes on the device."""
        changes = self.scheduler.take_changes()
        self._keep_processor_states(changes.preempted)
        self.device.copy_rows(changes.forks)

    def _keep_processor_states(self, preempted: list[tuple[Sequence, int]]) -> None:
        """Saves the logits processors' states of preempted sequences."""
        self.stats.preemptions += len(preempted)
        for sequence, row in preempted:
            state = self.device.processor_state(sequence.request.processor, row)
            sequence.processor_state = state


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
