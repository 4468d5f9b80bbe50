"""Logits processors of live requests: the slots that steps are compiled with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.engine.requests import Request
from jaxkv.sampling.params import LogitsProcessor
from jaxkv.sampling.sampler import ProcessorError


class Processors:
    """One slot for each processor in use.

    A step runs all of them, each on the rows that use it. The slot of a processor whose last
    request has ended is taken by the next new one; until then it stays, since another set of
    processors is another program.

    Args:
      vocab_size: width of the logits.
      max_len: tokens of a row's history.
    """

    def __init__(self, vocab_size: int, max_len: int):
        self._logits = jax.ShapeDtypeStruct((1, vocab_size), jnp.float32)
        self._token_ids = jax.ShapeDtypeStruct((1, max_len), jnp.int32)
        self._slots: list[LogitsProcessor] = []
        self._given: list[LogitsProcessor] = []  # as users gave them
        self._first: list[Any] = []  # states at the start of a request, with a leading axis of 1
        self._users: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[LogitsProcessor]:
        return iter(self._slots)

    def check(self, processor: LogitsProcessor) -> None:
        """Traces a processor as a step will.

        Raises:
          ProcessorError: it raises, or returns anything but logits and a state like the one that
            `init` made. Other requests are not concerned.
        """
        if self._find(processor) is not None:
            return
        try:
            state = _first_state(processor)
            result = jax.eval_shape(
                jax.vmap(processor.apply), self._logits, state, self._token_ids,
                jax.ShapeDtypeStruct((1,), jnp.int32),
            )  # fmt: skip
        except Exception as error:
            raise ProcessorError.raised(processor, error) from error
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ProcessorError(processor, f"returned {_kind(result)}, expected (logits, state)")
        logits, after = result
        shape = getattr(logits, "shape", None)
        width = self._logits.shape[1]
        if shape is None or shape[1:] not in ((width,), (1,), ()):
            raise ProcessorError(
                processor, f"returned logits of shape {_shape(logits)}, expected ({width},)"
            )
        if not jnp.issubdtype(logits.dtype, jnp.floating):
            raise ProcessorError(processor, f"returned logits of dtype {logits.dtype}")
        before, made = jax.tree.structure(state), jax.tree.structure(after)
        if before != made:
            raise ProcessorError(
                processor, f"returned a state of structure {made}, its init made {before}"
            )
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ProcessorError(
                    processor,
                    f"returned a state with {new.dtype}{_shape(new)}, its init made "
                    f"{old.dtype}{_shape(old)}",
                )

    def use(self, processor: LogitsProcessor) -> tuple[int, bool]:
        """Slot of a processor for one more request, and whether the slot is new for it."""
        slot = self._find(processor)
        if slot is not None:
            self._users[slot] += 1
            return slot, False
        unused = [slot for slot, users in enumerate(self._users) if not users]
        slot = unused[0] if unused else len(self._slots)
        first = _first_state(processor)
        self._slots[slot : slot + 1] = [_hashable(processor)]
        self._given[slot : slot + 1] = [processor]
        self._first[slot : slot + 1] = [first]
        self._users[slot : slot + 1] = [1]
        return slot, True

    def first_states(self, rows: int) -> tuple[Any, ...]:
        """States of all slots at the start of a request, `rows` times: NumPy arrays."""
        repeat = functools.partial(np.repeat, repeats=rows, axis=0)
        return tuple(jax.tree.map(repeat, first) for first in self._first)

    def release(self, slot: int) -> bool:
        """Follows the end of a request; whether no processor is left in use, and all were
        dropped."""
        self._users[slot] -= 1
        if any(self._users):
            return False
        self._slots, self._given, self._first, self._users = [], [], [], []
        return True

    def in_use(self, slot: int) -> bool:
        """Whether a request uses a slot."""
        return 0 <= slot < len(self._users) and self._users[slot] > 0

    def recount(self, requests: Iterable[Request]) -> None:
        """Counts the users of each slot again."""
        users = [0] * len(self._slots)
        for request in requests:
            if request.processor >= 0:
                users[request.processor] += 1
        self._users = users

    def slot_of(self, processor: LogitsProcessor) -> int:
        """Slot of a processor in the form in which steps are compiled with it."""
        return self._slots.index(processor)

    def _find(self, processor: LogitsProcessor) -> int | None:
        for slot, given in enumerate(self._given):
            if _same(given.init, processor.init) and _same(given.apply, processor.apply):
                return slot
        return None


def _first_state(processor: LogitsProcessor) -> Any:
    """The state at the start of a request: NumPy arrays of JAX's dtypes, with a leading axis."""
    return jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf))[None], processor.init())


class _ByIdentity:
    """A function that is equal to itself alone, whatever its own `__eq__` and `__hash__` say."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _hashable(processor: LogitsProcessor) -> LogitsProcessor:
    """The processor as a static argument of a step."""
    try:
        hash(processor)
        return processor
    except Exception:
        return LogitsProcessor(_ByIdentity(processor.init), _ByIdentity(processor.apply))


def _same(a: Any, b: Any) -> bool:
    """Whether two functions are one: a method is another object at each access."""
    return a is b or (isinstance(a, MethodType) and isinstance(b, MethodType)
                      and a.__self__ is b.__self__ and a.__func__ is b.__func__)  # fmt: skip


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"({', '.join(map(str, shape[1:]))})" if shape is not None else _kind(value)
