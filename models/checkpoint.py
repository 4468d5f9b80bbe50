"""Any checkpoint to a model and its tokenizer: GGUF file, Hugging Face folder, Orbax folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxkv.models.files import CheckpointError, GGUFFile
from jaxkv.models.gguf_loader import load_gguf
from jaxkv.models.hf_loader import load_hf
from jaxkv.models.llama import Llama
from jaxkv.models.orbax_checkpoint import PARAMS, load_orbax
from jaxkv.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model that is ready to generate.

    Attributes:
      model: the Llama; its config is `model.config`.
      tokenizer: the checkpoint's own.
      path: where it came from.
    """

    model: Llama
    tokenizer: Tokenizer
    path: Path


def load(path: str | Path, *, dtype: Any = jnp.float32, progress: bool = False) -> Checkpoint:
    """Loads a GGUF file, a Hugging Face folder or an Orbax checkpoint, whichever `path` is.

    Args:
      path: a `.gguf` file; a folder with `config.json` and safetensors; or one with `config.json`
        and `params/`, as `save_orbax` writes it.
      dtype: of the weights and activations.
      progress: show a progress bar on standard error.

    Raises:
      CheckpointError: nothing there, or something damaged or incomplete.
      ConfigError: a model or tokenizer that cannot be honoured, by field.
    """
    path = Path(path)
    if path.is_file():
        file = GGUFFile(path)
        # The tokenizer first: it takes a moment, the weights take longer.
        tokenizer = Tokenizer.from_gguf(file)
        return Checkpoint(load_gguf(file, dtype=dtype, progress=progress), tokenizer, path)
    if not path.is_dir():
        raise CheckpointError(f"no such file or folder: {path}")
    tokenizer = Tokenizer.from_folder(path)
    if (path / PARAMS).is_dir():
        return Checkpoint(load_orbax(path, dtype=dtype), tokenizer, path)
    return Checkpoint(load_hf(path, dtype=dtype, progress=progress), tokenizer, path)
