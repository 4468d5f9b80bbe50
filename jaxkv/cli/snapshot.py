"""`jaxkv snapshot diff`: compares two snapshots of a block pool."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxkv._util import to_json


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    p.description = "Compares snapshots of a block pool that Snapshot.write_csv wrote."
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    diff = actions.add_parser(
        "diff",
        help="blocks that leaked, appeared, vanished, moved or changed their reference count",
        description="Lists the blocks that leaked, appeared, vanished, moved or changed their "
        "reference count. The exit status is 1 if a block leaked.",
    )
    diff.add_argument("before", type=Path, metavar="A.csv", help="the earlier snapshot, a CSV file")
    diff.add_argument("after", type=Path, metavar="B.csv", help="the later snapshot, a CSV file")
    diff.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    diff.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from rich.console import Console

    from jaxkv.observe.snapshot import Snapshot, diff

    result = diff(Snapshot.read_csv(args.before), Snapshot.read_csv(args.after))
    if args.json:
        print(to_json(result.to_dict()))
    elif not (table := result.table()).row_count:
        print("no differences")
    else:
        counts = {name: len(entries) for name, entries in result.to_dict().items()}
        console = Console()
        console.print(table)
        console.print(", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items() if n))
    return 1 if result.leaked else 0
