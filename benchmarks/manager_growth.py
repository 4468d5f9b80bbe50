"""Growth of the block manager's costs: with cached blocks, pins, priorities, and the tree's shape.

    uv run benchmarks/manager_growth.py --json out.json

No call may pay for what it does not concern. The slowest of 10,000 calls shows the work that a
structure puts off; the collector's pauses are counted in, after `gc.freeze()` as a server calls it
once it has started.
"""

import argparse
import gc
import json
import os
import platform
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxkv import BlockManager

SIZE = 4  # tokens per block
clock = time.thread_time_ns  # processor time: what other processes take does not count


def fill(manager: BlockManager, tokens: np.ndarray, **options) -> None:
    """Caches each row of tokens as a prompt of its own."""
    for row in tokens:
        manager.allocate(0, row, **options)
        manager.commit(0, len(row) - manager.num_computed_tokens(0))
        manager.free(0)
    manager.take_plan()


def prompts(count: int, blocks: int, first: int = 0) -> np.ndarray:
    """Prompts without common blocks, one token more than fills the blocks."""
    tokens = np.zeros((count, blocks * SIZE + 1), np.int32)
    tokens[:, 0] = np.arange(first, first + count)
    return tokens


def make(blocks: int, **options) -> BlockManager:
    return BlockManager(blocks + 1, SIZE, max_seqs=4, max_blocks_per_seq=64, **options)


def timed(calls: int, call) -> dict[str, float]:
    """Median and slowest time of `calls` calls, us."""
    gc.collect()
    gc.freeze()
    times = []
    for i in range(calls):
        began = clock()
        call(i)
        times.append(clock() - began)
    gc.unfreeze()
    return {"median_us": float(np.median(times)) / 1e3, "slowest_us": max(times) / 1e3}


def allocate_and_free(cached: int, hits: bool, calls: int, **options) -> dict[str, float]:
    """Prompts of 8 blocks in a pool full of cached blocks: each evicts, or each hits."""
    manager, count = make(cached + 16, **options), cached // 8
    fill(manager, prompts(count, 8))
    new = prompts(calls, 8, first=0 if hits else count)
    new = new[np.random.default_rng(0).permutation(calls) % (count if hits else calls)]

    def call(i: int) -> None:
        manager.allocate(1, new[i])
        manager.commit(1, len(new[i]) - manager.num_computed_tokens(1))
        manager.free(1)
        manager.take_plan()

    return timed(calls, call)


def append(pinned: int, calls: int) -> dict[str, float]:
    """Appends that take a new block, beside pinned blocks."""
    manager = make(pinned + calls + 16)
    tokens = prompts(max(1, pinned // 50), 50)
    fill(manager, tokens)
    for row in tokens:
        manager.pin(row)
    manager.allocate("a", [1])

    def call(_: int) -> None:
        manager.append_batch(["a"], [5, 6, 7, 8], [4])
        if manager.length("a") > 50 * SIZE:
            manager.truncate("a", 1)

    return timed(calls, call)


def evict(priorities: int, calls: int) -> dict[str, float]:
    """Allocations that evict one block, in a pool whose blocks all have another priority."""
    manager = make(priorities)
    for i, row in enumerate(prompts(priorities, 1)[:, :SIZE]):
        manager.allocate(0, row, priority=1 + i)
        manager.commit(0, SIZE)
        manager.free(0)
    manager.take_plan()
    new = prompts(calls, 1, first=priorities)[:, :SIZE]

    def call(i: int) -> None:
        manager.allocate(1, new[i], priority=1 + priorities + i)
        manager.commit(1, SIZE)
        manager.free(1)
        manager.take_plan()

    return timed(calls, call)


def check(blocks: int, shape: str) -> float:
    """us per block of `check`."""
    manager = make(blocks + 4)
    if shape == "chains":
        fill(manager, prompts(blocks // 50, 50))
    else:
        tokens = prompts(blocks - 1, 2)
        tokens[:, SIZE], tokens[:, 0] = tokens[:, 0], 0  # one parent, all the rest its children
        fill(manager, tokens)
    began = clock()
    manager.check()
    return (clock() - began) / 1e3 / blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="1000,10000,100000,1000000", help="sizes, by commas")
    parser.add_argument("--calls", type=int, default=10_000, help="calls measured at each size")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    calls = args.calls
    figures = {
        "allocate + free, evicting 8 blocks": lambda n: allocate_and_free(n, False, calls),
        "allocate + free, hitting 8 blocks": lambda n: allocate_and_free(n, True, calls),
        "the same, radix index": lambda n: allocate_and_free(n, True, calls, prefix_index="radix"),
        "append of a new block, by pinned blocks": lambda n: append(n, calls),
        "eviction of one block, by priorities": lambda n: evict(n, calls),
        "check, a block, chains": lambda n: {"median_us": check(n, "chains")},
        "check, a block, one parent": lambda n: {"median_us": check(n, "one parent")},
    }
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name in track(figures, "figures", console=Console(stderr=True), transient=True):
        rows[name] = {str(size): figures[name](size) for size in sizes}
    table = Table(title="Block manager, us: median (slowest)")
    table.add_column("call")
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    for name, by_size in rows.items():
        cells = [
            f"{x['median_us']:,.2f}"
            if "slowest_us" not in x
            else f"{x['median_us']:,.0f} ({x['slowest_us']:,.0f})"
            for x in by_size.values()
        ]
        table.add_row(name, *cells)
    Console(width=120).print(table)
    if args.json:
        meta = {"python": platform.python_version(), "numpy": np.__version__,
                "cpus": os.cpu_count(), "load_1m": os.getloadavg()[0], "calls": calls}  # fmt: skip
        args.json.write_text(json.dumps({"meta": meta, "growth": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
