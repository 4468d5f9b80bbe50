"""What commands that run a model have in common."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from jaxkv.config import DTYPES


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The model, its cache and how steps are formed."""
    parser.add_argument(
        "--model", type=Path, metavar="PATH", default=argparse.SUPPRESS,
        help="GGUF file, Hugging Face folder or Orbax checkpoint (default: SmolLM2-135M-Instruct)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="float32", help="of weights, activations and cache"
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block of the cache")
    parser.add_argument(
        "--num-blocks", type=int, default=argparse.SUPPRESS, metavar="N",
        help="blocks in the pool (default: enough for what is to run)",
    )  # fmt: skip
    parser.add_argument(
        "--prefix-index", choices=["hash", "radix", "none"], default="hash",
        help="how cached prefixes are found",
    )  # fmt: skip
    parser.add_argument(
        "--steps-per-dispatch", type=int, default=1, metavar="N",
        help="tokens that the device makes before the host looks",
    )  # fmt: skip


def load_model(args: argparse.Namespace) -> tuple[Any, Path]:
    """The checkpoint that the options name, and its path."""
    from jaxkv.models import default_model, load  # the one place where jaxkv looks outward

    use_compilation_cache()
    path = getattr(args, "model", None) or default_model()
    return load(path, dtype=args.dtype, progress=True), path


def use_compilation_cache() -> None:
    """Keeps compiled steps on disk between runs of the command line."""
    import jax

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(base / "jaxkv" / "xla"))


def prefix_index(args: argparse.Namespace) -> str | None:
    """As `BlockManager` takes it."""
    return None if args.prefix_index == "none" else args.prefix_index
