"""Hugging Face folders: `config.json`, safetensors in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkv.models.config import LlamaConfig
from jaxkv.models.llama import Llama
from jaxkv.models.weights import CheckpointError, Reader, build


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      CheckpointError: no such file, or no JSON object in it.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_config(folder: Path) -> LlamaConfig:
    """The folder's config; end tokens also from `generation_config.json`."""
    generation = folder / "generation_config.json"
    return LlamaConfig.from_hf(
        read_json(folder / "config.json"),
        generation=read_json(generation) if generation.exists() else None,
    )


def load_hf(folder: Path, *, dtype: Any, progress: bool = False) -> Llama:
    """The model of a Hugging Face folder.

    Raises:
      CheckpointError: files or tensors missing, twice, unexpected or damaged; by name.
      ConfigError: a config that the model cannot honour.
    """
    return build(
        read_config(folder), _tensors(folder), dtype=dtype, source=str(folder), progress=progress
    )


def _tensors(folder: Path) -> dict[str, Reader]:
    """Readers of all tensors. The index, not the directory, says which files there must be."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        files = sorted(set(weight_map.values()))
        for name in files:
            if not (folder / name).exists():
                raise CheckpointError(f"{index} names {name}, which is not there")
    else:
        weight_map = {}
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} has no .safetensors file")
    readers: dict[str, Reader] = {}
    found_in: dict[str, str] = {}
    for file in files:
        for name in _names(folder / file):
            if name in found_in:
                raise CheckpointError(f"{folder}: {name} is in both {found_in[name]} and {file}")
            found_in[name] = file
            readers[name] = _reader(folder / file, name)
    for name, file in weight_map.items():
        if found_in.get(name) != file:
            raise CheckpointError(f"{index} says {name} is in {file}, but it is not")
    return readers


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="flax") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from None


def _reader(path: Path, name: str) -> Reader:
    def read() -> np.ndarray:
        with safe_open(path, framework="flax") as file:  # flax: NumPy alone has no bfloat16
            return np.asarray(file.get_tensor(name))

    return read
