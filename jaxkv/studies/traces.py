"""Request traces of LLM services: arrival times, lengths and shared prefixes.

Reads the formats of the public traces: Mooncake and Qwen-Bailian (JSON lines, with prefix
identity), Azure 2023 and 2024 and BurstGPT (CSV, without prefix identity). Host code: imports no
JAX.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from jaxkv._util import ceil_div, text_lines
from jaxkv.errors import JaxkvError

MOONCAKE_TOKENS, BAILIAN_TOKENS = 512, 16  # tokens that one hash id stands for
_DATA = Path(__file__).parent / "data"
PACKAGED = {
    "azure-code": _DATA / "AzureLLMInferenceTrace_code.csv",
    "azure-conv": _DATA / "AzureLLMInferenceTrace_conv.csv",
}
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


class TraceError(JaxkvError, ValueError):
    """A trace that cannot be read; the message names the file, the line and the column."""


class TracedRequest(NamedTuple):
    """One request of a trace.

    Attributes:
      arrival: seconds since the first request.
      input_tokens: length of the prompt, in tokens.
      output_tokens: number of generated tokens.
      ids: i64[]; hash ids of the prompt's contents.
    """

    arrival: float
    input_tokens: int
    output_tokens: int
    ids: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, as columns. Build one with `load_trace` or `Trace.of`.

    Attributes:
      name: name in titles and messages.
      arrival: f64[N] seconds since the first request.
      input_tokens: i64[N] lengths of the prompts, in tokens.
      output_tokens: i64[N] numbers of generated tokens.
      hash_ids: i64[H] ids of the prompts' contents, request by request: equal ids stand for equal
        tokens. Numbered from 0 in order of appearance.
      offsets: i64[N + 1]; request i has `hash_ids[offsets[i] : offsets[i + 1]]`. Its ids may cover
        less than the prompt, or nothing; the rest is shared with no other request.
      tokens_per_id: tokens that one id stands for; the last id of a prompt may stand for fewer.

    Example:
      >>> from jaxkv.studies.traces import Trace
      >>> trace = Trace.of([7.0, 5.0], [100, 80], [3, 9], hash_ids=[[4, 9], [4]], tokens_per_id=64)
      >>> trace.arrival.tolist(), trace.input_tokens.tolist(), trace.ids(1).tolist()
      ([0.0, 2.0], [80, 100], [0, 1])
    """

    name: str
    arrival: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    hash_ids: np.ndarray
    offsets: np.ndarray
    tokens_per_id: int

    @classmethod
    def of(
        cls,
        arrival: Sequence[float] | np.ndarray,
        input_tokens: Sequence[int] | np.ndarray,
        output_tokens: Sequence[int] | np.ndarray,
        *,
        hash_ids: Sequence[Sequence[int]] | None = None,
        tokens_per_id: int = 1,
        name: str = "trace",
    ) -> Self:
        """Makes a trace from columns, sorted by arrival (in seconds, from any origin).

        Raises:
          TraceError: columns of different lengths, no requests, a time that is not finite, a
            negative count, or more ids than the prompt has blocks of `tokens_per_id`.
        """
        times = np.asarray(arrival, np.float64)
        inputs, outputs = np.asarray(input_tokens, np.int64), np.asarray(output_tokens, np.int64)
        ids = [()] * len(times) if hash_ids is None else hash_ids
        if not len(times) == len(inputs) == len(outputs) == len(ids):
            rows = f"{len(times)}, {len(inputs)}, {len(outputs)} and {len(ids)}"
            raise TraceError(f"{name}: columns must have the same length, got {rows} rows")
        if not len(times):
            raise TraceError(f"{name} holds no requests")
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        for what, bad in (
            ("the time is not finite", ~np.isfinite(times)),
            ("a count of tokens is negative", (inputs < 0) | (outputs < 0)),
            (
                f"more hash ids than the prompt has blocks of {tokens_per_id} tokens",
                counts > ceil_div(inputs, tokens_per_id),
            ),
        ):
            if bad.any():
                raise TraceError(f"{name}: request {int(bad.argmax())}: {what}")
        order = np.argsort(times, kind="stable")
        numbers: dict[int, int] = {}
        flat = [numbers.setdefault(h, len(numbers)) for i in order.tolist() for h in ids[i]]
        return cls(
            name=name,
            arrival=times[order] - times[order[0]],
            input_tokens=inputs[order],
            output_tokens=outputs[order],
            hash_ids=np.array(flat, np.int64),
            offsets=np.concatenate([[0], counts[order].cumsum()]),
            tokens_per_id=tokens_per_id,
        )

    def __len__(self) -> int:
        return len(self.arrival)

    def __iter__(self) -> Iterator[TracedRequest]:
        """The requests, one by one; the columns are faster."""
        columns = self.arrival.tolist(), self.input_tokens.tolist(), self.output_tokens.tolist()
        for i, (arrival, inputs, outputs) in enumerate(zip(*columns, strict=True)):
            yield TracedRequest(arrival, inputs, outputs, self.ids(i))

    @property
    def has_ids(self) -> bool:
        """Whether prompts of this trace can share prefixes."""
        return len(self.hash_ids) > 0

    @property
    def max_len(self) -> int:
        """Length of the longest request, prompt and output, in tokens."""
        return int((self.input_tokens + self.output_tokens).max())

    def ids(self, request: int) -> np.ndarray:
        """i64[] hash ids of one request."""
        return self.hash_ids[self.offsets[request] : self.offsets[request + 1]]

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        return dataclasses.replace(
            self,
            arrival=self.arrival[:count],
            input_tokens=self.input_tokens[:count],
            output_tokens=self.output_tokens[:count],
            hash_ids=self.hash_ids[: self.offsets[: count + 1][-1]],
            offsets=self.offsets[: count + 1],
        )

    def with_shared_prefix(self, num_tokens: int, *, tokens_per_id: int = 16) -> Trace:
        """The same requests with a shared prefix: all prompts begin with the same tokens.

        Estimates for traces without ids what a common system prompt would save. Lengths do not
        change; the prefix is rounded down to a multiple of `tokens_per_id`, and is cut to the
        length of a shorter prompt.

        Example:
          >>> from jaxkv.studies.traces import load_trace
          >>> load_trace("azure-code").with_shared_prefix(64).ids(0).tolist()
          [0, 1, 2, 3]
        """
        counts = np.minimum(self.input_tokens, num_tokens) // tokens_per_id
        offsets = np.concatenate([[0], counts.cumsum()])
        ids = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return dataclasses.replace(self, hash_ids=ids, offsets=offsets, tokens_per_id=tokens_per_id)


