"""Paged attention on a GPU: correctness, share of the memory bandwidth, comparison with peers.

    uv run benchmarks/gpu_attention.py                 # with JAX's CUDA plugin installed
    uv run benchmarks/gpu_attention.py --only "decode jaxkv 4096" --json tuned.json
    uv run benchmarks/gpu_attention.py --dry-run       # the script on a CPU, without the kernels

Checks every kernel against its reference on random data, with outputs in memory that held NaN;
measures the copy bandwidth; then times decode and prefill of this library and of its peers, within
`--seconds`. benchmarks/NOTES.md explains the results. Exit status: 1 if a check of this library is
wrong or did not complete, 2 without an NVIDIA GPU.

Rows are computed in a separate process: a kernel that hangs or loses the device costs its row and a
new process, not the run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import platform
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import gpu_plan
import gpu_report
import gpu_rows
from gpu_rows import Case, PeerCheck, Task
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

RESULTS = Path(__file__).parent / "results" / "gpu_attention.json"
START_SECONDS = 90  # for a process to import its library and find the device
# (seconds that must be left to begin a row, seconds it may take), compilation included.
SECONDS = {"gpu_jax": (6, 60), "gpu_torch": (20, 120)}
LIBRARIES = {"gpu_jax": "jax", "gpu_torch": "torch"}
DEATHS = 2  # rows of one group that may end their process before the others are skipped


class Died(Exception):
    """A process ended or was ended before it sent a row; the message says how."""


class Worker:
    """A process that fills rows with the engine of a module.

    Attributes:
      module: name of the module.
      about: libraries and device of the process, or {"error": reason}.
    """

    def __init__(self, module: str, log: str, seed: int, dry: bool, seconds: float):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=gpu_rows.answer, args=(theirs, module, log, seed, dry)
        )
        self._process.start()
        theirs.close()
        self.module = module
        self.about = self._receive(seconds)

    def fill(self, task: Task, seconds: float) -> dict:
        """Returns the row of a task.

        Raises:
          Died: no row arrived within `seconds`, or the process ended.
        """
        with contextlib.suppress(OSError):  # the process has ended: `_receive` reports how
            self._connection.send(task)
        return self._receive(seconds)

    def close(self) -> None:
        """Ends the process, which frees the device's memory."""
        with contextlib.suppress(OSError):  # it has already ended
            self._connection.send(None)
            self._process.join(5)
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.join(10)  # the driver may hold a process whose kernel hangs

    def _receive(self, seconds: float) -> dict:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise Died(f"the process ended with {self._process.exitcode}") from None
        self._end()
        raise Died(f"no row within {seconds:.0f} s: the process was ended")


