"""Loading of checkpoints with their tokenizers: GGUF files, Hugging Face and Orbax folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxkv.models.errors import CheckpointError
from jaxkv.models.gguf_file import GGUFFile
from jaxkv.models.gguf_loader import load_gguf
from jaxkv.models.hf_loader import load_hf
from jaxkv.models.llama import Llama
from jaxkv.models.orbax_checkpoint import PARAMS, load_orbax
from jaxkv.models.replace_entries import complete_replacement
from jaxkv.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model that is ready to generate.

    Attributes:
      model: the Llama, with its config in `model.config`.
      tokenizer: the checkpoint's tokenizer.
      path: path of the checkpoint.
    """

    model: Llama
    tokenizer: Tokenizer
    path: Path


def load(path: str | Path, *, dtype: Any = jnp.float32, progress: bool = False) -> Checkpoint:
    """Loads a GGUF file, a Hugging Face folder or an Orbax checkpoint, whichever `path` is.

    Args:
      path: a `.gguf` file; a folder with `config.json` and safetensors; or a folder with
        `config.json` and `params/`, as `save_orbax` writes it.
      dtype: element type of the weights and activations.
      progress: show a progress bar on standard error.

    Raises:
      CheckpointError: the path does not exist or cannot be read, the checkpoint is damaged or
        incomplete, or its weights do not fit the memory.
      ConfigError: an unsupported model, tokenizer or dtype; the error names the field.
    """
    path = Path(path)
    try:
        return _load(path, dtype, progress)
    except OSError as error:  # a folder that may not be entered, a file that may not be read
        where = error.filename or path
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from None


def _load(path: Path, dtype: Any, progress: bool) -> Checkpoint:
    if path.is_file():
        file = GGUFFile(path)
        # The tokenizer first: it loads quickly, so its errors come before the weights load.
        tokenizer = Tokenizer.from_gguf(file)
        return Checkpoint(load_gguf(file, dtype=dtype, progress=progress), tokenizer, path)
    if not path.is_dir():
        raise CheckpointError(f"no such file or folder: {path}")
    complete_replacement(path)  # of a save that was interrupted
    tokenizer = Tokenizer.from_folder(path)
    if (path / PARAMS).is_dir():
        model = load_orbax(path, dtype=dtype)
    else:
        model = load_hf(path, dtype=dtype, progress=progress)
    _add_end_token(model, tokenizer)
    return Checkpoint(model, tokenizer, path)


def _add_end_token(model: Llama, tokenizer: Tokenizer) -> None:
    """Adds the tokenizer's end token to those of the config: chat models often name the end of a
    turn there alone."""
    token = tokenizer.backend.token_to_id(tokenizer.special.get("eos_token", ""))
    known = model.config.eos_token_ids
    if token is not None and token not in known and token < model.config.vocab_size:
        model.config = dataclasses.replace(model.config, eos_token_ids=(*known, token))
