"""How far each running sequence is, in arrays by row: a step over thousands is a few calls.

Host code: imports no JAX.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxkv.engine.requests import Sequence
from jaxkv.engine.work import Decodes
from jaxkv.sampling.params import MAX_STOP_TOKENS


class Taken(NamedTuple):
    """Sequences that got the token of a decode step.

    Attributes:
      sequences: sequences to which it was appended.
      ended: (sequence, token) of those that it ends.
      rest: indices in the step's decodes of those that are to be handled one by one.
    """

    sequences: list[Sequence]
    ended: list[tuple[Sequence, int]]
    rest: list[int]


class Progress:
    """Columns with one entry for each row of the block table.

    Attributes:
      sequences: whose row it is; None: nobody's.
      keys: i64[R]; their keys, -1 for nobody's. A key never comes back.
      known: i64[R]; tokens that the host has seen, the prompt included.
      scheduled: i64[R]; leading positions whose KV has been computed, or is being.
      appended: i64[R]; leading tokens that the block manager knows: it is told once in a block, and
        when something depends on it.
      slots: i64[R]; leading positions that may be written without asking the block manager.
      end: i64[R]; length at which the sequence ends.
      logprobs: i64[R]; likeliest tokens to report; -1: no log-probabilities.
      num_stop_ids: i64[R].
      stop_ids: i64[R, MAX_STOP_TOKENS]; -1 where unused.
      simple: bool[R]; its tokens are appended and told, and nothing else is done with them.
      unsent: bool[R]; its newest token was chosen by the host, and the device has not seen it.
      needs_sync: bool[R]; its next step follows from the tokens of this one, as in a beam search.
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
        self._decodes: Decodes | None = None

    def open(self, sequence: Sequence, row: int, *, scheduled: int, appended: int) -> None:
        """A sequence has got a row."""
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
        )

    def close(self, sequence: Sequence) -> None:
        """A sequence has lost its row."""
        self._decodes = None
        sequence.num_in_flight = self.num_in_flight(sequence)
        self.sequences[sequence.row], self.keys[sequence.row] = None, -1
        sequence.row = -1

    def decodes(self, rows: np.ndarray) -> Decodes:
        """What is known of the sequences in these rows; found anew for another array of rows."""
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
        """Whether none of them has lost its row since."""
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
        """Tokens of a row's sequence at these positions."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence.tokens[first:end]

    # -- one sequence ------------------------------------------------------------------------

    def prefilling(self, sequence: Sequence) -> bool:
        """Whether tokens that the manager got with the sequence are still to be computed."""
        return bool(self.scheduled[sequence.row] < self.appended[sequence.row])

    def num_in_flight(self, sequence: Sequence) -> int:
        """Tokens that have been sampled, or are being, and that the host has not seen."""
        if self.prefilling(sequence):
            return 0
        return int(self.scheduled[sequence.row] + 1 - self.known[sequence.row])

    def left(self, sequence: Sequence) -> int:
        """Tokens that it may still bring, those in flight not counted."""
        row = sequence.row
        return int(self.end[row] - self.known[row]) - self.num_in_flight(sequence)
