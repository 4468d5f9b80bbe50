"""Orbax checkpoints of a model: `config.json`, the tokenizer's files, weights under `params/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from models.hf_loader import read_config
from models.llama import Llama
from models.tokenizer import Tokenizer
from models.weights import CheckpointError

PARAMS = "params"


def save_orbax(folder: Path, model: Llama, tokenizer: Tokenizer | None = None) -> None:
    """Writes the model, and its tokenizer if given, to a new or existing folder."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=1))
    if tokenizer is not None:
        tokenizer.save(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS, nnx.to_pure_dict(nnx.state(model)), force=True)


def load_orbax(folder: Path, *, dtype: Any) -> Llama:
    """The model of an Orbax checkpoint, its weights cast to `dtype`.

    Raises:
      CheckpointError: weights missing, damaged, or not those of the config.
      ConfigError: a config that the model cannot honour.
    """
    folder = folder.absolute()
    config = read_config(folder)
    abstract_model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, abstract = nnx.split(abstract_model)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        nnx.to_pure_dict(abstract),
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            weights = checkpointer.restore(folder / PARAMS, target)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{folder / PARAMS}: cannot restore the weights: {reason}") from None
    nnx.replace_by_pure_dict(abstract, weights)
    return nnx.merge(graph, abstract)
