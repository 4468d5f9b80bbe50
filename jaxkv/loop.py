"""The step loop: admits requests, prefills them in chunks, decodes them as one batch."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxkv.block_manager import BlockManager
from jaxkv.config import CacheConfig
from jaxkv.reports import Plan
from jaxkv.sampling import SamplingArrays, SamplingParams, sample
from jaxkv.state import (
    Batch,
    DevicePlan,
    PagedState,
    apply_device_plan,
    apply_plan,
    bucket,
    init_state,
    pad_plan,
)

PREFILL_BUCKETS = (16, 64, 256)  # tokens of a prefill step; the last is the chunk size


@dataclasses.dataclass
class Output:
    """What one prompt became.

    Attributes:
      prompt_ids: the prompt.
      token_ids: the generated tokens, the end token included.
      finish_reason: "stop" (an end token) or "length" (max_tokens or the context).
      num_cached_tokens: prompt tokens whose KV was found in the cache.
      time_to_first_token: seconds from the call to the first token; None if there is none.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str = "length"
    num_cached_tokens: int = 0
    time_to_first_token: float | None = None


# How often a step was traced, by its (tokens, sequences): each should come up once per model.
trace_counts: Counter[tuple[int, int]] = Counter()

# (state, plan, tokens i32[T], batch, sampling) -> (next token of each sequence i32[S], state)
Step = Callable[
    [PagedState, DevicePlan, np.ndarray, Batch, SamplingArrays], tuple[jax.Array, PagedState]
]


def make_step(model: Any) -> Step:
    """The model's jitted step: plan, forward, sample. It donates the state.

    The weights are flattened here, once. With graph and parameters as arguments of the step a call
    took 9 to 11 ms to dispatch for SmolLM2, 4 of them to hash the graph.
    """
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    return functools.partial(_compiled_step(graph, tree), leaves)


@functools.lru_cache(maxsize=8)
def _compiled_step(graph: Any, tree: Any) -> Any:
    """One jitted function for all models of one structure, so that they share what it compiled."""

    @functools.partial(jax.jit, donate_argnames="state")
    def step(leaves, state, plan, tokens, batch, sampling):
        trace_counts[len(tokens), len(batch.query_start) - 1] += 1
        state = apply_device_plan(state, plan)
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        logits, state = model(tokens, state, batch)
        positions = jax.numpy.asarray(batch.positions)[batch.last_tokens] + 1
        return sample(logits, sampling, positions), state

    return step


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt on its way through the loop."""

    index: int
    prompt: list[int]
    params: SamplingParams
    limit: int  # tokens to generate at most: max_tokens, or what the context leaves
    stop: frozenset[int]
    output: Output
    row: int = -1

    @property
    def slots(self) -> int:
        """Slots it may come to need: the last token's KV is never written."""
        return len(self.prompt) + self.limit - 1


