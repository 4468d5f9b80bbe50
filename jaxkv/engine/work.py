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


@dataclasses.dataclass
class Work:
    """One step.

    Attributes:
      decodes: sequences that bring one token each, or `num_steps`.
      rows: i64[n]; theirs.
      keys: i64[n]; theirs.
      positions: i64[n]; of the tokens that they consume first.
      tokens: i64[n]; these tokens, where the host has seen them; -1 elsewhere.
      counts: i64[n]; how many each brings at most.
      chunks: of prompts, and of what preempted sequences must compute again.
      num_steps: decode steps of this dispatch; 1 where there are chunks.
      admitted: sequences that got a row for this step.
      logprobs: the most likeliest tokens that one of them wants reported; -1: none wants any.
    """

    decodes: list[Sequence]
    rows: np.ndarray
    keys: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    chunks: list[Chunk]
    num_steps: int
    admitted: list[Sequence]
    logprobs: int

    @classmethod
    def nothing(cls) -> Work:
        """A step of padding alone."""
        none = np.zeros(0, np.int64)
        return cls([], none, none, none, none, none, [], 1, [], -1)
