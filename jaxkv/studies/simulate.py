"""Replay of a request trace through the production block manager: hit rate, usage and waste.

Needs no device. Host code: imports no JAX.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxkv._util import ceil_div
from jaxkv.errors import ConfigError
from jaxkv.progress_bar import progress_bar
from jaxkv.studies.belady import belady_hit_rate
from jaxkv.studies.simulated_server import Service, SimulatedServer, Timeline
from jaxkv.studies.traces import Trace, load_trace


@dataclasses.dataclass(frozen=True)
class SimulationResult:
    """Result of `simulate`.

    Attributes:
      trace, requests: name of the trace and number of its requests.
      policy, block_size, num_blocks, prefix_index, service: arguments of `simulate`.
      hit_rate: prompt blocks found in the pool, counted in each prompt up to the first that was
        not found, over all prompt blocks.
      belady_hit_rate: upper bound for all policies with as many blocks. None if not requested.
      waste: slots that hold no token, over slots of active blocks; mean over time.
      contiguous_waste: waste if each sequence reserved `max_len` slots.
      peak_blocks: maximum number of blocks active at once.
      contiguous_peak_blocks: `peak_blocks` if each sequence reserved `max_len` slots.
      peak_seqs: maximum number of sequences live at once.
      blocks, hit_blocks: number of prompt blocks requested and found.
      blocks_written: number of blocks whose keys and values were computed, output included.
      evictions: number of cached blocks evicted.
      rejected: number of requests longer than the pool; their blocks count as not found.
      preemptions: number of times that a sequence lost its blocks and was queued again.
      max_len: length of the longest request, in tokens.
      table_bytes: bytes of the block table, i32[sequences, blocks of the longest].
      seconds: time until the last request was done, on the trace's clock.
      request_blocks, request_hits: i64[N] `blocks` and `hit_blocks` of each request.
      timeline: the pool over time.
    """

    trace: str
    requests: int
    policy: str
    block_size: int
    num_blocks: int
    prefix_index: Literal["hash", "radix"] | None
    service: Service | None
    hit_rate: float
    belady_hit_rate: float | None
    waste: float
    contiguous_waste: float
    peak_blocks: int
    contiguous_peak_blocks: int
    peak_seqs: int
    blocks: int
    hit_blocks: int
    blocks_written: int
    evictions: int
    rejected: int
    preemptions: int
    max_len: int
    table_bytes: int
    seconds: float
    request_blocks: np.ndarray = dataclasses.field(repr=False)
    request_hits: np.ndarray = dataclasses.field(repr=False)
    timeline: Timeline = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All values except the arrays, as plain data."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.repr}
        return fields | {"service": self.service and dataclasses.asdict(self.service)}


def simulate(
    trace: Trace | str | Path,
    *,
    num_blocks: int,
    policy: str = "lru",
    block_size: int = 512,
    prefix_index: Literal["hash", "radix"] | None = "hash",
    service: Service | None = None,
    belady: bool = True,
    progress: bool = False,
) -> SimulationResult:
    """Replays the requests of `trace` through a `BlockManager`, on the trace's own clock.

    Without `service`, a request takes no time: it arrives, its prompt is written, and it ends. Then
    every prompt block can be found again, including the last, partly filled one, and hit rates are
    those of an ideal cache of `num_blocks` blocks under the policy. With `service`, requests live
    and grow, and waste, peak and timeline are those of a server; a partly filled block is never
    shared.

    Args:
      trace: a trace, or an argument of `load_trace`.
      num_blocks: blocks that can hold tokens; the null block is not counted.
      policy: eviction policy, one of `jaxkv.manager.eviction.policies.POLICIES`.
      block_size: tokens per block.
      prefix_index: "hash", "radix", or None for no prefix caching.
      service: speed and capacity of the simulated server; None: requests take no time.
      belady: also compute `belady_hit_rate`.
      progress: show a progress bar on standard error.

    Raises:
      ConfigError: a size is not positive, or the policy or the index is unknown.
      TraceError: the trace cannot be read.

    Example:
      >>> from jaxkv.studies.simulate import simulate
      >>> from jaxkv.studies.traces import Trace
      >>> chat = Trace.of([0, 1, 2], [8, 8, 12], [4, 4, 4], tokens_per_id=4,
      ...                 hash_ids=[[1, 2], [3, 4], [1, 2, 5]])
      >>> r = simulate(chat, num_blocks=4, block_size=4)
      >>> round(r.hit_rate, 3), r.blocks_written, r.evictions
      (0.286, 5, 1)
      >>> simulate(chat, num_blocks=3, block_size=4).hit_blocks  # evicts the deeper block first
      1
    """
    trace = trace if isinstance(trace, Trace) else load_trace(trace)
    if num_blocks < 1 or block_size < 1:
        raise ConfigError(f"{num_blocks=} and {block_size=} must be positive")
    replay = SimulatedServer(trace, num_blocks, policy, block_size, prefix_index, service)
    with progress_bar(shown=progress) as bar:
        requests = replay.live() if service else replay.instant()
        what = f"{trace.name}, {num_blocks} blocks"
        deque(bar.track(requests, total=len(trace), description=what), maxlen=0)  # runs it
    bound = belady_hit_rate(trace, num_blocks, block_size) if belady else None
    return _result(replay, bound)


def _result(replay: SimulatedServer, bound: float | None) -> SimulationResult:
    trace, size, line = replay.trace, replay.block_size, replay.timeline()
    slots, reserved = line.active.sum() * size, line.seqs.sum() * trace.max_len
    peak_seqs = int(line.seqs.max(initial=0))
    longest = ceil_div(trace.max_len, size)
    blocks, hits = int(replay.request_blocks.sum()), int(replay.request_hits.sum())
    return SimulationResult(
        trace=trace.name,
        requests=len(trace),
        policy=replay.policy,
        block_size=size,
        num_blocks=replay.num_blocks,
        prefix_index=replay.prefix_index,
        service=replay.service,
        hit_rate=hits / max(blocks, 1),
        belady_hit_rate=bound,
        waste=float(line.unfilled.sum() / max(slots, 1)),
        contiguous_waste=float(1 - line.used.sum() / reserved) if reserved else 0.0,
        peak_blocks=int(line.active.max(initial=0)),
        contiguous_peak_blocks=peak_seqs * longest,
        peak_seqs=peak_seqs,
        blocks=blocks,
        hit_blocks=hits,
        blocks_written=replay.written,
        evictions=replay.evictions,
        rejected=replay.rejected,
        preemptions=replay.preemptions,
        max_len=trace.max_len,
        table_bytes=4 * replay.rows * longest,
        seconds=float(line.seconds.max(initial=0.0)),
        request_blocks=replay.request_blocks,
        request_hits=replay.request_hits,
        timeline=line,
    )
