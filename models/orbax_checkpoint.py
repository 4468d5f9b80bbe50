"""Orbax checkpoints of a model: `config.json`, the tokenizer's files, weights under `params/`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from jaxkv.models.errors import CheckpointError
from jaxkv.models.files import read_folder_config, read_json, write_json
from jaxkv.models.llama import Llama
from jaxkv.models.memory import check_fits
from jaxkv.models.replace_entries import complete_replacement, replaced_entries
from jaxkv.models.tokenizer import Tokenizer

PARAMS = "params"
_SIZES = "params.json"  # bytes of each file of `params`, by its path there
# What a tokenizer may have written: a new one without, say, a template replaces an old one with it.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                    "added_tokens.json", "chat_template.jinja")  # fmt: skip


def save_orbax(folder: str | Path, model: Llama, tokenizer: Tokenizer | None = None) -> None:
    """Writes a model, and its tokenizer if given, to a new or existing folder.

    A checkpoint that the folder holds is replaced once the new one is whole: a save that is
    interrupted at any point leaves one of the two.

    Raises:
      CheckpointError: the folder cannot be written to, or holds something else under the names of
        a checkpoint.
    """
    folder = Path(folder).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        complete_replacement(folder)
        _refuse_others(folder)
        gone = _TOKENIZER_FILES if tokenizer is not None else ()
        with replaced_entries(folder, gone=gone) as new:
            write_json(new / "config.json", model.config.to_hf())
            if tokenizer is not None:
                tokenizer.save(new)
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(new / PARAMS, nnx.to_pure_dict(nnx.state(model)))
            write_json(new / _SIZES, _file_sizes(new / PARAMS))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot save the model: {error}") from None


def _refuse_others(folder: Path) -> None:
    """Refuses to replace what is not a checkpoint of `save_orbax`."""
    params = folder / PARAMS
    if params.exists() and not (params / "_METADATA").is_file():
        raise CheckpointError(f"{params} exists and is not an Orbax checkpoint; move it, or choose "
                              "another folder")  # fmt: skip
    if (folder / "config.json").exists() and not params.exists():
        raise CheckpointError(f"{folder} has a config.json and no {PARAMS}: it holds another "
                              "model; choose another folder")  # fmt: skip


def load_orbax(folder: Path, *, dtype: Any) -> Llama:
    """Loads the model of an Orbax checkpoint; casts its weights to `dtype`.

    Raises:
      CheckpointError: weights that are missing, damaged, or do not match the config.
      ConfigError: an unsupported config.
    """
    folder = folder.absolute()
    config = read_folder_config(folder)
    abstract_model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, abstract = nnx.split(abstract_model)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        nnx.to_pure_dict(abstract),
    )
    path = folder / PARAMS
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; the checkpoint has no weights")
    leaves = jax.tree.leaves(target)
    check_fits(sum(math.prod(x.shape) for x in leaves), dtype, str(folder))
    _check_files(folder)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check_shapes(path, checkpointer.metadata(path).item_metadata, target)
            weights = checkpointer.restore(path, target)
    except CheckpointError:
        raise
    except Exception as error:
        raise restore_error(path, error) from None
    nnx.replace_by_pure_dict(abstract, weights)
    return nnx.merge(graph, abstract)


def restore_error(path: Path, error: BaseException) -> CheckpointError:
    """One line for what Orbax raises: bare exceptions of sixty lines, for missing or cut data."""
    while error.__cause__ is not None:
        error = error.__cause__
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return CheckpointError(f"{path}: cannot restore the weights; files are missing, cut short or "
                           f"damaged: {reason:.300}")  # fmt: skip


def _file_sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _check_files(folder: Path) -> None:
    """Compares files with those that were saved: a restore that fails leaks loops and threads."""
    if not (folder / _SIZES).exists():  # written by Orbax itself
        return
    found = _file_sizes(folder / PARAMS)
    for name, size in read_json(folder / _SIZES).items():
        if found.get(name) != size:
            got = f"has {found[name]} of {size} bytes" if name in found else "is missing"
            raise CheckpointError(f"{folder / PARAMS / name} {got}: the checkpoint is incomplete; "
                                  "copy it again, or save the model again")  # fmt: skip


def _check_shapes(path: Path, metadata: Any, target: Any) -> None:
    """Compares shapes before the restore: if that fails, it leaks an event loop and threads."""
    if metadata is None:
        raise CheckpointError(f"{path}: not an Orbax checkpoint, or a damaged one")

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(k, simple=True, separator="."): v.shape for k, v in leaves}

    # Orbax writes the indices of a list as strings, so names are compared instead of trees.
    saved, wanted = shapes(metadata.tree), shapes(target)
    wrong = sorted(n for n in saved | wanted if saved.get(n) != wanted.get(n))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} of {len(wanted)} weights do not match the config, such as "
            f"{name}: must be {wanted.get(name, 'absent')}, got {saved.get(name, 'none')}"
        )
