"""Attention of a ragged batch of queries over keys and values that lie in pages.

    out[t] = softmax(scale * q[t] @ K[s, : p + 1]^T) @ V[s, : p + 1]

where s is the sequence of token t and p its position: a sequence's queries are its last tokens, so
a decode step (one query each) and a prefill chunk are the same operation at other shapes.

Data movement: the page ids come from the block table, and each page is read where it lies. The XLA
path walks a few pages at a time with an online softmax and never gathers a whole sequence; the
reference gathers everything and is for tests.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import page_row, page_rows

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")

_MASKED = -1e30  # finite, so that a fully masked tile leaves no NaN behind
_DECODE_TILE = 64  # tokens of every sequence that one pass of the decode loop reads
_QUERY_TILE = 64  # queries of one sequence that the prefill loop takes at a time
_KEY_TILE = 256  # tokens that it then reads at a time


def supports(implementation: str, *, platform: str | None = None) -> tuple[bool, str]:
    """Whether an implementation can run, and the reason if not."""
    if implementation not in IMPLEMENTATIONS:
        return False, f"unknown implementation {implementation!r}; one of {IMPLEMENTATIONS}"
    if implementation == "mosaic_gpu":
        platform = platform or jax.default_backend()
        return False, f"there is no Mosaic GPU kernel yet (platform {platform!r}); use 'xla'"
    return True, ""


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array | None = None,
    *,
    layer: int,
    max_query_len: int = 1,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention over pages; see the module's docstring.

    Args:
      q: [T, num_q_heads, head_dim]; sequences in order, `query_start` says whose is which.
      kv_pages: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
      block_tables: i32[S, max_blocks_per_seq]. Entries past a sequence's length are never used.
      seq_lens: i32[S]; tokens of each sequence in the pool, this step's included. 0: no output.
      query_start: i32[S + 1]; queries `query_start[s] : query_start[s + 1]` are the last tokens of
        sequence s. None: one query for each sequence (T = S).
      layer: which layer of the pool.
      max_query_len: static; no sequence has more queries. 1 selects the decode form.
      scale: of the logits; 1 / sqrt(head_dim) by default.
      implementation: one of `IMPLEMENTATIONS`; None takes the first that runs here.

    Returns:
      [T, num_q_heads, head_dim] in q's dtype; zeros for queries of no sequence.

    Raises:
      ValueError: shapes or integer types that do not fit.
      NotImplementedError: the named implementation cannot run, with the reason.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.paged_attention import paged_attention
      >>> pages = jnp.ones((3, 1, 2, 1, 4, 8))
      >>> tables = jnp.array([[2, 1]], jnp.int32)
      >>> out = paged_attention(jnp.ones((1, 2, 8)), pages, tables, jnp.array([6]), layer=0)
      >>> out.shape, float(out.max())
      ((1, 2, 8), 1.0)
    """
    block_tables, seq_lens = jnp.asarray(block_tables), jnp.asarray(seq_lens)
    if query_start is None:
        query_start = jnp.arange(len(seq_lens) + 1, dtype=jnp.int32)
    query_start = jnp.asarray(query_start)
    _validate(q, kv_pages, block_tables, seq_lens, query_start, layer, max_query_len)
    if implementation is None:
        implementation = next(name for name in IMPLEMENTATIONS if supports(name)[0])
    runs, reason = supports(implementation)
    if not runs:
        raise NotImplementedError(f"paged_attention {implementation=}: {reason}")
    if not len(q):
        return q
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # Ids outside the pool can only be padding: point them at the null block; its reads are masked.
    in_pool = (block_tables >= 0) & (block_tables < kv_pages.shape[0])
    tables = jnp.where(in_pool, block_tables, 0).astype(jnp.int32)
    seq_lens, query_start = seq_lens.astype(jnp.int32), query_start.astype(jnp.int32)
    if implementation == "reference":
        out = paged_attention_reference(
            q, kv_pages, tables, seq_lens, query_start, layer=layer, scale=scale
        )
    elif max_query_len == 1:
        out = _decode_xla(q, kv_pages, tables, seq_lens, query_start, layer, scale)
    else:
        out = _prefill_xla(q, kv_pages, tables, seq_lens, query_start, layer, scale, max_query_len)
    return out.astype(q.dtype)


