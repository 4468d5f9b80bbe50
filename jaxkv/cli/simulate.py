"""`jaxkv simulate`: replays a request trace through the block manager, without a device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv._util import to_json
from jaxkv.errors import ConfigError
from jaxkv.manager.eviction.policies import POLICIES
from jaxkv.studies.simulated_server import Service
from jaxkv.studies.traces import PACKAGED, load_trace

if TYPE_CHECKING:
    from rich.table import Table

    from jaxkv.studies.simulate import SimulationResult

_FORMATS = (".png", ".pdf", ".svg")


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    p.description = (
        "Replays a request trace through the block manager, without a device, and reports the "
        "pool's hit rate, peak usage, evictions and wasted slots. Requests take no time unless "
        "--concurrency is given."
    )
    p.add_argument(
        "trace", metavar="TRACE",
        help="trace file (Mooncake or Qwen-Bailian JSON lines, Azure or BurstGPT CSV), or a "
        f"packaged trace: {', '.join(PACKAGED)}",
    )  # fmt: skip
    p.add_argument(
        "--blocks", type=int, required=True, metavar="N", help="blocks in the pool (required)"
    )
    p.add_argument(
        "--block-size", type=int, default=512, metavar="N",
        help="tokens per block (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--policy", choices=POLICIES, default="lru", help="eviction policy (default: %(default)s)"
    )
    p.add_argument(
        "--prefix-index", choices=["hash", "radix", "none"], default="hash",
        help="index that finds cached blocks; none: no prefix caching (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--concurrency", type=int, default=argparse.SUPPRESS, metavar="N",
        help="give requests a duration and serve at most N at once (default: they take no time)",
    )  # fmt: skip
    p.add_argument(
        "--prefill-rate", type=float, default=Service.prefill_tokens_per_s, metavar="X",
        help="with --concurrency: prompt tokens per second of one sequence (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--decode-rate", type=float, default=Service.decode_tokens_per_s, metavar="X",
        help="with --concurrency: generated tokens per second of one sequence "
        "(default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.add_argument(
        "--plot", type=Path, default=argparse.SUPPRESS, metavar="FILE",
        help="write a figure (PNG, PDF or SVG): hit rate against pool size, or for traces without "
        "prefix identity waste against block size; and the pool over time",
    )  # fmt: skip
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from rich.console import Console

    from jaxkv.studies.simulate import simulate

    plot = getattr(args, "plot", None)
    if plot is not None and (plot.suffix not in _FORMATS or not plot.parent.is_dir()):
        raise ConfigError(
            f"--plot {plot} must be in an existing folder and end in one of {', '.join(_FORMATS)}"
        )
    service = None
    if hasattr(args, "concurrency"):
        service = Service(args.prefill_rate, args.decode_rate, args.concurrency)
    trace = load_trace(args.trace)
    result = simulate(
        trace,
        num_blocks=args.blocks,
        policy=args.policy,
        block_size=args.block_size,
        prefix_index=None if args.prefix_index == "none" else args.prefix_index,
        service=service,
        progress=True,
    )
    if plot is not None:
        from jaxkv.cli.simulation_plot import figure

        figure(trace, result).savefig(plot)
    if args.json:
        print(to_json(result.to_dict()))
    else:
        Console().print(_table(result))
    return 0


def _table(r: SimulationResult) -> Table:
    from rich.table import Table

    table = Table(show_header=False, title=f"{r.trace}, {r.requests} requests")
    bound = "" if r.belady_hit_rate is None else f" (Belady's bound: {r.belady_hit_rate:.1%})"
    rows = [
        ("pool", f"{r.num_blocks} blocks of {r.block_size} tokens, {r.policy}"),
        ("prompt blocks found", f"{r.hit_rate:.1%}{bound}"),
        ("blocks written", f"{r.blocks_written} ({r.blocks} prompt blocks requested)"),
        ("evictions", f"{r.evictions}"),
        ("slots wasted", f"{r.waste:.1%} ({r.contiguous_waste:.1%} if contiguous)"),
        ("peak", f"{r.peak_blocks} blocks, {r.peak_seqs} sequences"),
        (
            f"peak with {r.max_len} tokens per sequence",
            f"{r.contiguous_peak_blocks} blocks",
        ),
        ("requests too long for the pool", f"{r.rejected}"),
        ("preemptions", f"{r.preemptions}"),
        ("block table", f"{r.table_bytes} bytes"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
