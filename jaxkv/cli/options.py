"""Options and helpers of the commands that run a model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from jaxkv.config import DTYPES


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model, its cache and the engine's steps."""
    parser.add_argument(
        "--model", type=Path, metavar="PATH", default=argparse.SUPPRESS,
        help="GGUF file, Hugging Face folder or Orbax checkpoint (default: SmolLM2-135M-Instruct)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="float32",
        help="element type of weights, activations and cache (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="N",
        help="tokens per block of the cache (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--num-blocks", type=int, default=argparse.SUPPRESS, metavar="N",
        help="blocks in the pool (default: enough for all sequences that run at once)",
    )  # fmt: skip
    parser.add_argument(
        "--prefix-index", choices=["hash", "radix", "none"], default="hash",
        help="index that finds cached prefixes; none: no prefix caching (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--steps-per-dispatch", type=int, default=1, metavar="N",
        help="decode steps that the device runs per dispatch (default: %(default)s)",
    )  # fmt: skip


def load_model(args: argparse.Namespace) -> tuple[Any, Path]:
    """The checkpoint that the options name, and its path."""
    from jaxkv.models import default_model, load  # loads JAX and Flax

    use_compilation_cache()
    path = getattr(args, "model", None) or default_model()
    return load(path, dtype=args.dtype, progress=True), path


def use_compilation_cache() -> None:
    """Keeps compiled steps on disk for later runs of the command line."""
    import jax

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(base / "jaxkv" / "xla"))


def prefix_index(args: argparse.Namespace) -> str | None:
    """The option's value as an argument of `BlockManager`."""
    return None if args.prefix_index == "none" else args.prefix_index
