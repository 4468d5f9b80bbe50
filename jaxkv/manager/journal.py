"""Public calls as events: what was asked and what came of it, for logs that can be run again."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv.errors import JaxkvError
from jaxkv.manager import events


class Observed:
    """Listeners, and events with the time and counts that they need.

    A subclass sets `clock` and gives `_ref_counts_of` and `_free_count`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._time: float | None = None  # of the operation that is being recorded
        self._listeners: list[events.Listener] = []

    def subscribe(self, listener: events.Listener) -> None:
        """Tells `listener` every event from now on, within the call that causes it."""
        self._listeners.append(listener)
        self._listening_changed(True)

    def unsubscribe(self, listener: events.Listener) -> None:
        """Ends a subscription."""
        self._listeners.remove(listener)
        self._listening_changed(bool(self._listeners))

    def _now(self) -> float:
        """The clock; within a recorded operation it stands still, so that it can be run again."""
        return self.clock() if self._time is None else self._time

    def _listening_changed(self, listening: bool) -> None:
        raise NotImplementedError

    def _ref_counts_of(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        raise NotImplementedError

    def _free_count(self) -> int:
        raise NotImplementedError

    def _emit(self, kind: str, *, seq: Any = None, blocks: Any = (), **detail: Any) -> None:
        blocks = tuple(int(b) for b in blocks)
        event = events.Event(
            kind, self._now(), seq, blocks, self._ref_counts_of(blocks), self._free_count(), detail
        )
        for listener in list(self._listeners):
            listener(event)


def operation[Method: Callable[..., Any]](method: Method) -> Method:
    """A public call that changes the manager: an event of it follows those of its effects."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._listeners:
            return method(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        detail: dict[str, Any] = {"name": method.__name__, "arguments": _plain(arguments)}
        outermost, self._time = self._time is None, self._now()
        try:
            result = method(self, *args, **kwargs)
        except JaxkvError as error:
            self._emit(events.OPERATION, **detail, error=f"{type(error).__name__}: {error}")
            raise
        else:
            self._emit(events.OPERATION, **detail, result=_plain(result))
            return result
        finally:
            if outermost:
                self._time = None

    return call  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    """Lists, numbers and text of arguments and results, as JSON will have them."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if hasattr(value, "seq_ids"):  # Rows
        return list(value.seq_ids)
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [_plain(x) for x in value]
    return value
