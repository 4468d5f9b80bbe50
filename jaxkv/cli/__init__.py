"""The command line, the outermost layer. Only it and `compile_check` import `models`.

A command's module is imported when the command is named. The module imports at its top what its
options need, and JAX, Flax, rich and matplotlib inside `run`, where the command needs them.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxkv import __version__
from jaxkv.errors import JaxkvError

_COMMANDS = {
    "generate": "generate text through a paged KV cache",
    "bench": "measure the engine on the requests of a trace",
    "simulate": "replay a request trace through the block manager, without a device",
    "size": "compute the memory of a KV cache and suggest a block size",
    "snapshot": "compare snapshots of a block pool",
    "replay": "rerun the log of a block manager and report the first difference",
    "compile-check": "compile kernels and whole steps for GPUs you do not have",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Bad input prints one line to standard error and returns 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(prog="jaxkv", description="The paged KV-cache memory layer for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in argv:  # the options of other commands are not needed
            module = importlib.import_module(f"jaxkv.cli.{name.replace('-', '_')}")
            module.add_options(command)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text is UTF-8, whatever the locale
            stream.reconfigure(encoding="utf-8", errors="replace")
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has all it wants, as in `jaxkv ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as when SIGPIPE ends a program
    except (JaxkvError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"jaxkv {args.command}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
