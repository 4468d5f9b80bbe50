"""The event journal of a block manager: one time per call, listeners, calls as events.

A public call reads the clock once, and its events are sent when its change is complete. A recorded
call is an event of its own, after the events of its effects, so that a log can be run again.
"""

from __future__ import annotations

import copy
import functools
import inspect
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, Protocol

from jaxkv._util import to_plain
from jaxkv.errors import JaxkvError
from jaxkv.manager import events

Counts = Callable[[tuple[int, ...]], tuple[tuple[int, ...], int]]


class Journal:
    """Listeners of one manager, and the time of its calls and events.

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
        self._time: float | None = None  # time of the public call that is running
        self._listeners: list[events.Listener] = []
        self._unsent: deque[tuple[events.Listener, events.Event]] = deque()
        self._sending = False

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy: no call runs, and nothing is subscribed."""
        nothing = Journal(self.clock).__dict__
        return nothing | {"counts": self.counts}

    def __deepcopy__(self, memo: dict[int, Any]) -> Journal:
        """A copy that reads the same clock."""
        memo[id(self)] = same = Journal(self.clock)
        same.counts = copy.deepcopy(self.counts, memo)
        return same

    def subscribe(self, listener: events.Listener) -> None:
        """Adds a listener."""
        self._listeners.append(listener)
        self.listening = True

    def unsubscribe(self, listener: events.Listener) -> None:
        """Removes a listener; no effect if it is not subscribed."""
        self._listeners = [each for each in self._listeners if each != listener]
        self.listening = bool(self._listeners)

    @property
    def running(self) -> bool:
        """Whether a public call is running."""
        return self._time is not None

    def now(self) -> float:
        """The clock, which stands still within a public call: a decision has one time."""
        return self.clock() if self._time is None else self._time

    def begin(self) -> bool:
        """Begins a public call; returns whether it is the outermost one, which `end` must end."""
        if self._time is not None:
            return False
        self._time = self.clock()
        return True

    def abandon(self) -> None:
        """Forgets a public call that was interrupted, and its events."""
        self._time, self._sending = None, False
        self._unsent.clear()

    def end(self) -> None:
        """Ends the outermost public call, and sends its events."""
        self._time = None
        if self._unsent:
            self._send()

    def emit(self, kind: str, *, seq: Any = None, blocks: Any = (), **detail: Any) -> None:
        """Makes an event, which is sent at the end of the public call."""
        blocks = tuple(int(b) for b in blocks)
        ref_counts, num_available = self.counts(blocks)
        event = events.Event(kind, self.now(), seq, blocks, ref_counts, num_available, detail)
        self._unsent += [(listener, event) for listener in self._listeners]

    def _send(self) -> None:
        """Sends all events, also those of calls that a listener makes; listeners may raise."""
        if self._sending:
            return
        failed: list[str] = []
        self._sending = True
        try:
            while self._unsent:
                listener, event = self._unsent.popleft()
                if listener not in self._listeners:
                    continue
                try:
                    listener(event)
                except Exception as error:
                    self.unsubscribe(listener)
                    failed.append(_failure(listener, event, error))
        finally:
            self._sending = False
            for text in failed:
                warnings.warn(text, RuntimeWarning, stacklevel=4)  # at the public call's caller

    def record[Result](
        self, name: str, arguments: dict[str, Any], run: Callable[[], Result]
    ) -> Result:
        """Runs a call and emits it as an operation, with its result or its error."""
        detail: dict[str, Any] = {"name": name, "arguments": to_plain(arguments)}
        try:
            result = run()
        except JaxkvError as error:
            self.emit(events.OPERATION, **detail, error=f"{type(error).__name__}: {error}")
            raise
        self.emit(events.OPERATION, **detail, result=to_plain(result))
        return result


def _failure(listener: events.Listener, event: events.Event, error: Exception) -> str:
    name = getattr(listener, "__qualname__", None) or repr(listener)
    frames = traceback.extract_tb(error.__traceback__)
    return (
        f"listener {name} raised {type(error).__name__}: {error} ({frames[-1].filename}:"
        f"{frames[-1].lineno}) at the event {event.kind!r}; it is unsubscribed, and the manager "
        "goes on"
    )


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
        journal = self.journal
        outermost = journal.begin()
        try:
            if not journal.listening:
                return method(self, *args, **kwargs)
            arguments = dict(signature.bind(self, *args, **kwargs).arguments)
            del arguments["self"]
            return journal.record(method.__name__, arguments, lambda: method(self, *args, **kwargs))
        finally:
            if outermost:
                journal.end()

    return call


def query[Owner: HasJournal, **Params, Result](
    method: Callable[Concatenate[Owner, Params], Result],
) -> Callable[Concatenate[Owner, Params], Result]:
    """Marks a public question whose answer depends on the time: it reads the clock once."""

    @functools.wraps(method)
    def call(self: Owner, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        outermost = self.journal.begin()
        try:
            return method(self, *args, **kwargs)
        finally:
            if outermost:
                self.journal.end()

    return call


def fresh_start[Owner: HasJournal, Result](
    method: Callable[[Owner], Result],
) -> Callable[[Owner], Result]:
    """Marks an operation that follows an interrupted one: what that one began is forgotten."""

    @functools.wraps(method)
    def call(self: Owner) -> Result:
        self.journal.abandon()
        return method(self)

    return call
