"""`jaxkv compile-check`: ahead-of-time compilation for GPUs that the machine does not have."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxkv._util import to_json
from jaxkv.compile_check.targets import NAMES, Target
from jaxkv.errors import ConfigError


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    p.description = (
        "Compiles the operations on the pool, the kernels and whole model steps to machine code "
        "for GPUs that this machine need not have, and prints the resources that the compiler "
        "reports. The exit status is 1 if a program does not compile, spills registers, copies "
        "the pool or writes it element by element. Needs the dependency group `aot` "
        "(uv run --group aot)."
    )
    p.add_argument(
        "--gpu", action="append", choices=[*NAMES, "all"], metavar="NAME",
        help=f"target GPU: {', '.join(NAMES)} or all; may be repeated (default: h200)",
    )  # fmt: skip
    p.add_argument("--kernels-only", action="store_true", help="leave out the whole model steps")
    p.add_argument(
        "--only", action="append", metavar="TEXT",
        help="compile only programs with TEXT in their names; may be repeated",
    )  # fmt: skip
    p.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to FILE, as JSON"
    )
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from rich.console import Console

    from jaxkv.compile_check.compiler import compile_all
    from jaxkv.compile_check.programs import programs
    from jaxkv.compile_check.report import table
    from jaxkv.progress_bar import progress_bar

    asked = args.gpu or ["h200"]
    targets = [name for name in NAMES if name in asked or "all" in asked]
    names = [
        program.name
        for program in programs().values()
        if any(text in program.name for text in args.only or [""])
        and (program.kind != "step" or not args.kernels_only)
    ]
    if not names:
        raise ConfigError(f"--only matches no program; the programs are: {'; '.join(programs())}")
    jobs = [(target, name) for target in targets for name in names]
    rows = {}
    with progress_bar() as bar:
        for row in bar.track(compile_all(jobs), total=len(jobs), description="compiling"):
            rows[row.target, row.program] = row
    ordered = [rows[job] for job in jobs]
    if args.json is not None:
        text = to_json([row.to_dict() for row in ordered], indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console.width = 200  # at 80 most words of the table would be broken
    for target in targets:
        console.print(table(Target.load(target), [rows[target, name] for name in names]))
    broken = [f"{r.target}, {r.program}: {what}" for r in ordered for what in r.broken]
    for line in broken:
        console.print(line, style="red", markup=False, highlight=False)
    return 1 if broken else 0
