"""The command line: the outermost layer. It and `compile_check` alone know `models`.

A command's module is imported when the command is named. At its top it imports what its options
need; JAX, Flax, rich and matplotlib come inside `run`, where the command needs them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxkv import __version__
from jaxkv.errors import JaxkvError

_COMMANDS = {
    "generate": "generate text through a paged KV cache",
    "bench": "measure the engine on the requests of a trace",
    "simulate": "replay a request trace through the block manager, without a device",
    "size": "memory that a cache takes, and the block size that fits",
    "snapshot": "compare snapshots of the blocks",
    "replay": "run the log of a block manager again and compare",
    "compile-check": "compile kernels and whole steps for GPUs you do not have",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Bad input is one line on standard error and status 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(prog="jaxkv", description="The paged KV-cache memory layer for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in argv:  # the options of the others are never looked at
            module = importlib.import_module(f"jaxkv.cli.{name.replace('-', '_')}")
            module.add_options(command)
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
