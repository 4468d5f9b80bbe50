"""Orbax checkpoints of a model: `config.json`, the tokenizer's files, weights under `params/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from jaxkv.models.errors import CheckpointError
from jaxkv.models.files import read_folder_config
from jaxkv.models.llama import Llama
from jaxkv.models.tokenizer import Tokenizer

PARAMS = "params"


def save_orbax(folder: Path, model: Llama, tokenizer: Tokenizer | None = None) -> None:
    """Writes a model, and its tokenizer if given, to a new or existing folder."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=1))
    if tokenizer is not None:
        tokenizer.save(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS, nnx.to_pure_dict(nnx.state(model)), force=True)


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
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check_shapes(path, checkpointer.metadata(path).item_metadata, target)
            weights = checkpointer.restore(path, target)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: cannot restore the weights: {reason}") from None
    nnx.replace_by_pure_dict(abstract, weights)
    return nnx.merge(graph, abstract)


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
