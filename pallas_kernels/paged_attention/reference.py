"""Reference implementation of paged attention: simple and slow, for tests.

Data movement: gathers every page of every sequence, in float32, and computes one dense softmax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.pallas_kernels.formats import dequantise
from jaxkv.pallas_kernels.layout import PoolShape, layer_pages


def paged_attention_reference(
    q: jax.Array,
    kv_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    layer: int,
    scale: float,
    kv_scales: jax.Array | None = None,
    window: int | None = None,
    causal: bool = True,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) in float32; arguments as in `paged_attention`, which checks them."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = PoolShape.of(kv_pages).num_kv_heads
    scales = None if kv_scales is None else layer_pages(kv_scales, block_tables, layer)
    pages = dequantise(layer_pages(kv_pages, block_tables, layer), scales)  # [S, M, 2, H, B, D]
    pages = pages.transpose(2, 0, 3, 1, 4, 5)  # [2, S, H, M, B, D]
    k, v = pages.reshape(2, len(block_tables), num_kv_heads, -1, head_dim)  # [S, H, M * B, D]
    token = jnp.arange(num_tokens)
    s = jnp.searchsorted(query_start, token, side="right") - 1
    s = jnp.clip(s, 0, len(seq_lens) - 1)
    position = seq_lens[s] - query_start[s + 1] + token
    slot = jnp.arange(k.shape[2])
    visible = (slot < seq_lens[s][:, None]) & (token < query_start[s + 1])[:, None]
    if causal:
        visible &= slot <= position[:, None]
    if window is not None:
        visible &= slot > position[:, None] - window
    repeat = num_q_heads // num_kv_heads  # query head h reads KV head h // repeat
    k, v = jnp.repeat(k, repeat, axis=1)[s], jnp.repeat(v, repeat, axis=1)[s]  # [T, Hq, M * B, D]
    logits = jnp.einsum("thd,thkd->thk", q.astype(jnp.float32), k) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)  # [T, Hq]
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    live = visible.any(-1)[:, None]
    weights = jnp.where(live[..., None], jnp.exp(logits - lse[..., None]), 0)
    v = jnp.where(visible[:, None, :, None], v, 0)
    return jnp.einsum("thk,thkd->thd", weights, v), jnp.where(live, lse, -jnp.inf)
