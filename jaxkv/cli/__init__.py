"""The command line: the outermost layer. It and `compile_check` alone know `models`."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from jaxkv.cli import bench, compile_check, generate, replay, simulate, size, snapshot
from jaxkv.errors import JaxkvError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: list[str] | None = None) -> int:
    """Runs a command; its exit status. Bad input is one line on standard error and status 2."""
    parser = _Parser(prog="jaxkv", description="The paged KV-cache memory layer for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, bench, simulate, size, snapshot, replay, compile_check):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (JaxkvError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"jaxkv {args.command}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
