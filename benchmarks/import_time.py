"""Start-up time of commands and imports that need no JAX.

    uv run benchmarks/import_time.py --json out.json

Starts each command in its own process, in turn, so that a drift of the machine's speed affects all
alike. The figure of interest is `jaxkv --help` less the bare interpreter.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from turns import machine

JAXKV = str(Path(sys.executable).with_name("jaxkv"))
SIZES = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--memory", "16GiB"]
BARE, HELP = "python -c pass", "jaxkv --help"
COMMANDS = {
    BARE: [sys.executable, "-c", "pass"],
    HELP: [JAXKV, "--help"],
    "from jaxkv import BlockManager": [sys.executable, "-c", "from jaxkv import BlockManager"],
    "jaxkv size --layers ...": [JAXKV, "size", *SIZES],
    "import jax": [sys.executable, "-c", "import jax"],
}


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="runs of each command")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    for command in COMMANDS.values():
        seconds(command)  # compiles modules to bytecode, fills the page cache
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    console = Console(stderr=True)
    for _ in track(range(args.rounds), "rounds", console=console, transient=True):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    rows = [
        {"command": name, "s_median": statistics.median(t), "s_min": min(t)}
        for name, t in times.items()
    ]
    table = Table(title="seconds of wall time")
    for name in ("command", "median", "min"):
        table.add_column(name, justify="left" if name == "command" else "right")
    for row in rows:
        table.add_row(row["command"], f"{row['s_median']:.3f}", f"{row['s_min']:.3f}")
    console = Console()
    console.print(table)
    pairs = zip(times[HELP], times[BARE], strict=True)
    overhead = statistics.median(ours - bare for ours, bare in pairs)
    console.print(f"{HELP} less {BARE}: {overhead:.3f} s, target below 0.5 s")
    if args.json:
        meta = machine() | {"rounds": args.rounds, "help_less_bare_s": overhead}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
