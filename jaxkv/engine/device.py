"""The device side of an engine: the cache, the sampler's rows, and the compiled steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from jaxkv._util import next_power_of_two
from jaxkv.cache.plan import DevicePlan, apply_plan, bucket, pad_plan
from jaxkv.cache.state import PagedState, init_state
from jaxkv.config import CacheConfig
from jaxkv.engine.batching import Batching, StepInputs, StepShape
from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.processors import Processors
from jaxkv.engine.requests import Sequence, SequenceError
from jaxkv.engine.steps import Steps, make_steps
from jaxkv.engine.work import Work
from jaxkv.manager.records import Plan, PlanOrder
from jaxkv.sampling.params import MAX_STOP_TOKENS, LogitsProcessor
from jaxkv.sampling.sampler import Sampled, SamplerState, set_rows

# Most likely tokens that a step reports: 64 for a user, more for beams with many end tokens.
_LOGPROB_BUCKETS = (0, 8, 64, 32 * (1 + MAX_STOP_TOKENS))
_MIN_PLAN = 8  # cells and lengths of the smallest plan of a step


@dataclasses.dataclass
class InFlightStep:
    """A step that was dispatched and whose tokens the host has not taken in.

    Attributes:
      work: the step's work. The tokens of its decodes come first, step by step.
      sampled: sampled tokens; arrays on the device.
      inputs: the step's arguments, and the places of its tokens.
    """

    work: Work
    sampled: Sampled
    inputs: StepInputs


class Device:
    """The cache, the sampler's rows, and the steps that move them on."""

    def __init__(self, model: Any, cache: CacheConfig, config: SchedulerConfig):
        self.cache, self.config = cache, config
        self._vocab_size: int = model.config.vocab_size
        self._steps: Steps = make_steps(model)
        self._batching = Batching(cache, config)
        self.processors = Processors(self._vocab_size, cache.max_len)
        self._no_changes: dict[int, DevicePlan] = {}  # by size
        self.reset()

    def reset(self) -> None:
        """Makes an empty cache and empty sampler rows: at the start, and after a failed step."""
        if (old := getattr(self, "state", None)) is not None:  # there is no room for two pools
            old.kv_pages.delete()
        self._last: PlanOrder | None = None  # of the plans that were applied
        placement = self._steps.placement
        self.state: PagedState = init_state(self.cache, device=placement)
        self.sampler: SamplerState = jax.device_put(self._empty(self.cache.max_seqs), placement)

    def _empty(self, rows: int) -> SamplerState:
        states = self.processors.first_states(rows)
        return SamplerState.empty(rows, self.cache.max_len).with_processor_states(states)

    # -- rows --------------------------------------------------------------------------------

    def use_processor(self, processor: LogitsProcessor | None) -> int:
        """Slot of a logits processor for one more request, -1 for none; steps are compiled with it
        from then on."""
        if processor is None:
            return -1
        slot, new = self.processors.use(processor)
        if new:
            first = self.processors.first_states(self.cache.max_seqs)[slot]
            states = list(self.sampler.history.processor_states)
            states[slot : slot + 1] = [jax.device_put(first, self._steps.placement)]
            self.sampler = self.sampler.with_processor_states(tuple(states))
        return slot

    def release_processor(self, slot: int) -> None:
        """Follows the end of a request that used a logits processor."""
        if slot >= 0 and self.processors.release(slot):
            self.sampler = self.sampler.with_processor_states(())

    def fill_rows(self, sequences: Seq[Sequence]) -> None:
        """Fills the sampler's rows of sequences that got one: tokens and parameters.

        Raises:
          SequenceError: the row of one sequence cannot be filled; no row was changed.
        """
        if not sequences:
            return
        size = next_power_of_two(len(sequences))
        new = self._empty(size)
        rows = np.full(size, self.cache.max_seqs, np.int32)
        for i, sequence in enumerate(sequences):
            request = sequence.request
            rows[i] = sequence.row
            try:
                new.fill(
                    i, sequence.tokens, request.params, num_prompt=len(request.prompt),
                    end=request.end, stop_ids=sorted(request.stop_ids), seed=request.seed,
                    sample=sequence.sample, processor=request.processor,
                )  # fmt: skip
                if sequence.processor_state is not None:
                    kept = new.history.processor_states[request.processor]
                    state = sequence.processor_state.state
                    jax.tree.map(lambda x, s, i=i: x.__setitem__(i, s), kept, state)
            except Exception as error:
                raise SequenceError(sequence, error) from error
        self.sampler = set_rows(self.sampler, rows, new)

    # -- steps -------------------------------------------------------------------------------

    def send(self, work: Work, plan: Plan, shape: StepShape | None = None) -> InFlightStep:
        """Dispatches a step, in the smallest shape that holds it, without waiting for it. Donates
        state and history."""
        shape = shape or self._batching.shape_of(work)
        inputs = self._batching.inputs(work, shape)
        options: dict[str, Any] = dict(
            num_logprobs=self._num_logprobs(work.logprobs), processors=tuple(self.processors)
        )
        step, size = self._steps.step, max(_MIN_PLAN, self.cache.max_seqs)
        if not shape.chunk_tokens:
            step, size = self._steps.decode, max(_MIN_PLAN, shape.decodes)
            options["num_steps"] = shape.num_steps
        plan = self._copy_blocks(plan)
        if max(len(plan.cells), len(plan.lengths)) > size:
            # Too many changes for the step's own small plan (a prompt was admitted or ended).
            self.apply(plan)
            plan = Plan.empty()
        sampled = self._run(step, self._pad(plan, size), *inputs.args, **options)
        return InFlightStep(work, sampled, inputs)

    def _run(self, step: Callable[..., Any], plan: DevicePlan, *args: Any, **options: Any):
        history, params = self.sampler.history, self.sampler.params
        sampled, self.state, history = step(self.state, history, params, plan, *args, **options)
        self.sampler = SamplerState(history, params)
        return sampled

    def send_draft(
        self, row: int, start: int, tokens: list[int], plan: Plan, *,
        num_tokens: int | None = None, logprobs: int = -1,
    ) -> Sampled:  # fmt: skip
        """A choice after each of `tokens`, the row's from position `start` on."""
        inputs = self._batching.draft(row, start, tokens, num_tokens)
        self.apply(plan)
        nothing = pad_plan(Plan.empty(), cells=_MIN_PLAN, lengths=_MIN_PLAN)
        return self._run(
            self._steps.step, nothing, *inputs.args,
            num_logprobs=self._num_logprobs(logprobs), processors=tuple(self.processors),
        )  # fmt: skip

    def apply(self, plan: Plan) -> None:
        """Applies a plan without a step."""
        plan = self._copy_blocks(plan)
        if len(plan.cells) or len(plan.lengths):
            size = bucket(max(len(plan.cells), len(plan.lengths)))
            self.state = apply_plan(self.state, pad_plan(plan, cells=size, lengths=size))

    def _copy_blocks(self, plan: Plan) -> Plan:
        """Runs a plan's block copies by themselves, so that steps need no shape for them; returns
        the rest of the plan."""
        plan = self._in_order(plan)
        none = Plan.empty()
        if len(plan.copies):
            copies = dataclasses.replace(none, copies=plan.copies)
            self.state = apply_plan(self.state, pad_plan(copies))
        return dataclasses.replace(plan, copies=none.copies)

    def _in_order(self, plan: Plan) -> Plan:
        """Checks that no plan was left out that did more than clear cells; returns the plan without
        its order.

        Raises:
          StateError: somebody else has taken a plan of the manager: the cache is lost.
        """
        order, last = plan.order, self._last
        if order is None:
            return plan
        if last is not None and (last.chain is not order.chain or last.number < order.settled):
            at = f"the engine has applied plan {last.number} of {last.chain.name}"
            raise order.chain.refuse(order.number, order.before, at)
        self._last = order
        return dataclasses.replace(plan, order=None)

    def shapes(self, *, drafts: bool) -> list[StepShape]:
        """All shapes of steps; log-probabilities and logits processors make more of each."""
        return self._batching.shapes(drafts=drafts)

    def compile(self, shape: StepShape) -> None:
        """Compiles a step by running it on nothing but padding."""
        none = Plan.empty()
        if shape.draft:
            sampled = self.send_draft(0, 0, [], none, num_tokens=shape.chunk_tokens)
        else:
            sampled = self.send(Work.nothing(), none, shape).sampled
        jax.block_until_ready(sampled)

    def compile_updates(self) -> None:
        """Compiles the updates between steps: rows that are filled or moved."""
        max_seqs, columns = self.cache.max_seqs, self.cache.max_blocks_per_seq
        for size in _powers(max_seqs):
            rows = np.full(size, max_seqs, np.int32)
            self.sampler = set_rows(self.sampler, rows, self._empty(size))
        none = Plan.empty()
        for size in _powers(max_seqs * columns):
            if size >= _MIN_PLAN:
                self.state = apply_plan(self.state, pad_plan(none, cells=size, lengths=size))
        for size in _powers(2 * max_seqs):  # of rows that go on, and of those admitted
            copies = np.zeros((max(_MIN_PLAN, size), 2), np.int32)  # the null block onto itself
            plan = dataclasses.replace(none, copies=copies)
            self.state = apply_plan(self.state, pad_plan(plan))

    def _num_logprobs(self, wanted: int) -> int | None:
        """Most likely tokens that a step reports, as a bucket; None: no log-probabilities."""
        return None if wanted < 0 else min(bucket(wanted, _LOGPROB_BUCKETS), self._vocab_size)

    def _pad(self, plan: Plan, size: int) -> DevicePlan:
        """Pads a plan to `size` changes; unchanged parts are padding kept on the device."""
        if size not in self._no_changes:
            nothing = pad_plan(Plan.empty(), cells=size, lengths=size)
            self._no_changes[size] = jax.device_put(nothing)
        none = self._no_changes[size]
        if not len(plan.cells) and not len(plan.lengths):
            return none
        padded = pad_plan(plan, cells=size, lengths=size)
        return DevicePlan(
            none.copies,
            padded.cells if len(plan.cells) else none.cells,
            padded.lengths if len(plan.lengths) else none.lengths,
        )


def _powers(size: int) -> list[int]:
    """Powers of two up to the first that holds `size`."""
    return [1 << i for i in range((size - 1).bit_length() + 1)]
