"""What is compiled: single kernels, whole steps of a model, and a step over eight GPUs.

Shapes only: no weight and no pool is ever made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from models import Llama, LlamaConfig

Form = Literal["decode", "prefill"]

_MODELS = {
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, tie_word_embeddings=True,
    ),
    "Llama-3-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, rope_theta=500000.0,
    ),
}  # fmt: skip
_MODEL_OF_HEAD_DIM = {config.head_dim: config for config in _MODELS.values()}

# form, head_dim (whose model gives the numbers of heads), block size, dtype of pool and queries
_KERNELS: tuple[tuple[Form, int, int, str], ...] = (
    ("decode", 64, 16, "bfloat16"),
    ("decode", 64, 64, "bfloat16"),
    ("decode", 128, 16, "bfloat16"),
    ("decode", 128, 64, "bfloat16"),
    ("decode", 80, 16, "bfloat16"),
    ("decode", 96, 16, "bfloat16"),
    ("decode", 256, 16, "bfloat16"),
    ("decode", 128, 16, "float16"),
    ("prefill", 64, 16, "bfloat16"),
    ("prefill", 64, 64, "bfloat16"),
    ("prefill", 128, 16, "bfloat16"),
    ("prefill", 128, 64, "bfloat16"),
    ("prefill", 80, 16, "bfloat16"),
    ("prefill", 96, 16, "bfloat16"),
    ("prefill", 256, 16, "bfloat16"),
)
_MAX_LEN = 2048  # of each of 64 sequences: the pool is far larger than all else that a step holds
_DECODE_SEQS = 64
_PREFILL_TOKENS, _PREFILL_SEQS = 512, 8
_KERNEL_LAYERS = 2  # more than one, so that a layer is not the whole pool
_SHARDED_LAYERS = 4  # each is compiled for itself: more would say the same

_WHOLE, _BY_HEADS = PartitionSpec(), PartitionSpec(None, "heads")


@dataclasses.dataclass(frozen=True)
class Program:
    """A step to compile: `function(state, *args)`, its cache donated.

    Attributes:
      name: what the table calls it.
      kernel: whether it is one attention call, and not a stack of them.
      num_devices: GPUs it runs on.
      cache: the shape of its cache, all devices together.
      group: query heads that share a KV head.
      build: function and abstract arguments on a mesh of `num_devices`, the state first.
    """

    name: str
    kernel: bool
    num_devices: int
    cache: jaxkv.CacheConfig
    group: int
    build: Callable[[Mesh], tuple[Callable[..., Any], tuple[Any, ...]]]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool on one device."""
        return self.cache.pool_bytes // self.num_devices


def programs() -> dict[str, Program]:
    """All programs by name, kernels first."""
    models = [(name, config) for name, config in _MODELS.items()]
    listed = [_kernel(*row) for row in _KERNELS]
    listed += [_model_step(form, *model) for model in models for form in ("decode", "prefill")]
    listed += [_sharded(form, *models[-1], num_devices=8) for form in ("decode", "prefill")]
    return {program.name: program for program in listed}


def _kernel(form: Form, head_dim: int, block_size: int, dtype: str) -> Program:
    """K and V of a step's tokens into the pool, and attention, in one layer of several."""
    like = _MODEL_OF_HEAD_DIM.get(head_dim, _MODELS["Llama-3-8B"])
    config = dataclasses.replace(like, head_dim=head_dim, num_layers=_KERNEL_LAYERS)
    cache = _cache(config, block_size, dtype)

    def step(state, q, k, v, batch):
        return jaxkv.attention(q, k, v, state, 1, batch)

    def build(mesh: Mesh):
        batch = _batch(form)
        q, kv = (
            jax.ShapeDtypeStruct((len(batch.rows), heads, head_dim), dtype)
            for heads in (config.num_heads, config.num_kv_heads)
        )
        return step, _on(mesh, (_state(cache), q, kv, kv, batch))

    name = f"{form} {dtype}, head {head_dim}, block {block_size}"
    return Program(name, True, 1, cache, config.num_heads // config.num_kv_heads, build)


def _model_step(form: Form, name: str, config: LlamaConfig) -> Program:
    """The library's own model, all of its layers."""
    cache = _cache(config, jaxkv.CacheConfig.block_size, "bfloat16")

    def build(mesh: Mesh):
        model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model)
        batch = _batch(form)
        tokens = jax.ShapeDtypeStruct(batch.rows.shape, jnp.int32)

        def step(state, params, tokens, batch):
            return nnx.merge(graph, params)(tokens, state, batch)

        return step, _on(mesh, (_state(cache), params, tokens, batch))

    group = config.num_heads // config.num_kv_heads
    return Program(f"{name} {form}, whole", False, 1, cache, group, build)


