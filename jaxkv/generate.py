"""Batched generation: chunked prefill, batched decode, one compile per bucket, donated state."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxkv.config import CacheConfig
from jaxkv.errors import ConfigError
from jaxkv.loop import Loop, Output, Request
from jaxkv.sampling import SamplingParams


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
    loop = Loop(model, cache, started, on_token)
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
            decode_tokens_per_s=loop.decode_tokens / loop.decode_seconds
            if loop.decode_tokens
            else 0,
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
    if block_size < 1:
        raise ConfigError(f"{block_size=} must be positive")
    all_params = _per_prompt(params, len(prompts))
    context = config.max_position_embeddings
    if max_seqs is None:
        max_seqs = 1 << (min(32, max(1, len(prompts))) - 1).bit_length()
    if num_blocks is None:
        lengths = [
            min(context, len(p) + a.max_tokens) for p, a in zip(prompts, all_params, strict=True)
        ]
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
) -> list[Request]:
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
        request = Request(i, ids, one, limit, stop, Output(ids, []))
        needed = cache.blocks_for(request.slots)
        if limit and needed > usable:
            raise ConfigError(
                f"prompt {i} of {len(ids)} tokens and max_tokens={limit} needs {needed} blocks of "
                f"{cache.block_size} tokens, the pool has {usable}; raise num_blocks to "
                f"{needed + 1} or lower max_tokens"
            )
        requests.append(request)
    return requests
