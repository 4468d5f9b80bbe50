"""Batches: the tokens that a step computes, ragged, with static shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.state import PagedState
from jaxkv.errors import JaxkvError
from jaxkv.pallas_kernels.integers import int32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "positions", "query_start", "logits_at"],
    meta_fields=["max_query_len", "num_decodes"],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens of one step: ragged, T tokens of S sequences in one flat array.

    Attributes:
      rows: i32[T]; table row of each token's sequence; `max_seqs` or above, or negative, for
        padding.
      positions: i32[T]; position of each token in its sequence.
      query_start: i32[S + 1]; sequence s has tokens `query_start[s] : query_start[s + 1]`.
        Sequences without tokens are padding, at the end.
      max_query_len: static; most tokens of a sequence in this step. 1 means a decode step.
      num_decodes: static; number of leading sequences with one token each, which attend in the
        decode form beside the chunks of others.
      logits_at: i32[L]; tokens whose logits the model returns. None: the last of each sequence.
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
        """Decodes (one token each), padded to `num_decodes`, followed by chunks of other sequences.

        Args:
          decode_rows: table rows of the decodes.
          decode_positions: positions of their tokens.
          rows: table rows of the sequences with chunks.
          starts: positions of the chunks' first tokens.
          counts: numbers of tokens of the chunks.
          num_decodes: decodes, padding included.
          num_tokens: tokens of all chunks, padding included.
          num_seqs: sequences with chunks, padding included.
          padding_row: `max_seqs` of the cache.

        Raises:
          ValueError: rows or positions that are not integers, or do not fit 32 bits.
          JaxkvError: more sequences or tokens than the batch has room for.
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
        # Not 1, which would promise one query per sequence.
        return cls(token_rows, positions, query_start, max(2, num_tokens), num_decodes)

    @classmethod
    def decode(
        cls, rows: np.ndarray, positions: np.ndarray, *, num_seqs: int, padding_row: int
    ) -> Batch:
        """One token for each of `rows`, at `positions`, padded to `num_seqs` sequences.

        Raises:
          ValueError: rows or positions that are not integers, or do not fit 32 bits.
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

    @classmethod
    def following(cls, state: PagedState, rows: jax.Array | np.ndarray) -> Batch:
        """The next token of each row, at the position after those whose KV is written.

        Positions are `state.seq_lens` of the rows, so that a device loop needs no host: reserve the
        slots with `BlockManager.reserve` before it, append and commit the tokens after it.

        Args:
          state: the cache, with all plans applied.
          rows: i32[S]; `max_seqs` or above, or negative, for padding.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxkv
          >>> config = jaxkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=3)
          >>> jaxkv.Batch.following(jaxkv.init_state(config), jnp.array([2, 8])).positions.tolist()
          [0, 0]
        """
        rows = jnp.asarray(int32("rows", rows))
        max_seqs = len(state.seq_lens)
        live = (rows >= 0) & (rows < max_seqs)
        positions = jnp.where(live, state.seq_lens[jnp.where(live, rows, 0)], 0)
        query_start = jnp.arange(len(rows) + 1, dtype=jnp.int32)
        return cls(rows, positions, query_start, max_query_len=1)

    def in_int32(self) -> Batch:
        """The same batch with all numbers in int32.

        Raises:
          ValueError: numbers that are not integers or, on the host, do not fit 32 bits.
        """
        names = "rows", "positions", "query_start"
        fields = {name: jnp.asarray(int32(name, getattr(self, name))) for name in names}
        return dataclasses.replace(self, **fields)

    @property
    def last_tokens(self) -> jax.Array:
        """i32[S]; index of each sequence's last token in this batch (0 for padding)."""
        return jnp.maximum(jnp.asarray(self.query_start)[1:] - 1, 0)

    @property
    def logit_tokens(self) -> jax.Array:
        """i32[L]; indices of the tokens whose logits the model returns."""
        return self.last_tokens if self.logits_at is None else jnp.asarray(self.logits_at)


def advance(state: PagedState, batch: Batch) -> PagedState:
    """Counts the batch's tokens as written, in `seq_lens`; models call it after the last layer."""
    batch = batch.in_int32()
    rows = jnp.asarray(batch.rows)
    rows = jnp.where(rows >= 0, rows, len(state.seq_lens))  # a negative one would wrap
    ends = jnp.asarray(batch.positions) + 1
    return dataclasses.replace(state, seq_lens=state.seq_lens.at[rows].max(ends, mode="drop"))
