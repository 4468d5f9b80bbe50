"""From named tensors to a model: every parameter set exactly once, every tensor accounted for.

Loaders read files into tensors under Hugging Face's names; this module is the one place that knows
which parameter each name is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track

from jaxkv.errors import JaxkvError
from models.config import LlamaConfig
from models.llama import Llama

Reader = Callable[[], np.ndarray]  # reads one tensor when called


class CheckpointError(JaxkvError):
    """A checkpoint that is incomplete, damaged, or not what its config says."""


_MODULES = {
    "attention": "self_attn",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}
# Buffers that old checkpoints carry and that the config determines.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$")


def hf_name(path: tuple[Any, ...]) -> str:
    """Hugging Face's name of the parameter at an NNX path.

    Example:
      >>> hf_name(("layers", 3, "attention", "q_proj", "weight"))
      'model.layers.3.self_attn.q_proj.weight'
    """
    *modules, leaf = path
    if modules[0] == "embed":
        return "model.embed_tokens.weight"
    prefix = [] if modules[0] == "lm_head" else ["model"]
    names = [str(_MODULES.get(part, part)) for part in modules]
    return ".".join([*prefix, *names, "bias" if leaf == "bias" else "weight"])


def build(
    config: LlamaConfig,
    tensors: Mapping[str, Reader],
    *,
    dtype: Any,
    source: str,
    progress: bool = False,
) -> Llama:
    """A model with the weights of `tensors`, read one at a time.

    Args:
      config: what the checkpoint says it is.
      tensors: readers of the checkpoint's tensors, by Hugging Face name; matrices [out, in].
      dtype: of the model's weights and activations.
      source: the checkpoint's name, for messages.
      progress: show a progress bar on standard error.

    Raises:
      CheckpointError: missing or unexpected tensors, or one of the wrong shape, by name; before
        any weight is read.
    """
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    wanted = {path: hf_name(path) for path, _ in nnx.to_flat_state(abstract)}
    missing = sorted(set(wanted.values()) - set(tensors))
    # A tied checkpoint may carry the head all the same; the config says that it is the embedding.
    spare = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unexpected = sorted(
        name for name in set(tensors) - set(wanted.values()) - spare if not _IGNORED.match(name)
    )
    if missing or unexpected:
        problems = [
            f"{len(names)} {kind} ({_some(names)})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise CheckpointError(f"{source}: tensors do not match its config: {'; '.join(problems)}")

    flat = []
    leaves = list(nnx.to_flat_state(abstract))
    for path, variable in track(
        leaves, description="loading weights", disable=not progress, transient=True,
        console=Console(stderr=True),
    ):  # fmt: skip
        value = tensors[wanted[path]]()
        if value.shape != variable.get_value().shape:
            raise CheckpointError(
                f"{source}: {wanted[path]} has shape {value.shape}, its config wants "
                f"{variable.get_value().shape}"
            )
        flat.append((path, variable.replace(jnp.asarray(value, dtype))))
    model = nnx.merge(graph, nnx.from_flat_state(flat))
    jax.block_until_ready(nnx.state(model))
    return model


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
