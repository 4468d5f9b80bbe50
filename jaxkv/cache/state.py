"""The state of a paged cache on the device: an immutable PyTree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jaxkv.cache.order import remember
from jaxkv.config import CacheConfig
from jaxkv.errors import StaleStateError
from jaxkv.pallas_kernels.formats import format_of
from jaxkv.pallas_kernels.layout import PoolShape

_STALE = """\
This PagedState was donated to a step; its pool belongs to the state that the step returned.
The old name was probably used again:
    logits, new_state = decode_step(params, state, tokens)
    logits, new_state = decode_step(params, state, tokens)   # `state` was donated above
Rebind the name at every step instead:
    logits, state = decode_step(params, state, tokens)
If the step itself failed after the donation, the pool is lost: make a new one with
jaxkv.init_state(config) and run the sequences again."""


@dataclasses.dataclass(frozen=True)
class PagedState:
    """Pages and block tables. Every transition returns a new state; steps donate the old one.

    A PyTree. It flattens through its own function instead of `register_dataclass`, so that passing
    a donated state to any JAX function raises `StaleStateError`, which shows the fix.

    Attributes:
      kv_pages: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; K at 0, V at 1.
      kv_scales: [num_blocks, num_layers, 2, num_kv_heads, block_size] when the pages are
        quantised; None otherwise.
      block_tables: i32[max_seqs, max_blocks_per_seq]; 0 (the null block) where unused.
      seq_lens: i32[max_seqs]; tokens whose KV is written: `apply_plan` sets it for new rows,
        `advance` increases it, and `Batch.following` reads the next positions from it.
    """

    kv_pages: jax.Array
    kv_scales: jax.Array | None
    block_tables: jax.Array
    seq_lens: jax.Array


def is_stale(state: PagedState) -> bool:
    """Whether the state's pool was donated to a step."""
    pages = state.kv_pages
    concrete = isinstance(pages, jax.Array) and not isinstance(pages, jax.core.Tracer)
    return concrete and pages.is_deleted()


_FIELDS = tuple(field.name for field in dataclasses.fields(PagedState))


def _flatten(state: PagedState):
    if is_stale(state):
        raise StaleStateError(_STALE)
    return tuple(getattr(state, name) for name in _FIELDS), None


def _flatten_with_keys(state: PagedState):
    leaves, meta = _flatten(state)
    return tuple(zip(map(jax.tree_util.GetAttrKey, _FIELDS), leaves, strict=True)), meta


jax.tree_util.register_pytree_with_keys(
    PagedState, _flatten_with_keys, lambda _, leaves: PagedState(*leaves), _flatten
)


def init_state(config: CacheConfig, *, device: Any = None) -> PagedState:
    """An empty cache: zeroed pages (and scales, if they are quantised), tables of null blocks,
    lengths of 0.

    Args:
      config: sizes of the cache.
      device: a `jax.Device` or `jax.sharding.Sharding` of all arrays, which are then committed to
        it, like those that a step with committed weights returns; None: JAX's default device,
        uncommitted.

    Example:
      >>> import jaxkv
      >>> config = jaxkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=3)
      >>> jaxkv.init_state(config).kv_pages.shape
      (3, 1, 2, 1, 16, 8)
    """
    shape = PoolShape.for_config(config)
    page_format = format_of(config.dtype)
    scales = None
    if page_format.quantised:
        scales = jnp.zeros(shape.scales_shape(), config.scale_dtype, device=device)
    tables = config.max_seqs, config.max_blocks_per_seq
    state = PagedState(
        kv_pages=jnp.zeros(shape.array_shape(), page_format.dtype, device=device),
        kv_scales=scales,
        block_tables=jnp.zeros(tables, jnp.int32, device=device),
        seq_lens=jnp.zeros(config.max_seqs, jnp.int32, device=device),
    )
    remember(state, None)
    return state
