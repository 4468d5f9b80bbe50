"""Small helpers that several rooms share. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast, overload

import numpy as np

from jaxkv.errors import ConfigError


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: np.ndarray, b: int) -> np.ndarray: ...


def ceil_div(a: int | np.ndarray, b: int) -> int | np.ndarray:
    """a / b, rounded up.

    Example:
      >>> ceil_div(33, 16)
      3
    """
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` and at least 1.

    Example:
      >>> [next_power_of_two(n) for n in (0, 1, 5, 8)]
      [1, 1, 8, 8]
    """
    return 1 << max(0, n - 1).bit_length()


INT64_MAX = 2**63 - 1


def as_int(name: str, value: Any, low: int = 0, high: int = INT64_MAX) -> int:
    """The value as a Python int, so that no arithmetic wraps.

    Integers of NumPy are accepted; bools and floats are not.

    Raises:
      ConfigError: not an integer, or not in `low` to `high`.

    Example:
      >>> as_int("lookahead", np.int32(3))
      3
      >>> as_int("lookahead", 0.5)
      Traceback (most recent call last):
      jaxkv.errors.ConfigError: lookahead=0.5 must be an integer from 0 to 2**63 - 1
    """
    shown = None
    if type(value) is not int:
        try:
            value = operator.index(cast(Any, None) if isinstance(value, bool) else value)
        except TypeError:
            shown = repr(value)
    if shown is None and low <= value <= high:
        return value
    if shown is None:  # Python refuses to print integers of many digits
        shown = value if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
    most = "2**63 - 1" if high == INT64_MAX else high
    raise ConfigError(f"{name}={shown} must be an integer from {low} to {most}")


def require_positive(**values: Any) -> None:
    """Raises ConfigError, naming the first value that is not a positive integer.

    Example:
      >>> require_positive(block_size=16, num_layers=0)
      Traceback (most recent call last):
      jaxkv.errors.ConfigError: num_layers=0 must be a positive integer
    """
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a positive integer")


def to_plain(value: Any) -> Any:
    """Dicts, lists, numbers and text in place of dataclasses, NumPy values and tuples, for JSON.

    An object with a method `to_plain()` decides for itself; anything else stays as it is.

    Example:
      >>> to_plain({"ids": np.array([1, 2]), "pair": (1, "x")})
      {'ids': [1, 2], 'pair': [1, 'x']}
    """
    if isinstance(value, Mapping):
        return {key: to_plain(x) for key, x in value.items()}
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [to_plain(x) for x in value]
    return value


def to_json(
    value: Any, *, default: Callable[[Any], Any] | None = None, indent: int | None = None
) -> str:
    """JSON text of `to_plain(value)`; NaN and infinities, which JSON does not have, become null.

    Args:
      default: makes JSON values of objects that have none.
      indent: spaces of each level; None for one line.

    Example:
      >>> to_json({"median": float("nan"), "ids": np.array([1, 2])})
      '{"median": null, "ids": [1, 2]}'
    """
    plain = to_plain(value)
    try:
        return json.dumps(plain, default=default, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(plain), default=default, indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list) else value


def text_lines(text: str) -> list[str]:
    """Lines of a text file, without their ends.

    Lines end at LF or CR LF. `str.splitlines` also cuts at form feeds, NEL, U+2028 and others,
    which are characters within a line.

    Example:
      >>> text_lines("a\\u2028b\\r\\nc\\n")
      ['a\\u2028b', 'c']
    """
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines
