"""Models built from named tensors: each parameter is set once, each tensor is accounted for.

Loaders read files into tensors under Hugging Face's names; this module alone maps the names to
parameters.
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

from jaxkv.models.config import LlamaConfig
from jaxkv.models.files import CheckpointError
from jaxkv.models.llama import Llama

Reader = Callable[[], np.ndarray]  # reads one tensor when called


_MODULES = {
    "attention": "self_attn",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}
# Parameters that fuse several of a checkpoint's tensors.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Buffers of old checkpoints, which the config determines.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$")


def hf_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Hugging Face's names of the tensors that make up the parameter at an NNX path.

    Example:
      >>> hf_names(("layers", 3, "mlp", "gate_up_proj", "weight"))
      ('model.layers.3.mlp.gate_proj.weight', 'model.layers.3.mlp.up_proj.weight')
    """
    *modules, leaf = path
    if modules[0] == "embed":
        return ("model.embed_tokens.weight",)
    prefix = [] if modules[0] == "lm_head" else ["model"]
    *names, last = [str(_MODULES.get(part, part)) for part in modules]
    kind = "bias" if leaf == "bias" else "weight"
    return tuple(".".join([*prefix, *names, x, kind]) for x in _FUSED.get(last, (last,)))


def _part_shapes(path: tuple[Any, ...], shape: tuple[int, ...], c: LlamaConfig) -> list[tuple]:
    """Shapes of the tensors `hf_names(path)`."""
    if path[-2] == "qkv_proj":
        rows = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    else:
        parts = len(hf_names(path))
        rows = [shape[0] // parts] * parts
    return [(n, *shape[1:]) for n in rows]


def _fuse(path: tuple[Any, ...], parts: list[np.ndarray], config: LlamaConfig) -> np.ndarray:
    """The parameter at `path`, fused from its parts in the order that its module reads."""
    if len(parts) == 1:
        return parts[0]
    if path[-2] == "qkv_proj":  # by KV head
        rest = parts[0].shape[1:]
        parts = [x.reshape(config.num_kv_heads, -1, *rest) for x in parts]
        return np.concatenate(parts, axis=1).reshape(-1, *rest)
    return np.concatenate(parts)


def build(
    config: LlamaConfig,
    tensors: Mapping[str, Reader],
    *,
    dtype: Any,
    source: str,
    progress: bool = False,
) -> Llama:
    """Builds a model with the weights of `tensors`, read one at a time.

    Args:
      config: the checkpoint's config.
      tensors: readers of the checkpoint's tensors, by Hugging Face name; matrices [out, in].
      dtype: element type of the model's weights and activations.
      source: the checkpoint's name, for error messages.
      progress: show a progress bar on standard error.

    Raises:
      CheckpointError: missing or unexpected tensors, before any weight is read; or a tensor of the
        wrong shape. The error names them.
    """
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    leaves = list(nnx.to_flat_state(abstract))
    wanted = {name for path, _ in leaves for name in hf_names(path)}
    missing = sorted(wanted - set(tensors))
    # A tied checkpoint may hold a head too; it is ignored, as the config ties it to the embedding.
    spare = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unexpected = sorted(name for name in set(tensors) - wanted - spare if not _IGNORED.match(name))
    if missing or unexpected:
        problems = [
            f"{len(names)} {kind} ({_some(names)})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise CheckpointError(f"{source}: tensors do not match the config: {'; '.join(problems)}")

    flat = []
    for path, variable in track(
        leaves, description="loading weights", disable=not progress, transient=True,
        console=Console(stderr=True),
    ):  # fmt: skip
        shapes = _part_shapes(path, variable.get_value().shape, config)
        parts = []
        for name, shape in zip(hf_names(path), shapes, strict=True):
            parts.append(tensors[name]())
            if parts[-1].shape != shape:
                raise CheckpointError(
                    f"{source}: {name} must have shape {shape}, got {parts[-1].shape}"
                )
        value = _fuse(path, parts, config)
        flat.append((path, variable.replace(jnp.asarray(value, dtype))))
    model = nnx.merge(graph, nnx.from_flat_state(flat))
    jax.block_until_ready(nnx.state(model))
    return model


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
