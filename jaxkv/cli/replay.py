"""`jaxkv replay`: runs a log of a block manager again and says where it goes another way."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    p.description = (
        "Runs a log that jaxkv.record wrote on a new block manager and compares "
        "all that it does. Exit status 1 where it differs."
    )
    p.add_argument("log", type=Path, metavar="LOG", help="JSON lines")
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from jaxkv.observe.log import replay

    report = replay(args.log, progress=not args.json)
    print(json.dumps(report.to_dict()) if args.json else report)
    return 1 if report.difference else 0
