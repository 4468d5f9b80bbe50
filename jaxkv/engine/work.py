"""The work of one step: decodes and prompt chunks. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.engine.requests import Sequence


@dataclasses.dataclass
class Chunk:
    """A chunk of a prompt: tokens `start : start + count` of a sequence.

    Attributes:
      sequence: the sequence.
      start: first position.
      count: number of positions.
      children: samples forked off in this step; each draws its own first token.
    """

    sequence: Sequence
    start: int
    count: int
    children: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def last(self) -> bool:
        """Whether the chunk ends the prompt, so that a token is sampled."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class Decodes:
    """Sequences that decode together. The same object while the set does not change.

    Attributes:
      sequences: the n sequences.
      rows: i64[n]; their rows.
      keys: i64[n]; their keys.
      simple: bool[n]; tokens are appended and reported, with no other work per token.
      all_simple: whether all are simple.
      needs_sync: whether the next step of any of them depends on the tokens of this one.
      logprobs: largest number of most likely tokens to report; -1: no log-probabilities.
      num_stop_ids: largest number of stop token ids.
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
    """The work of one step.

    Attributes:
      decodes: sequences that generate one token each, or `num_steps`.
      positions: i64[n]; position of the first input token of each decode.
      tokens: i64[n]; that token, where the host chose it; -1 elsewhere. None: -1 everywhere.
      counts: i64[n]; most tokens that each generates in this dispatch.
      chunks: chunks of prompts, and of tokens that preempted sequences recompute.
      num_steps: decode steps of this dispatch; 1 if there are chunks.
      admitted: sequences that got a row for this step.
      logprobs: largest number of most likely tokens to report; -1: no log-probabilities.
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
        """A step of nothing but padding."""
        none = np.zeros(0, np.int64)
        decodes = Decodes([], none, none, none > 0, True, False, -1, 0)
        return cls(decodes, none, None, none, [], 1, [], -1)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences with work in this step."""
        chunks = [s for chunk in self.chunks for s in (chunk.sequence, *chunk.children)]
        return [*self.decodes.sequences, *chunks]
