"""Rows of the GPU benchmark, the timing of calls, and the loop of a process that fills rows.

Without JAX or PyTorch: the main process must not claim the GPU, and the PyTorch process does not
import JAX.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Literal

import numpy as np

Form = Literal["decode", "prefill"]

ROTATED = 2**30  # bytes that the calls of a row read before they repeat
MAX_LAYERS: dict[Form, int] = {"decode": 16, "prefill": 4}  # each is compiled into the step
MAX_SETS = 8
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention to time. `name` identifies the row in tables and for `--only`.

    Attributes:
      engine: implementation, one of `gpu_plan.ENGINES`.
      form: decode (one query per sequence) or prefill.
      context: tokens of each sequence, those of the queries included.
      batch: number of sequences.
      block: tokens per page; 0 for contiguous keys and values.
      heads: query heads.
      kv_heads: KV heads.
      dim: head_dim.
      dtype: dtype of keys and values.
      queries: queries per sequence, its last tokens.
      ragged: whether lengths vary from an eighth of `context` up to it.
      layers: layers of the pool; 0 for enough to read from memory and not from L2.
    """

    engine: str
    form: Form
    context: int
    batch: int
    block: int = 16
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"
    queries: int = 1
    ragged: bool = False
    layers: int = 0

    @property
    def kind(self) -> str:
        """Kind of the row."""
        return self.form

    @property
    def group(self) -> str:
        """Name of the rows that share a limit of ended processes."""
        return f"{self.engine} {self.form}"

    @property
    def name(self) -> str:
        """All attributes in one line."""
        parts = [self.form, self.engine, f"{self.context}x{self.batch}"]
        parts += [f"block {self.block}"] * (self.block > 0)
        parts += [f"{self.heads}/{self.kv_heads}", self.dtype]
        parts += [f"queries {self.queries}"] * (self.queries not in (1, self.context))
        parts += ["ragged"] * self.ragged + [f"layers {self.layers}"] * (self.layers > 0)
        return " ".join(parts)

    @property
    def query_dtype(self) -> str:
        """Dtype of queries and output."""
        return "bfloat16" if self.dtype == "int8" else self.dtype

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of the sequences, i32[batch]."""
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        lengths = np.linspace(self.context // 8, self.context, self.batch).astype(np.int32)
        return np.random.default_rng(0).permutation(lengths)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer, scales included."""
        scales = 4 if self.dtype == "int8" else 0
        return 2 * self.kv_heads * (self.dim * ITEMSIZE[self.dtype] + scales)

    @property
    def read_bytes(self) -> int:
        """Minimum bytes of K and V that one call reads."""
        return int(self.lengths.sum(dtype=np.int64)) * self.bytes_per_token

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products, without causally masked pairs."""
        first = self.lengths.astype(np.int64) - self.queries + 1  # keys that the first query sees
        pairs = self.queries * first + self.queries * (self.queries - 1) // 2
        return 4 * self.heads * self.dim * int(pairs.sum())

    @property
    def rotation(self) -> tuple[int, int]:
        """(layers, sets): calls per step and number of steps, all on different keys and values."""
        layers = self.layers or min(MAX_LAYERS[self.form], -(-ROTATED // self.read_bytes))
        return layers, min(MAX_SETS, -(-ROTATED // (layers * self.read_bytes)))

    @property
    def resident_bytes(self) -> int:
        """Bytes of device memory of all keys and values."""
        layers, sets = self.rotation
        return layers * sets * self.batch * self.context * self.bytes_per_token


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copy bandwidth of device memory, the reference for all other rows."""

    kind: ClassVar[str] = "copy"
    group: ClassVar[str] = "copy"
    name: ClassVar[str] = "copy bandwidth"
    engine: ClassVar[str] = "jax"


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """Paged attention against its reference. All slots that it must not read are NaN.

    Attributes:
      what: short description.
      lens: tokens of the sequences.
      counts: queries of each sequence; None for a decode step.
      heads: query heads.
      kv_heads: KV heads.
      dim: head_dim.
      block: tokens per page.
      dtype: dtype of pages and queries.
      scale_dtype: dtype of the scales of int8 pages; None for pages of `dtype`.
      window: window of `paged_attention`.
      soft_cap: soft cap of `paged_attention`.
      sinks: whether heads have sinks.
      padding: padding queries after those of the sequences.
      parts: whether the two halves of each context are computed separately and merged.
    """

    kind: ClassVar[str] = "check"
    engine: ClassVar[str] = "jaxkv"

    what: str
    lens: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    dtype: str = "bfloat16"
    scale_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    padding: int = 0
    parts: bool = False

    @property
    def form(self) -> Form:
        """Form of the kernel."""
        return "decode" if self.counts is None else "prefill"

    @property
    def group(self) -> str:
        """Group of the row, see `Case.group`."""
        return f"jaxkv {self.form}"

    @property
    def name(self) -> str:
        """Name of the row, see `Case`."""
        dtype = "int8" if self.scale_dtype else self.dtype
        size = f"block {self.block} head {self.dim} {self.heads}/{self.kv_heads} {dtype}"
        return f"check {self.form} {size}: {self.what}"