def load_trace(source: str | Path) -> Trace:
    """Loads a trace from a file, or a packaged trace by its name.

    The format of a file is recognised by its content.

    Args:
      source: a path (Mooncake or Qwen-Bailian JSON lines; Azure or BurstGPT CSV), or "azure-code"
        or "azure-conv", which come with the package.

    Raises:
      TraceError: unknown format, no requests, or a bad value; the error names file, line and
        column.
      OSError: the file cannot be opened.

    Example:
      >>> from jaxkv.studies.traces import load_trace
      >>> trace = load_trace("azure-code")
      >>> len(trace), int(trace.input_tokens[0]), int(trace.output_tokens[0]), trace.has_ids
      (8819, 4808, 10, False)
    """
    path = PACKAGED.get(str(source), Path(source))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text: {error}") from None
    except FileNotFoundError:
        names = ", ".join(PACKAGED)
        raise TraceError(f"no such trace: {path} (give a file, or one of {names})") from None
    lines = text_lines(text)
    name = str(source) if str(source) in PACKAGED else path.stem
    first = next((line for line in lines if line.strip()), "")
    load = _load_json_lines if first.lstrip().startswith("{") else _load_csv
    return load(path, name, lines)


def _fail(path: Path, line: int, column: str | None, what: str) -> NoReturn:
    where = f"{path}, line {line}" + (f", column {column}" if column else "")
    raise TraceError(f"{where}: {what}")


