"""Llama weights from Hugging Face folders: safetensors in one file or in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkv.models.files import CheckpointError, read_folder_config, read_json
from jaxkv.models.llama import Llama
from jaxkv.models.weights import Reader, build


def load_hf(folder: Path, *, dtype: Any, progress: bool = False) -> Llama:
    """Loads the model of a Hugging Face folder.

    Raises:
      CheckpointError: missing, duplicate, unexpected or damaged files or tensors; the error names
        them.
      ConfigError: an unsupported config.
    """
    config = read_folder_config(folder)
    return build(config, _tensors(folder), dtype=dtype, source=str(folder), progress=progress)


def _tensors(folder: Path) -> dict[str, Reader]:
    """Readers of all tensors. The index, if there is one, determines the required files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        files = sorted(set(weight_map.values()))
        for name in files:
            if not (folder / name).exists():
                raise CheckpointError(f"{index} names {name}, which does not exist")
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
            raise CheckpointError(f"{index} maps {name} to {file}, which does not hold it")
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
