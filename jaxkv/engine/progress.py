"""Progress of the running sequences, in arrays by row: a step over thousands is a few calls.

Host code: imports no JAX.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxkv.engine.requests import Sequence
from jaxkv.engine.work import Decodes
from jaxkv.sampling.params import MAX_STOP_TOKENS


class Taken(NamedTuple):
    """Result of `Progress.take`.

    Attributes:
      sequences: sequences to which a token was appended.
      ended: (sequence, token) of sequences that end with it.
      rest: indices in the step's decodes of sequences that need more work per token.
    """

    sequences: list[Sequence]
    ended: list[tuple[Sequence, int]]
    rest: list[int]


class Progress:
    """Columns with one entry for each row of the block table.

    Attributes:
      sequences: sequence of each row; None: the row is free.
      keys: i64[R]; key of each row's sequence, -1 for free rows. Keys are never reused.
      known: i64[R]; tokens that the host has, the prompt included.
      scheduled: i64[R]; leading positions whose KV is computed or in flight.
      appended: i64[R]; leading tokens that the block manager has: they are synced once per block,
        and before a call that depends on them.
      slots: i64[R]; leading positions that may be written without a call to the block manager.
      end: i64[R]; length at which the sequence ends.
      logprobs: i64[R]; most likely tokens to report; -1: no log-probabilities.
      num_stop_ids: i64[R]; number of stop token ids.
      stop_ids: i64[R, MAX_STOP_TOKENS]; -1 where unused.
      simple: bool[R]; tokens are appended and reported, with no other work per token.
      unsent: bool[R]; the newest token was chosen by the host and is not on the device yet.
      processor: i64[R]; slot of the logits processor, -1 for none.
      needs_sync: bool[R]; the next step depends on the tokens of this one, as in a beam search.
    """

    def __init__(self, max_seqs: int):
        self.sequences: list[Sequence | None] = [None] * max_seqs
        self._columns = np.zeros((8, max_seqs), np.int64)
        (
            self.keys, self.known, self.scheduled, self.appended, self.slots, self.end,
            self.logprobs, self.num_stop_ids,
        ) = self._columns  # fmt: skip
        self.keys[:] = -1
        self.stop_ids = np.full((max_seqs, MAX_STOP_TOKENS), -1, np.int64)
        self.simple = np.zeros(max_seqs, bool)
        self.unsent = np.zeros(max_seqs, bool)
        self.needs_sync = np.zeros(max_seqs, bool)
        self.processor = np.full(max_seqs, -1, np.int64)
        self._decodes: Decodes | None = None

    def open(self, sequence: Sequence, row: int, *, scheduled: int, appended: int) -> None:
        """Fills the columns of a row for its new sequence."""
        request, params = sequence.request, sequence.request.params
        sequence.row, self.sequences[row] = row, sequence
        self._columns[:, row] = (
            sequence.key, len(sequence.tokens), scheduled, appended, 0, request.end,
            request.logprobs, len(request.stop_ids),
        )  # fmt: skip
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(request.stop_ids)] = sorted(request.stop_ids)
        self.unsent[row] = False
        self.needs_sync[row] = request.beam is not None
        self.simple[row] = (
            request.logprobs < 0
            and not params.stop
            and request.beam is None
            and params.num_samples == params.n
            and request.processor < 0
        )
        self.processor[row] = request.processor

    def close(self, sequence: Sequence) -> None:
        """Frees the row of a sequence."""
        self._decodes = None
        sequence.num_in_flight = self.num_in_flight(sequence)
        self.sequences[sequence.row], self.keys[sequence.row] = None, -1
        sequence.row = -1

    def decodes(self, rows: np.ndarray) -> Decodes:
        """The sequences in these rows as one step's decodes; cached while the array is the same."""
        if self._decodes is None or self._decodes.rows is not rows:
            sequences = [s for row in rows.tolist() if (s := self.sequences[row]) is not None]
            simple = self.simple[rows]
            self._decodes = Decodes(
                sequences, rows, self.keys[rows], simple, bool(simple.all()),
                bool(self.needs_sync[rows].any()), int(self.logprobs[rows].max(initial=-1)),
                int(self.num_stop_ids[rows].max(initial=0)),
            )  # fmt: skip
        return self._decodes

    def all_there(self, decodes: Decodes) -> bool:
        """Whether all of these sequences still have their rows."""
        return decodes is self._decodes

    def take(self, decodes: Decodes, counts: np.ndarray, step: int, tokens: np.ndarray) -> Taken:
        """Appends the tokens of one decode step to all sequences that need nothing else done.

        Args:
          decodes: sequences of the step.
          counts: i64[n]; steps of the dispatch in which each brings a token.
          step: number of the step in its dispatch.
          tokens: i32[n].

        Returns:
          A `Taken`.
        """
        rows, sequences = decodes.rows, decodes.sequences
        rest: list[int] = []
        if step or not decodes.all_simple or not self.all_there(decodes):
            brings = counts > step
            simple = decodes.simple & brings & (self.keys[rows] == decodes.keys)
            rest, chosen = np.flatnonzero(brings & ~simple).tolist(), np.flatnonzero(simple)
            rows, tokens = rows[chosen], tokens[chosen]
            sequences = [sequences[i] for i in chosen.tolist()]
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
        known = self.known[rows] + 1
        self.known[rows] = known
        ends = known >= self.end[rows]
        if count := decodes.num_stop_ids:
            ends |= (self.stop_ids[rows, :count] == tokens[:, None]).any(axis=1)
        ended = [(sequences[i], int(tokens[i])) for i in np.flatnonzero(ends).tolist()]
        return Taken(sequences, ended, rest)

    def tokens(self, row: int, first: int, end: int) -> list[int]:
        """Tokens of a row's sequence at positions `first` to `end - 1`."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence.tokens[first:end]

    # -- one sequence ------------------------------------------------------------------------

    def prefilling(self, sequence: Sequence) -> bool:
        """Whether tokens that were allocated with the sequence are still to be computed."""
        return bool(self.scheduled[sequence.row] < self.appended[sequence.row])

    def num_in_flight(self, sequence: Sequence) -> int:
        """Number of tokens in flight: sampled, or being sampled, and not on the host yet."""
        # The token of a hypothesis with candidates has come; its search takes it in.
        if self.prefilling(sequence) or sequence.candidates is not None:
            return 0
        return int(self.scheduled[sequence.row] + 1 - self.known[sequence.row])

    def left(self, sequence: Sequence) -> int:
        """Number of tokens that it may still generate, those in flight not counted."""
        row = sequence.row
        return int(self.end[row] - self.known[row]) - self.num_in_flight(sequence)