def _load_json_lines(path: Path, name: str, lines: list[str]) -> Trace:
    rows: list[tuple[float, int, int, list[int]]] = []
    per_second = per_id = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            _fail(path, number, str(error.colno), f"not valid JSON: {error.msg}")
        if not isinstance(record, dict):
            _fail(path, number, None, "not a JSON object")
        if not per_id:  # the first record determines the format
            bailian = "chat_id" in record
            per_id = BAILIAN_TOKENS if bailian else MOONCAKE_TOKENS
            per_second = 1 if bailian else 1000
        for column in _MOONCAKE:
            if column not in record:
                known = f"known formats of JSON lines have {', '.join(_MOONCAKE)}"
                _fail(path, number, column, f"missing; {known}")
        time, prompt, output, ids = (record[column] for column in _MOONCAKE)
        if not _is_number(time):
            _fail(path, number, "timestamp", f"must be a finite number, got {time!r}")
        for column, value in (("input_length", prompt), ("output_length", output)):
            if type(value) is not int or value < 0:
                _fail(path, number, column, f"must be a non-negative integer, got {value!r}")
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            _fail(path, number, "hash_ids", "must be a list of integers")
        if len(ids) > ceil_div(prompt, per_id):
            _fail(
                path, number, "hash_ids",
                f"{len(ids)} ids of {per_id} tokens, but input_length is {prompt}",
            )  # fmt: skip
        rows.append((time / per_second, prompt, output, ids))
    times, prompts, outputs, ids = zip(*rows, strict=True)
    return Trace.of(times, prompts, outputs, hash_ids=ids, tokens_per_id=per_id, name=name)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < float("inf")


def _load_csv(path: Path, name: str, lines: list[str]) -> Trace:
    reader = csv.reader(lines)
    header = [cell.strip() for cell in next((row for row in reader if row), [])]
    if set(_AZURE) <= set(header):
        columns, to_seconds = _AZURE, _seconds_of_dates
    elif set(_BURSTGPT) <= set(header):
        columns, to_seconds = _BURSTGPT, _seconds
    else:
        if not header:
            raise TraceError(f"{path} holds no requests: it is empty")
        _fail(
            path, reader.line_num, "1",
            f"unknown format {lines[reader.line_num - 1][:60]!r}; known are Mooncake or "
            f"Qwen-Bailian JSON lines, CSV with {', '.join(_AZURE)}, and CSV with "
            + ", ".join(_BURSTGPT),
        )  # fmt: skip
    numbers, rows = [], []
    for row in reader:
        if row:
            if len(row) != len(header):
                what = f"{len(row)} cells, but the header has {len(header)}"
                missing = header[len(row)] if len(row) < len(header) else str(len(header) + 1)
                _fail(path, reader.line_num, missing, what)
            numbers.append(reader.line_num)
            rows.append(row)
    if not rows:
        raise TraceError(f"{path} holds no requests: only a header")
    cells = list(zip(*rows, strict=True))

    def column(index: int, convert: Callable[[Sequence[str]], np.ndarray], what: str) -> np.ndarray:
        values = cells[header.index(columns[index])]
        try:
            return convert(values)
        except ValueError:  # find the value that the error names
            for line, value in zip(numbers, values, strict=True):
                try:
                    convert([value])
                except ValueError:
                    _fail(path, line, columns[index], f"must be {what}, got {value!r}")
            raise

    return Trace.of(
        column(0, to_seconds, "a time"),
        column(1, _whole, "a non-negative integer"),
        column(2, _whole, "a non-negative integer"),
        name=name,
    )


def _whole(cells: Iterable[str]) -> np.ndarray:
    values = np.array([int(cell) for cell in cells], np.int64)
    if (values < 0).any():
        raise ValueError("negative")
    return values


def _seconds(cells: Iterable[str]) -> np.ndarray:
    values = np.array([float(cell) for cell in cells])
    if not np.isfinite(values).all():
        raise ValueError("not finite")
    return values


_UTC = re.compile(r"\s*(\+00:?00|Z)$")


def _seconds_of_dates(cells: Iterable[str]) -> np.ndarray:
    """Seconds since 1970; the 2024 traces write a UTC offset, the 2023 ones do not."""
    dates = np.array([_UTC.sub("", cell.strip()) for cell in cells], "datetime64[ns]")
    if np.isnat(dates).any():
        raise ValueError("not a date")
    return dates.astype(np.int64) / 1e9
