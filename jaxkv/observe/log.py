"""Log of a block manager's operations, and its replay: reproduces a failure on another machine.

The log is JSON lines: a header with the format and the manager's configuration, then every event.
The manager is deterministic except for its clock, and each operation carries the time it read, so
the replay makes the same choices, block for block. Host code: imports no JAX.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from jaxkv.errors import JaxkvError
from jaxkv.manager.block_manager import BlockManager
from jaxkv.manager.events import OPERATION, Event, Listener

FORMAT, VERSION = "jaxkv event log", 1


class ReplayError(JaxkvError, ValueError):
    """A log that cannot be written or read. The message names the line, if there is one."""


def record(manager: BlockManager, file: IO[str]) -> Listener:
    """Writes a manager's operations and events to a file, from its first operation on.

    Args:
      manager: manager that has not been used yet, with the default hash function.
      file: text file open for writing. Lines that are not flushed are lost when the process is
        killed; `replay` accepts an incomplete last line.

    Returns:
      The listener. `manager.unsubscribe(listener)` stops the recording.

    Raises:
      ReplayError: the manager has been used, so its blocks are not where those of a new one are.

    Warns:
      RuntimeWarning: an operation has an argument that JSON does not preserve, such as a sequence
        id that is neither str nor int. The operation took effect, and recording has stopped: a
        log with a gap cannot be replayed.

    Example:
      >>> import io
      >>> from jaxkv import BlockManager
      >>> from jaxkv.observe.log import record, replay
      >>> manager, log = BlockManager(4, 2, max_seqs=2, max_blocks_per_seq=3), io.StringIO()
      >>> listener = record(manager, log)
      >>> _ = manager.allocate("a", [1, 2, 3])
      >>> manager.free("a")
      >>> _ = log.seek(0)
      >>> print(replay(log))
      2 operations, 4 events: all as logged
    """
    if manager.stats().peak_active:
        raise ReplayError("the manager has been used; start recording before its first operation")
    header = {"format": FORMAT, "version": VERSION, "config": manager.to_dict()}
    try:
        print(json.dumps(header, allow_nan=False), file=file)
    except ValueError:
        raise ReplayError(f"a log cannot hold this manager's settings: {header['config']} has a "
                          "number that JSON does not have") from None  # fmt: skip

    def listener(event: Event) -> None:
        _require_plain(event)
        print(event.to_json(), file=file)

    manager.subscribe(listener)
    return listener


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between a log and its replay.

    Attributes:
      line: line number in the log, the header being line 1.
      operation: the call, in readable form.
      what: "result", or the kind of the event that differs.
      expected: value in the log.
      got: value in the replay.
    """

    line: int
    operation: str
    what: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return (
            f"line {self.line}: {self.operation}: {self.what} differs\n"
            f"  expected {self.expected}\n  got      {self.got}"
        )


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """Result of a replay.

    Attributes:
      operations: number of operations replayed.
      events: number of events compared, the operations included.
      difference: the first difference, where the replay stopped; None if there is none.
      note: remark on the log, for example that its last line is incomplete; or None.
    """

    operations: int
    events: int
    difference: Difference | None = None
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dataclasses.asdict(self) | {"same": self.difference is None}

    def __str__(self) -> str:
        verdict = ": all as logged" if self.difference is None else f", then\n{self.difference}"
        note = f"\nnote: {self.note}" if self.note else ""
        return f"{self.operations} operations, {self.events} events{verdict}{note}"


