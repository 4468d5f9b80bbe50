"""An engine's machinery: sends steps off, takes their tokens in, ends requests."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from jaxkv.config import CacheConfig
from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.device import Device, Flight
from jaxkv.engine.outputs import Outputs
from jaxkv.engine.requests import (
    FinishReason,
    Request,
    RequestOutput,
    Sequence,
    Status,
    Timings,
    TokenLogprobs,
)
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.statistics import EngineStats
from jaxkv.engine.steps import trace_counts
from jaxkv.engine.work import Work
from jaxkv.manager import events
from jaxkv.manager.block_manager import BlockManager
from jaxkv.manager.records import Plan
from jaxkv.sampling.params import SamplingParams
from jaxkv.sampling.sampler import ProcessorError


class EngineCore:
    """What `Engine` is made of; its arguments are described there."""

    def __init__(
        self,
        model: Any,
        cache: CacheConfig,
        scheduler: SchedulerConfig | None = None,
        *,
        tokenizer: Any = None,
        eos_token_ids: Seq[int] | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        **manager_options: Any,
    ):
        self.cache, self.config = cache, scheduler or SchedulerConfig()
        self.tokenizer, self.clock = tokenizer, clock
        self.vocab_size: int = model.config.vocab_size
        eos = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.eos_token_ids = tuple(eos)
        self.max_len = min(cache.max_len, model.config.max_position_embeddings)
        self.manager = BlockManager.for_config(cache, **manager_options)
        self._scheduler = Scheduler(
            self.manager, self.config, forked=self._forked, preempted=self._preempted
        )
        self._device = Device(model, cache, self.config)
        self._requests: dict[Hashable, Request] = {}
        self._flights: deque[Flight] = deque()
        self._forks: list[tuple[Sequence, Sequence]] = []  # whose rows are to be copied
        self._outputs = Outputs(tokenizer)
        self._kept: list[RequestOutput] = []  # of other requests while `generate` ran
        self._searching: list[Request] = []  # beam searches: their hypotheses step together
        self._numbers = itertools.count()
        self._seeds = np.random.default_rng(seed)
        self._stats = EngineStats()
        self._last_decode: float | None = None  # when the tokens of a decode step last came

    def _new_request(
        self, request_id: Hashable, prompt: list[int], params: SamplingParams, priority: int,
        namespace: Any, stop_ids: frozenset[int], end: int, unforked: int = 0,
    ) -> Request:  # fmt: skip
        number = next(self._numbers)
        if request_id is None:
            while number in self._requests:  # a user's own name
                number = next(self._numbers)
            request_id = number
        first_in = -priority if self.config.policy == "priority" else 0
        seed = int(self._seeds.integers(2**32)) if params.seed is None else params.seed
        request = Request(
            request_id, prompt, params, namespace, (first_in, number), stop_ids, end, seed,
            Timings(self.clock()), unforked=unforked, logprobs=_logprobs_kept(params),
            processor=self._device.use_processor(params.logits_processor),
        )  # fmt: skip
        self._requests[request_id] = request
        return request

    # -- steps -------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Waits for the steps that are under way; `step` gives what they brought."""
        while self._flights:
            self._collect(self._flights.popleft())

    def _send(self) -> bool | None:
        """Schedules and dispatches one step; whether it went off. None: there is none."""
        began = time.perf_counter()
        work = self._scheduler.schedule()
        scheduled = time.perf_counter()
        if work is None:
            return None
        plan, now = self.manager.take_plan(), self.clock()
        for sequence in work.admitted:
            if sequence.request.timings.scheduled is None:
                sequence.request.timings.scheduled = now
        planned, traces = time.perf_counter(), trace_counts.total()
        try:
            self._device.fill_rows(work.admitted)
            self._copy_forked_rows()
            flight = self._device.send(work, plan)
        except Exception as error:
            self._fail(work.sequences, error, plan)
            return False
        self._scheduler.dispatched(work)
        self._flights.append(flight)
        host, ended = self._stats.host, time.perf_counter()
        host.schedule += scheduled - began
        host.plan += planned - scheduled
        if trace_counts.total() > traces:
            self._stats.compile_seconds += ended - planned
            self._last_decode = None
        else:
            host.dispatch += ended - planned
        self._stats.steps += 1
        self._stats.decode_steps += not work.chunks
        self._stats.prompt_tokens += sum(chunk.count for chunk in work.chunks)
        self._stats.peak_running = max(self._stats.peak_running, len(self._scheduler.running))
        return True

    def _collect(self, flight: Flight) -> None:
        """Takes in the tokens of a step that was sent off earlier; waits for them if need be."""
        began = time.perf_counter()
        try:
            sampled = jax.tree.map(np.asarray, flight.sampled)
        except Exception as error:
            self._flights.clear()  # those after it follow from it
            self._device.lose()
            self._fail(flight.work.sequences, error)
            for sequence in self._scheduler.waiting:
                sequence.awaited = 0
            return
        came = time.perf_counter()
        for chunk, first in flight.prompts:
            request = chunk.sequence.request
            targets = chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
            assert request.prompt_logprobs is not None
            request.prompt_logprobs += [
                _token_logprobs(sampled, first + i, token, request.logprobs)
                for i, token in enumerate(targets)
            ]
        now, before = self.clock(), self._stats.generated_tokens
        for step in range(flight.work.num_steps):
            self._take_decoded(flight.work, sampled, step, step * flight.stride, now)
        for sequence, place in flight.places:
            self._take_token(sequence, sampled, place, now)
        for request in list(self._searching):
            self._advance_search(request, now)
        stats = self._stats
        stats.host.wait += came - began
        stats.host.process += time.perf_counter() - came
        decoding = not flight.work.chunks
        if decoding and self._last_decode is not None:
            stats.decode_tokens += stats.generated_tokens - before
            stats.decode_seconds += came - self._last_decode
        self._last_decode = came if decoding else None

    def _take_decoded(self, work: Work, sampled: Any, step: int, first: int, now: float) -> None:
        """The tokens of one decode step, which begin at place `first`."""
        at, decodes = self._scheduler.at, work.decodes
        rows, sequences = decodes.rows, decodes.sequences
        tokens, rest = sampled.tokens[first : first + len(rows)], []
        if step or not decodes.all_plain or not at.all_there(decodes):
            brings = work.counts > step
            plain = decodes.plain & brings & (at.keys[rows] == decodes.keys)  # and still there
            rest, chosen = np.flatnonzero(brings & ~plain).tolist(), np.flatnonzero(plain)
            rows, tokens = rows[chosen], tokens[chosen]
            sequences = [sequences[i] for i in chosen.tolist()]
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
        known = at.known[rows] + 1
        at.known[rows] = known
        self._stats.generated_tokens += len(rows)
        self._outputs.note_all(sequences)
        ends = known >= at.end[rows]
        if count := decodes.num_stop_ids:
            ends |= (at.stop_ids[rows, :count] == tokens[:, None]).any(axis=1)
        for i in np.flatnonzero(ends).tolist():
            stops = int(tokens[i]) in sequences[i].request.stop_ids
            self._finish(sequences[i], "stop" if stops else "length")
        for i in rest:
            self._take_token(decodes.sequences[i], sampled, first + i, now)

    def _verify(self, sequence: Sequence, draft: list[int]) -> None:
        """Computes a draft's tokens in one step and takes those that the sequence would choose."""
        fits = self._scheduler.reserve_for(sequence, 1 + len(draft))
        if sequence.status is not Status.RUNNING:
            return  # not even its next token had a slot: it waits for one
        start = int(self._scheduler.at.scheduled[sequence.row])
        tokens, plan = [*sequence.tokens[start:], *draft][:fits], self.manager.take_plan()
        try:
            logprobs = sequence.request.logprobs
            brought = self._device.send_draft(sequence.row, start, tokens, plan, logprobs=logprobs)
            sampled = jax.tree.map(np.asarray, brought)
        except Exception as error:
            self._fail([sequence], error, plan)
            return
        now = self.clock()
        for i, token in enumerate(sampled.tokens.tolist()[: len(tokens)]):
            self._take_token(sequence, sampled, i, now)
            right = i + 1 < len(tokens) and tokens[i + 1] == token
            if sequence.finish_reason is not None or not right:
                break
        if sequence.finish_reason is None:
            self._scheduler.verified(sequence)
        self._stats.steps += 1

    def _take_token(self, sequence: Sequence, sampled: Any, place: int, now: float) -> None:
        request, token = sequence.request, int(sampled.tokens[place])
        if sequence.finish_reason is not None:
            return
        if request.beam is not None:
            if sequence.status is Status.RUNNING:
                sequence.candidates = sampled.top_ids[place], sampled.top_logprobs[place]
            else:
                sequence.awaited = 0
            return
        if request.logprobs >= 0:
            logprobs = _token_logprobs(sampled, place, token, request.logprobs)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs.logprob
        if request.timings.first_token is None:
            request.timings.first_token = now
        self._scheduler.take(sequence, token)
        self._stats.generated_tokens += 1
        self._outputs.note(sequence)
        if token in request.stop_ids or (
            request.params.stop and self._outputs.finds_stop_text(sequence)
        ):
            self._finish(sequence, "stop")
        elif len(sequence.tokens) >= request.end:
            self._finish(sequence, "length")

    def _advance_search(self, request: Request, now: float) -> None:
        """A step of a beam search, once the candidates of all its hypotheses have come."""
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
        self._stats.generated_tokens += len(live)
        for sequence in live:
            sequence.candidates = None
        spare = self._scheduler.branch(request, live, chosen)
        # More may have ended than ever lived on at once: of one token, all but one.
        more = len(beam.results()) - len(request.samples)
        spare += [self._scheduler.sequence(request, request.prompt) for _ in range(more)]
        for sequence in spare:
            self._finish(sequence, "stop")
        self._copy_forked_rows()

    # -- ends --------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if sequence.finish_reason is not None:
            return
        request = sequence.request
        sequence.finish_reason, sequence.error = reason, error
        self._scheduler.remove(sequence)
        self._outputs.note(sequence)
        if request.unforked or any(s.finish_reason is None for s in request.samples):
            return
        request.timings.finished = self.clock()
        self._outputs.choose(request)
        if request in self._searching:  # it ended before its search was over
            self._searching.remove(request)
        del self._requests[request.id]
        if not any(r.processor >= 0 for r in self._requests.values()):
            self._device.drop_processors()

    def _fail(self, concerned: list[Sequence], error: Exception, plan: Plan | None = None) -> None:
        """Ends the requests of a step that failed; the others go on, from their tokens if need be.

        A user's logits processor that fails ends its own requests only. A plan that the step was
        to take along goes to the device without it.
        """
        if plan is not None and not self._device.is_lost:
            self._device.apply(plan)
        if isinstance(error, ProcessorError):
            concerned = [s for s in concerned if s.request.processor == error.processor]
            self._device.disable_processor(error.processor)
        message = f"{type(error).__name__}: {error}"
        for sequence in concerned:
            sequence.request.unforked = 0
            self._finish(sequence, "error", message)
        if self._device.is_lost:
            self._forks.clear()
            for sequence in list(self._scheduler.running):
                self._scheduler.preempt(sequence, "the cache was lost with a step that failed")
            self.manager.take_plan()
            self.manager.reset_prefix_cache()
            self._device.reset()

    def _refuse(self, sequence: Sequence) -> None:
        """Nothing runs, and yet there is no room: pins, or what others hold, leave too little."""
        a = self.manager.can_allocate(sequence.tokens, namespace=sequence.request.namespace)
        self._finish(
            sequence, "error",
            f"out of cache: {len(sequence.tokens)} tokens need {a.needed} blocks, {a.available} "
            "can be had though nothing runs; unpin prefixes or raise num_blocks",
        )  # fmt: skip

    # -- called by the scheduler -------------------------------------------------------------

    def _forked(self, parent: Sequence, child: Sequence) -> None:
        self._forks.append((parent, child))

    def _copy_forked_rows(self) -> None:
        """Before any of them can lose its row."""
        forks, self._forks = self._forks, []
        self._device.copy_rows(forks)

    def _preempted(self, sequence: Sequence, reason: str) -> None:
        self._stats.preemptions += 1
        if not self._device.is_lost:
            sequence.processor_state = self._device.processor_state(sequence)
        detail = {"reason": reason, "request": sequence.request.id, "sample": sequence.sample}
        self.manager.note(events.PREEMPT, sequence.key, detail)


def _logprobs_kept(params: SamplingParams) -> int:
    """Likeliest tokens to keep with each token; 0: its own probability alone; -1: not even that."""
    if params.logprobs is not None:
        return params.logprobs
    ranked = params.num_samples > params.n
    return 0 if ranked or params.prompt_logprobs else -1


def _token_logprobs(sampled: Any, place: int, token: int, count: int) -> TokenLogprobs:
    ids, logprobs = sampled.top_ids[place, :count], sampled.top_logprobs[place, :count]
    top = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return TokenLogprobs(token, float(sampled.logprobs[place]), top)
