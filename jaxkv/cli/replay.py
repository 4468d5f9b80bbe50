"""`jaxkv replay`: reruns the log of a block manager and reports the first difference."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxkv._util import to_json


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    p.description = (
        "Reruns the operations in a log of jaxkv.record on a new block manager and compares "
        "results and events with the log. The exit status is 1 if they differ."
    )
    p.add_argument("log", type=Path, metavar="LOG", help="log file of jaxkv.record (JSON lines)")
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from jaxkv.observe.log import replay

    report = replay(args.log, progress=not args.json)
    print(to_json(report.to_dict()) if args.json else report)
    return 1 if report.difference else 0
