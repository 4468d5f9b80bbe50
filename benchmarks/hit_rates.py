"""Prefix-cache hit rates of the eviction policies on a request trace, beside Belady's bound.

    uv run benchmarks/hit_rates.py mooncake_conversation_trace.jsonl --json out.json

The trace comes from kvcache-ai/Mooncake (FAST25-release/traces). Any trace that `jaxkv simulate`
reads can be used.
"""

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxkv import belady_hit_rate, load_trace, simulate
from jaxkv.manager.eviction.policies import POLICIES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", help="trace file, or azure-code or azure-conv")
    parser.add_argument("--blocks", default="1000,4000,8000,16000", help="pool sizes, in blocks")
    parser.add_argument("--block-size", type=int, default=512, help="tokens per block")
    parser.add_argument("--policies", default=",".join(POLICIES), help="eviction policies")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    trace = load_trace(args.trace)
    sizes = [int(n) for n in args.blocks.split(",")]
    rates, seconds = {}, {}
    for policy in args.policies.split(","):
        began = time.perf_counter()
        results = [
            simulate(
                trace, num_blocks=n, policy=policy, block_size=args.block_size, belady=False,
                progress=True,
            )
            for n in sizes
        ]  # fmt: skip
        rates[policy] = [r.hit_rate for r in results]
        seconds[policy] = (time.perf_counter() - began) / len(sizes)
    rates["Belady"] = [belady_hit_rate(trace, n, args.block_size) for n in sizes]
    table = Table(title=f"{trace.name}: {len(trace):,} requests, blocks of {args.block_size}")
    for column in ("policy", *(f"{n:,} blocks" for n in sizes), "s per replay"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy, row in rates.items():
        spent = f"{seconds[policy]:.1f}" if policy in seconds else "-"
        table.add_row(policy, *(f"{x:.4f}" for x in row), spent)
    Console().print(table)
    if args.json:
        out = {"trace": trace.name, "block_size": args.block_size, "blocks": sizes,
               "hit_rate": rates, "seconds_per_replay": seconds}  # fmt: skip
        args.json.write_text(json.dumps(out, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
