"""`jaxkv simulate`: a request trace through the block manager, with no device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

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
        "Replays a request trace through the block manager, with no device: how much "
        "of the prompts a pool would find, what it holds and what it wastes. Requests take no time "
        "unless --concurrency is given."
    )
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument(
        "trace", metavar="TRACE",
        help="a file (Mooncake or Qwen-Bailian JSON lines, Azure or BurstGPT CSV), or "
        + ", ".join(PACKAGED),
    )  # fmt: skip
    p.add_argument("--blocks", type=int, required=True, metavar="N", help="blocks in the pool")
    p.add_argument("--block-size", type=int, default=512, metavar="N", help="tokens per block")
    p.add_argument("--policy", choices=POLICIES, default="lru", help="which block is evicted")
    p.add_argument(
        "--prefix-index", choices=["hash", "radix", "none"], default="hash",
        help="how blocks are found; none: never",
    )  # fmt: skip
    p.add_argument(
        "--concurrency", type=int, default=argparse.SUPPRESS, metavar="N",
        help="requests take time, and at most N are served at once",
    )  # fmt: skip
    p.add_argument(
        "--prefill-rate", type=float, default=Service.prefill_tokens_per_s, metavar="X",
        help="prompt tokens per second, of one sequence",
    )  # fmt: skip
    p.add_argument(
        "--decode-rate", type=float, default=Service.decode_tokens_per_s, metavar="X",
        help="generated tokens per second, of one sequence",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.add_argument(
        "--plot", type=Path, default=argparse.SUPPRESS, metavar="FILE",
        help="draw hit rate (or waste) against size, and the pool over time: PNG, PDF or SVG",
    )  # fmt: skip
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from rich.console import Console

    from jaxkv.studies.simulate import simulate

    plot = getattr(args, "plot", None)
    if plot is not None and (plot.suffix not in _FORMATS or not plot.parent.is_dir()):
        raise ConfigError(f"--plot {plot}: not a {', '.join(_FORMATS)} file in an existing folder")
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
        print(json.dumps(result.to_dict()))
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
        ("blocks written", f"{r.blocks_written} ({r.blocks} prompt blocks asked for)"),
        ("evictions", f"{r.evictions}"),
        ("slots wasted", f"{r.waste:.1%} ({r.contiguous_waste:.1%} if contiguous)"),
        ("peak", f"{r.peak_blocks} blocks, {r.peak_seqs} sequences"),
        (
            f"peak if {r.max_len} tokens were reserved for each",
            f"{r.contiguous_peak_blocks} blocks",
        ),
        ("requests too long for the pool", f"{r.rejected}"),
        ("preemptions", f"{r.preemptions}"),
        ("block table", f"{r.table_bytes} bytes"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