def _sharded(form: Form, name: str, config: LlamaConfig, num_devices: int) -> Program:
    """Attention layers and their projections, divided over devices by KV heads."""
    config = dataclasses.replace(config, num_layers=_SHARDED_LAYERS)
    cache = _cache(config, jaxkv.CacheConfig.block_size, "bfloat16")
    group, width = config.num_heads // config.num_kv_heads, config.hidden_size
    layers_heads = (config.num_layers, config.num_kv_heads)

    def step(state, x, w_qkv, w_out, batch):
        for layer in range(config.num_layers):
            qkv = jnp.einsum("te,hegd->thgd", x, w_qkv[layer])
            q = qkv[:, :, :group].reshape(len(x), -1, config.head_dim)
            k, v = qkv[:, :, group], qkv[:, :, group + 1]
            out, state = jaxkv.attention(q, k, v, state, layer, batch)
            out = out.reshape(len(x), -1, group * config.head_dim)
            x = x + jax.lax.psum(jnp.einsum("thd,hde->te", out, w_out[layer]), "heads")
        return x, state

    def build(mesh: Mesh):
        batch = _batch(form)
        shapes = (
            (len(batch.rows), width),
            (*layers_heads, width, group + 2, config.head_dim),
            (*layers_heads, group * config.head_dim, width),
        )
        arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        state_spec = dataclasses.replace(
            jax.tree.map(lambda _: _WHOLE, _state(cache)),
            kv_pages=PartitionSpec(None, None, None, "heads"),
        )
        specs = (state_spec, _WHOLE, _BY_HEADS, _BY_HEADS, _WHOLE)
        sharded = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(_WHOLE, state_spec), check_vma=False
        )
        return sharded, _on(mesh, (_state(cache), *arrays, batch), specs)

    what = f"{name} {form}, attention of {config.num_layers} layers"
    return Program(what, False, num_devices, cache, group, build)


def _cache(config: LlamaConfig, block_size: int, dtype: str) -> jaxkv.CacheConfig:
    return jaxkv.CacheConfig.for_model(
        config, max_len=_MAX_LEN, block_size=block_size, max_seqs=_DECODE_SEQS, dtype=dtype
    )


def _state(cache: jaxkv.CacheConfig) -> jaxkv.PagedState:
    return jax.eval_shape(lambda: jaxkv.init_state(cache))


def _batch(form: Form) -> jaxkv.Batch:
    if form == "decode":
        one = np.zeros(_DECODE_SEQS, np.int32)
        return jaxkv.Batch.decode(one, one, num_seqs=_DECODE_SEQS, padding_row=_DECODE_SEQS)
    return jaxkv.Batch.ragged(
        [], [], [],
        num_tokens=_PREFILL_TOKENS, num_seqs=_PREFILL_SEQS, padding_row=_DECODE_SEQS,
    )  # fmt: skip


def _on(mesh: Mesh, tree: Any, specs: Any = _WHOLE) -> Any:
    """The tree's shapes, laid out on the mesh; specs are of the tree or of its leading parts."""

    def shaped(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(shaped, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
