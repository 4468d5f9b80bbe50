"""`jaxkv bench`: throughput and latency of the engine on the requests of a trace."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from jaxkv._util import to_json
from jaxkv.cli.options import add_engine_options, load_model, prefix_index
from jaxkv.config import CacheConfig
from jaxkv.engine.config import SchedulerConfig
from jaxkv.studies.traces import PACKAGED, load_trace

if TYPE_CHECKING:
    from rich.table import Table

    from jaxkv.studies.bench import Measured
    from jaxkv.studies.workload import Workload


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    p.description = (
        "Runs requests with the lengths of a trace through the engine and prints throughput, "
        "latencies and the host's time per step. Prompts are random tokens and share the prefixes "
        "that they share in the trace. All requests are submitted at the start and decoded "
        "greedily. Compilation is done beforehand and not counted."
    )
    add_engine_options(p)
    p.add_argument(
        "--trace", default="azure-conv", metavar="TRACE",
        help="trace file (Mooncake or Qwen-Bailian JSON lines, Azure or BurstGPT CSV), or a "
        f"packaged trace: {', '.join(PACKAGED)} (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--requests", type=int, default=64, metavar="N",
        help="number of requests, from the start of the trace (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--scale", type=float, default=8, metavar="X",
        help="divisor of the trace's prompt and output lengths (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--max-seqs", type=int, default=32, metavar="N",
        help="maximum number of sequences that run at once (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--chunk", type=int, default=256, metavar="N",
        help="maximum number of prompt tokens per step (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--compare", action="store_true",
        help="also run the requests in static batches and one by one",
    )  # fmt: skip
    p.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="seed of the random tokens (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from rich.console import Console

    from jaxkv.engine.engine import Engine
    from jaxkv.studies.bench import continuous, one_by_one, static_batches
    from jaxkv.studies.workload import Workload

    trace = load_trace(args.trace)
    checkpoint, path = load_model(args)
    model = checkpoint.model
    work = Workload.of(
        trace, requests=args.requests, scale=args.scale, vocab_size=model.config.vocab_size,
        max_len=model.config.max_position_embeddings, seed=args.seed,
    )  # fmt: skip
    # A static batch is as long as its longest prompt and its longest output together.
    longest = max(map(len, work.prompts)) + max(work.max_tokens) if args.compare else work.max_len
    cache = CacheConfig.for_model(
        model.config, max_len=min(longest, model.config.max_position_embeddings),
        max_seqs=min(args.max_seqs, len(work.prompts)), block_size=args.block_size,
        num_blocks=getattr(args, "num_blocks", None), dtype=args.dtype,
    )  # fmt: skip
    buckets = tuple(sorted({min(16, args.chunk), min(64, args.chunk), args.chunk}))
    scheduler = SchedulerConfig(
        max_tokens_per_step=args.chunk, prefill_buckets=buckets,
        decode_steps_per_dispatch=args.steps_per_dispatch,
    )  # fmt: skip
    engine = Engine(model, cache, scheduler, prefix_index=prefix_index(args))
    compiling = engine.warm_up()
    modes = [continuous, static_batches, one_by_one] if args.compare else [continuous]
    results = [mode(engine, work, progress=True) for mode in modes]
    if args.json:
        rows = [dataclasses.asdict(r) | {"tokens_per_s": r.tokens_per_s} for r in results]
        cells = dataclasses.asdict(cache)
        print(to_json({"workload": work.name, "model": str(path), "cache": cells,
                          "compile_s": compiling, "results": rows}))  # fmt: skip
        return 0
    Console().print(_table(work, results, compiling))
    return 0


def _table(work: Workload, results: list[Measured], compiling: float) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{work.name}: {sum(map(len, work.prompts))} prompt tokens, "
        f"{sum(work.max_tokens)} generated",
        caption=f"{compiling:.0f} s of compilation beforehand, not counted",
    )
    table.add_column("")
    for result in results:
        table.add_column(result.mode, justify="right")

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    def pair(values: tuple[float, float]) -> str:
        return f"{values[0]:.3f} / {values[1]:.3f}"

    row("tokens/s", *(f"{r.tokens_per_s:.1f}" for r in results))
    row("seconds", *(f"{r.seconds:.2f}" for r in results))
    row("first token, median / p95, s", *(pair(r.first_token_s) for r in results))
    row("later tokens, median / p95, s", *(pair(r.token_s) for r in results))
    row("prompt tokens computed", *(f"{r.computed_prompt_tokens}" for r in results))
    row("steps", *(f"{r.steps}" for r in results))
    row("preemptions", *(f"{r.preemptions}" for r in results))
    table.add_section()
    for name in results[0].host_ms:
        row(f"{name}, ms per step", *(f"{r.host_ms[name]:.3f}" for r in results))
    return table
