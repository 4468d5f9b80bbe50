"""The rows of the GPU benchmark, how their calls are timed, and the loop of a process that fills
them.

Plain Python: the process that hands out rows takes no GPU, and the one that runs PyTorch no JAX.
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

ROTATED = 2**30  # bytes that the calls of a row read before they come back to the same ones
MAX_LAYERS: dict[Form, int] = {"decode": 16, "prefill": 4}  # each is compiled into the step
MAX_SETS = 8
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention to be timed. `name` tells rows of a table and of `--only` apart.

    Attributes:
      engine: whose; see `gpu_plan.ENGINES`.
      form: decode (one query of each sequence) or prefill.
      context: tokens of each sequence, the queries' own included.
      batch: sequences.
      block: tokens in a page; 0 where keys and values are contiguous.
      heads: query heads.
      kv_heads: KV heads.
      dim: head_dim.
      dtype: of keys and values.
      queries: of each sequence, its last tokens.
      ragged: lengths from an eighth of `context` up to it.
      layers: of the pool; 0 for as many as it takes to read from memory and not from L2.
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
        """Of the row."""
        return self.form

    @property
    def group(self) -> str:
        """Rows that may end their process together."""
        return f"{self.engine} {self.form}"

    @property
    def name(self) -> str:
        """All of it in one line."""
        parts = [self.form, self.engine, f"{self.context}x{self.batch}"]
        parts += [f"block {self.block}"] * (self.block > 0)
        parts += [f"{self.heads}/{self.kv_heads}", self.dtype]
        parts += [f"queries {self.queries}"] * (self.queries not in (1, self.context))
        parts += ["ragged"] * self.ragged + [f"layers {self.layers}"] * (self.layers > 0)
        return " ".join(parts)

    @property
    def query_dtype(self) -> str:
        """Of queries and output."""
        return "bfloat16" if self.dtype == "int8" else self.dtype

    @property
    def lengths(self) -> np.ndarray:
        """Tokens i32[batch] of the sequences."""
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        lengths = np.linspace(self.context // 8, self.context, self.batch).astype(np.int32)
        return np.random.default_rng(0).permutation(lengths)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one layer, with int8's scales."""
        scales = 4 if self.dtype == "int8" else 0
        return 2 * self.kv_heads * (self.dim * ITEMSIZE[self.dtype] + scales)

    @property
    def read_bytes(self) -> int:
        """Bytes of K and V that one call reads at least."""
        return int(self.lengths.sum(dtype=np.int64)) * self.bytes_per_token

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products, without what causality hides."""
        first = self.lengths.astype(np.int64) - self.queries + 1  # keys that the first query sees
        pairs = self.queries * first + self.queries * (self.queries - 1) // 2
        return 4 * self.heads * self.dim * int(pairs.sum())

    @property
    def rotation(self) -> tuple[int, int]:
        """(layers, sets): calls of one step, each on keys and values of its own, and such steps."""
        layers = self.layers or min(MAX_LAYERS[self.form], -(-ROTATED // self.read_bytes))
        return layers, min(MAX_SETS, -(-ROTATED // (layers * self.read_bytes)))

    @property
    def resident_bytes(self) -> int:
        """Device memory of all keys and values."""
        layers, sets = self.rotation
        return layers * sets * self.batch * self.context * self.bytes_per_token


@dataclasses.dataclass(frozen=True)
class Copy:
    """How fast device memory is copied: the measure of all other rows."""

    kind: ClassVar[str] = "copy"
    group: ClassVar[str] = "copy"
    name: ClassVar[str] = "copy bandwidth"
    engine: ClassVar[str] = "jax"


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """Paged attention against its reference. Everything that it must not read is NaN.

    Attributes:
      what: says what is particular about it.
      lens: tokens of the sequences.
      counts: queries of each; None for a decode step.
      heads: query heads.
      kv_heads: KV heads.
      dim: head_dim.
      block: tokens in a page.
      dtype: of pages and queries.
      scale_dtype: of int8 pages' scales; None for pages of `dtype`.
      window: see `paged_attention`, as the next.
      soft_cap: see `paged_attention`.
      sinks: whether there are.
      padding: queries of no sequence behind the others.
      parts: whether the two halves of each context are computed apart and merged.
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
        """The kernel's."""
        return "decode" if self.counts is None else "prefill"

    @property
    def group(self) -> str:
        """As a case's."""
        return f"jaxkv {self.form}"

    @property
    def name(self) -> str:
        """As a case's."""
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
        """As a case's."""
        return f"check {self.operation}"


@dataclasses.dataclass(frozen=True)
class PeerCheck:
    """A peer's attention against a dense one, so that its time is that of the same function."""

    kind: ClassVar[str] = "check"

    case: Case

    @property
    def engine(self) -> str:
        """Whose."""
        return self.case.engine

    @property
    def group(self) -> str:
        """As a case's."""
        return self.case.group

    @property
    def name(self) -> str:
        """As a case's."""
        return f"check {self.case.name}"


Task = Case | Copy | AttentionCheck | OperationCheck | PeerCheck


def measure(call: Callable[[int], Any], wait: Callable[[Any], Any], sets: int, calls: int) -> dict:
    """Microseconds of one of the `calls` that `call(i)` enqueues on the i-th set of inputs.

    Calls are enqueued back to back, for at least 10 ms and through all sets, between two waits for
    the device; the median of such samples counts.
    """

    def sample(count: int) -> float:
        began, out = time.perf_counter(), None
        for i in range(count):
            out = call(i % sets)
        wait(out)
        return (time.perf_counter() - began) / count

    sample(sets)  # the clocks rise, and lazy things happen
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
    """The fields of a check's row; it is right if the error is within the tolerance, or as told."""
    right = error <= tolerance if right is None else right
    return {
        "status": "ok" if right else "wrong",
        "max_error": error if math.isfinite(error) else None,
        "tolerance": tolerance,
    }


class NotHere(Exception):
    """A row that this machine cannot fill, with the reason: skipped, and not failed."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """What a process fills rows with.

    Attributes:
      about: its libraries and device.
      run: a task's row.
      probe: raises if the device computes no more, as after an illegal access.
    """

    about: dict
    run: Callable[[Any], dict]
    probe: Callable[[], Any]


def answer(connection: Connection, module: str, log: str, seed: int, dry: bool) -> None:
    """The life of a process that fills rows: says what it runs on, then answers task by task.

    Args:
      connection: to the process that asks; None ends this one.
      module: whose `start(seed, dry)` gives the `Engine`. What it raises, an import too, is
        answered by {"error": reason}; what a row raises becomes its status and reason, and a
        device that is lost ends the process.
      log: a file for what libraries print.
      seed: of the data.
      dry: whether no GPU is wanted.
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
        except Exception as error:  # of any kind: it belongs into the table
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
