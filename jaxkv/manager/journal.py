"""The event journal of a block manager: listeners, the operations' clock, calls as events.

A recorded call is an event of its own, after the events of its effects, so that a log can be run
again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Protocol

from jaxkv._util import to_plain
from jaxkv.errors import JaxkvError
from jaxkv.manager import events

Counts = Callable[[tuple[int, ...]], tuple[tuple[int, ...], int]]


class Journal:
    """Listeners of one manager, and the time of its events.

    Args:
      clock: monotonic clock, seconds.

    Attributes:
      counts: returns the ref counts of given blocks and the number of available blocks; set by the
        manager once its pool exists.
      listening: whether anything is subscribed. Callers skip building an event when it is False.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.counts: Counts = lambda blocks: ((0,) * len(blocks), 0)
        self.listening = False
        self._time: float | None = None  # time of the operation that is being recorded
        self._listeners: list[events.Listener] = []

    def subscribe(self, listener: events.Listener) -> None:
        """Adds a listener."""
        self._listeners.append(listener)
        self.listening = True

    def unsubscribe(self, listener: events.Listener) -> None:
        """Removes a listener."""
        self._listeners.remove(listener)
        self.listening = bool(self._listeners)

    def now(self) -> float:
        """The clock. It stands still within a recorded operation, so that a log replays exactly."""
        return self.clock() if self._time is None else self._time

    def emit(self, kind: str, *, seq: Any = None, blocks: Any = (), **detail: Any) -> None:
        """Sends an event to all listeners."""
        blocks = tuple(int(b) for b in blocks)
        ref_counts, num_available = self.counts(blocks)
        event = events.Event(kind, self.now(), seq, blocks, ref_counts, num_available, detail)
        for listener in list(self._listeners):
            listener(event)

    def record[Result](
        self, name: str, arguments: dict[str, Any], run: Callable[[], Result]
    ) -> Result:
        """Runs a call and emits it as an operation, with its result or its error."""
        detail: dict[str, Any] = {"name": name, "arguments": to_plain(arguments)}
        outermost, self._time = self._time is None, self.now()
        try:
            result = run()
        except JaxkvError as error:
            self.emit(events.OPERATION, **detail, error=f"{type(error).__name__}: {error}")
            raise
        else:
            self.emit(events.OPERATION, **detail, result=to_plain(result))
            return result
        finally:
            if outermost:
                self._time = None


class HasJournal(Protocol):
    """An object whose calls can be recorded."""

    @property
    def journal(self) -> Journal: ...


def operation[Owner: HasJournal, **Params, Result](
    method: Callable[Concatenate[Owner, Params], Result],
) -> Callable[Concatenate[Owner, Params], Result]:
    """Marks a public call that changes the manager; it is recorded while anything listens."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Owner, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not self.journal.listening:
            return method(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        return self.journal.record(
            method.__name__, arguments, lambda: method(self, *args, **kwargs)
        )

    return call
