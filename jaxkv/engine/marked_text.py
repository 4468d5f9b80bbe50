"""Text with its special tokens shown, for stop texts that contain some. Imports no JAX."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from jaxkv.engine.protocols import TextStream


class MarkedText:
    """Text of a growing sequence with its special tokens, beside the text without them.

    Args:
      shown: detokenizer that shows special tokens.
      plain: detokenizer that leaves them out.

    Attributes:
      value: the text with special tokens.
    """

    def __init__(self, shown: TextStream, plain: TextStream):
        self._shown, self._plain = shown, plain
        self.value = ""
        self._num_plain = 0
        # After each token: length of the text with special tokens, and of the text without.
        self._ends: list[tuple[int, int]] = [(0, 0)]

    def push(self, token_ids: Sequence[int]) -> None:
        """Adds tokens."""
        for token in token_ids:
            self.value += self._shown.push([token])
            self._num_plain += len(self._plain.push([token]))
            self._ends.append((len(self.value), self._num_plain))

    def plain_length(self, end: int) -> int:
        """Length of the text without special tokens, of the first `end` characters of `value`."""
        last = bisect.bisect_right(self._ends, end, key=lambda ends: ends[0]) - 1
        shown, plain = self._ends[last]
        following = self._ends[min(last + 1, len(self._ends) - 1)][1]
        return min(plain + end - shown, following)  # within a special token: before it
