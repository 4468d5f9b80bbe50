"""The device's side of the cache: an immutable PyTree and the pure functions that step it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxkv.config import DTYPES, CacheConfig
from jaxkv.errors import JaxkvError, StaleStateError
from jaxkv.manager.records import Plan
from jaxkv.pallas_kernels.copy_blocks import copy_blocks
from jaxkv.pallas_kernels.integers import int32

_STALE = """\
This PagedState was donated to a step and its pool now belongs to the state that step returned.
Probably the old name was kept:
    logits, new_state = decode_step(params, state, tokens)
    logits, new_state = decode_step(params, state, tokens)   # `state` is gone
Rebind the name at every step instead:
    logits, state = decode_step(params, state, tokens)
If the step itself failed after it took the state, the pool is lost: make a new one with
jaxkv.init_state(config) and run the sequences again."""


@dataclasses.dataclass(frozen=True)
class PagedState:
    """Pages and block tables. Every transition returns a new one; steps donate the old one.

    A PyTree. It flattens through a function of ours and not through `register_dataclass`, so that
    handing a donated state to any JAX function raises `StaleStateError` with the way out.

    Attributes:
      kv_pages: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; K at 0, V at 1.
      kv_scales: leaves beside the pages when they are quantised; None otherwise.
      block_tables: i32[max_seqs, max_blocks_per_seq]; 0 (the null block) where unused.
      seq_lens: i32[max_seqs]; tokens whose KV is written.
    """

    kv_pages: jax.Array
    kv_scales: jax.Array | None
    block_tables: jax.Array
    seq_lens: jax.Array


def is_stale(state: PagedState) -> bool:
    """Whether the state's pool was donated away."""
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


def init_state(config: CacheConfig) -> PagedState:
    """An empty cache: zeroed pages, tables of null blocks, lengths of 0.

    Example:
      >>> import jaxkv
      >>> config = jaxkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=3)
      >>> jaxkv.init_state(config).kv_pages.shape
      (3, 1, 2, 1, 16, 8)
    """
    shape = (
        config.num_blocks,
        config.num_layers,
        2,
        config.num_kv_heads,
        config.block_size,
        config.head_dim,
    )
    return PagedState(
        kv_pages=jnp.zeros(shape, DTYPES[config.dtype]),
        kv_scales=None,
        block_tables=jnp.zeros((config.max_seqs, config.max_blocks_per_seq), jnp.int32),
        seq_lens=jnp.zeros(config.max_seqs, jnp.int32),
    )


