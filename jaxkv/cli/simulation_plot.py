"""The figure of `jaxkv simulate --plot`."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxkv._util import ceil_div
from jaxkv.studies.simulate import SimulationResult, simulate
from jaxkv.studies.traces import Trace

_POOLS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # pool sizes of the plot, relative to the requested one
_BLOCK_SIZES = (1, 4, 16, 64, 256)


def figure(trace: Trace, result: SimulationResult) -> Figure:
    """Two plots: hit rate against pool size, and the pool over time.

    For a trace without hash ids the first plot is waste against block size.
    """
    canvas = Figure(figsize=(11, 4.2), layout="constrained", dpi=150)
    left, right = canvas.subplots(1, 2)
    if trace.has_ids:
        _hit_rates(left, trace, result)
    else:
        _wastes(left, trace, result)
    if result.service is not None:
        _pool_over_time(right, result)
    else:
        _hits_over_time(right, trace, result)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    canvas.suptitle(
        f"{result.trace}: {result.requests} requests, {result.num_blocks} blocks of "
        f"{result.block_size} tokens, {result.policy}"
    )
    return canvas


def _hit_rates(axes: Axes, trace: Trace, result: SimulationResult) -> None:
    sizes = sorted({max(1, int(result.num_blocks * part)) for part in _POOLS})
    runs = [
        simulate(
            trace, num_blocks=size, policy=result.policy, block_size=result.block_size,
            prefix_index=result.prefix_index, progress=True,
        )
        for size in sizes
    ]  # fmt: skip
    axes.plot(sizes, [r.belady_hit_rate or 0.0 for r in runs], "k--", label="Belady's bound")
    axes.plot(
        sizes, [r.hit_rate for r in runs], "o-", label=f"{result.policy}, requests take no time"
    )
    axes.plot(result.num_blocks, result.hit_rate, "D", label="this run")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="blocks in the pool", ylabel="prompt blocks found", title="Hit rate")


def _wastes(axes: Axes, trace: Trace, result: SimulationResult) -> None:
    slots = result.num_blocks * result.block_size
    runs = [
        simulate(
            trace, num_blocks=ceil_div(slots, size), block_size=size, prefix_index=None,
            service=result.service, belady=False, progress=True,
        )
        for size in _BLOCK_SIZES
    ]  # fmt: skip
    axes.plot(_BLOCK_SIZES, [r.waste for r in runs], "o-", label="paged")
    axes.plot(result.block_size, result.waste, "D", label="this run")
    axes.axhline(
        result.contiguous_waste, color="k", ls="--", label=f"{result.max_len} slots per sequence"
    )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens per block", ylabel="slots that hold no token", title="Waste")


def _pool_over_time(axes: Axes, result: SimulationResult) -> None:
    line = result.timeline
    at = np.linspace(0, len(line.seconds) - 1, 2000).astype(int) if len(line.seconds) else []
    minutes = line.seconds[at] / 60
    axes.stackplot(
        minutes, line.active[at], line.cached[at],
        labels=["held by live sequences", "kept for prefix hits"], alpha=0.7,
    )  # fmt: skip
    axes.axhline(result.num_blocks, color="k", lw=1, label="the pool")
    axes.axhline(
        result.contiguous_peak_blocks, color="k", ls="--",
        label=f"peak with {result.max_len} slots per sequence: {result.contiguous_peak_blocks}",
    )  # fmt: skip
    top = min(1.2 * result.contiguous_peak_blocks, 3 * result.num_blocks)
    axes.set_ylim(0, max(top, 1.5 * result.num_blocks))  # a peak far above it is given as a number
    axes.set(xlabel="minutes", ylabel="blocks", title="Memory over time")


def _hits_over_time(axes: Axes, trace: Trace, result: SimulationResult) -> None:
    minutes = trace.arrival / 60
    edges = np.linspace(0, max(minutes[-1], 1e-9), 61)
    found, asked = (
        np.histogram(minutes, edges, weights=w)[0]
        for w in (result.request_hits, result.request_blocks)
    )
    rate = np.divide(found, asked, out=np.full(60, np.nan), where=asked > 0)
    axes.plot(edges[1:], rate, drawstyle="steps-pre", label="prompt blocks found")
    axes.plot(
        result.timeline.seconds / 60, result.timeline.cached / result.num_blocks,
        label="share of the pool kept for prefix hits",
    )  # fmt: skip
    axes.set(xlabel="minutes", title="Over time")
