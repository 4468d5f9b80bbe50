"""Checks of parameter values: type, and the range that the device's arrays hold.

A check takes a field's name and its value, and returns the value as a plain Python object, or
raises a ConfigError that names the field. Host code: imports no JAX.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from jaxkv.errors import ConfigError

INT32_MAX = 2**31 - 1
_F32_MAX = float(np.finfo(np.float32).max)
_F32_TINY = float(np.finfo(np.float32).tiny)  # smaller numbers may be 0 on a device

Check = Callable[[str, Any], Any]


def refuse(name: str, value: Any, wanted: str) -> NoReturn:
    """Raises the ConfigError of a field with a wrong value."""
    try:
        shown = repr(value)
    except Exception:
        shown = f"<{type(value).__name__}>"
    if len(shown) > 200:
        shown = shown[:200] + "..."
    raise ConfigError(f"{name}={shown} must be {wanted}")


def require(good: bool, name: str, value: Any, wanted: str) -> None:
    """Refuses a value unless it is good."""
    if not good:
        refuse(name, value, wanted)


def as_integer(value: Any) -> int | None:
    """The value as a Python integer; None for anything else, booleans and floats included."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer in `[low, high]`; Python's and NumPy's are accepted, booleans are not."""

    low: int
    high: int
    hint: str = ""

    def __call__(self, name: str, value: Any) -> int:
        number = as_integer(value)
        if number is None or not self.low <= number <= self.high:
            hint = f" ({self.hint})" if self.hint else ""
            refuse(name, value, f"an integer from {self.low} to {self.high}{hint}")
        return number


@dataclasses.dataclass(frozen=True)
class Float:
    """A number that float32 holds, in `[low, high]`.

    Attributes:
      low: least value.
      high: greatest value.
      open_low: whether `low` itself is refused, and numbers that a device may round to it.
      hint: what a special value means.
    """

    low: float = -_F32_MAX
    high: float = _F32_MAX
    open_low: bool = False
    hint: str = ""

    def __call__(self, name: str, value: Any) -> float:
        try:
            # Strings, booleans and complex numbers are not meant, though some convert.
            bad = isinstance(value, str | bytes | bool | np.bool_) or np.ndim(value) > 0
            number = math.nan if bad else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        least = self.low + _F32_TINY if self.open_low else self.low
        if not least <= number <= self.high:  # false for NaN too
            bounds = [] if self.high == _F32_MAX else [f"at most {self.high:g}"]
            if self.low != -_F32_MAX:
                bounds.insert(0, f"{'above' if self.open_low else 'at least'} {self.low:g}")
            hint = f" ({self.hint})" if self.hint else ""
            refuse(name, value, ", ".join(["a number that float32 holds", *bounds]) + hint)
        return number


@dataclasses.dataclass(frozen=True)
class Flag:
    """True or False."""

    def __call__(self, name: str, value: Any) -> bool:
        require(isinstance(value, bool | np.bool_), name, value, "True or False")
        return bool(value)


@dataclasses.dataclass(frozen=True)
class Optional:
    """None, or what another check accepts."""

    check: Check

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None else self.check(name, value)


@dataclasses.dataclass(frozen=True)
class Instance:
    """A value of one class."""

    kind: type

    def __call__(self, name: str, value: Any) -> Any:
        require(isinstance(value, self.kind), name, value, f"a {self.kind.__name__}")
        return value


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Token ids: integers from 0 to 2**31 - 1; `within` compares them with a vocabulary."""

    def __call__(self, name: str, value: Any) -> tuple[int, ...]:
        wanted = f"a sequence of token ids, integers from 0 to {INT32_MAX}"
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            refuse(name, value, wanted)
        ids = [as_integer(token) for token in value]
        good = [token for token in ids if token is not None and 0 <= token <= INT32_MAX]
        require(len(good) == len(ids), name, value, wanted)
        return tuple(sorted(good) if isinstance(value, set | frozenset) else good)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that steps are compiled for, strictly increasing."""

    def __call__(self, name: str, value: Any) -> tuple[int, ...]:
        wanted = "strictly increasing and start at 1 or more"
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            refuse(name, value, wanted)
        sizes = [as_integer(size) for size in value]
        good = [size for size in sizes if size is not None and 1 <= size <= INT32_MAX]
        require(bool(good) and good == sizes == sorted(set(good)), name, value, wanted)
        return tuple(good)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Non-empty texts; one text counts as a sequence of it."""

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        wanted = "a non-empty text, or a sequence of them"
        if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
            refuse(name, value, wanted)
        texts = (value,) if isinstance(value, str) else tuple(value)
        require(all(isinstance(text, str) and text for text in texts), name, value, wanted)
        return texts


@dataclasses.dataclass(frozen=True)
class Bias:
    """{token id: addend to its logit}, for `most` tokens at most."""

    most: int

    def __call__(self, name: str, value: Any) -> dict[int, float]:
        wanted = f"a mapping of at most {self.most} token ids to numbers that float32 holds"
        if not isinstance(value, Mapping) or len(value) > self.most:
            refuse(name, value, wanted)
        token, addend = Integer(0, INT32_MAX), Float()
        try:
            return {token(name, key): addend(name, bias) for key, bias in value.items()}
        except ConfigError as error:
            refuse(name, value, f"{wanted}: {error}")


def within(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises ConfigError for token ids outside the vocabulary."""
    outside = sorted(token for token in token_ids if not 0 <= token < vocab_size)
    if outside:
        raise ConfigError(
            f"{name} has token ids outside the vocabulary of {vocab_size}: "
            f"{', '.join(map(str, outside[:8]))}{', ...' if len(outside) > 8 else ''}"
        )
