"""Time per call of the block manager: 200,000 blocks of 16 tokens, no device.

    uv run benchmarks/manager.py --json out.json

The figures of nano-vllm's manager in the table were measured on two cores of the same kind.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxkv import BlockManager

BLOCKS, SIZE = 200_001, 16
# operation: (nano-vllm, target), in nanoseconds
FIGURES = {
    "append one token, 256 sequences": (382, 40),
    "append one token, 4096 sequences": (None, 15),
    "allocate 1024 tokens, no hit": (124_000, 60_000),
    "allocate 1024 tokens, full hit": (96_000_000, 60_000),
    "free a sequence of 1152 tokens": (12_000, 5_000),
    "block of a (sequence, position), 100,000 live": (None, 20),
}


def best(run: Callable[[], object], repeat: int, per: int = 1) -> float:
    """Median time of `repeat` runs, in ns per item."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - began)
    return float(np.median(times)) / per


def append(sequences: int, options: dict) -> float:
    manager = BlockManager(BLOCKS, SIZE, max_seqs=sequences, max_blocks_per_seq=64, **options)
    ids = list(range(sequences))
    for i in ids:
        manager.allocate(i, np.arange(100) + 1000 * i)
    rows = manager.select(ids)
    tokens = np.arange(sequences, dtype=np.int32)
    steps = 16 * 30
    began = time.perf_counter_ns()
    for _ in range(steps):
        manager.append_batch(rows, tokens)
    return (time.perf_counter_ns() - began) / steps / sequences


def prompts(options: dict) -> dict[str, float]:
    """Times of allocating without and with hits, and of freeing, in a pool full of content."""
    manager = BlockManager(BLOCKS, SIZE, max_seqs=64, max_blocks_per_seq=128, **options)
    rng = np.random.default_rng(0)
    contents = rng.integers(0, 50_000, (2_900, 1025)).astype(np.int32)
    clock = time.perf_counter_ns
    for i, tokens in enumerate(contents):
        manager.allocate(i, tokens)
        manager.commit(i, 1025)
        manager.free(i)
        if i % 50 == 0:
            manager.take_plan()
    miss, hit, free = [], [], []
    for tokens in rng.integers(0, 50_000, (150, 1024)).astype(np.int32):
        began = clock()
        manager.allocate("a", tokens)
        miss.append(clock() - began)
        manager.commit("a", 1024)
        manager.free("a")
        manager.take_plan()
        for _ in range(3):  # the same again
            began = clock()
            manager.allocate("a", tokens)
            hit.append(clock() - began)
            manager.commit("a", 1024 - manager.num_computed_tokens("a"))
            for token in range(128):
                manager.append("a", token)
            manager.commit("a", 128)
            began = clock()
            manager.free("a")
            free.append(clock() - began)
        manager.take_plan()
    return {
        "allocate 1024 tokens, no hit": float(np.median(miss)),
        "allocate 1024 tokens, full hit": float(np.median(hit)),
        "free a sequence of 1152 tokens": float(np.median(free)),
    }


def locate() -> float:
    live = 100_000
    manager = BlockManager(2 * live + 1, SIZE, max_seqs=live, max_blocks_per_seq=8)
    for i in range(live):
        manager.allocate(i, np.full(20, i))
    rng = np.random.default_rng(0)
    rows, positions = rng.integers(0, live, 1_000_000), rng.integers(0, 20, 1_000_000)
    return best(lambda: manager.locate(rows, positions), 5, len(rows))


def one_round(options: dict) -> dict[str, float]:
    """Every operation measured once, ns."""
    rows = {f"append one token, {n} sequences": append(n, options) for n in (256, 4096)}
    rows |= prompts(options)
    return rows | {"block of a (sequence, position), 100,000 live": locate()}


def bytes_of(manager: BlockManager) -> tuple[float, float]:
    """Array bytes per block and per sequence."""
    arrays = lambda o: [  # noqa: E731
        v
        for v in vars(o).values()
        if isinstance(v, np.ndarray) and v.base is None  # no views
    ]
    pool, table = manager._pool, manager._table
    owners = (pool, pool.tree, pool.policy.policy, pool.index)  # some arrays have two owners
    distinct = {id(a): a.nbytes for owner in owners for a in arrays(owner)}
    per_block = sum(distinct.values()) + sys.getsizeof(pool.hashes)
    return per_block / manager.num_blocks, sum(a.nbytes for a in arrays(table)) / manager.max_seqs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prefix-index", default="hash", choices=["hash", "radix"])
    parser.add_argument("--eviction", default="lru", help="eviction policy")
    parser.add_argument("--rounds", type=int, default=5, help="repeats; the figures are medians")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    options = {"prefix_index": args.prefix_index, "eviction": args.eviction}
    gc.freeze()
    progress = track(range(args.rounds), "rounds", console=Console(stderr=True), transient=True)
    done = [one_round(options) for _ in progress]
    rounds = {name: [row[name] for row in done] for name in FIGURES}
    rows = {name: float(np.median(times)) for name, times in rounds.items()}
    block, sequence = bytes_of(BlockManager(BLOCKS, SIZE, max_seqs=64, max_blocks_per_seq=128))
    table = Table(title=f"Block manager, ns ({args.prefix_index}, {args.eviction})")
    for column in ("operation", "jaxkv", "nano-vllm", "target"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for name, value in rows.items():
        nano, target = FIGURES[name]
        table.add_row(name, f"{value:,.0f}", f"{nano:,}" if nano else "-", f"{target:,}")
    Console().print(table)
    Console().print(
        f"arrays: {block:.0f} bytes per block of {SIZE} tokens, {sequence:.0f} per sequence of at "
        "most 128 blocks"
    )
    if args.json:
        meta = {"python": platform.python_version(), "numpy": np.__version__,
                "cpus": os.cpu_count(), "load_1m": os.getloadavg()[0], **options}  # fmt: skip
        bytes_ = {"bytes_per_block": block, "bytes_per_sequence": sequence}
        out = {"meta": meta, "ns": rows, "rounds": {"ns": rounds}, **bytes_}
        args.json.write_text(json.dumps(out, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
