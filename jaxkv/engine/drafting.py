"""Draft tokens for `Engine.verify`. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Drafts the tokens that followed an earlier occurrence of the sequence's last few tokens.

    Needs no second model; useful when outputs quote their prompts (prompt lookup decoding,
    https://github.com/apoorvumang/prompt-lookup-decoding).

    Attributes:
      max_ngram: longest run of last tokens to search for; shorter runs follow if it is not found.
      min_ngram: shortest run to search for.
      num_tokens: most tokens of a draft.

    Raises:
      ConfigError: a size out of range.

    Example:
      >>> from jaxkv import PromptLookup
      >>> PromptLookup(num_tokens=3)([7, 1, 2, 3, 4, 5, 9, 1, 2])
      [3, 4, 5]
      >>> PromptLookup(num_tokens=5)([1, 2, 1, 2])  # repeats, as the text does
      [1, 2, 1, 2, 1]
    """

    max_ngram: int = 3
    min_ngram: int = 1
    num_tokens: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram or self.num_tokens < 1:
            raise ConfigError(
                f"min_ngram={self.min_ngram} must be at least 1 and at most "
                f"max_ngram={self.max_ngram}, and num_tokens={self.num_tokens} at least 1"
            )

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Drafts the continuation of the tokens; empty if no earlier occurrence is found."""
        known = np.asarray(tokens, np.int64)
        for size in range(min(self.max_ngram, len(known) - 1), self.min_ngram - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(known[:-1], size)
            found = np.flatnonzero((windows == known[-size:]).all(axis=1))
            if len(found):
                start = int(found[-1]) + size
                # Where fewer tokens follow than wanted, the text repeats, and so does the draft.
                return np.resize(known[start : start + self.num_tokens], self.num_tokens).tolist()
        return []
