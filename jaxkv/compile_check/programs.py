"""Programs to compile: operations on the pool, kernels, steps of whole models and over eight GPUs.

Shapes only: neither weights nor a pool are allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv.models import Llama, LlamaConfig
from jaxkv.pallas_kernels.copy_blocks import copy_blocks
from jaxkv.pallas_kernels.layout import PoolShape, split_by_heads
from jaxkv.pallas_kernels.move_blocks import gather_blocks, put_blocks, zero_blocks
from jaxkv.pallas_kernels.paged_attention.cascade import cascade_attention
from jaxkv.pallas_kernels.paged_attention.support import Form
from jaxkv.pallas_kernels.scatter_kv import scatter_kv

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

# form, head_dim (which selects the model that gives the numbers of heads), block size, page dtype
_KERNELS: tuple[tuple[Form, int, int, str], ...] = (
    ("decode", 64, 16, "bfloat16"),
    ("decode", 64, 64, "bfloat16"),
    ("decode", 128, 16, "bfloat16"),
    ("decode", 128, 64, "bfloat16"),
    ("decode", 80, 16, "bfloat16"),
    ("decode", 96, 16, "bfloat16"),
    ("decode", 256, 16, "bfloat16"),
    ("decode", 128, 16, "float16"),
    ("decode", 64, 64, "int8"),
    ("decode", 128, 64, "int8"),
    ("decode", 128, 128, "int8"),
    ("prefill", 64, 16, "bfloat16"),
    ("prefill", 64, 64, "bfloat16"),
    ("prefill", 128, 16, "bfloat16"),
    ("prefill", 128, 64, "bfloat16"),
    ("prefill", 80, 16, "bfloat16"),
    ("prefill", 96, 16, "bfloat16"),
    ("prefill", 256, 16, "bfloat16"),
)
_CASCADES = ((64, 16, "bfloat16"), (128, 16, "bfloat16"))  # head_dim, block size, page dtype
_POOL_BYTES = 40 * 2**30  # per GPU: more than 2^31 elements, and than the rest of a step
_MAX_LEN = 2048
_DECODE_SEQS = 64
_PREFILL_TOKENS, _PREFILL_SEQS = 512, 8
_MOVED_BLOCKS = 32  # blocks per operation
_KERNEL_LAYERS = 2  # more than one, so that a layer is not the whole pool
_SHARDED_LAYERS = 4  # layers compile separately, more would show the same
# Limits of the kernels launched: about those that were needed when this was written.
_KERNEL_LAUNCHES = 9  # one layer's writes and attention
_LAYER_LAUNCHES = 14  # a layer of a model
_OTHER_LAUNCHES = 10  # a model outside its layers

_WHOLE, _BY_HEADS = PartitionSpec(), PartitionSpec(None, "heads")


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile, `function(pool or state, *args)`, with its first argument donated.

    Attributes:
      name: name in the table.
      kind: "operation" on the pool, "kernel" (attention of one layer) or "step" (all layers).
      num_devices: GPUs that the program runs on.
      pool: pages and, if quantised, scales; all devices together.
      call: arguments of `supports` for its attention; None without attention.
      build: returns the function and its abstract arguments on a mesh of `num_devices`.
      max_launches: most kernels that a run may launch; None: not limited.
    """

    name: str
    kind: Literal["operation", "kernel", "step"]
    num_devices: int
    pool: tuple[jax.ShapeDtypeStruct, ...]
    call: Mapping[str, Any] | None
    build: Callable[[Mesh], tuple[Callable[..., Any], tuple[Any, ...]]]
    max_launches: int | None = None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool on one device."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.pool) // self.num_devices

    @property
    def pool_elements(self) -> set[int]:
        """Elements of the pool's arrays on one device."""
        return {math.prod(x.shape) // self.num_devices for x in self.pool}


def programs() -> dict[str, Program]:
    """Returns all programs by name, small ones first."""
    models = [(name, config) for name, config in _MODELS.items()]
    listed = _operations()
    listed += [_kernel(*row) for row in _KERNELS]
    listed += [_cascade(*row) for row in _CASCADES]
    listed += [_model_step(form, *model) for model in models for form in ("decode", "prefill")]
    listed += [_sharded(form, *models[-1], num_devices=8) for form in ("decode", "prefill")]
    return {program.name: program for program in listed}


def _operations() -> list[Program]:
    """Operations that write or move blocks of Llama-3-8B's pool."""
    config = _MODELS["Llama-3-8B"]
    state = _state(config, jaxkv.CacheConfig.block_size, "bfloat16")
    quantised = _state(config, 64, "int8")
    pages = state.kv_pages
    ids = jax.ShapeDtypeStruct((_MOVED_BLOCKS,), jnp.int32)
    staged = jax.ShapeDtypeStruct(PoolShape.of(pages).staging_shape(_MOVED_BLOCKS), pages.dtype)
    token = jax.ShapeDtypeStruct((_PREFILL_TOKENS,), jnp.int32)
    kv = jax.ShapeDtypeStruct((*token.shape, config.num_kv_heads, config.head_dim), jnp.bfloat16)
    tokens = kv, kv, token, token

    def scatter(kv_pages, *tokens):
        return scatter_kv(kv_pages, *tokens, layer=1)

    def scatter_int8(pool, *tokens):
        kv_pages, kv_scales = pool
        return scatter_kv(kv_pages, *tokens, layer=1, kv_scales=kv_scales)

    def gather(pool, ids):
        return pool, gather_blocks(pool, ids)

    def of(name: str, function: Callable[..., Any], pool: Any, *args: Any) -> Program:
        arrays = tuple(jax.tree.leaves(pool))
        return Program(
            name, "operation", 1, arrays, None, lambda mesh: (function, _on(mesh, (pool, *args)))
        )

    return [
        of("scatter_kv bfloat16", scatter, pages, *tokens),
        of("scatter_kv int8", scatter_int8, _pool(quantised), *tokens),
        of("copy_blocks", copy_blocks, pages, ids, ids),
        of("gather_blocks", gather, pages, ids),
        of("put_blocks", put_blocks, pages, staged, ids),
        of("zero_blocks", zero_blocks, pages, ids),
    ]


def _kernel(form: Form, head_dim: int, block_size: int, dtype: str) -> Program:
    """Writes K and V of a step's tokens and attends, in one layer of several."""
    like = _MODEL_OF_HEAD_DIM.get(head_dim, _MODELS["Llama-3-8B"])
    config = dataclasses.replace(like, head_dim=head_dim, num_layers=_KERNEL_LAYERS)
    state = _state(config, block_size, dtype)
    query_dtype = "bfloat16" if dtype == "int8" else dtype

    def step(state, q, k, v, batch):
        return jaxkv.attention(q, k, v, state, 1, batch)

    def build(mesh: Mesh):
        batch = _batch(form)
        q, kv = (
            jax.ShapeDtypeStruct((len(batch.rows), heads, head_dim), query_dtype)
            for heads in (config.num_heads, config.num_kv_heads)
        )
        return step, _on(mesh, (state, q, kv, kv, batch))

    name = f"{form} {dtype}, head {head_dim}, block {block_size}"
    call = _call(config, form, state, query_dtype)
    return Program(name, "kernel", 1, _pool(state), call, build, _KERNEL_LAUNCHES)


def _cascade(head_dim: int, block_size: int, dtype: str) -> Program:
    """Cascade attention of a decode step, in one layer of several."""
    config = dataclasses.replace(_MODEL_OF_HEAD_DIM[head_dim], num_layers=_KERNEL_LAYERS)
    state = _state(config, block_size, dtype)

    def step(state, q, shared):
        out = cascade_attention(
            q, state.kv_pages, state.block_tables, state.seq_lens, **shared._asdict(), layer=1
        )
        return out, state

    def build(mesh: Mesh):
        q = jax.ShapeDtypeStruct((_DECODE_SEQS, config.num_heads, head_dim), dtype)
        nothing = np.zeros((_DECODE_SEQS, 1), np.int32)
        shared = jaxkv.shared_prefix_groups(nothing, nothing[:, 0], block_size=block_size)
        return step, _on(mesh, (state, q, shared))

    name = f"cascade {dtype}, head {head_dim}, block {block_size}"
    call = _call(config, "prefill", state, dtype) | dict(causal=False)
    return Program(name, "kernel", 1, _pool(state), call, build, 2 * _KERNEL_LAUNCHES)


def _model_step(form: Form, name: str, config: LlamaConfig) -> Program:
    """A step of the library's model, all layers."""
    state = _state(config, jaxkv.CacheConfig.block_size, "bfloat16")

    def build(mesh: Mesh):
        model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model)
        batch = _batch(form)
        tokens = jax.ShapeDtypeStruct(batch.rows.shape, jnp.int32)

        def step(state, params, tokens, batch):
            return nnx.merge(graph, params)(tokens, state, batch)

        return step, _on(mesh, (state, params, tokens, batch))

    call = _call(config, form, state, "bfloat16")
    launches = _LAYER_LAUNCHES * config.num_layers + _OTHER_LAUNCHES
    return Program(f"{name} {form}, whole", "step", 1, _pool(state), call, build, launches)