def _validate(q, kv_pages, block_tables, seq_lens, query_start, layer, max_query_len) -> None:
    if q.ndim != 3 or kv_pages.ndim != 6 or kv_pages.shape[2] != 2:
        raise ValueError(
            f"expected q [T, num_q_heads, head_dim] and kv_pages [num_blocks, num_layers, 2, "
            f"num_kv_heads, block_size, head_dim], got {q.shape=} and {kv_pages.shape=}"
        )
    num_kv_heads, head_dim = kv_pages.shape[3], kv_pages.shape[5]
    if q.shape[2] != head_dim:
        raise ValueError(f"head_dim differs: {q.shape=} but {kv_pages.shape=}")
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads or q.shape[1] == 0:
        raise ValueError(
            f"{q.shape[1]} query heads do not divide into groups over {num_kv_heads} KV heads"
        )
    if not 0 <= layer < kv_pages.shape[1]:
        raise ValueError(f"{layer=} is not one of the pool's {kv_pages.shape[1]} layers")
    if block_tables.ndim != 2 or seq_lens.shape != (len(block_tables),):
        raise ValueError(
            f"one length and one table row per sequence: {block_tables.shape=}, {seq_lens.shape=}"
        )
    if query_start.shape != (len(seq_lens) + 1,):
        raise ValueError(f"query_start wants {len(seq_lens) + 1} entries: {query_start.shape=}")
    if max_query_len < 1 or (max_query_len == 1 and len(q) != len(seq_lens)):
        raise ValueError(
            f"{max_query_len=} with {len(q)} queries of {len(seq_lens)} sequences: a decode step "
            "has one query per sequence"
        )
    for name, x in (
        ("block_tables", block_tables), ("seq_lens", seq_lens), ("query_start", query_start)
    ):  # fmt: skip
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {x.dtype}")


# -- the XLA path ----------------------------------------------------------------------------


def _read_pages(kv_pages, blocks, layer, scale, dtype):
    """scale * K and V of pages `blocks` i32[..., P]: [..., num_kv_heads, P * block_size, head_dim].

    The scale is K's, not q's, since XLA's CPU code vectorises a gather that computes something: 33
    against 44 ms a step to read 32 sequences of 281 tokens of a 30-layer model.
    """
    num_kv_heads, block_size, head_dim = kv_pages.shape[3:]
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    row = page_row(kv_pages, blocks[..., None, :], layer, 0, heads)  # [..., H, P]
    pages = page_rows(kv_pages)
    shape = (*row.shape[:-1], row.shape[-1] * block_size, head_dim)
    take = lambda r: pages.at[r].get(mode="promise_in_bounds").astype(dtype)  # noqa: E731
    return (take(row) * scale).reshape(shape), take(row + num_kv_heads).reshape(shape)


def _accumulate(carry, q, k, v, visible, written):
    """One online-softmax step of `...hqd` queries over a tile of `...htd` keys and values.

    visible broadcasts to [..., h, q, t], written to [..., h, t, 1]. A slot that is not written
    must not be multiplied either: 0 x NaN is NaN, and a recycled slot may hold anything. (A row
    that sees nothing at all sums weights of 1 over such zeros, and so comes out as 0.)
    """
    m, total, acc = carry
    f32 = jnp.float32
    s = jnp.einsum("...hqd,...htd->...hqt", q, k, preferred_element_type=f32)
    s = jnp.where(visible, s, _MASKED)
    v = jnp.where(written, v, jnp.zeros_like(v))
    m_new = jnp.maximum(m, s.max(axis=-1, keepdims=True))
    alpha = jnp.exp(m - m_new)
    p = jnp.exp(s - m_new)
    total = total * alpha + p.sum(axis=-1, keepdims=True)
    out = jnp.einsum("...hqt,...htd->...hqd", p.astype(v.dtype), v, preferred_element_type=f32)
    return m_new, total, acc * alpha + out


