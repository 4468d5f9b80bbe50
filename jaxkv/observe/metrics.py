"""Counters, gauges and histograms of a block manager, computed from its events.

Available as a dict (`Metrics.to_dict`) and for Prometheus (`Metrics.prometheus`). The time per
event is proportional to the number of its blocks; memory is 8 bytes per block and two counts for
each of the last 1000 requests. Host code: imports no JAX. Like the manager, for use in the thread
that runs the step loop.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.errors import ConfigError
from jaxkv.manager import events
from jaxkv.manager.block_manager import BlockManager
from jaxkv.manager.events import Event

RECENT_REQUESTS = 1000  # window of the recent hit rate
# 1 ms to 14 h in steps of 1, 2, 5: from a block reused within a step to one kept over night.
SECONDS_BUCKETS = tuple(m * 10.0**e for e in range(-3, 5) for m in (1, 2, 5))

_FAMILIES = {  # key of `to_dict`: kind and help text of the exposition
    "kv_cache_usage": (
        "gauge",
        "Share of the usable blocks: active (a sequence references them), cached (only a prefix "
        "lookup would find them), free (they hold nothing).",
    ),
    "kv_cache_blocks": ("gauge", "Usable blocks by state: active, cached, free."),
    "pinned_blocks": ("gauge", "Blocks that a pin keeps from eviction."),
    "internal_fragmentation_slots": (
        "gauge",
        "Slots allocated to sequences minus slots used; a shared block counts once per sequence.",
    ),
    "sequences": ("gauge", "Live sequences."),
    "requests": ("counter", "Sequences that were allocated."),
    "requests_refused": ("counter", "Calls of allocate that failed."),
    "prefix_cache_queries": ("counter", "Prompt tokens that were looked up, once per request."),
    "prefix_cache_hits": ("counter", "Prompt tokens that were found, once per request."),
    "prefix_cache_hit_rate": ("gauge", "Tokens found per token looked up, over all requests."),
    "prefix_cache_hit_rate_recent": (
        "gauge",
        f"Tokens found per token looked up, over the last {RECENT_REQUESTS} requests.",
    ),
    "block_allocations": ("counter", "Blocks allocated to new sequences, hits not counted."),
    "block_evictions": ("counter", "Cached blocks evicted to make room for others."),
    "block_copies": ("counter", "Blocks copied on write."),
    "block_lifetime_seconds": ("histogram", "Time from storing a block to its eviction."),
    "block_idle_before_evict_seconds": (
        "histogram",
        "Time from the last use of a block to its eviction.",
    ),
    "block_reuse_gap_seconds": (
        "histogram",
        "Time from the last use of a cached block (stored, hit or released) to its next hit.",
    ),
}


class Histogram:
    """Counts of values between fixed bounds; a value on a bound is in the bucket below it.

    Args:
      bounds: increasing upper bounds; a last bucket takes the values above them.

    Example:
      >>> histogram = Histogram((1.0, 10.0))
      >>> histogram.observe([0.5, 1.0, 3.0, 99.0])
      >>> histogram.to_dict()
      {'buckets': {'1': 2, '10': 3, '+Inf': 4}, 'sum': 103.5, 'count': 4}
    """

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BUCKETS):
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, values: float | list[float] | np.ndarray) -> None:
        """Counts one value or several."""
        values = np.atleast_1d(values)
        np.add.at(self._counts, np.searchsorted(self._bounds, values), 1)
        self._sum += float(values.sum())

    def to_dict(self) -> dict[str, Any]:
        """Cumulative counts by upper bound, the sum of the values and their number."""
        cumulative = self._counts.cumsum().tolist()
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return {
            "buckets": dict(zip(bounds, cumulative, strict=True)),
            "sum": self._sum,
            "count": cumulative[-1],
        }


class Metrics:
    """Counts of a manager's events since this object was created, and its present block usage.

    A request counts once: when `allocate` succeeds, not for attempts that fail.

    Args:
      manager: manager whose events are counted, until `close`.

    Example:
      >>> from jaxkv import BlockManager
      >>> from jaxkv.observe.metrics import Metrics
      >>> manager = BlockManager(9, 2, max_seqs=2, max_blocks_per_seq=4, prefix_index="hash")
      >>> metrics = Metrics(manager)
      >>> _ = manager.allocate("a", [1, 2, 3, 4, 5])
      >>> manager.commit("a", 5)
      >>> manager.allocate("b", [1, 2, 3, 4, 6]).num_cached_tokens
      4
      >>> values = metrics.to_dict()
      >>> values["prefix_cache_queries"], values["prefix_cache_hits"]
      (10, 4)
      >>> values["kv_cache_blocks"], values["internal_fragmentation_slots"]
      ({'active': 4, 'cached': 0, 'free': 4}, 2)
      >>> print(metrics.prometheus().splitlines()[2])
      jaxkv_kv_cache_usage{state="active"} 0.5
    """

    def __init__(self, manager: BlockManager):
        self._manager = manager
        self._counts = dict.fromkeys(
            (name for name, (kind, _) in _FAMILIES.items() if kind == "counter"), 0
        )
        self._lifetime, self._idle, self._reuse_gap = Histogram(), Histogram(), Histogram()
        self._last_use = np.full(manager.num_blocks, np.nan)  # f64[num_blocks] seconds
        self._recent: deque[tuple[int, int]] = deque()  # queries and hits of a request
        self._recent_queries = self._recent_hits = 0
        self._looks_up = manager.to_dict()["prefix_index"] is not None
        self._handlers = {
            events.STORED: self._used,
            events.FREE: self._used,
            events.HIT: self._on_hit,
            events.ALLOCATE: self._on_allocate,
            events.EVICT: self._on_evict,
            events.COPY: self._on_copy,
            events.OPERATION: self._on_operation,
        }
        manager.subscribe(self._on_event)

    def close(self) -> None:
        """Unsubscribes from the manager. The counts stay readable."""
        self._manager.unsubscribe(self._on_event)

    def to_dict(self) -> dict[str, Any]:
        """All values as plain data: shares and rates from 0 to 1, times in seconds."""
        stats = self._manager.stats()
        blocks = {"active": stats.active, "cached": stats.cached, "free": stats.free}
        counts = self._counts
        values = counts | {
            "kv_cache_usage": {s: n / sum(blocks.values()) for s, n in blocks.items()},
            "kv_cache_blocks": blocks,
            "pinned_blocks": stats.pinned,
            "internal_fragmentation_slots": stats.allocated_slots - stats.used_slots,
            "sequences": stats.num_seqs,
            "prefix_cache_hit_rate": _rate(
                counts["prefix_cache_hits"], counts["prefix_cache_queries"]
            ),
            "prefix_cache_hit_rate_recent": _rate(self._recent_hits, self._recent_queries),
            "block_lifetime_seconds": self._lifetime.to_dict(),
            "block_idle_before_evict_seconds": self._idle.to_dict(),
            "block_reuse_gap_seconds": self._reuse_gap.to_dict(),
        }
        return {name: values[name] for name in _FAMILIES}

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """All values in Prometheus's text exposition format 0.0.4, with the prefix `jaxkv_`.

        Args:
          labels: labels to add to every sample, for example the model's name.

        Raises:
          ConfigError: a label name that Prometheus does not allow, or that is reserved.
        """
        fixed = dict(labels or {})
        for name in fixed:
            if name in ("le", "state") or not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name):
                raise ConfigError(
                    "label names must consist of letters, digits and _, not start with a digit or "
                    f"__, and not be 'le' or 'state'; got {name!r}"
                )
        lines: list[str] = []
        for name, value in self.to_dict().items():
            kind, text = _FAMILIES[name]
            name = f"jaxkv_{name}_total" if kind == "counter" else f"jaxkv_{name}"
            lines += [f"# HELP {name} {_escape(text)}", f"# TYPE {name} {kind}"]
            if kind == "histogram":
                for bound, count in value["buckets"].items():
                    lines.append(_sample(f"{name}_bucket", fixed | {"le": bound}, count))
                lines.append(_sample(f"{name}_sum", fixed, value["sum"]))
                lines.append(_sample(f"{name}_count", fixed, value["count"]))
            elif isinstance(value, dict):
                lines += [_sample(name, fixed | {"state": s}, x) for s, x in value.items()]
            else:
                lines.append(_sample(name, fixed, value))
        return "\n".join(lines) + "\n"

    # -- events ------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if handler := self._handlers.get(event.kind):
            handler(event)

    def _used(self, event: Event) -> None:
        self._last_use[list(event.blocks)] = event.time

    def _on_hit(self, event: Event) -> None:
        gaps = event.time - self._last_use[list(event.blocks)]
        self._reuse_gap.observe(gaps[~np.isnan(gaps)])  # NaN: last used before `subscribe`
        self._used(event)

    def _on_allocate(self, event: Event) -> None:
        self._counts["block_allocations"] += event.detail["num_new_blocks"]

    def _on_evict(self, event: Event) -> None:
        self._counts["block_evictions"] += len(event.blocks)
        self._lifetime.observe(event.detail["age"])
        self._idle.observe(event.detail["idle"])

    def _on_copy(self, event: Event) -> None:
        self._counts["block_copies"] += 1

    def _on_operation(self, event: Event) -> None:
        detail = event.detail
        if detail["name"] != "allocate":
            return
        if "error" in detail:
            self._counts["requests_refused"] += 1
            return
        self._counts["requests"] += 1
        arguments = detail["arguments"]
        if self._looks_up and not arguments.get("skip_prefix_cache"):
            self._count_lookup(len(arguments["token_ids"]), detail["result"]["num_cached_tokens"])

    def _count_lookup(self, queries: int, hits: int) -> None:
        self._counts["prefix_cache_queries"] += queries
        self._counts["prefix_cache_hits"] += hits
        self._recent.append((queries, hits))
        self._recent_queries += queries
        self._recent_hits += hits
        if len(self._recent) > RECENT_REQUESTS:
            queries, hits = self._recent.popleft()
            self._recent_queries -= queries
            self._recent_hits -= hits


def _rate(hits: int, queries: int) -> float:
    return hits / queries if queries else 0.0


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{k}="{_escape(v, quoted=True)}"' for k, v in labels.items())
    return f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}"


def _escape(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
