"""`jaxkv size`: memory of a model's KV cache, paged and contiguous, and a block size for it."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxkv._util import to_json
from jaxkv.cli.text import read_lines
from jaxkv.config import DTYPES, CacheConfig, ModelShape
from jaxkv.errors import ConfigError
from jaxkv.planning.sizing import (
    BlockSizeSuggestion,
    CacheSize,
    Shape,
    cache_size,
    suggest_block_size,
)
from jaxkv.studies.traces import PACKAGED, load_trace

if TYPE_CHECKING:
    from rich.table import Table

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS = {"": 1} | {unit.lower(): 1024**i for i, unit in enumerate(_BINARY)}
_UNITS |= {unit: 1000**i for i, unit in enumerate(("kb", "mb", "gb", "tb"), 1)}


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    p.description = (
        "Computes the memory of a model's KV cache and the number of sequences that a budget "
        "holds, paged and contiguous. Given sequence lengths, also suggests a block size. Reads no "
        "weights."
    )
    p.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL",
        help="GGUF file, or Hugging Face or Orbax folder (config.json is enough); or give "
        "--layers, --kv-heads and --head-dim",
    )  # fmt: skip
    p.add_argument("--layers", type=int, metavar="N", help="number of transformer layers")
    p.add_argument("--kv-heads", type=int, metavar="N", help="number of key/value heads per layer")
    p.add_argument("--head-dim", type=int, metavar="N", help="elements per head")
    p.add_argument(
        "--memory", required=True, metavar="SIZE",
        help="memory budget of the cache, such as 16GiB, 1.5GB or a number of bytes (required)",
    )  # fmt: skip
    p.add_argument(
        "--max-len", type=int, default=4096, metavar="N",
        help="length of the longest sequence, in tokens; a contiguous cache reserves it for every "
        "sequence (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--block-size", type=int, default=CacheConfig.block_size, metavar="N",
        help="tokens per block (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--length", type=int, metavar="N",
        help="length of the sequences that the budget is filled with, in tokens (default: mean of "
        "the given lengths, else --max-len)",
    )  # fmt: skip
    lengths = p.add_mutually_exclusive_group()
    lengths.add_argument(
        "--lengths-file", type=Path, metavar="FILE",
        help="suggest a block size for the final sequence lengths in FILE, in tokens, one per line",
    )  # fmt: skip
    lengths.add_argument(
        "--trace", metavar="TRACE",
        help="suggest a block size for the requests of a trace file, or of a packaged trace: "
        + ", ".join(PACKAGED),
    )  # fmt: skip
    p.add_argument(
        "--dtype", choices=list(DTYPES), default=CacheConfig.dtype,
        help="element type of the cache for the suggested block size (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    model = _shape(args)
    memory = _parse_bytes(args.memory)
    lengths = _lengths(args)
    length = args.length
    if length is None:
        length = args.max_len if lengths is None else int(np.ceil(lengths.mean()))
    sizes = {
        dtype: cache_size(
            model, memory_bytes=memory, max_len=args.max_len, length=length,
            block_size=args.block_size, dtype=dtype,
        )
        for dtype in DTYPES
    }  # fmt: skip
    suggestion = None
    if lengths is not None:
        suggestion = suggest_block_size(
            lengths,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=args.dtype,
            max_len=args.max_len,
            concurrency=sizes[args.dtype].config.max_seqs,
        )
    if args.json:
        report = {
            "model": None if args.model is None else str(args.model),
            "num_layers": model.num_layers,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "memory_bytes": memory,
            "max_len": args.max_len,
            "length": length,
            "block_size": args.block_size,
            "dtypes": {dtype: size.to_dict() for dtype, size in sizes.items()},
            "suggestion": None if suggestion is None else suggestion.to_dict(),
        }
        print(to_json(report))
        return 0
    from rich.console import Console

    console = Console()
    console.print(_pool_table(model, sizes))
    console.print(_sequences_table(sizes))
    if suggestion is not None:
        console.print(_suggestion_table(suggestion))
    return 0


def _shape(args: argparse.Namespace) -> ModelShape:
    given = {"--layers": args.layers, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    missing = [flag for flag, value in given.items() if value is None]
    if args.model is None:
        if missing:
            raise ConfigError(f"no model; give MODEL, or add {', '.join(missing)}")
        return Shape(args.layers, args.kv_heads, args.head_dim)
    if len(missing) < len(given):
        raise ConfigError(f"give MODEL or {', '.join(given)}, not both")
    from jaxkv.models.files import read_config

    try:
        return read_config(args.model)
    except ConfigError as error:
        raise ConfigError(f"{error}; to size the cache anyway, give {', '.join(given)}") from None


def _lengths(args: argparse.Namespace) -> np.ndarray | None:
    """i64[N] final lengths in tokens, or None if no lengths were given."""
    if args.trace is not None:
        trace = load_trace(args.trace)
        return trace.input_tokens + trace.output_tokens
    if args.lengths_file is None:
        return None
    path, lengths = args.lengths_file, []
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            if not re.fullmatch(r"\s*0*[1-9][0-9]{0,17}\s*", line):
                what = f"length must be a positive integer, got {line.strip()[:40]!r}"
                raise ConfigError(f"{path}, line {number}: {what}")
            lengths.append(int(line))
    if not lengths:
        raise ConfigError(f"{path} holds no lengths; write one per line, in tokens")
    return np.array(lengths, np.int64)


def _parse_bytes(text: str) -> int:
    """Bytes of a size such as "16GiB", "1.5 GB" or "4096"."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"--memory {text!r} is not a size; give a number of bytes, or one with a unit from KiB "
            "to TiB or KB to TB"
        )
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def _bytes(count: float) -> str:
    for unit in _BINARY[:-1]:
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} {_BINARY[-1]}"


