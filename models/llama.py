"""A Llama in Flax NNX: one stack of layers, two ways to attend.

`model(tokens, state, batch)` is the paged step, `model.dense(tokens)` the causal forward pass
without a cache that training and the tests use. Both run the same layers with different attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.errors import ConfigError
from jaxkv.models.config import LlamaConfig
from jaxkv.models.linear import Linear, project
from jaxkv.models.rope import apply_rope, inverse_frequencies, rope_phases

# attend(q [..., Hq, D], k [..., H, D], v [..., H, D], layer, cache) -> out [..., Hq, D], cache
Attend = Callable[[jax.Array, jax.Array, jax.Array, int, Any], tuple[jax.Array, Any]]


def float_dtype(dtype: Any) -> jnp.dtype:
    """The type of weights and activations that `dtype` names.

    Raises:
      ConfigError: it is unknown, or not a floating-point type of two bytes or more.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise ConfigError(f"dtype={dtype!r} is unknown; float32, bfloat16 and float16 are "
                          "supported") from None  # fmt: skip
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise ConfigError(f"dtype={found.name} is not supported for weights; float32, bfloat16 and "
                          "float16 are")  # fmt: skip
    return found


class Attention(nnx.Module):
    """Grouped-query attention of one layer.

    One matrix projects to q, k and v: rows [num_kv_heads, group + 2, head_dim], the queries of a
    group, then the key and value that they share, so that it can be split by KV heads. The
    projections and the MLP took 24 ms for one token of SmolLM2 on two cores with three matrices,
    and 20 ms with one.
    """

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        kind: dict[str, Any] = dict(bias=c.attention_bias, dtype=dtype, rngs=rngs)
        self.qkv_proj = Linear(
            c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, **kind
        )
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, **kind)
        self.num_kv_heads, self.head_dim = c.num_kv_heads, c.head_dim

    def __call__(self, x: jax.Array, phases, attend: Attend, layer: int, cache: Any):
        rows = x.shape[:-1]
        qkv = self.qkv_proj(x).reshape(*rows, self.num_kv_heads, -1, self.head_dim)
        q = apply_rope(qkv[..., :-2, :].reshape(*rows, -1, self.head_dim), phases)
        k = apply_rope(qkv[..., -2, :], phases)
        out, cache = attend(q, k, qkv[..., -1, :], layer, cache)
        return self.o_proj(out.reshape(*rows, -1)), cache


class MLP(nnx.Module):
    """SwiGLU; one matrix projects to gate and up, rows [2, intermediate_size]."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        wide, narrow = config.intermediate_size, config.hidden_size
        kind: dict[str, Any] = dict(bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.gate_up_proj = Linear(narrow, 2 * wide, **kind)
        self.down_proj = Linear(wide, narrow, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_norm = _norm(config, dtype, rngs)
        self.attention = Attention(config, dtype, rngs)
        self.post_norm = _norm(config, dtype, rngs)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x: jax.Array, phases, attend: Attend, layer: int, cache: Any):
        out, cache = self.attention(self.input_norm(x), phases, attend, layer, cache)
        x = x + out
        return x + self.mlp(self.post_norm(x)), cache


def _norm(config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=dtype, rngs=rngs
    )


class Llama(nnx.Module):
    """Llama 2 and 3, and models of the same architecture (SmolLM2, TinyLlama, ...).

    Args:
      config: shapes and constants.
      dtype: element type of weights and activations.
      rngs: random streams of the initial weights.

    Raises:
      ConfigError: a dtype in which the model cannot compute.

    Example:
      >>> from flax import nnx
      >>> from jaxkv.models import Llama, LlamaConfig
      >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_layers=1,
      ...                      num_heads=2, num_kv_heads=1, head_dim=4)
      >>> Llama(config, rngs=nnx.Rngs(0)).dense(jnp.zeros((2, 5), jnp.int32)).shape
      (2, 5, 11)
    """

    def __init__(self, config: LlamaConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        dtype = float_dtype(dtype)
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = _norm(config, dtype, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs
            )

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend, cache: Any):
        """Final hidden states [..., hidden_size] of tokens i32[...], and the cache."""
        c = self.config
        inv_freq = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, c.rope_divisors)
        phases = rope_phases(positions, inv_freq)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, phases, attend, i, cache)
        return self.norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., vocab_size] of hidden states [..., hidden_size]."""
        tied = self.config.tie_word_embeddings
        weight = self.embed.embedding[...] if tied else self.lm_head.weight[...]
        return project(hidden, weight).astype(jnp.float32)

    def __call__(
        self, tokens: jax.Array, state: jaxkv.PagedState, batch: jaxkv.Batch
    ) -> tuple[jax.Array, jaxkv.PagedState]:
        """Runs one paged step.

        Args:
          tokens: i32[T] tokens of the batch.
          state: the cache.
          batch: rows and positions of the tokens.

        Returns:
          f32[L, vocab_size] logits after the tokens that the batch names (by default the last token
          of each sequence), and the new state.
        """

        def attend(q, k, v, layer, state):
            return jaxkv.attention(q, k, v, state, layer, batch)

        x, state = self.hidden(tokens, jnp.asarray(batch.positions), attend, state)
        return self.logits(x[batch.logit_tokens]), jaxkv.advance(state, batch)

    def dense(self, tokens: jax.Array) -> jax.Array:
        """Logits f32[batch, length, vocab_size] of i32 tokens, by a causal pass without a cache."""

        def attend(q, k, v, layer, cache):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.logits(self.hidden(tokens, positions, attend, None)[0])
