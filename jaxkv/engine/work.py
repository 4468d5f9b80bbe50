"""What one step computes. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.engine.requests import Sequence


@dataclasses.dataclass
class Chunk:
    """Tokens `start : start + count` of a sequence.

    Attributes:
      sequence: whose.
      start: first position.
      count: positions.
      children: samples forked off in this step, which draw their first token beside it.
    """

    sequence: Sequence
    start: int
    count: int
    children: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def last(self) -> bool:
        """Whether a token follows."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class Decodes:
    """Sequences that decode together. The same object for as long as they do, step by step.

    Attributes:
      sequences: n of them.
      rows: i64[n].
      keys: i64[n].
      simple: bool[n]; whose tokens are appended and told, and nothing else is done with them.
      all_simple: whether that holds for all.
      needs_sync: whether the next step of one follows from the tokens of this one.
      logprobs: the most likeliest tokens that one of them wants reported; -1: none wants any.
      num_stop_ids: the most that one of them has.
    """

    sequences: list[Sequence]
    rows: np.ndarray
    keys: np.ndarray
    simple: np.ndarray
    all_simple: bool
    needs_sync: bool
    logprobs: int
    num_stop_ids: int

    def __len__(self) -> int:
        return len(self.rows)


@dataclasses.dataclass
class Work:
    """One step.

    Attributes:
      decodes: sequences that bring one token each, or `num_steps`.
      positions: i64[n]; of the tokens that they consume first.
      tokens: i64[n]; these tokens, where the host chose them; -1 elsewhere. None: -1 everywhere.
      counts: i64[n]; how many each brings at most.
      chunks: of prompts, and of what preempted sequences must compute again.
      num_steps: decode steps of this dispatch; 1 where there are chunks.
      admitted: sequences that got a row for this step.
      logprobs: the most likeliest tokens that one of all wants reported; -1: none wants any.
    """

    decodes: Decodes
    positions: np.ndarray
    tokens: np.ndarray | None
    counts: np.ndarray
    chunks: list[Chunk]
    num_steps: int
    admitted: list[Sequence]
    logprobs: int

    @classmethod
    def nothing(cls) -> Work:
        """A step of padding alone."""
        none = np.zeros(0, np.int64)
        decodes = Decodes([], none, none, none > 0, True, False, -1, 0)
        return cls(decodes, none, None, none, [], 1, [], -1)

    @property
    def sequences(self) -> list[Sequence]:
        """All that it computes something of."""
        chunks = [s for chunk in self.chunks for s in (chunk.sequence, *chunk.children)]
        return [*self.decodes.sequences, *chunks]
