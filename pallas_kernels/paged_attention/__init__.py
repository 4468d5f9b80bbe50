"""Attention of a ragged batch of queries over keys and values in pages.

    out[t] = softmax(scale * q[t] @ K[s, : p + 1]^T) @ V[s, : p + 1]

where s is the sequence of token t and p its position: a sequence's queries are its last tokens, so
a decode step (one query each) and a prefill chunk are the same operation at other shapes. Options:
a sliding window, a soft cap on the logits, attention sinks, int8 pages, the log-sum-exp.

Data movement: the page ids come from the block table, and pages are read in place, a few at a time;
pages behind a window are not read. This module checks the call and dispatches it to an
implementation: `mosaic_gpu` is the GPU kernels, `xla` runs everywhere, `reference` gathers
everything and is for tests. `support` decides which of them can run; `operands` converts the
elements of pages to numbers.

`decode_gpu` and `prefill_gpu` are the kernels for Hopper and Blackwell, `decode_ampere` and
`prefill_ampere` those for Ampere; `launch_gpu` launches them. `pages_gpu` and `pages_ampere` load
the pages, `products_gpu` multiplies operands in shared memory, and `decode_steps_gpu` and
`prefill_steps_gpu` hold the softmax, which all generations share. `cascade` builds on this
operation and reads a prefix that sequences share only once.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv.pallas_kernels.formats import check_scales
from jaxkv.pallas_kernels.integers import int32
from jaxkv.pallas_kernels.layout import PoolShape, or_null
from jaxkv.pallas_kernels.paged_attention.merge import merge_attention
from jaxkv.pallas_kernels.paged_attention.reference import paged_attention_reference
from jaxkv.pallas_kernels.paged_attention.support import (
    IMPLEMENTATIONS,
    PagedAttentionFallbackWarning,
    choose,
    device_of_kernels,
    supports,
)
from jaxkv.pallas_kernels.paged_attention.xla import decode_xla, prefill_xla

__all__ = [
    "IMPLEMENTATIONS",
    "PagedAttentionFallbackWarning",
    "merge_attention",
    "paged_attention",
    "paged_attention_reference",
    "supports",
]


@overload
def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    query_start: ArrayLike | None = None,
    *,
    layer: int,
    kv_scales: jax.Array | None = None,
    max_query_len: int = 1,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
    interpret: Any = None,
) -> jax.Array: ...


@overload
def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    query_start: ArrayLike | None = None,
    *,
    layer: int,
    kv_scales: jax.Array | None = None,
    max_query_len: int = 1,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    q, kv_pages, block_tables, seq_lens, query_start=None,
    *, layer, kv_scales=None, max_query_len=1, scale=None, window=None, causal=True, soft_cap=None,
    sinks=None, return_lse=False, implementation=None, interpret=None,
):  # fmt: skip
    """Attention over pages, see the module docstring.

    Args:
      q: [T, num_q_heads, head_dim], in the order of the sequences; `query_start` delimits them.
      kv_pages: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
      block_tables: i32[S, max_blocks_per_seq]. Entries past a sequence's length, or behind the
        window of its first query, are never used.
      seq_lens: i32[S], tokens of each sequence in the pool, including this step's. Length 0 gives
        no output.
      query_start: i32[S + 1]; queries `query_start[s] : query_start[s + 1]` are the last tokens of
        sequence s. None: one query for each sequence (T = S).
      layer: layer of the pool.
      kv_scales: [num_blocks, num_layers, 2, num_kv_heads, block_size], float32 or bfloat16, exactly
        if the pages are int8: k = code * scale. From `scatter_kv`.
      max_query_len: upper bound of the queries per sequence (static). 1 selects the decode form.
      scale: scale of the logits; 1 / sqrt(head_dim) by default.
      window: number of positions that a query sees, its own included (static). None: all.
      causal: whether a query sees only positions up to its own (static); otherwise it sees all
        tokens of its sequence.
      soft_cap: bound of the logits (static): after the scale they become
        soft_cap * tanh(logits / soft_cap).
      sinks: [num_q_heads], the logit of an extra key with value 0 that every query of the head
        sees, neither scaled nor capped: out = sum_i exp(s_i) v_i / (sum_i exp(s_i) + exp(sink)).
      return_lse: whether to return the log-sum-exp too, for `merge_attention`.
      implementation: one of `IMPLEMENTATIONS`; None selects the first that runs here.
      interpret: Pallas's `InterpretGPUParams` or True: run GPU kernels interpreted, on any device.

    Returns:
      [T, num_q_heads, head_dim] in q's dtype; zeros for queries outside all sequences. With
      `return_lse`, (output, f32[T, num_q_heads]): the natural log of the softmax denominator, sink
      included. It is -inf, even with a sink, for queries outside all sequences or of a sequence of
      length 0.

    Raises:
      ValueError: the shapes do not fit; lengths, starts or block ids are not integers; lengths or
        starts do not fit 32 bits.
      NotImplementedError: the named implementation cannot run; the error gives the reason.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkv.pallas_kernels.paged_attention import paged_attention
      >>> pages = jnp.ones((3, 1, 2, 1, 4, 8))
      >>> tables = jnp.array([[2, 1]], jnp.int32)
      >>> out = paged_attention(jnp.ones((1, 2, 8)), pages, tables, jnp.array([6]), layer=0)
      >>> out.shape, float(out.max())
      ((1, 2, 8), 1.0)
    """
    layer, max_query_len = operator.index(layer), operator.index(max_query_len)
    _validate_shapes(q, kv_pages, layer)
    _validate_options(q, window, causal, soft_cap, sinks)
    check_scales(kv_pages, kv_scales)
    if query_start is None:
        query_start = np.arange(len(seq_lens) + 1, dtype=np.int32)
    lens = jnp.asarray(int32("seq_lens", seq_lens))
    starts = jnp.asarray(int32("query_start", query_start))
    tables = or_null("block_tables", block_tables, kv_pages)
    _validate_metadata(len(q), tables, lens, starts, max_query_len)
    _validate_queries(len(q), query_start, max_query_len)
    pool = PoolShape.of(kv_pages)
    head_dim = pool.head_dim
    implementation = choose(
        implementation,
        head_dim=head_dim,
        block_size=pool.block_size,
        dtype=kv_pages.dtype,
        query_dtype=q.dtype,
        group=q.shape[1] // pool.num_kv_heads,
        form="decode" if max_query_len == 1 else "prefill",
        causal=causal,
        interpret=bool(interpret),
    )
    if not len(q):
        return (q, jnp.zeros(q.shape[:2], jnp.float32)) if return_lse else q
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    options: dict[str, Any] = dict(
        layer=layer,
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
        window=None if window is None else operator.index(window),
        soft_cap=None if soft_cap is None else float(soft_cap),
    )
    if implementation == "reference":
        out, lse = paged_attention_reference(
            q, kv_pages, tables, lens, starts,
            kv_scales=kv_scales, sinks=sinks, causal=causal, **options,
        )  # fmt: skip
        return (out.astype(q.dtype), lse) if return_lse else out.astype(q.dtype)
    args = q, kv_pages, kv_scales, tables, lens, starts, sinks
    if implementation == "mosaic_gpu":
        # Imported on use: Pallas's GPU support takes half a second to import.
        from jaxkv.pallas_kernels.paged_attention.mosaic_gpu import attend_gpu

        _, compute_capability = device_of_kernels(interpret=bool(interpret))
        options |= dict(
            layer=jnp.int32(layer),
            causal=causal,
            max_query_len=max_query_len,
            compute_capability=compute_capability,
        )
        out, lse = attend_gpu(*args, **options, interpret=interpret or False)
        return (out.astype(q.dtype), lse) if return_lse else out.astype(q.dtype)
    if max_query_len == 1:
        out, *lse = decode_xla(*args, **options, return_lse=return_lse)
    else:
        out, *lse = prefill_xla(
            *args, **options, causal=causal, return_lse=return_lse, max_query_len=max_query_len
        )
    return (out.astype(q.dtype), lse[0][..., 0]) if return_lse else out.astype(q.dtype)


def _validate_shapes(q, kv_pages, layer) -> None:
    pool = PoolShape.of(kv_pages)
    if q.ndim != 3:
        raise ValueError(f"q must be [T, num_q_heads, head_dim], got {q.shape=}")
    num_kv_heads = pool.num_kv_heads
    if q.shape[2] != pool.head_dim:
        raise ValueError(
            f"q and kv_pages must have the same head_dim, got {q.shape=} and {kv_pages.shape=}"
        )
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads or q.shape[1] == 0:
        raise ValueError(
            f"{q.shape[1]} query heads cannot be grouped evenly over {num_kv_heads} KV heads"
        )
    if not 0 <= layer < pool.num_layers:
        raise ValueError(f"layer must be in [0, {pool.num_layers}), got {layer}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must have a floating-point dtype, got {q.dtype}")


def _validate_options(q, window, causal, soft_cap, sinks) -> None:
    if window is not None and window < 1:
        raise ValueError(
            "window must be 1 or more (a query sees at least itself), or None for no window, got "
            f"{window}"
        )
    if window is not None and not causal:
        raise ValueError(f"a window needs causal attention: got {window=} with {causal=}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, or None for no cap, got {soft_cap}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(
            f"sinks must hold one logit per query head ({q.shape[1]}), got {sinks.shape=}"
        )


def _validate_metadata(num_tokens, block_tables, seq_lens, query_start, max_query_len) -> None:
    if block_tables.ndim != 2 or seq_lens.shape != (len(block_tables),):
        raise ValueError(
            "block_tables and seq_lens must have one row and one length per sequence, got "
            f"{block_tables.shape=} and {seq_lens.shape=}"
        )
    if query_start.shape != (len(seq_lens) + 1,):
        raise ValueError(
            f"query_start must have {len(seq_lens) + 1} entries, got {query_start.shape=}"
        )
    if max_query_len < 1 or (max_query_len == 1 and num_tokens != len(seq_lens)):
        raise ValueError(
            "max_query_len must be 1 or more, and 2 or more unless each sequence has one query: "
            f"got {max_query_len=} with {num_tokens} queries of {len(seq_lens)} sequences"
        )


def _validate_queries(num_tokens, query_start, max_query_len) -> None:
    """Checks the values of query_start where they are known, that is outside a jitted function."""
    if isinstance(query_start, jax.core.Tracer):
        return
    counts = np.diff(np.asarray(query_start).astype(np.int64))
    if counts.size and (counts.min() < 0 or counts.sum() > num_tokens):
        raise ValueError(
            f"query_start must not decrease or exceed the number of queries, {num_tokens}, got "
            f"{np.asarray(query_start).tolist()}"
        )
    if counts.size and counts.max() > max_query_len:
        raise ValueError(
            f"max_query_len must be at least {counts.max()} (the most queries of a sequence), got "
            f"{max_query_len}"
        )
