"""Batches of steps: a scheduler's work as the padded arrays of a compiled step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.cache.batch import Batch
from jaxkv.cache.plan import bucket
from jaxkv.config import CacheConfig
from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.requests import Sequence
from jaxkv.engine.steps import SampledPositions
from jaxkv.engine.work import Chunk, Decodes, Work
from jaxkv.errors import ConfigError


class StepShape(NamedTuple):
    """Static shape of a step: what it is compiled for.

    Attributes:
      chunk_tokens: room for prompt tokens; 0: a decode step.
      decodes: room for sequences with one token.
      num_steps: decode steps of one dispatch.
      draft: whether the tokens are a draft, with a choice after each of them.
    """

    chunk_tokens: int
    decodes: int
    num_steps: int = 1
    draft: bool = False


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """Arguments of a step, and the places of the tokens that it samples.

    Attributes:
      tokens: i32[T]; -1 where the device has the token.
      batch: the batch.
      sampled: the positions after which a token is sampled; None in a decode step: all.
      stride: places from one token of a decode to its next.
      places: (sequence, place of its token) of those whose prompt ends in this step.
      prompts: (chunk, first place of its tokens) where their log-probabilities are wanted.
    """

    tokens: Any
    batch: Batch
    sampled: SampledPositions | None
    stride: int
    places: list[tuple[Sequence, int]]
    prompts: list[tuple[Chunk, int]]

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments of the step."""
        rest = () if self.sampled is None else (self.sampled,)
        return (self.tokens, self.batch, *rest)


class Batching:
    """Makes the arrays of steps, in as few shapes as the buckets allow.

    Raises:
      ConfigError: decode buckets without room for all rows of the cache.
    """

    def __init__(self, cache: CacheConfig, config: SchedulerConfig):
        self._cache, self._config = cache, config
        powers = (1 << i for i in range(cache.max_seqs.bit_length()))
        self.decode_buckets = config.decode_buckets or sorted({*powers, cache.max_seqs})
        if self.decode_buckets[-1] < cache.max_seqs:
            raise ConfigError(
                f"decode_buckets={self.decode_buckets} have no room for max_seqs={cache.max_seqs}"
            )
        self._decoding: tuple[Decodes, Batch, jax.Array] | None = None  # of the last decode step

    def shapes(self, *, drafts: bool) -> list[StepShape]:
        """All shapes of steps; log-probabilities and logits processors make more of each."""
        steps = sorted({1, self._config.decode_steps_per_dispatch})
        prompts = [(0, False), (self._cache.max_seqs, False), *([(0, True)] if drafts else [])]
        return [
            *(StepShape(tokens, n, 1, draft) for tokens in self._config.prefill_buckets
              for n, draft in prompts),
            *(StepShape(0, n, k) for n in self.decode_buckets for k in steps),
        ]  # fmt: skip

    def shape_of(self, work: Work) -> StepShape:
        """The smallest shape that holds a step's work."""
        count = len(work.decodes)
        if not work.chunks:
            return StepShape(0, bucket(count, self.decode_buckets), work.num_steps)
        tokens = bucket(sum(chunk.count for chunk in work.chunks), self._config.prefill_buckets)
        return StepShape(tokens, self._cache.max_seqs if count else 0)

    def inputs(self, work: Work, shape: StepShape) -> StepInputs:
        """The arrays of a step."""
        return self._mixed(work, shape) if shape.chunk_tokens else self._decode(work, shape)

    def draft(
        self, row: int, start: int, tokens: Seq[int], num_tokens: int | None = None
    ) -> StepInputs:
        """A choice after each of `tokens`, the row's from position `start` on; padded."""
        max_seqs, count = self._cache.max_seqs, len(tokens)
        num_tokens = num_tokens or bucket(count, self._config.prefill_buckets)
        batch = Batch.ragged(
            [row], [start], [count],
            num_tokens=num_tokens, num_seqs=min(num_tokens, max_seqs), padding_row=max_seqs,
        )  # fmt: skip
        batch = dataclasses.replace(batch, logits_at=np.arange(num_tokens, dtype=np.int32))
        given, rows = np.full(num_tokens, -1, np.int32), np.full(num_tokens, max_seqs, np.int32)
        given[:count], rows[:count] = tokens, row
        # No choice is kept: the right ones are known only when all of them are.
        keep, targets = np.zeros(num_tokens, bool), np.full(num_tokens, -1, np.int32)
        return StepInputs(given, batch, SampledPositions(rows, keep, targets), 0, [], [])

    def _decode(self, work: Work, shape: StepShape) -> StepInputs:
        count, size = len(work.decodes), shape.decodes
        # From step to step only the positions change. The rest stays on the device: an array from
        # the host costs as much dispatch time as ten that are there.
        if self._decoding is None or self._decoding[0] is not work.decodes:
            batch = Batch.decode(
                work.decodes.rows, work.positions, num_seqs=size, padding_row=self._cache.max_seqs
            )
            unseen = np.full(size, -1, np.int32)
            self._decoding = work.decodes, *jax.device_put((batch, unseen))
        _, batch, tokens = self._decoding
        positions = np.zeros(size, np.int32)
        positions[:count] = work.positions
        if work.tokens is not None:
            tokens = np.full(size, -1, np.int32)
            tokens[:count] = work.tokens
        batch = dataclasses.replace(batch, positions=positions)
        return StepInputs(tokens, batch, None, size, [], [])

    def _mixed(self, work: Work, shape: StepShape) -> StepInputs:
        chunks, max_seqs, count = work.chunks, self._cache.max_seqs, len(work.decodes)
        num_tokens, num_decodes = shape.chunk_tokens, shape.decodes
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
        # Places: decodes, then one for each chunk that ends a prompt and for its children, then, if
        # log-probabilities of prompts are requested, all tokens of the chunks.
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
        sampled = SampledPositions(rows, keep, targets)
        return StepInputs(tokens, batch, sampled, size, places, prompts)
