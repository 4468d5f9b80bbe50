"""Batched generation: all prompts at once through an engine of their own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jaxkv._util import ceil_div
from jaxkv.config import CacheConfig
from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.engine import AnyParams, Engine
from jaxkv.engine.requests import RequestOutput
from jaxkv.errors import ConfigError
from jaxkv.sampling.params import BeamSearchParams, SamplingParams


@dataclasses.dataclass
class Output:
    """What one prompt became.

    Attributes:
      prompt_ids: the prompt.
      token_ids: the generated tokens, the end token included.
      finish_reason: "stop" (an end token), "length" (max_tokens or the context) or "error".
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
    """Outputs in the order of the prompts, samples of one prompt together; what the call took."""

    outputs: list[Output]
    stats: GenerationStats


def generate(
    model: Any,
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

    Prompts beyond the cache's rows or blocks wait until others have finished.

    Args:
      model: an NNX module `model(tokens, state, batch) -> logits, state` with a `config` that has
        `num_layers`, `num_kv_heads`, `head_dim`, `max_position_embeddings`, `eos_token_ids`.
      prompts: token ids, one sequence each.
      params: for all prompts, or one for each; greedy by default. Of one for all, each prompt has a
        seed of its own, so that equal prompts draw differently.
      cache: sizes of the cache; by default one that holds up to 32 of the prompts at once.
      eos_token_ids: in place of the model's own.
      scheduler: how steps are formed.
      manager_options: of the `BlockManager`: prefix_index, eviction, ...
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
    places: dict[Hashable, int] = {}
    for i, (prompt, one) in enumerate(zip(prompts, _per_prompt(params, len(prompts)), strict=True)):
        try:
            places[engine.submit(prompt, one)] = i
        except ConfigError as error:
            raise ConfigError(f"prompt {i}: {error}") from None
    last: dict[tuple[int, int], RequestOutput] = {}
    for output in engine.stream():
        last[places[output.request_id], output.sample] = output
        if on_token is not None:
            for token in output.new_token_ids:
                on_token(places[output.request_id], token)

    def since(moment: float | None) -> float | None:
        return None if moment is None else moment - started

    outputs = [
        Output(
            prompt_ids=output.prompt_ids,
            token_ids=output.token_ids,
            finish_reason=output.finish_reason or "abort",
            num_cached_tokens=output.num_cached_tokens,
            time_to_first_token=None
            if (at := output.timings.first_token) is None
            else at - started,
        )
        for _, output in sorted(last.items())
    ]
    stats = engine.stats()
    assert stats.blocks is not None
    peak = stats.blocks.peak_active
    return Generation(
        outputs=outputs,
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
    config: Any,
    prompts: Sequence[Sequence[int]],
    params: AnyParams | Sequence[AnyParams] | None = None,
    *,
    block_size: int = 16,
    max_seqs: int | None = None,
    num_blocks: int | None = None,
    dtype: str = "float32",
) -> CacheConfig:
    """A cache for these prompts: rows for up to 32 of their samples, blocks for the longest such.

    Rows and blocks are rounded up to powers of two, so that other prompts reuse what was compiled.
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
        max_seqs = 1 << (min(32, max(1, len(lengths))) - 1).bit_length()
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