class Loop:
    """The step loop: owns the manager and the state."""

    def __init__(
        self,
        model: Any,
        cache: CacheConfig,
        started: float,
        on_token: Callable[[int, int], None] | None,
    ):
        self.step = make_step(model)
        self.cache = cache
        self.manager = BlockManager.for_config(cache)
        self.state = init_state(cache)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.started = started
        self.on_token = on_token
        self.decode_buckets = [1 << i for i in range((cache.max_seqs - 1).bit_length() + 1)]
        self.decode_steps = self.prefill_steps = self.decode_tokens = self.peak_seqs = 0
        self.decode_seconds = self.compile_seconds = 0.0

    def run(self) -> None:
        while self.waiting or self.prefilling or self.decoding:
            self._admit()
            if self.prefilling:
                self._prefill()
            else:
                self._decode()

    def _admit(self) -> None:
        """First come, first served, while rows are free and the pool holds all to their ends."""
        running = self.prefilling + self.decoding
        promised = sum(self.cache.blocks_for(r.slots) for r in running)
        while self.waiting and len(running) < self.cache.max_seqs:
            request = self.waiting[0]
            promised += self.cache.blocks_for(request.slots)
            if promised > self.cache.num_blocks - 1:
                break
            allocation = self.manager.allocate(request.index, request.prompt)
            request.row = allocation.row
            request.output.num_cached_tokens = allocation.num_cached_tokens
            self.prefilling.append(self.waiting.popleft())
            running.append(request)
        self.peak_seqs = max(self.peak_seqs, len(running))

    def _prefill(self) -> None:
        """One chunk of the prompts that wait for theirs, the longest waiting first."""
        chosen, starts, counts, tokens = [], [], [], []
        budget = PREFILL_BUCKETS[-1]
        for request in self.prefilling:
            start = self.manager.num_computed_tokens(request.index)
            count = min(budget, len(request.prompt) - start)
            if count == 0:
                break
            budget -= count
            chosen.append(request)
            starts.append(start)
            counts.append(count)
            tokens += request.prompt[start : start + count]
        batch = Batch.ragged(
            [r.row for r in chosen],
            starts,
            counts,
            num_tokens=bucket(len(tokens), PREFILL_BUCKETS),
            num_seqs=self.cache.max_seqs,
            padding_row=self.cache.max_seqs,
        )
        sampled = self._step(chosen, tokens, batch)
        self.prefill_steps += 1
        for request, start, count, token in zip(chosen, starts, counts, sampled, strict=True):
            self.manager.commit(request.index, count)
            if start + count == len(request.prompt):
                self.prefilling.remove(request)
                self.decoding.append(request)
                self._take_token(request, token)

    def _decode(self) -> None:
        """One token of every running sequence."""
        chosen = list(self.decoding)
        tokens = [r.output.token_ids[-1] for r in chosen]
        ids = [r.index for r in chosen]
        self.manager.append_batch(ids, np.array(tokens))
        positions = [len(r.prompt) + len(r.output.token_ids) - 1 for r in chosen]
        batch = Batch.decode(
            np.array([r.row for r in chosen]),
            np.array(positions),
            num_seqs=bucket(len(chosen), self.decode_buckets),
            padding_row=self.cache.max_seqs,
        )
        compiled, began = self.compile_seconds, time.perf_counter()
        sampled = self._step(chosen, tokens, batch)
        if self.compile_seconds == compiled:
            self.decode_seconds += time.perf_counter() - began
            self.decode_tokens += len(chosen)
        self.decode_steps += 1
        for request, token in zip(chosen, sampled, strict=True):
            self.manager.commit(request.index, 1)
            self._take_token(request, token)

    def _step(self, chosen: list[Request], tokens: list[int], batch: Batch) -> list[int]:
        """Runs the device step; the sampled token of each chosen request."""
        num_seqs = len(batch.query_start) - 1
        padded = np.zeros(len(batch.positions), np.int32)
        padded[: len(tokens)] = tokens
        sampling = SamplingArrays.of(
            [r.params for r in chosen], [r.index for r in chosen], num_seqs
        )
        plan = self.manager.take_plan()
        size = max(8, num_seqs)
        if len(plan.cells) > size or len(plan.lengths) > size:
            # Too many changes for the step's own small plan (a prompt came or went).
            self.state = apply_plan(self.state, plan)
            plan = Plan.empty()
        traces, began = trace_counts.total(), time.perf_counter()
        sampled, self.state = self.step(
            self.state,
            pad_plan(plan, cells=size, lengths=size),
            padded,
            batch,
            sampling,
        )
        if trace_counts.total() > traces:
            self.compile_seconds += time.perf_counter() - began
        return np.asarray(sampled)[: len(chosen)].tolist()

    def _take_token(self, request: Request, token: int) -> None:
        output = request.output
        if not output.token_ids:
            output.time_to_first_token = time.perf_counter() - self.started
        output.token_ids.append(token)
        if self.on_token is not None:
            self.on_token(request.index, token)
        if token in request.stop or len(output.token_ids) >= request.limit:
            output.finish_reason = "stop" if token in request.stop else "length"
            self.decoding.remove(request)
            self.manager.free(request.index)
