"""Checks of requests and managers before an engine accepts them. Host code: imports no JAX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, SupportsIndex, cast

from jaxkv.config import CacheConfig
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.manager.block_manager import BlockManager
from jaxkv.manager.prefix.keys import root_of
from jaxkv.sampling.checks import as_integer
from jaxkv.sampling.params import MAX_STOP_TOKENS


def checked_prompt(
    prompt: str | Sequence[int], tokenizer: Any, *, max_len: int, vocab_size: int
) -> list[int]:
    """Token ids of a prompt.

    Raises:
      ConfigError: text without a tokenizer, an empty or too long prompt, a value that is not an
        integer, or one outside the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError(
                "a prompt as text needs the engine's tokenizer=; otherwise give token ids"
            )
        try:
            prompt = tokenizer.encode(prompt)
        except Exception as error:
            raise ConfigError(
                f"the tokenizer cannot encode the prompt: {type(error).__name__}: {error}"
            ) from error
    try:
        tokens = None if isinstance(prompt, bytes | Mapping) else list(prompt)
    except TypeError:  # not iterable
        tokens = None
    if tokens is None:
        raise ConfigError(f"the prompt must be token ids or a text, got {type(prompt).__name__}")
    try:
        ids = [operator.index(cast(SupportsIndex, token)) for token in tokens]
    except TypeError:
        kinds = sorted({type(token).__name__ for token in tokens})
        raise ConfigError(f"prompt token ids must be integers, got {', '.join(kinds)}") from None
    if not ids:
        raise ConfigError("the prompt is empty; give at least one token")
    if len(ids) > max_len:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, the longest sequence has {max_len}; shorten it"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ConfigError(
            f"the prompt has token ids from {min(ids)} to {max(ids)}; the vocabulary has "
            f"{vocab_size}"
        )
    return ids


def require_order_and_keys(request_id: Hashable, priority: int, namespace: Any) -> None:
    """Raises ConfigError for an id that cannot be looked up, a priority that is not an integer, and
    a namespace that cannot be part of a key."""
    try:
        hash(request_id)
    except TypeError:
        raise ConfigError(f"request_id={request_id!r} must be hashable") from None
    if as_integer(priority) is None:
        raise ConfigError(f"priority={priority!r} must be an integer")
    try:
        root_of(namespace, 0)
    except JaxkvError as error:
        raise ConfigError(f"namespace={namespace!r}: {error}") from None


def require_manager_fits(
    manager: BlockManager,
    cache: CacheConfig,
    clock: Callable[[], float] | None,
    options: Mapping[str, Any],
) -> None:
    """Raises ConfigError unless an engine with this cache can use a given block manager."""
    if options:
        raise ConfigError(
            f"{', '.join(options)}: options of the block manager go to its constructor when "
            "manager= is given"
        )
    if clock is not None and clock is not manager.clock:
        raise ConfigError("clock= and the clock of manager= differ: an engine has one clock")
    if manager.block_size != cache.block_size:
        raise ConfigError(
            f"the manager has block_size={manager.block_size}, the cache {cache.block_size}"
        )
    for name in ("num_blocks", "max_seqs", "max_blocks_per_seq"):
        has, room = getattr(manager, name), getattr(cache, name)
        if has > room:
            raise ConfigError(f"the manager has {name}={has}, the cache has room for {room}")
    stats = manager.stats()
    if stats.active or stats.cached or stats.num_seqs:
        raise ConfigError(
            f"the manager has {stats.num_seqs} sequences, {stats.active} active and "
            f"{stats.cached} cached blocks, whose KV is not in this engine's cache: free them and "
            "call reset_prefix_cache()"
        )


def require_window(manager: BlockManager, config: Any) -> None:
    """Raises ConfigError if a manager frees blocks that some layer of the model still reads.

    A model declares its window by `config.sliding_window`, None or missing if it has none; a config
    that lists `layer_types` has one only if no layer attends to everything.
    """
    given, window = manager.sliding_window, getattr(config, "sliding_window", None)
    if given is None:
        return
    kinds = getattr(config, "layer_types", None) or ()
    whole = [i for i, kind in enumerate(kinds) if kind != "sliding_attention"]
    if whole or not getattr(config, "use_sliding_window", True):
        window = None
    if window is None or given < window:
        has = f"layers {whole[:4]} have none" if whole else f"the model's config has {window}"
        raise ConfigError(
            f"sliding_window={given} frees blocks that the model still reads: {has}; leave it out, "
            "or give the largest window of the layers, if all have one"
        )


def require_fits(manager: BlockManager, prompt: int, end: int) -> None:
    """Raises ConfigError if the pool can never hold a sequence of this length by itself."""
    needed, usable = _blocks_for(manager, prompt, end), manager.num_blocks - 1
    if needed > usable:
        raise ConfigError(
            f"{prompt} tokens, and {end - prompt} to generate, need {needed} blocks of "
            f"{manager.block_size} tokens; the pool has {usable}: raise num_blocks to {needed + 1} "
            "or lower max_tokens"
        )


def _blocks_for(manager: BlockManager, prompt: int, end: int) -> int:
    """Most blocks of a sequence that ends at length `end`: no step reads its last token's KV."""
    return manager.blocks_for(max(prompt, end - 1))


def require_beams_fit(manager: BlockManager, width: int, prompt: int, end: int) -> None:
    """Raises ConfigError if the hypotheses of a beam search never fit: they step together."""
    if width > manager.max_seqs:
        raise ConfigError(
            f"a beam search of width {width} needs {width} rows, the cache has {manager.max_seqs}; "
            "raise max_seqs"
        )
    # Without an index a search that lost its blocks computes each hypothesis by itself.
    shared = prompt // manager.block_size if manager.prefix_index is not None else 0
    needed = shared + width * (_blocks_for(manager, prompt, end) - shared)
    if needed > manager.num_blocks - 1:
        raise ConfigError(
            f"a beam search of width {width} from {prompt} to {end} tokens may need {needed} "
            f"blocks, the pool has {manager.num_blocks - 1}; raise num_blocks to {needed + 1}"
        )


def checked_stop_ids(
    stop_token_ids: Sequence[int], eos_token_ids: Sequence[int], ignore_eos: bool
) -> frozenset[int]:
    """Tokens that end a request.

    Raises:
      ConfigError: more than a step can compare with.
    """
    ids = frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset(eos_token_ids))
    if len(ids) > MAX_STOP_TOKENS:
        raise ConfigError(f"at most {MAX_STOP_TOKENS} stop token ids are supported, got {len(ids)}")
    return ids
