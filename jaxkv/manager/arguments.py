"""Checks of the numbers that callers pass, made before anything changes.

Scalars: `as_int` of `jaxkv._util`. Arrays are checked without a loop over their items.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from jaxkv._util import INT64_MAX
from jaxkv.errors import ConfigError


def as_number(name: str, value: Any) -> float:
    """The value as a finite float of at least 0.

    Raises:
      ConfigError: a bool, not a number, not finite, or negative.

    Example:
      >>> as_number("ttl", np.float32(1.5))
      1.5
    """
    number = math.nan
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            number = float(cast(Any, value))
        except OverflowError:
            number = math.inf
    if not 0 <= number < math.inf:
        shown = number if number == math.inf else repr(cast(Any, value))
        raise ConfigError(f"{name}={shown} must be a finite number of at least 0")
    return number


def as_integers(name: str, values: Any) -> np.ndarray:
    """Flat integers as an array of whichever integer type NumPy finds.

    Raises:
      ConfigError: not a flat sequence of integers; bools are not integers.

    Example:
      >>> as_integers("counts", [1.5])
      Traceback (most recent call last):
      jaxkv.errors.ConfigError: counts must be a flat sequence of integers, got float64 (1,)
    """
    if isinstance(values, np.ndarray):
        array = cast(np.ndarray, values)
        if array.ndim == 1 and array.dtype.kind in "iu":  # the common case
            return array
    if isinstance(values, list | tuple) and bool in set(map(type, cast(list[Any], values))):
        raise ConfigError(f"{name} must be a flat sequence of integers, got a bool")
    try:
        array = np.asarray(cast(Any, values))
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{name} must be a flat sequence of integers: {error}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ConfigError(
            f"{name} must be a flat sequence of integers, got {array.dtype} {array.shape}"
        )
    return array


def as_int64(
    name: str, values: Any, length: int | None = None, low: int = 0, high: int = INT64_MAX
) -> np.ndarray:
    """i64[length]; flat integers in `low` to `high`.

    Raises:
      ConfigError: not that many integers in that range.

    Example:
      >>> as_int64("counts", (1, 2), 2, low=1)
      array([1, 2])
    """
    array = as_integers(name, values)
    if length is not None and len(array) != length:
        raise ConfigError(f"{name}: expected {length}, one per sequence, got {len(array)}")
    if array.size:
        least, most = int(np.minimum.reduce(array)), int(np.maximum.reduce(array))
        if least < low or most > high:
            raise ConfigError(
                f"{name} must be integers from {low} to {high}, got {least} to {most}"
            )
    return array.astype(np.int64, copy=False)