def _start(shape):
    """Online-softmax carry of queries [..., D]: running maximum, sum and output."""
    column = (*shape[:-1], 1)
    return (
        jnp.full(column, _MASKED, jnp.float32),
        jnp.zeros(column, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _finish(carry):
    _, total, acc = carry
    return jnp.where(total > 0, acc / jnp.where(total > 0, total, 1), 0)


def _pad_columns(tables, pages_per_tile):
    """Table padded with null blocks, so that the last tile's slice is not moved to fit."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages_per_tile)))


def _decode_xla(q, kv_pages, tables, seq_lens, query_start, layer, scale):
    """All sequences in step: each pass of the loop takes the next tile of every sequence."""
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_pages.shape[3:5]
    pages_per_tile = max(1, min(tables.shape[1], _DECODE_TILE // block_size))
    tile = pages_per_tile * block_size
    tables = _pad_columns(tables, pages_per_tile)
    lens = jnp.where(query_start[1:] > query_start[:-1], seq_lens, 0)
    q = q.reshape(num_seqs, num_kv_heads, -1, head_dim)

    def body(i, carry):
        blocks = lax.dynamic_slice_in_dim(tables, i * pages_per_tile, pages_per_tile, 1)
        k, v = _read_pages(kv_pages, blocks, layer, scale, q.dtype)
        visible = i * tile + jnp.arange(tile, dtype=jnp.int32) < lens[:, None]
        return _accumulate(carry, q, k, v, visible[:, None, None, :], visible[:, None, :, None])

    num_tiles = lax.div(lens.max() + (tile - 1), jnp.int32(tile))
    carry = lax.fori_loop(0, num_tiles, body, _start(q.shape))
    return _finish(carry).reshape(num_seqs, num_q_heads, head_dim)


def _prefill_xla(q, kv_pages, tables, seq_lens, query_start, layer, scale, max_query_len):
    """One tile of one sequence's queries at a time, over as many pages as it may see.

    A tile's rows past its sequence's end hold the next sequence's queries; their output is
    rubbish and is overwritten by that sequence's own tile, which starts right there.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_pages.shape[3:5]
    query_tile = min(_QUERY_TILE, max_query_len, num_tokens)
    pages_per_tile = max(1, min(tables.shape[1], _KEY_TILE // block_size))
    tile = pages_per_tile * block_size
    tables = _pad_columns(tables, pages_per_tile)
    q = jnp.pad(q, ((0, query_tile), (0, 0), (0, 0)))
    counts = query_start[1:] - query_start[:-1]
    tiles_before = jnp.cumsum(-(-counts // query_tile))

    def query_tile_of(i, out):
        s = jnp.searchsorted(tiles_before, i, side="right").astype(jnp.int32)
        first = jnp.where(s > 0, tiles_before[s - 1], 0)
        offset = (i - first) * query_tile  # of the tile inside its sequence
        at = query_start[s] + offset
        length = seq_lens[s]
        positions = length - counts[s] + offset + jnp.arange(query_tile, dtype=jnp.int32)
        last_seen = jnp.minimum(positions[-1] + 1, length)
        qt = lax.dynamic_slice_in_dim(q, at, query_tile, 0)
        # [tile, H, G, D] -> [H, G * tile, D]: the heads of a group share their keys.
        qt = qt.reshape(query_tile, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
        group = qt.shape[1]
        qt = qt.reshape(num_kv_heads, group * query_tile, head_dim)
        row_positions = jnp.tile(positions, group)

        def key_tile(j, carry):
            blocks = lax.dynamic_slice(tables, (s, j * pages_per_tile), (1, pages_per_tile))[0]
            k, v = _read_pages(kv_pages, blocks, layer, scale, q.dtype)
            token = j * tile + jnp.arange(tile, dtype=jnp.int32)
            visible = (token <= row_positions[:, None]) & (token < length)
            return _accumulate(carry, qt, k, v, visible[None], (token < length)[:, None])

        num_tiles = lax.div(last_seen + (tile - 1), jnp.int32(tile))
        o = _finish(lax.fori_loop(0, num_tiles, key_tile, _start(qt.shape)))
        o = o.reshape(num_kv_heads, group, query_tile, head_dim).transpose(2, 0, 1, 3)
        o = o.reshape(query_tile, num_q_heads, head_dim)
        return lax.dynamic_update_slice_in_dim(out, o, at, 0)

    out = jnp.zeros(q.shape, jnp.float32)
    out = lax.fori_loop(0, tiles_before[-1], query_tile_of, out)[:num_tokens]
    # The last tile may have run over the end of the last sequence.
    return jnp.where(jnp.arange(num_tokens)[:, None, None] < query_start[-1], out, 0)


# -- the reference ---------------------------------------------------------------------------


def paged_attention_reference(q, kv_pages, block_tables, seq_lens, query_start, *, layer, scale):
    """Gathers every page, one dense softmax in float32. Obviously right, and slow."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_pages.shape[3]
    pages = kv_pages[block_tables, layer].astype(jnp.float32)  # [S, M, 2, H, B, D]
    pages = pages.transpose(2, 0, 3, 1, 4, 5)  # [2, S, H, M, B, D]
    k, v = pages.reshape(2, len(block_tables), num_kv_heads, -1, head_dim)  # [S, H, M * B, D]
    token = jnp.arange(num_tokens)
    s = jnp.searchsorted(query_start, token, side="right") - 1
    s = jnp.clip(s, 0, len(seq_lens) - 1)
    position = seq_lens[s] - query_start[s + 1] + token
    slot = jnp.arange(k.shape[2])
    visible = (slot <= position[:, None]) & (slot < seq_lens[s][:, None])
    visible &= (token < query_start[s + 1])[:, None]
    repeat = num_q_heads // num_kv_heads  # query head h reads KV head h // repeat
    k, v = jnp.repeat(k, repeat, axis=1)[s], jnp.repeat(v, repeat, axis=1)[s]  # [T, Hq, M * B, D]
    logits = jnp.einsum("thd,thkd->thk", q.astype(jnp.float32) * scale, k)
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    weights = jnp.where(visible.any(-1)[:, None, None], jax.nn.softmax(logits, axis=-1), 0)
    v = jnp.where(visible[:, None, :, None], v, 0)
    return jnp.einsum("thk,thkd->thd", weights, v)