def _pool_table(model: ModelShape, sizes: dict[str, CacheSize]) -> Table:
    first = next(iter(sizes.values()))
    table = _columns(
        ("dtype", "per token", "per block", "blocks", "pool", "block tables"),
        title=f"{model.num_layers} layers, {model.num_kv_heads} KV heads of {model.head_dim}; "
        f"{_bytes(first.memory_bytes)} in blocks of {first.config.block_size} tokens",
        caption="One block is the null block. Block tables are not part of the budget.",
    )
    for dtype, size in sizes.items():
        config = size.config
        table.add_row(
            dtype,
            _bytes(config.bytes_per_token),
            _bytes(config.block_bytes),
            str(config.num_blocks),
            _bytes(config.pool_bytes),
            _bytes(size.table_bytes),
        )
    return table


def _sequences_table(sizes: dict[str, CacheSize]) -> Table:
    first = next(iter(sizes.values()))
    table = _columns(
        ("dtype", "paged, each", "at once", "contiguous, each", "at once"),
        title=f"Sequences of {first.length} tokens, longest {first.max_len}",
        caption=f"A contiguous cache reserves {first.max_len} tokens per sequence.",
    )
    for dtype, size in sizes.items():
        table.add_row(
            dtype,
            _bytes(size.paged_bytes),
            str(size.paged_concurrency),
            _bytes(size.contiguous_bytes),
            str(size.contiguous_concurrency),
        )
    return table


def _suggestion_table(suggestion: BlockSizeSuggestion) -> Table:
    table = _columns(
        ("block size", "empty slots", "waste", "table", "one copy", "copy cost", "total"),
        title=f"Blocks of {suggestion.block_size} tokens cost least ({suggestion.dtype})",
        caption=f"Bytes per sequence, mean length {suggestion.mean_length:.0f}; each copy is "
        f"charged {suggestion.copy_cost} bytes. The older rule sqrt(mean length x concurrency) / 6 "
        f"gives {suggestion.rule_of_thumb:.0f} for {suggestion.concurrency} sequences.",
    )
    for cost in suggestion.costs:
        table.add_row(
            str(cost.block_size),
            f"{cost.empty_slots:.1f}",
            _bytes(cost.waste_bytes),
            _bytes(cost.table_bytes),
            _bytes(cost.copy_bytes),
            _bytes(cost.kernel_bytes),
            _bytes(cost.total_bytes),
            style="bold green" if cost.block_size == suggestion.block_size else None,
        )
    return table


def _columns(names: tuple[str, ...], *, title: str, caption: str) -> Table:
    from rich.table import Table

    table = Table(title=title, caption=caption)
    for name in names:
        table.add_column(name, justify="left" if name == "dtype" else "right")
    return table
