"""Blocks behind a sliding window: one rule for running sequences and for prefix hits."""

from __future__ import annotations

import numpy as np


def blocks_behind(length: int, window: int, block_size: int) -> int:
    """Number of leading blocks that no query from position `length` on sees.

    A query sees `window` tokens, itself included.

    Example:
      >>> blocks_behind(10, window=6, block_size=4)  # the query at 10 sees 5 to 10
      1
    """
    return max(0, length - window + 1) // block_size


def longest_hit(found: np.ndarray, window: int, block_size: int) -> np.ndarray:
    """The longest prefix whose next query sees only cached blocks.

    Its last block must be cached in any case: blocks computed behind it are found through it.

    Args:
      found: i64[n]; cached blocks of a prompt, 0 for missing ones.

    Returns:
      i64; the leading part of `found`, 0 for blocks behind the window.

    Example:
      >>> longest_hit(np.array([0, 0, 5, 6, 0, 7]), window=6, block_size=4)
      array([0, 0, 5, 6])
    """
    ends = np.arange(1, len(found) + 1)
    behind = np.minimum(np.maximum(0, ends * block_size - window + 1) // block_size, ends - 1)
    # 1-based index of the last missing block of each prefix.
    missing = np.maximum.accumulate(np.where(found == 0, ends, 0))
    good = np.flatnonzero(missing <= behind)
    length = int(ends[good[-1]]) if len(good) else 0
    hits = found[:length].copy()
    if length:
        hits[: behind[length - 1]] = 0
    return hits