def _sharded(form: Form, name: str, config: LlamaConfig, num_devices: int) -> Program:
    """Attention layers and their projections, divided over devices by KV heads."""
    config = dataclasses.replace(config, num_layers=_SHARDED_LAYERS)
    state = _state(config, jaxkv.CacheConfig.block_size, "bfloat16", num_devices)
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
            jax.tree.map(lambda _: _WHOLE, state),
            kv_pages=split_by_heads("heads"),
        )
        specs = (state_spec, _WHOLE, _BY_HEADS, _BY_HEADS, _WHOLE)
        sharded = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(_WHOLE, state_spec), check_vma=False
        )
        return sharded, _on(mesh, (state, *arrays, batch), specs)

    what = f"{name} {form}, attention of {config.num_layers} layers"
    call = _call(config, form, state, "bfloat16")
    launches = _LAYER_LAUNCHES * config.num_layers + _OTHER_LAUNCHES
    return Program(what, "step", num_devices, _pool(state), call, build, launches)


def _state(config: LlamaConfig, block_size: int, dtype: str, num_devices: int = 1):
    """State with `_POOL_BYTES` of pages on each device; int8 pages have float32 scales."""
    cache = jaxkv.CacheConfig.for_model(
        config, memory_bytes=_POOL_BYTES * num_devices, max_len=_MAX_LEN, block_size=block_size,
        max_seqs=_DECODE_SEQS, dtype=dtype,
    )  # fmt: skip
    return jax.eval_shape(lambda: jaxkv.init_state(cache))


