"""From a scheduler's work to a compiled step and back: batches, buckets, rows on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.batch import Batch
from jaxkv.cache.plan import DevicePlan, apply_plan, bucket, pad_plan
from jaxkv.cache.state import PagedState, init_state, is_stale
from jaxkv.config import CacheConfig
from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.requests import Sequence
from jaxkv.engine.steps import Entries, Steps, make_steps
from jaxkv.engine.work import Chunk, Decodes, Work
from jaxkv.errors import ConfigError
from jaxkv.manager.records import Plan
from jaxkv.sampling.params import LogitsProcessor
from jaxkv.sampling.sampler import Sampled, SamplerState, copy_rows, set_rows

_LOGPROB_BUCKETS = (0, 8, 64)  # likeliest tokens that a step reports
_MIN_PLAN = 8  # cells and lengths of the smallest plan that a step takes along


@dataclasses.dataclass
class Flight:
    """A step that was sent off.

    Attributes:
      work: what it computes. The tokens of its decodes come first, step by step.
      sampled: what it brings; arrays on the device.
      stride: from one token of a decode to its next.
      places: (sequence, place of its token) of those whose prompt ends.
      prompts: (chunk, first place of its tokens) where their log-probabilities are wanted.
    """

    work: Work
    sampled: Sampled
    stride: int
    places: list[tuple[Sequence, int]]
    prompts: list[tuple[Chunk, int]]


class Form(NamedTuple):
    """What a step is compiled for.

    Attributes:
      chunk_tokens: room for prompt tokens; 0: a decode step.
      decodes: room for sequences with one token.
      num_steps: decode steps of one dispatch.
      draft: a choice after each of the tokens, which are a draft.
    """

    chunk_tokens: int
    decodes: int
    num_steps: int = 1
    draft: bool = False


class Device:
    """The cache, the sampler's rows, and the steps that move them on."""

    def __init__(self, model: Any, cache: CacheConfig, config: SchedulerConfig):
        self.cache, self.config = cache, config
        self._steps: Steps = make_steps(model)
        powers = (1 << i for i in range(cache.max_seqs.bit_length()))
        self.decode_buckets = config.decode_buckets or sorted({*powers, cache.max_seqs})
        if self.decode_buckets[-1] < cache.max_seqs:
            raise ConfigError(
                f"decode_buckets={self.decode_buckets} have no room for max_seqs={cache.max_seqs}"
            )
        self.processors: list[LogitsProcessor] = []
        self._no_changes: dict[int, DevicePlan] = {}  # by size
        self._decoding: tuple[Decodes, Batch, jax.Array] | None = None  # the last ones
        self.reset()

    def reset(self) -> None:
        """An empty cache and no sequences: at the start, and after a step that failed."""
        self.state: PagedState = init_state(self.cache)
        self.sampler: SamplerState = jax.tree.map(jnp.asarray, self._empty(self.cache.max_seqs))

    @property
    def is_lost(self) -> bool:
        """Whether a step that failed took the cache with it."""
        return is_stale(self.state) or self.sampler.history.token_ids.is_deleted()

    def lose(self) -> None:
        """The cache came out of a step that failed: nothing in it can be read."""
        self.state.kv_pages.delete()

    def _empty(self, rows: int) -> SamplerState:
        states = tuple(
            jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], rows, 0), processor.init())
            for processor in self.processors
        )
        return SamplerState.empty(rows, self.cache.max_len).with_processor_states(states)

    # -- rows --------------------------------------------------------------------------------

    def use_processor(self, processor: LogitsProcessor | None) -> int:
        """Its index, -1 for none; from its first use on, steps are compiled with it."""
        if processor is None:
            return -1
        if processor not in self.processors:
            rows = self.cache.max_seqs
            first = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], rows, 0),
                                 processor.init())  # fmt: skip
            self.processors.append(processor)
            states = (*self.sampler.history.processor_states, first)
            self.sampler = self.sampler.with_processor_states(states)
        return self.processors.index(processor)

    def disable_processor(self, index: int) -> None:
        """A processor that failed does nothing from now on."""
        self.processors[index] = LogitsProcessor(
            self.processors[index].init, lambda logits, state, tokens, length: (logits, state)
        )

    def drop_processors(self) -> None:
        """No request uses one any more."""
        if self.processors:
            self.processors.clear()
            self.sampler = self.sampler.with_processor_states(())

    def processor_state(self, sequence: Sequence) -> Any:
        """The state of a running sequence's processor, to be kept while it has no row."""
        i = sequence.request.processor
        if i < 0:
            return None
        return jax.tree.map(lambda x: x[sequence.row], self.sampler.history.processor_states[i])

    def fill_rows(self, sequences: Seq[Sequence]) -> None:
        """The rows of sequences that were admitted: tokens and parameters."""
        if not sequences:
            return
        size = 1 << (len(sequences) - 1).bit_length()
        new = self._empty(size)
        rows = np.full(size, self.cache.max_seqs, np.int32)
        for i, sequence in enumerate(sequences):
            request = sequence.request
            rows[i] = sequence.row
            new.fill(
                i, sequence.tokens, request.params, num_prompt=len(request.prompt),
                end=request.end, stop_ids=sorted(request.stop_ids), seed=request.seed,
                sample=sequence.sample, processor=request.processor,
            )  # fmt: skip
            if sequence.processor_state is not None:
                kept = new.history.processor_states[request.processor]
                jax.tree.map(lambda x, s, i=i: x.__setitem__(i, s), kept, sequence.processor_state)
                sequence.processor_state = None
        self.sampler = set_rows(self.sampler, rows, new)

    def copy_rows(self, pairs: Seq[tuple[Sequence, Sequence]]) -> None:
        """(parent, child): the child's row becomes the parent's, with the child's seed."""
        if not pairs:
            return
        size = 1 << (len(pairs) - 1).bit_length()
        sources, rows = np.zeros(size, np.int32), np.full(size, self.cache.max_seqs, np.int32)
        seeds, samples = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        for i, (parent, child) in enumerate(pairs):
            sources[i], rows[i] = parent.row, child.row
            seeds[i], samples[i] = child.request.seed, child.sample
        self.sampler = copy_rows(self.sampler, sources, rows, seeds, samples)

    # -- steps -------------------------------------------------------------------------------

    def send(self, work: Work, plan: Plan, form: Form | None = None) -> Flight:
        """Sends a step off, in the smallest form that holds it; does not wait for it. Donates state
        and history."""
        form = form or self._form(work)
        options: dict[str, Any] = dict(
            num_logprobs=_num_logprobs(work.logprobs), processors=tuple(self.processors)
        )
        if form.chunk_tokens:
            brings, args = self._mixed(work, form)
            size = max(_MIN_PLAN, self.cache.max_seqs)
            step = self._steps.step
        else:
            brings, args = self._decode(work, form)
            size = max(_MIN_PLAN, form.decodes)
            step = self._steps.decode
            options["num_steps"] = form.num_steps
        plan = self._copy_blocks(plan)
        if max(len(plan.cells), len(plan.lengths)) > size:
            # Too many changes for the step's own small plan (a prompt came or went).
            self.apply(plan)
            plan = Plan.empty()
        padded = self._pad(plan, size)
        sampled = self._run(step, padded, *args, **options)
        return Flight(work, sampled, *brings)

    def _run(self, step: Callable[..., Any], plan: DevicePlan, *args: Any, **options: Any):
        history, params = self.sampler.history, self.sampler.params
        sampled, self.state, history = step(self.state, history, params, plan, *args, **options)
        self.sampler = SamplerState(history, params)
        return sampled

    def send_draft(
        self, row: int, start: int, tokens: list[int], plan: Plan, *,
        num_tokens: int | None = None, logprobs: int = -1,
    ) -> Sampled:  # fmt: skip
        """A choice after each of `tokens`, the row's from position `start` on; padded."""
        max_seqs, count = self.cache.max_seqs, len(tokens)
        num_tokens = num_tokens or bucket(count, self.config.prefill_buckets)
        batch = Batch.ragged(
            [row], [start], [count],
            num_tokens=num_tokens, num_seqs=min(num_tokens, max_seqs), padding_row=max_seqs,
        )  # fmt: skip
        batch = dataclasses.replace(batch, logits_at=np.arange(num_tokens, dtype=np.int32))
        given, rows = np.full(num_tokens, -1, np.int32), np.full(num_tokens, max_seqs, np.int32)
        given[:count], rows[:count] = tokens, row
        # Nothing is kept: which choices count is known when all of them are.
        entries = Entries(rows, np.zeros(num_tokens, bool), np.full(num_tokens, -1, np.int32))
        self.apply(plan)
        nothing = pad_plan(Plan.empty(), cells=_MIN_PLAN, lengths=_MIN_PLAN)
        return self._run(
            self._steps.step, nothing, given, batch, entries,
            num_logprobs=_num_logprobs(logprobs), processors=tuple(self.processors),
        )  # fmt: skip

    def apply(self, plan: Plan) -> None:
        """The tables follow the manager without a step."""
        plan = self._copy_blocks(plan)
        if len(plan.cells) or len(plan.lengths):
            size = bucket(max(len(plan.cells), len(plan.lengths)))
            self.state = apply_plan(self.state, pad_plan(plan, cells=size, lengths=size))

    def _copy_blocks(self, plan: Plan) -> Plan:
        """Copies a plan's blocks, by themselves, so that there are as few forms as there are sizes;
        what is left of it."""
        none = Plan.empty()
        if len(plan.copies):
            copies = dataclasses.replace(none, copies=plan.copies)
            self.state = apply_plan(self.state, pad_plan(copies))
        return dataclasses.replace(plan, copies=none.copies)

    def forms(self, *, drafts: bool) -> list[Form]:
        """All forms of steps, log-probabilities and logits processors apart."""
        steps = sorted({1, self.config.decode_steps_per_dispatch})
        prompts = [(0, False), (self.cache.max_seqs, False), *([(0, True)] if drafts else [])]
        return [
            *(Form(tokens, n, 1, draft) for tokens in self.config.prefill_buckets
              for n, draft in prompts),
            *(Form(0, n, k) for n in self.decode_buckets for k in steps),
        ]  # fmt: skip

    def compile(self, form: Form) -> None:
        """Runs a step of padding alone, which changes nothing that counts."""
        none = Plan.empty()
        if form.draft:
            sampled = self.send_draft(0, 0, [], none, num_tokens=form.chunk_tokens)
        else:
            sampled = self.send(Work.nothing(), none, form).sampled
        jax.block_until_ready(sampled)

    def compile_updates(self) -> None:
        """Likewise all else that happens between steps: rows that come, fork or move."""
        max_seqs, columns = self.cache.max_seqs, self.cache.max_blocks_per_seq
        for size in _powers(max_seqs):
            rows, numbers = np.full(size, max_seqs, np.int32), np.zeros(size, np.uint32)
            self.sampler = set_rows(self.sampler, rows, self._empty(size))
            self.sampler = copy_rows(self.sampler, rows * 0, rows, numbers, numbers)
        none = Plan.empty()
        for size in _powers(max_seqs * columns):
            if size >= _MIN_PLAN:
                self.state = apply_plan(self.state, pad_plan(none, cells=size, lengths=size))
        for size in _powers(max_seqs):
            copies = np.zeros((max(_MIN_PLAN, size), 2), np.int32)  # the null block onto itself
            plan = dataclasses.replace(none, copies=copies)
            self.state = apply_plan(self.state, pad_plan(plan))

    def _form(self, work: Work) -> Form:
        count = len(work.decodes)
        if not work.chunks:
            return Form(0, bucket(count, self.decode_buckets), work.num_steps)
        tokens = bucket(sum(chunk.count for chunk in work.chunks), self.config.prefill_buckets)
        return Form(tokens, self.cache.max_seqs if count else 0)

    def _pad(self, plan: Plan, size: int) -> DevicePlan:
        """A plan with room for `size` changes; of what has not changed, padding from the device."""
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

    def _decode(self, work: Work, form: Form):
        count, size = len(work.decodes), form.decodes
        # From step to step only the positions change. The rest stays on the device: each array that
        # comes from the host takes as long as ten that are there.
        if self._decoding is None or self._decoding[0] is not work.decodes:
            batch = Batch.decode(
                work.decodes.rows, work.positions, num_seqs=size, padding_row=self.cache.max_seqs
            )
            unseen = np.full(size, -1, np.int32)
            self._decoding = work.decodes, *jax.device_put((batch, unseen))
        _, batch, tokens = self._decoding
        positions = np.zeros(size, np.int32)
        positions[:count] = work.positions
        if work.tokens is not None:
            tokens = np.full(size, -1, np.int32)
            tokens[:count] = work.tokens
        return (size, [], []), (tokens, dataclasses.replace(batch, positions=positions))

    def _mixed(self, work: Work, form: Form):
        chunks, max_seqs, count = work.chunks, self.cache.max_seqs, len(work.decodes)
        num_tokens, num_decodes = form.chunk_tokens, form.decodes
        num_seqs = min(num_tokens, max_seqs)
        batch = Batch.mixed(
            work.decodes.rows,
            work.positions,
            [c.sequence.row for c in chunks],
            [c.start for c in chunks],
            [c.count for c in chunks],
            num_decodes=num_decodes, num_tokens=num_tokens, num_seqs=num_seqs,
            padding_row=max_seqs,
        )  # fmt: skip
        tokens = np.full(len(batch.positions), -1, np.int32)
        if work.tokens is not None:
            tokens[:count] = work.tokens
        # Places: decodes, then a choice for each chunk's end and its children, then, where the
        # prompts' log-probabilities are wanted, all tokens of the chunks.
        ends = [c for c in chunks if c.last]
        choices = sum(1 + len(c.children) for c in ends)
        room = num_seqs if choices <= num_seqs else max_seqs
        whole = any(c.sequence.request.wants_prompt_logprobs for c in chunks)
        size = num_decodes + room + (num_tokens if whole else 0)
        at, rows = np.zeros(size, np.int32), np.full(size, max_seqs, np.int32)
        keep, targets = np.zeros(size, bool), np.full(size, -1, np.int32)
        at[:count], rows[:count], keep[:count] = np.arange(count), work.decodes.rows, True
        places, prompts, place, token = [], [], num_decodes, num_decodes
        for chunk in chunks:
            if whole and chunk.sequence.request.wants_prompt_logprobs:
                first = room + token
                span = slice(first, first + chunk.count)
                at[span] = np.arange(token, token + chunk.count)
                nexts = chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
                targets[first : first + len(nexts)] = nexts
                prompts.append((chunk, first))
            token += chunk.count
            if chunk.last:
                for sequence in (chunk.sequence, *chunk.children):
                    at[place], rows[place], keep[place] = token - 1, sequence.row, True
                    places.append((sequence, place))
                    place += 1
        batch = dataclasses.replace(batch, logits_at=at)
        return (size, places, prompts), (tokens, batch, Entries(rows, keep, targets))


def _powers(size: int) -> list[int]:
    """Powers of two up to the first that holds `size`."""
    return [1 << i for i in range((size - 1).bit_length() + 1)]


def _num_logprobs(wanted: int) -> int | None:
    """How many likeliest tokens a step must report; None: no log-probabilities."""
    return None if wanted < 0 else bucket(wanted, _LOGPROB_BUCKETS)