# -- plans -----------------------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["copies", "cells", "lengths"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """A `Plan` padded to a bucket, ready to go into a jitted step.

    Attributes:
      copies: i32[C, 2] (source, destination); padding copies to a block past the pool: dropped.
      cells: i32[E, 3] (row, column, block); padding names a row past the table: dropped.
      lengths: i32[R, 2] (row, length); padding likewise.
    """

    copies: jax.Array | np.ndarray
    cells: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray


def bucket(size: int, buckets: Sequence[int] | None = None) -> int:
    """The smallest bucket that holds `size`: of `buckets`, or of the powers of two from 8."""
    if buckets is None:
        return max(8, 1 << (size - 1).bit_length())
    for candidate in buckets:
        if size <= candidate:
            return candidate
    raise JaxkvError(f"{size} is larger than the largest bucket of {list(buckets)}")


def pad_plan(plan: Plan, *, cells: int | None = None, lengths: int | None = None) -> DevicePlan:
    """Pads a plan to fixed sizes, or to power-of-two buckets, so that its shape rarely changes."""

    def pad(entries: np.ndarray, size: int | None) -> np.ndarray:
        size = bucket(len(entries)) if size is None else bucket(len(entries), [size])
        out = np.full((size, entries.shape[1]), np.iinfo(np.int32).max, np.int32)
        out[: len(entries)] = entries
        return out

    copies = pad(plan.copies, None if len(plan.copies) else 0)
    copies[len(plan.copies) :, 0] = 0  # a source is read before the copy is dropped
    return DevicePlan(copies, pad(plan.cells, cells), pad(plan.lengths, lengths))


def apply_device_plan(state: PagedState, plan: DevicePlan) -> PagedState:
    """`apply_plan` for use inside a jitted step. Block copies first, then tables and lengths."""
    copies = jnp.asarray(plan.copies)
    pages, scales = (  # without scales, None has no leaves
        jax.tree.map(lambda pool: copy_blocks(pool, copies[:, 0], copies[:, 1]), pool)
        for pool in (state.kv_pages, state.kv_scales)
    )
    rows, columns, blocks = (plan.cells[:, i] for i in range(3))
    tables = state.block_tables.at[rows, columns].set(blocks, mode="drop")
    lens = state.seq_lens.at[plan.lengths[:, 0]].set(plan.lengths[:, 1], mode="drop")
    return dataclasses.replace(
        state, kv_pages=pages, kv_scales=scales, block_tables=tables, seq_lens=lens
    )


_apply = jax.jit(apply_device_plan, donate_argnames="state")


def apply_plan(state: PagedState, plan: Plan | DevicePlan) -> PagedState:
    """Brings the device's tables and lengths to where the manager's are. Donates state.

    For those who drive the state themselves; a step takes the plan as an argument instead and
    saves a dispatch.

    Args:
      plan: from `BlockManager.take_plan()`, or padded by `pad_plan`; plans must be applied in the
        order taken.

    Raises:
      StaleStateError: the state was donated before.
    """
    return _apply(state, plan if isinstance(plan, DevicePlan) else pad_plan(plan))


# -- batches ---------------------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "positions", "query_start", "logits_at"],
    meta_fields=["max_query_len", "num_decodes"],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Which tokens a step computes: ragged, in one flat row of T tokens of S sequences.

    Attributes:
      rows: i32[T]; the table row of each token's sequence. Padding tokens: `max_seqs` or above, or
        negative.
      positions: i32[T]; position of each token in its sequence.
      query_start: i32[S + 1]; tokens `query_start[s] : query_start[s + 1]` are of sequence s.
        Sequences without tokens are padding and stand at the end.
      max_query_len: static; no sequence has more tokens in this step. 1 means a decode step.
      num_decodes: static; so many sequences, the first ones, have one token each, and attend in the
        decode form though others bring chunks.
      logits_at: i32[L]; the tokens whose logits the model returns. None: each sequence's last.
    """

    rows: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    query_start: jax.Array | np.ndarray
    max_query_len: int
    num_decodes: int = 0
    logits_at: jax.Array | np.ndarray | None = None

    @classmethod
    def ragged(
        cls,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        num_tokens: int,
        num_seqs: int,
        padding_row: int,
    ) -> Batch:
        """Sequence i has `counts[i]` tokens from position `starts[i]`; padded to a bucket.

        Args:
          num_tokens: T, at least sum(counts).
          num_seqs: S, at least len(rows).
          padding_row: `max_seqs` of the cache.
        """
        nothing = np.zeros(0, np.int32)
        return cls.mixed(
            nothing, nothing, rows, starts, counts,
            num_decodes=0, num_tokens=num_tokens, num_seqs=num_seqs, padding_row=padding_row,
        )  # fmt: skip

    @classmethod
    def mixed(
        cls,
        decode_rows: np.ndarray,
        decode_positions: np.ndarray,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        num_decodes: int,
        num_tokens: int,
        num_seqs: int,
        padding_row: int,
    ) -> Batch:
        """Sequences with one token each, padded to `num_decodes`, before the chunks of others.

        Args:
          decode_rows: of the sequences with one token.
          decode_positions: of these tokens.
          rows: of the sequences with chunks.
          starts: positions of their first tokens.
          counts: their tokens.
          num_decodes: sequences of the first kind, padding included.
          num_tokens: of the second kind, padding included.
          num_seqs: of the second kind, padding included.
          padding_row: `max_seqs` of the cache.

        Raises:
          ValueError: rows or positions that are no integers, or do not fit 32 bits.
          JaxkvError: sequences or tokens that do not fit the batch.
        """
        total = int(sum(counts))
        if len(decode_rows) > num_decodes:
            raise JaxkvError(f"{len(decode_rows)} sequences do not fit a batch of {num_decodes}")
        if total > num_tokens or len(rows) > num_seqs:
            raise JaxkvError(
                f"{total} tokens of {len(rows)} sequences do not fit a batch of {num_tokens} "
                f"tokens and {num_seqs} sequences"
            )
        token_rows = np.full(num_decodes + num_tokens, padding_row, np.int32)
        positions = np.zeros(num_decodes + num_tokens, np.int32)
        token_rows[: len(decode_rows)] = int32("decode_rows", decode_rows)
        positions[: len(decode_rows)] = int32("decode_positions", decode_positions)
        chunks = int32("rows", np.asarray(rows)), int32("starts", np.asarray(starts)), counts
        query_start = np.full(num_decodes + num_seqs + 1, num_decodes + total, np.int32)
        query_start[:num_decodes] = np.arange(num_decodes)
        at = num_decodes
        for i, (row, start, count) in enumerate(zip(*chunks, strict=True)):
            query_start[num_decodes + i] = at
            token_rows[at : at + count] = row
            positions[at : at + count] = np.arange(start, start + count)
            at += count
        # Not 1, which would promise one query of every sequence.
        return cls(token_rows, positions, query_start, max(2, num_tokens), num_decodes)

    @classmethod
    def decode(
        cls, rows: np.ndarray, positions: np.ndarray, *, num_seqs: int, padding_row: int
    ) -> Batch:
        """One token for each of `rows`, at `positions`; padded to `num_seqs` sequences.

        Raises:
          ValueError: rows or positions that are no integers, or do not fit 32 bits.
          JaxkvError: more rows than sequences.
        """
        if len(rows) > num_seqs:
            raise JaxkvError(f"{len(rows)} sequences do not fit a batch of {num_seqs}")
        padded_rows = np.full(num_seqs, padding_row, np.int32)
        padded_rows[: len(rows)] = int32("rows", rows)
        padded_positions = np.zeros(num_seqs, np.int32)
        padded_positions[: len(rows)] = int32("positions", positions)
        query_start = np.minimum(np.arange(num_seqs + 1), len(rows)).astype(np.int32)
        return cls(padded_rows, padded_positions, query_start, max_query_len=1)

    def in_int32(self) -> Batch:
        """The same tokens, all numbers of type int32.

        Raises:
          ValueError: numbers that are no integers or, on the host, do not fit.
        """
        names = "rows", "positions", "query_start"
        fields = {name: jnp.asarray(int32(name, getattr(self, name))) for name in names}
        return dataclasses.replace(self, **fields)

    @property
    def last_tokens(self) -> jax.Array:
        """i32[S]; index of each sequence's last token in this batch (0 where it has none)."""
        return jnp.maximum(jnp.asarray(self.query_start)[1:] - 1, 0)

    @property
    def logit_tokens(self) -> jax.Array:
        """i32[L]; index of the tokens whose logits the model returns."""
        return self.last_tokens if self.logits_at is None else jnp.asarray(self.logits_at)


def advance(state: PagedState, batch: Batch) -> PagedState:
    """The KV of the batch's tokens is written in all layers: lengths follow."""
    batch = batch.in_int32()
    rows = jnp.asarray(batch.rows)
    rows = jnp.where(rows >= 0, rows, len(state.seq_lens))  # a negative one would wrap
    ends = jnp.asarray(batch.positions) + 1
    return dataclasses.replace(state, seq_lens=state.seq_lens.at[rows].max(ends, mode="drop"))
