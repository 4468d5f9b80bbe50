"""Llama weights from Hugging Face folders: safetensors in one file or in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkv.models.errors import CheckpointError
from jaxkv.models.files import read_folder_config, read_json
from jaxkv.models.llama import Llama
from jaxkv.models.weights import StoredTensor, build

_FLOATS = ("F64", "F32", "F16", "BF16")
# Weights that may stand beside a model's: an adapter, or the same weights in Meta's form.
_OTHERS = ("adapter_", "consolidated")


def load_hf(folder: Path, *, dtype: Any, progress: bool = False) -> Llama:
    """Loads the model of a Hugging Face folder.

    Raises:
      CheckpointError: missing, duplicate, unexpected or damaged files or tensors, or weights that
        do not fit the memory; the error names them.
      ConfigError: an unsupported config.
    """
    config = read_folder_config(folder)
    return build(config, _tensors(folder), dtype=dtype, source=str(folder), progress=progress)


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors: of `model.safetensors`, or else of the files that the index names."""
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] = {}
    if (folder / "model.safetensors").exists():
        files = ["model.safetensors"]  # as transformers has it: an index beside it is stale
    elif index.exists():
        weight_map = _weight_map(index)
        files = sorted(set(weight_map.values()))
        for name in files:
            if not (folder / name).exists():
                raise CheckpointError(f"{index} names {name}, which does not exist; the folder is "
                                      "incomplete")  # fmt: skip
    else:
        files = _files_without_index(folder)
    tensors: dict[str, StoredTensor] = {}
    found_in: dict[str, str] = {}
    for file in files:
        for name, tensor in _contents(folder / file).items():
            if name in found_in:
                raise CheckpointError(f"{folder}: {name} is in both {found_in[name]} and {file}")
            found_in[name] = file
            tensors[name] = tensor
    for name, file in weight_map.items():
        if found_in.get(name) != file:
            raise CheckpointError(f"{index} maps {name} to {file}, which does not hold it")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    value = read_json(index).get("weight_map")
    if not isinstance(value, dict) or not value:
        got = "none" if value is None else f"{value!r:.80}"
        raise CheckpointError(f"{index}: weight_map must map names of tensors to files, got {got}")
    for name, file in value.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: weight_map maps {name} to {file!r:.80}, which is not "
                                  "the name of a file in this folder")  # fmt: skip
    return value


def _files_without_index(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    files = [name for name in found if not name.startswith(_OTHERS)]
    if not files:
        others = found or sorted(path.name for path in folder.glob("*.bin"))
        beside = f", only {', '.join(others[:4])}" if others else ""
        raise CheckpointError(
            f"{folder} has no .safetensors file of a model{beside}; it needs model.safetensors, or "
            "shards with model.safetensors.index.json"
        )
    return files


def _contents(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="flax") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            kinds = {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in parts.items()}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None
    return {
        name: StoredTensor(shape, _reader(path, name), "" if kind in _FLOATS else f"type {kind}")
        for name, (shape, kind) in kinds.items()
    }


def _reader(path: Path, name: str):
    def read() -> np.ndarray:
        try:
            with safe_open(path, framework="flax") as file:  # flax: NumPy alone has no bfloat16
                return np.asarray(file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None

    return read


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, OSError):
        return CheckpointError(f"{path} cannot be read: {error.strerror or error}")
    return CheckpointError(f"{path} is damaged or cut short: {error}")
