"""Batched generation: chunked prefill, batched decode, one compile per bucket, donated state."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxkv.block_manager import BlockManager, Plan
from jaxkv.config import CacheConfig
from jaxkv.errors import ConfigError
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


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """What a call of `generate` took.

    Attributes:
      prompt_tokens: over all prompts.
      generated_tokens: over all prompts.
      seconds: wall time of the whole call, compilation included.
      compile_seconds: of those, in steps that had to be compiled first (or read from JAX's
        compilation cache).
      decode_tokens_per_s: tokens of the other decode steps over their seconds; 0 if there is none.
      decode_steps: decode steps run.
      prefill_steps: prefill steps run.
      peak_blocks: most blocks that were in use at once.
      kv_bytes: bytes of those blocks.
      contiguous_bytes: bytes that as many caches of `max_len`, one a sequence, would reserve.
      max_len: longest sequence the cache allows, in tokens.
    """

    prompt_tokens: int
    generated_tokens: int
    seconds: float
    compile_seconds: float
    decode_tokens_per_s: float
    decode_steps: int
    prefill_steps: int
    peak_blocks: int
    kv_bytes: int
    contiguous_bytes: int
    max_len: int


@dataclasses.dataclass(frozen=True)
class Generation:
    """Outputs in the order of the prompts, and the statistics of the call."""

    outputs: list[Output]
    stats: GenerationStats


# How often `step` was traced, by its (tokens, sequences): each should come up once per model.
trace_counts: Counter[tuple[int, int]] = Counter()


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def step(
    graph: nnx.GraphDef,
    params: Any,
    state: PagedState,
    plan: DevicePlan,
    tokens: jax.Array | np.ndarray,
    batch: Batch,
    sampling: SamplingArrays,
) -> tuple[jax.Array, PagedState]:
    """One step of a model split by `nnx.split`: plan, forward, sample. Donates state.

    Args:
      tokens: i32[T], those of the batch.
      sampling: S rows.

    Returns:
      i32[S], the token after each sequence's last one; and the new state.
    """
    trace_counts[len(tokens), len(batch.query_start) - 1] += 1
    state = apply_device_plan(state, plan)
    logits, state = nnx.merge(graph, params)(tokens, state, batch)
    positions = jax.numpy.asarray(batch.positions)[batch.last_tokens] + 1
    return sample(logits, sampling, positions), state


@dataclasses.dataclass(eq=False)
class _Request:
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


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    cache: CacheConfig | None = None,
    eos_token_ids: Sequence[int] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> Generation:
    """Generates from token-id prompts as one batch through a paged cache.

    Prompts beyond the cache's rows or blocks wait until others have finished. A prompt is admitted
    when the pool holds it to its last token, so that nothing need be preempted.

    Args:
      model: an NNX module `model(tokens, state, batch) -> logits, state` with a `config` that has
        `num_layers`, `num_kv_heads`, `head_dim`, `max_position_embeddings`, `eos_token_ids`.
      prompts: token ids, one sequence each.
      params: for all prompts, or one for each; greedy by default.
      cache: sizes of the cache; by default one that holds up to 32 of the prompts at once.
      eos_token_ids: in place of the model's own.
      on_token: called with (prompt index, token id) as each token arrives.

    Raises:
      ConfigError: an empty prompt, one longer than the context, a token id outside the vocabulary,
        or a request that the pool can never hold; with the numbers, before anything runs.

    Example:
      >>> import jaxkv
      >>> from flax import nnx
      >>> from models import Llama, LlamaConfig
      >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_layers=1,
      ...                      num_heads=2, num_kv_heads=1, head_dim=4)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> result = jaxkv.generate(model, [[1, 2, 3], [4]], jaxkv.SamplingParams(max_tokens=5))
      >>> [len(output.token_ids) for output in result.outputs]
      [5, 5]
    """
    started = time.perf_counter()
    cache = cache or default_cache(model.config, prompts, params)
    stop = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
    requests = _requests(model.config, prompts, params, cache, stop)
    loop = _Loop(model, cache, started, on_token)
    for request in requests:
        if request.limit > 0:
            loop.waiting.append(request)
    loop.run()
    prompt_tokens = sum(len(r.prompt) for r in requests)
    generated = sum(len(r.output.token_ids) for r in requests)
    peak = loop.manager.stats().peak_active
    return Generation(
        outputs=[request.output for request in requests],
        stats=GenerationStats(
            prompt_tokens=prompt_tokens,
            generated_tokens=generated,
            seconds=time.perf_counter() - started,
            compile_seconds=loop.compile_seconds,
            decode_tokens_per_s=loop.decode_tokens / loop.decode_seconds if loop.decode_tokens else 0,
            decode_steps=loop.decode_steps,
            prefill_steps=loop.prefill_steps,
            peak_blocks=peak,
            kv_bytes=peak * cache.block_bytes,
            contiguous_bytes=loop.peak_seqs * cache.max_len * cache.bytes_per_token,
            max_len=cache.max_len,
        ),
    )


def default_cache(
    config: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    block_size: int = 16,
    max_seqs: int | None = None,
    num_blocks: int | None = None,
    dtype: str = "float32",
) -> CacheConfig:
    """A cache for these prompts: rows for up to 32 of them, blocks for the longest such.

    Rows and blocks are rounded up to powers of two, so that other prompts reuse what was compiled.
    """
    all_params = _per_prompt(params, len(prompts))
    context = config.max_position_embeddings
    if max_seqs is None:
        max_seqs = 1 << (min(32, max(1, len(prompts))) - 1).bit_length()
    if num_blocks is None:
        lengths = [min(context, len(p) + a.max_tokens) for p, a in zip(prompts, all_params, strict=True)]
        blocks = sorted((-(-length // block_size) for length in lengths), reverse=True)
        num_blocks = 1 << max(6, sum(blocks[:max_seqs]).bit_length())
    return CacheConfig.for_model(
        config, num_blocks=num_blocks, max_len=context, block_size=block_size, max_seqs=max_seqs,
        dtype=dtype,
    )  # fmt: skip


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts but {len(params)} sampling parameters")
    return list(params)


def _requests(
    config: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    cache: CacheConfig,
    eos_token_ids: Sequence[int],
) -> list[_Request]:
    """Checked requests; refuses all before any of them runs."""
    context = min(cache.max_len, config.max_position_embeddings)
    usable = cache.num_blocks - 1
    requests = []
    for i, (prompt, one) in enumerate(zip(prompts, _per_prompt(params, len(prompts)), strict=True)):
        ids = [int(token) for token in prompt]
        if not ids:
            raise ConfigError(f"prompt {i} is empty; give at least one token")
        if len(ids) > context:
            raise ConfigError(
                f"prompt {i} has {len(ids)} tokens, the context holds {context}; shorten it"
            )
        if min(ids) < 0 or max(ids) >= config.vocab_size:
            raise ConfigError(
                f"prompt {i} has token ids from {min(ids)} to {max(ids)}; the vocabulary has "
                f"{config.vocab_size}"
            )
        limit = min(one.max_tokens, context - len(ids) + 1)
        stop = frozenset(one.stop_token_ids) | (
            frozenset() if one.ignore_eos else frozenset(eos_token_ids)
        )
        request = _Request(i, ids, one, limit, stop, Output(ids, []))
        needed = cache.blocks_for(request.slots)
        if limit and needed > usable:
            raise ConfigError(
                f"prompt {i} of {len(ids)} tokens and max_tokens={limit} needs {needed} blocks of "
                f"{cache.block_size} tokens, the pool has {usable}; raise num_blocks to "
                f"{needed + 1} or lower max_tokens"
            )
        requests.append(request)
    return requests


class _Loop:
    """The step loop: owns the manager and the state."""

    def __init__(
        self,
        model: Any,
        cache: CacheConfig,
        started: float,
        on_token: Callable[[int, int], None] | None,
    ):
        self.graph, self.params = nnx.split(model)
        self.cache = cache
        self.manager = BlockManager.for_config(cache)
        self.state = init_state(cache)
        self.waiting: deque[_Request] = deque()
        self.prefilling: list[_Request] = []
        self.decoding: list[_Request] = []
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
                return
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

    def _step(self, chosen: list[_Request], tokens: list[int], batch: Batch) -> list[int]:
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
        sampled, self.state = step(
            self.graph,
            self.params,
            self.state,
            pad_plan(plan, cells=size, lengths=size),
            padded,
            batch,
            sampling,
        )
        if trace_counts.total() > traces:
            self.compile_seconds += time.perf_counter() - began
        return np.asarray(sampled)[: len(chosen)].tolist()

    def _take_token(self, request: _Request, token: int) -> None:
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