@dataclasses.dataclass(frozen=True)
class OperationCheck:
    """An operation on pages against NumPy. `operation` is one of `gpu_checks.OPERATIONS`."""

    kind: ClassVar[str] = "check"
    engine: ClassVar[str] = "jaxkv"
    group: ClassVar[str] = "jaxkv operations"

    operation: str

    @property
    def name(self) -> str:
        """Name of the row, see `Case`."""
        return f"check {self.operation}"


@dataclasses.dataclass(frozen=True)
class PeerCheck:
    """A peer's attention against dense attention, to confirm that it computes the same function."""

    kind: ClassVar[str] = "check"

    case: Case

    @property
    def engine(self) -> str:
        """Engine of the case."""
        return self.case.engine

    @property
    def group(self) -> str:
        """Group of the case."""
        return self.case.group

    @property
    def name(self) -> str:
        """Name of the row, see `Case`."""
        return f"check {self.case.name}"


Task = Case | Copy | AttentionCheck | OperationCheck | PeerCheck


def measure(call: Callable[[int], Any], wait: Callable[[Any], Any], sets: int, calls: int) -> dict:
    """Microseconds per call, where `call(i)` enqueues `calls` calls on the i-th set of inputs.

    Calls are enqueued back to back, for at least 10 ms and through all sets, between two waits for
    the device; "us" is the median of such samples.
    """

    def sample(count: int) -> float:
        began, out = time.perf_counter(), None
        for i in range(count):
            out = call(i % sets)
        wait(out)
        return (time.perf_counter() - began) / count

    sample(sets)  # warm-up: clocks rise, lazy initialisation runs
    count = max(sets, min(1000, math.ceil(0.01 / sample(sets))))
    began, samples = time.perf_counter(), []
    while len(samples) < 3 or (len(samples) < 41 and time.perf_counter() - began < 0.6):
        samples.append(1e6 * sample(count) / calls)
    return {
        "us": float(np.median(samples)),
        "us_min": float(np.min(samples)),
        "us_p90": float(np.quantile(samples, 0.9)),
        "samples": len(samples),
        "calls_per_sample": count * calls,
    }


def verdict(error: float, tolerance: float, right: bool | None = None) -> dict:
    """Fields of a check's row; `right` overrides the comparison of error and tolerance."""
    right = error <= tolerance if right is None else right
    return {
        "status": "ok" if right else "wrong",
        "max_error": error if math.isfinite(error) else None,
        "tolerance": tolerance,
    }


class NotHere(Exception):
    """A row that this machine cannot fill, with the reason; it is skipped, not failed."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """Functions of a process that fills rows.

    Attributes:
      about: libraries and device of the process.
      run: returns the row of a task.
      probe: raises if the device has failed, as after an illegal access.
    """

    about: dict
    run: Callable[[Any], dict]
    probe: Callable[[], Any]


def answer(connection: Connection, module: str, log: str, seed: int, dry: bool) -> None:
    """Main loop of a process that fills rows: sends `Engine.about`, then a row for each task.

    Args:
      connection: connection to the main process, which sends tasks; None ends this process.
      module: module whose `start(seed, dry)` returns the `Engine`. An error there, also in the
        import, is reported as {"error": reason}; an error of a row becomes its status and reason,
        and a lost device ends the process.
      log: file for the output of libraries.
      seed: seed of the data.
      dry: whether to run without a GPU.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    try:
        engine = importlib.import_module(module).start(seed, dry)
    except Exception as error:
        traceback.print_exc()
        connection.send({"error": _one_line(error)})
        return
    connection.send(engine.about)
    while (task := connection.recv()) is not None:
        began = time.perf_counter()
        try:
            row: dict[str, Any] = {"status": "ok"} | engine.run(task)
        except NotHere as error:
            row = {"status": "skipped", "reason": str(error)}
        except Exception as error:  # any error is a row of the table
            traceback.print_exc()
            row = {"status": "failed", "reason": _one_line(error)}
        row["seconds"] = time.perf_counter() - began
        if row["status"] == "failed":
            try:
                engine.probe()
            except Exception:
                connection.send(row | {"device_lost": True})
                return
        connection.send(row)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
