"""Batched generation: all prompts through one call of an engine made for them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxkv._util import ceil_div, next_power_of_two
from jaxkv.config import CacheConfig
from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.engine import AnyParams, Engine
from jaxkv.engine.outputs import RequestOutput
from jaxkv.engine.protocols import Model, ModelConfig
from jaxkv.errors import ConfigError
from jaxkv.sampling.params import BeamSearchParams, SamplingParams

Output = RequestOutput  # the type of a result's outputs, under its public name


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counters and times of a call of `generate`.

    Attributes:
      prompt_tokens: over all prompts.
      generated_tokens: over all prompts.
      seconds: wall time of the whole call, compilation included.
      compile_seconds: part of `seconds` spent in steps that were compiled first (or read from
        JAX's compilation cache).
      decode_tokens_per_s: tokens per second of the other decode steps; 0 without any.
      decode_steps: decode steps run.
      prefill_steps: prefill steps run.
      peak_blocks: most blocks in use at once.
      kv_bytes: bytes of these blocks.
      contiguous_bytes: bytes of contiguous caches of `max_len`, one for each sequence.
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
    """Result of a call of `generate`.

    Attributes:
      outputs: last outputs, in the order of the prompts, samples of one prompt together.
      stats: counters and times of the call.
    """

    outputs: list[RequestOutput]
    stats: GenerationStats


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    params: AnyParams | Sequence[AnyParams] | None = None,
    *,
    cache: CacheConfig | None = None,
    eos_token_ids: Sequence[int] | None = None,
    scheduler: SchedulerConfig | None = None,
    on_token: Callable[[int, int], None] | None = None,
    **manager_options: Any,
) -> Generation:
    """Generates from token-id prompts as one batch through a paged cache.

    Prompts for which the cache has no row or no blocks wait until others have finished.

    Args:
      model: an NNX module `model(tokens, state, batch) -> logits, state` with a `config`; see
        `jaxkv.engine.protocols.Model`.
      prompts: token ids, one sequence each.
      params: parameters for all prompts, or one for each; greedy by default. With one for all, each
        prompt gets its own seed, so that equal prompts draw different tokens.
      cache: sizes of the cache; by default it holds up to 32 of the prompts at once.
      eos_token_ids: end tokens in place of the model's own.
      scheduler: configuration of the steps.
      manager_options: options of the `BlockManager`: prefix_index, eviction, ...
      on_token: called with (prompt index, token id) as each token arrives.

    Raises:
      ConfigError: an empty prompt, one longer than the context, a token id outside the vocabulary,
        or a request that the pool can never hold; with the numbers, before anything runs.

    Example:
      >>> import jaxkv
      >>> from flax import nnx
      >>> from jaxkv.models import Llama, LlamaConfig
      >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_layers=1,
      ...                      num_heads=2, num_kv_heads=1, head_dim=4)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> result = jaxkv.generate(model, [[1, 2, 3], [4]], jaxkv.SamplingParams(max_tokens=5))
      >>> [len(output.token_ids) for output in result.outputs]
      [5, 5]
    """
    started = time.perf_counter()
    cache = cache or default_cache(model.config, prompts, params)
    engine = Engine(model, cache, scheduler, eos_token_ids=eos_token_ids, **manager_options)
    params = _per_prompt(params, len(prompts))
    groups = engine.generate(prompts, params, progress=False, on_token=on_token)
    stats = engine.stats()
    assert stats.blocks is not None
    peak = stats.blocks.peak_active
    return Generation(
        outputs=[output for group in groups for output in group],
        stats=GenerationStats(
            prompt_tokens=sum(map(len, prompts)),
            generated_tokens=stats.generated_tokens,
            seconds=time.perf_counter() - started,
            compile_seconds=stats.compile_seconds,
            decode_tokens_per_s=stats.decode_tokens / (stats.decode_seconds or 1),
            decode_steps=stats.decode_steps,
            prefill_steps=stats.steps - stats.decode_steps,
            peak_blocks=peak,
            kv_bytes=peak * cache.block_bytes,
            contiguous_bytes=stats.peak_running * cache.max_len * cache.bytes_per_token,
            max_len=cache.max_len,
        ),
    )


def default_cache(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    params: AnyParams | Sequence[AnyParams] | None = None,
    *,
    block_size: int = 16,
    max_seqs: int | None = None,
    num_blocks: int | None = None,
    dtype: str = "float32",
) -> CacheConfig:
    """Sizes of a cache for these prompts: rows for up to 32 samples, blocks for the longest 32.

    Rows and blocks are rounded up to powers of two, so that other prompts reuse compiled programs.
    """
    if block_size < 1:
        raise ConfigError(f"{block_size=} must be positive")
    all_params = _per_prompt(params, len(prompts))
    context = config.max_position_embeddings
    lengths = [
        min(context, len(prompt) + one.max_tokens)
        for prompt, one in zip(prompts, all_params, strict=True)
        for _ in range(one.num_samples)
    ]
    if max_seqs is None:
        max_seqs = next_power_of_two(min(32, len(lengths)))
    if num_blocks is None:
        blocks = sorted((ceil_div(length, block_size) for length in lengths), reverse=True)
        num_blocks = 1 << max(6, sum(blocks[:max_seqs]).bit_length())
    return CacheConfig.for_model(
        config, num_blocks=num_blocks, max_len=context, block_size=block_size, max_seqs=max_seqs,
        dtype=dtype,
    )  # fmt: skip


def _per_prompt(params: AnyParams | Sequence[AnyParams] | None, count: int) -> list[AnyParams]:
    if isinstance(params, BeamSearchParams):
        return [params] * count
    if params is None or isinstance(params, SamplingParams):
        params = params or SamplingParams()
        seeds = np.random.SeedSequence(params.seed or 0).generate_state(count)
        return [dataclasses.replace(params, seed=int(seed)) for seed in seeds]
    if len(params) != count:
        raise ConfigError(f"{count} prompts but {len(params)} sampling parameters")
    return list(params)