class Filler:
    """Fills rows in the process of each row's engine, one process at a time, in a time budget.

    Attributes:
      about: `Worker.about` by module.
      ends: time.monotonic() at the end of the budget.
    """

    def __init__(self, args: argparse.Namespace, log: str):
        self._args, self._log = args, log
        self._worker: Worker | None = None
        self._deaths: Counter[str] = Counter()
        self.about: dict[str, dict] = {}
        self.ends = time.monotonic() + args.seconds

    def start(self, module: str) -> dict:
        """Returns `Worker.about` of a module's process; starts the process if needed."""
        if importlib.util.find_spec(LIBRARIES[module]) is None:
            self.about[module] = {"error": f"{LIBRARIES[module]} is not installed"}
            return self.about[module]
        if self._worker is None or self._worker.module != module:
            self.close()
            seconds = min(START_SECONDS, self.ends - time.monotonic())
            self._worker = Worker(module, self._log, self._args.seed, self._args.dry_run, seconds)
            self.about[module] = self._worker.about
        return self._worker.about

    def fill(self, task: Task) -> dict:
        """Returns the task's row, even if its process ends."""
        module = "gpu_torch" if task.engine.startswith("torch") else "gpu_jax"
        row = {"kind": task.kind, "name": task.name, "engine": task.engine}
        row |= {"dry_run": True} if self._args.dry_run else {}
        case = task.case if isinstance(task, PeerCheck) else task
        if isinstance(case, Case):
            row |= dataclasses.asdict(case)
        least, most = SECONDS[module]
        left = self.ends - time.monotonic()
        if self._deaths[task.group] >= DEATHS:
            return row | _skipped(f"{DEATHS} rows of '{task.group}' ended their process")
        if left < least:
            return row | _skipped(f"the {self._args.seconds} s are used up")
        try:
            about = self.start(module)
            if "error" in about:
                return row | _skipped(about["error"])
            assert self._worker is not None
            row |= self._worker.fill(task, min(most, self.ends - time.monotonic()))
            if row.get("device_lost"):
                raise Died(f"{row['reason']}; the device was lost")
        except Died as death:
            self._deaths[task.group] += 1
            self._worker = None
            row |= {"status": "failed", "reason": str(death)}
            if time.monotonic() >= self.ends:
                row |= _skipped(f"the {self._args.seconds} s were used up while it ran")
        return row

    def close(self) -> None:
        """Ends the running process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _skipped(reason: str) -> dict:
    return {"status": "skipped", "reason": reason}


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=520, help="time budget of the whole run")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="only rows whose names contain TEXT; "
        "may be repeated; the copy bandwidth is always measured",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names of the rows and exit")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="seed of the data")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="tiny rows on the CPU with the XLA implementation, to test the script itself",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, help=f"default: {RESULTS}; with --only or --dry-run, none"
    )
    parser.add_argument("--label", default="", help="description of the change, kept in the JSON")
    parser.add_argument("--log", help="file for the output of the libraries")
    args = parser.parse_args()
    if args.json is None and not args.dry_run and not args.only:
        args.json = RESULTS
    return args


def main() -> int:
    args = parse()
    tasks = gpu_plan.dry() if args.dry_run else gpu_plan.full()
    only = args.only or [""]
    tasks = [t for t in tasks if t.kind == "copy" or any(text in t.name for text in only)]
    if args.list:
        print("\n".join(task.name for task in tasks))
        return 0
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        filler = Filler(args, args.log or log.name)
        try:
            return run(args, tasks, filler)
        finally:
            filler.close()


def run(args: argparse.Namespace, tasks: list[Task], filler: Filler) -> int:
    """Fills all rows, writes the document after each, and prints the report."""
    try:
        device = filler.start("gpu_jax")
    except Died as death:
        device = {"error": str(death)}
    if not args.dry_run and not device.get("nvidia"):
        found = device.get("error") or f"JAX finds {device['device']} ({device['platform']})"
        needs = f"gpu_attention needs an NVIDIA GPU, but {found}; --dry-run runs without one"
        print(needs, file=sys.stderr)
        return 2
    rows: list[dict] = []
    document = {
        "meta": {
            "label": args.label,
            "dry_run": args.dry_run,
            "seed": args.seed,
            "seconds": args.seconds,
            "python": platform.python_version(),
            "engines": gpu_plan.ENGINES,
            "processes": filler.about,
        },
        "complete": False,
        "rows": rows,
    }
    err = Console(stderr=True)
    err.width = err.width if err.is_terminal else 160
    columns = (
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("of {task.fields[seconds]} s"),
    )  # fmt: skip
    copy = None
    with Progress(*columns, console=err, transient=True) as bar:
        progress = bar.add_task("", total=len(tasks), seconds=args.seconds)
        for task in tasks:
            bar.update(progress, description=task.name)
            write(args.json, document | {"in_progress": task.name})
            rows.append(filler.fill(task))
            if task.kind == "copy" and rows[-1]["status"] == "ok":
                document["copy_bytes_per_s"] = copy = rows[-1]["bytes_per_s"]
            bar.advance(progress)
            err.print(gpu_report.line(rows[-1], copy), markup=False, highlight=False)
    targets = gpu_plan.targets(rows, copy)
    document["targets"] = [dataclasses.asdict(t) | {"met": t.met} for t in targets]
    write(args.json, document | {"complete": True})
    out = Console()
    out.width = out.width if out.is_terminal else 120
    gpu_report.show(out, rows, copy, targets, args.dry_run)
    own = [r for r in rows if r["kind"] == "check" and r["engine"] == "jaxkv"]
    return 1 if any(r["status"] in ("wrong", "failed") for r in own) else 0


def write(file: Path | None, document: dict) -> None:
    """Writes the document as JSON, atomically."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(partial, file)


if __name__ == "__main__":
    raise SystemExit(main())
