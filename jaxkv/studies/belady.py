"""Belady's bound: the best hit rate of any eviction policy. Host code: imports no JAX."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from pathlib import Path

import numpy as np

from jaxkv._util import ceil_div
from jaxkv.errors import ConfigError
from jaxkv.studies.traces import Trace, load_trace


def belady_hit_rate(trace: Trace | str | Path, num_blocks: int, block_size: int = 512) -> float:
    """Share of prompt blocks found by a pool that knows the future, if requests take no time.

    Evicts the block whose next use is farthest; among those that the same request uses next, the
    deepest. A new block is not kept if all others are used before it. A prefix is used no later
    than the blocks that follow it, so the blocks kept are closed under prefixes: every hit is part
    of a found prefix.

    Args:
      trace: a trace, or an argument of `load_trace`.
      num_blocks: blocks that can hold tokens.
      block_size: tokens per block. A prompt's last, partly filled block counts as one.

    Raises:
      ConfigError: a size is not positive.

    Example:
      >>> from jaxkv.studies.belady import belady_hit_rate
      >>> from jaxkv.studies.traces import Trace
      >>> loop = Trace.of([0, 1, 2, 3], [1] * 4, [1] * 4, hash_ids=[[7], [8], [7], [8]])
      >>> belady_hit_rate(loop, 1, 1), belady_hit_rate(loop, 2, 1)
      (0.25, 0.5)
    """
    if num_blocks < 1 or block_size < 1:
        raise ConfigError(f"{num_blocks=} and {block_size=} must be positive")
    trace = trace if isinstance(trace, Trace) else load_trace(trace)
    total = int((ceil_div(trace.input_tokens, block_size)).sum())
    return _most_hits(prefix_keys(trace, block_size), num_blocks) / total if total else 0.0


def prefix_keys(trace: Trace, block_size: int) -> np.ndarray:
    """i64[] keys of the prompt blocks that another request could share, request by request.

    Two keys are equal if the blocks and all blocks before them are. Blocks that the ids do not
    cover to their end are left out: no other request has them.
    """
    per_id = trace.tokens_per_id
    parts, whole = (per_id // block_size, True) if per_id % block_size == 0 else (1, False)
    numbers: dict[Hashable, int] = {}
    keys = []
    for request, tokens in enumerate(trace.input_tokens.tolist()):
        ids = trace.ids(request).tolist()
        shared = min(ceil_div(tokens, block_size), len(ids) * per_id // block_size)
        if whole:  # a node of the prefix tree for each id, split into parts below
            chain = _chain(ids, numbers)
            split = np.repeat(np.array(chain, np.int64) * parts, parts)
            keys.append((split + np.tile(np.arange(parts), len(chain)))[:shared])
        else:
            starts = range(0, shared * block_size, block_size)
            inside = [tuple(ids[s // per_id : ceil_div((s + block_size), per_id)]) for s in starts]
            keys.append(np.array(_chain(inside, numbers), np.int64))
    return np.concatenate(keys)


def _chain(contents: Iterable[Hashable], numbers: dict[Hashable, int]) -> list[int]:
    """A number for each prefix of `contents`; new ones are added to `numbers`."""
    node, nodes = -1, []
    for content in contents:
        node = numbers.setdefault((node, content), len(numbers))
        nodes.append(node)
    return nodes


def _most_hits(keys: np.ndarray, capacity: int) -> int:
    """Number of references found by a cache of `capacity` keys under Belady's rule."""
    order = np.argsort(keys, kind="stable")
    again = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    never = len(keys)
    next_use = np.full(len(keys), never)
    next_use[order[again]] = order[again + 1]
    # A resident block is identified by the position of its next use, all that the heap holds. The
    # farthest is never stale: stale entries lie in the past.
    resident = bytearray(len(keys))
    farthest: list[int] = []  # negated, for the smallest-first heap
    size = hits = 0
    relevant = next_use < never
    relevant[order[again + 1]] = True
    for position in np.flatnonzero(relevant).tolist():
        if resident[position]:
            hits += 1
            size -= 1
        upcoming = int(next_use[position])
        if upcoming == never:
            continue
        if size < capacity:
            size += 1
            heapq.heappush(farthest, -upcoming)
        elif upcoming < -farthest[0]:
            resident[-heapq.heapreplace(farthest, -upcoming)] = False
        else:
            continue
        resident[upcoming] = True
    return hits