def _pool(state: jaxkv.PagedState) -> tuple[Any, ...]:
    return tuple(jax.tree.leaves((state.kv_pages, state.kv_scales)))


def _call(config: LlamaConfig, form: Form, state: jaxkv.PagedState, query_dtype: str):
    """Arguments of `supports`."""
    return dict(
        head_dim=config.head_dim,
        block_size=PoolShape.of(state.kv_pages).block_size,
        dtype=state.kv_pages.dtype,
        query_dtype=query_dtype,
        group=config.num_heads // config.num_kv_heads,
        form=form,
    )


def _batch(form: Form) -> jaxkv.Batch:
    if form == "decode":
        one = np.zeros(_DECODE_SEQS, np.int32)
        return jaxkv.Batch.decode(one, one, num_seqs=_DECODE_SEQS, padding_row=_DECODE_SEQS)
    return jaxkv.Batch.ragged(
        [], [], [],
        num_tokens=_PREFILL_TOKENS, num_seqs=_PREFILL_SEQS, padding_row=_DECODE_SEQS,
    )  # fmt: skip


def _on(mesh: Mesh, tree: Any, specs: Any = _WHOLE) -> Any:
    """Shapes of the tree, sharded over the mesh; specs match the tree or a prefix of it."""

    def shaped(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(shaped, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