def replay(log: str | Path | IO[str], progress: bool = False) -> ReplayReport:
    """Runs a log's operations on a new manager and compares results and events with the log.

    Args:
      log: log that `record` wrote: a path, or a text file open for reading.
      progress: show a progress bar on standard error (for a path).

    Raises:
      ReplayError: not a log of this format, a line that is not an event, or an unknown operation.
      ConfigError: the configuration in the header is not valid.
      OSError: the file cannot be read.
    """
    if not isinstance(log, str | Path):
        return _replay(log)
    path = Path(log)
    with open(path, encoding="utf-8", errors="replace") as file:
        if not progress:
            return _replay(file)
        columns = TextColumn("replaying"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("replaying", total=path.stat().st_size)

            def lines() -> Iterator[str]:
                for line in file:
                    bar.advance(task, len(line))  # JSON is written in ASCII
                    yield line

            return _replay(lines())


class _Replayer:
    """A new manager whose clock follows the log, and the events it emits."""

    def __init__(self, config: Mapping[str, Any]):
        self._now = 0.0
        self._emitted: list[dict[str, Any]] = []
        try:
            self._manager = BlockManager(**config, clock=lambda: self._now)
        except TypeError as error:
            raise ReplayError(f"line 1: BlockManager rejects the configuration: {error}") from None
        self._manager.subscribe(lambda event: self._emitted.append(json.loads(event.to_json())))

    def run(self, operation: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Runs an operation and returns the events it emitted, its own last."""
        name, arguments = operation["detail"]["name"], operation["detail"]["arguments"]
        if not hasattr(getattr(BlockManager, name, None), "__wrapped__"):  # by @operation
            raise ReplayError(f"{where}: unknown operation {name!r}")
        self._now = operation["time"]
        self._emitted.clear()
        try:
            getattr(self._manager, name)(**arguments)
        except Exception as error:
            if not self._emitted:  # rejected before the operation began: bad arguments
                raise ReplayError(f"{where}: {_call(name, arguments)}: {error}") from None
        return self._emitted


def _replay(lines: Iterable[str]) -> ReplayReport:
    replayer: _Replayer | None = None
    group: list[tuple[int, dict[str, Any]]] = []  # events since the last operation, with lines
    operations = events = 0
    note = None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            if number == 1 or line.endswith("\n"):
                raise ReplayError(
                    f"line {number} is not valid JSON: {line.strip()[:60]!r}"
                ) from None
            note = f"line {number}, the last, is incomplete: its writer was stopped"
            break
        if replayer is None:
            replayer = _Replayer(_config(entry))
            continue
        group.append((number, _checked(entry, f"line {number}")))
        if entry["kind"] != OPERATION:
            continue
        got = replayer.run(entry, f"line {number}")
        if difference := _compare(group, got):
            return ReplayReport(operations, events, difference)
        operations, events = operations + 1, events + len(group)
        group.clear()
    if replayer is None:
        raise ReplayError("the log is empty")
    if group and note is None:
        note = f"the log ends within an operation: {len(group)} events after the last complete one"
    return ReplayReport(operations, events, note=note)


def _config(header: Any) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ReplayError(f"line 1 is not the header of a {FORMAT}")
    if header.get("version") != VERSION:
        raise ReplayError(
            f"line 1: the log has version {header.get('version')!r}; this release reads version "
            f"{VERSION}"
        )
    if not isinstance(header.get("config"), dict):
        raise ReplayError("line 1: the header has no configuration")
    return header["config"]


def _checked(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or entry.keys() != {f.name for f in dataclasses.fields(Event)}:
        raise ReplayError(f"{where} is not an event: {str(entry)[:60]}")
    if entry["kind"] == OPERATION:
        detail = entry["detail"]
        if not isinstance(detail, dict) or not isinstance(detail.get("arguments"), dict):
            raise ReplayError(f"{where} is an operation without arguments")
        if not isinstance(detail.get("name"), str) or not isinstance(entry["time"], int | float):
            raise ReplayError(f"{where} is an operation without a name or a time")
    return entry


def _compare(
    logged: list[tuple[int, dict[str, Any]]], got: list[dict[str, Any]]
) -> Difference | None:
    """The first difference of an operation. The result is compared first: it says most."""
    line, operation = logged[-1]
    detail = operation["detail"]
    call = _call(detail["name"], detail["arguments"])
    expected, actual = _outcome(detail), _outcome(got[-1]["detail"])
    if expected != actual:
        return Difference(line, call, "result", expected, actual)
    # Both lists end with their only operation event, so that a missing event shows as well.
    for (line, entry), actual in zip(logged, got, strict=False):
        if _timeless(entry) != _timeless(actual):
            return Difference(line, call, f"event {entry['kind']!r}", entry, actual)
    return None


def _timeless(event: dict[str, Any]) -> dict[str, Any]:
    """The event without times, which may be read a little later within the same operation."""
    detail = {name: x for name, x in event["detail"].items() if name not in ("age", "idle")}
    return event | {"time": None, "detail": detail}


def _outcome(detail: Mapping[str, Any]) -> dict[str, Any]:
    return {name: detail[name] for name in ("result", "error") if name in detail}


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{k}={v!r}" for k, v in arguments.items() if v is not None)
    return f"{name}({shown if len(shown) <= 120 else shown[:117] + '...'})"


def _require_plain(event: Event) -> None:
    """Rejects arguments that JSON does not preserve; a tuple may come back as a list."""
    arguments = event.detail["arguments"] if event.kind == OPERATION else {}
    ids = [event.seq, *(arguments.get(name) for name in ("seq_id", "parent_id", "child_id"))]
    for seq in (*ids, *arguments.get("seq_ids", ())):
        if seq is not None and type(seq) not in (str, int):
            raise ReplayError(
                f"sequence ids in a log must be str or int, got {type(seq).__name__}: {seq!r}"
            )
    for name, value in arguments.items():
        if not _is_plain(value):
            raise ReplayError(
                f"a log cannot hold {name}={value!r} of {event.detail['name']}: JSON does not "
                "preserve it"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(type(item) is int or _is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int | None)
