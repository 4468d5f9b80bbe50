"""Models built from named tensors: each parameter is set once, each tensor is accounted for.

Loaders read files into tensors under Hugging Face's names; this module alone maps the names to
parameters.
"""

from __future__ import annotations

import dataclasses
import math
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
from jaxkv.models.errors import CheckpointError
from jaxkv.models.llama import Llama
from jaxkv.models.memory import check_fits

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, not yet read.

    Attributes:
      shape: shape in the model; matrices are [out, in].
      read: reads the tensor.
      unsupported: the stored type, when it cannot be read.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    unsupported: str = ""


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
_IGNORED = re.compile(
    r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)


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
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: Any,
    source: str,
    progress: bool = False,
) -> Llama:
    """Builds a model with the weights of `tensors`, read one at a time.

    Args:
      config: the checkpoint's config.
      tensors: the checkpoint's tensors, by Hugging Face name.
      dtype: element type of the model's weights and activations.
      source: the checkpoint's name, for error messages.
      progress: show a progress bar on standard error.

    Raises:
      CheckpointError: before any weight is read, for tensors that are missing, unexpected, of the
        wrong shape or of an unsupported type, and for weights that do not fit the memory. The error
        names them.
    """
    config, tensors = _resolve_head(config, tensors)
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    leaves = list(nnx.to_flat_state(abstract))
    shapes = {
        name: shape
        for path, variable in leaves
        for name, shape in zip(
            hf_names(path), _part_shapes(path, variable.get_value().shape, config), strict=True
        )
    }
    _check(tensors, shapes, source)
    check_fits(sum(math.prod(shape) for shape in shapes.values()), dtype, source)

    flat = []
    for path, variable in track(
        leaves, description="loading weights", disable=not progress, transient=True,
        console=Console(stderr=True),
    ):  # fmt: skip
        parts = [tensors[name].read() for name in hf_names(path)]
        value = _fuse(path, parts, config)
        flat.append((path, variable.replace(jnp.asarray(value, dtype))))
    model = nnx.merge(graph, nnx.from_flat_state(flat))
    jax.block_until_ready(nnx.state(model))
    return model


def _resolve_head(
    config: LlamaConfig, tensors: Mapping[str, StoredTensor]
) -> tuple[LlamaConfig, Mapping[str, StoredTensor]]:
    """Settles what a tied config and a head in the file mean together, as transformers 5 does.

    A head alone is the embedding too. Beside the embedding it is redundant if the two are equal,
    and else the model is not tied, whatever the config says.
    """
    if not config.tie_word_embeddings or HEAD not in tensors:
        return config, tensors
    rest = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    head = tensors[HEAD]
    if EMBEDDING not in tensors:
        return config, rest | {EMBEDDING: head}
    embedding = tensors[EMBEDDING]
    readable = not (head.unsupported or embedding.unsupported)
    if readable and head.shape == embedding.shape and np.array_equal(head.read(), embedding.read()):
        return config, rest
    return dataclasses.replace(config, tie_word_embeddings=False), tensors


def _check(
    tensors: Mapping[str, StoredTensor], shapes: dict[str, tuple[int, ...]], source: str
) -> None:
    """Compares the checkpoint's tensors with the names and shapes that the config asks for."""
    missing = sorted(shapes.keys() - tensors.keys())
    unexpected = sorted(
        name for name in tensors.keys() - shapes.keys() if not _IGNORED.fullmatch(name)
    )
    if missing or unexpected:
        problems = [
            f"{len(names)} {kind} ({_some(names)})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise CheckpointError(f"{source}: tensors do not match the config: {'; '.join(problems)}")
    for name, shape in shapes.items():
        if (got := tensors[name].shape) != shape:
            raise CheckpointError(f"{source}: {name} must have shape {shape}, got {got}")
    for name in shapes:
        if unsupported := tensors[name].unsupported:
            raise CheckpointError(
                f"{source}: {name} is stored with {unsupported}, which is not supported; convert "
                "the checkpoint to bfloat16, float16 or float32"
            )


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
