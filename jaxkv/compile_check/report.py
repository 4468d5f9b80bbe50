"""What the compiler said, in numbers: resources, thread blocks that fit, limits that are broken."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from rich.table import Table

from jaxkv.compile_check.targets import Target

_WARP = 32
_REGISTERS_OF_WARP = 256  # registers are given to warps in pieces of this size
_RESERVED_SHARED = 1024  # bytes that the driver keeps in every thread block, compute 8.0 and above
_MAX_BLOCKS = 32  # resident in one SM, compute 8.0, 9.0 and 10.0


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a thread block takes; of several kernels in one step, the most of each.

    Attributes:
      registers: of a thread.
      spill_bytes: stored and loaded again for want of registers, all kernels together.
      shared_bytes: shared memory.
      threads: of a thread block.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int

    @classmethod
    def parse(cls, output: str) -> Resources | None:
        """From what Mosaic GPU and ptxas print; None when no kernel was compiled."""
        registers = re.findall(r"Used (\d+) registers", output)
        if not registers:
            return None
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
        threads = re.findall(r"\.(?:max|req)ntid (\d+)(?:, (\d+))?(?:, (\d+))?", output)
        shared = re.findall(r"Resources\(smem_scratch_bytes=(\d+)(.*)", output)
        return cls(
            registers=max(map(int, registers)),
            spill_bytes=sum(int(stores) + int(loads) for stores, loads in spills),
            shared_bytes=max(int(scratch) + _barrier_bytes(rest) for scratch, rest in shared),
            threads=max(math.prod(int(n or 1) for n in sizes) for sizes in threads),
        )

    def blocks_per_sm(self, target: Target) -> int:
        """Thread blocks that one SM of the target holds at once."""
        warps = -(-self.threads // _WARP)
        registers = -(-self.registers * _WARP // _REGISTERS_OF_WARP) * _REGISTERS_OF_WARP * warps
        if self.shared_bytes > target.shared_bytes_per_block:
            return 0
        return min(
            _MAX_BLOCKS,
            target.threads // (warps * _WARP),
            target.registers // registers,
            target.shared_bytes // (self.shared_bytes + _RESERVED_SHARED),
        )


def _barrier_bytes(counts: str) -> int:
    """Each barrier takes 8 bytes of shared memory behind the scratch."""
    return 8 * sum(
        int(barriers) * int(count)
        for barriers, count in re.findall(r"num_barriers=(\d+)[^:]*\): (\d+)", counts)
    )


def count_kernels(hlo: str) -> int:
    """Calls of Mosaic GPU kernels in a compiled module."""
    return hlo.count('custom_call_target="mosaic_gpu')


def count_pool_copies(hlo: str, pool_elements: Collection[int]) -> int:
    """Instructions of a compiled module that copy or transpose something of the pool's size."""
    moved = re.findall(r"= \(?\w+\[([\d,]+)\][^=]* (?:copy|copy-start|transpose)\(", hlo)
    return sum(_elements(shape) in pool_elements for shape in moved)


def count_atomic_scatters(hlo: str, pool_elements: Collection[int]) -> int:
    """Scatters into the pool whose indices may repeat: XLA then writes elements of fewer than 32
    bits one by one, each with a compare-and-swap."""
    scatters = re.findall(r"= \w+\[([\d,]+)\]\S* scatter\((.*)", hlo)
    return sum(
        _elements(shape) in pool_elements and "unique_indices=true" not in rest
        for shape, rest in scatters
    )


def _elements(shape: str) -> int:
    return math.prod(map(int, shape.split(",")))


@dataclasses.dataclass(frozen=True)
class Row:
    """One program compiled for one target. What does not apply, or is not known, is None.

    Attributes:
      target: name of the GPU.
      program: its name.
      num_devices: GPUs that it runs on.
      pool_bytes: of the cache, on one GPU, as are all bytes here.
      attention: what attends: "mosaic_gpu" or "xla"; None for an operation that does not.
      kernels: calls of Mosaic GPU kernels.
      fallback: why it is not a kernel.
      error: why it does not compile.
      resources: of the kernels.
      blocks_per_sm: thread blocks that fit one SM.
      bytes_in_flight: of one SM: what the kernel declares, times the thread blocks that fit.
      alias_bytes: of the arguments, reused for the results.
      pool_copies: instructions that copy the pool.
      atomic_scatters: scatters into the pool that compare and swap each element.
      temp_bytes: beside arguments and results.
      seconds: it took to trace and compile, beside others.
    """

    target: str
    program: str
    num_devices: int
    pool_bytes: int
    attention: str | None = None
    kernels: int = 0
    fallback: str | None = None
    error: str | None = None
    resources: Resources | None = None
    blocks_per_sm: int | None = None
    bytes_in_flight: int | None = None
    alias_bytes: int | None = None
    pool_copies: int | None = None
    atomic_scatters: int | None = None
    temp_bytes: int | None = None
    seconds: float | None = None

    @property
    def broken(self) -> list[str]:
        """The promises that this row breaks."""
        if self.error is not None:
            return [f"does not compile: {self.error.splitlines()[0]}"]
        broken = []
        if self.attention is not None and self.fallback is None and not self.kernels:
            broken.append("a kernel claims to support this, but the step calls none")
        if self.kernels and self.resources is None:
            broken.append("the compiler did not say what its kernels take")
        if self.resources and self.resources.spill_bytes:
            broken.append(f"{self.resources.spill_bytes} bytes of registers spill")
        if self.blocks_per_sm == 0:
            broken.append("no thread block fits an SM")
        if self.alias_bytes is not None and self.alias_bytes < self.pool_bytes:
            broken.append(f"{self.alias_bytes} bytes aliased, the pool has {self.pool_bytes}")
        if self.pool_copies:
            broken.append(f"{self.pool_copies} copies of the pool")
        if self.atomic_scatters:
            broken.append(f"{self.atomic_scatters} scatters compare and swap each element")
        if self.temp_bytes is not None and self.temp_bytes >= self.pool_bytes:
            broken.append(f"{self.temp_bytes} temporary bytes, as many as the pool or more")
        return broken

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"broken": self.broken}


def table(target: Target, rows: Sequence[Row]) -> Table:
    """The rows of one target."""
    major, minor = target.compute_capability
    reasons = sorted({row.fallback for row in rows if row.fallback})
    table = Table(
        title=f"{target.name}, compute capability {major}.{minor}",
        caption="\n".join(f"xla: {reason}" for reason in reasons),
    )
    for name in ("step", "GPUs", "compiled", "attention"):
        table.add_column(name)
    for name in ("regis-\nters", "spilled\nB", "shared\nKiB", "blocks\nper SM", "in flight\nKiB/SM",
                 "pool\nMiB", "aliased\nMiB", "pool\ncopies", "temp\nMiB", "s"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        used = row.resources
        table.add_row(
            row.program,
            str(row.num_devices),
            "yes" if row.error is None else "no",
            f"{row.attention} x{row.kernels}" if row.kernels else row.attention or "-",
            _number(used and used.registers),
            _number(used and used.spill_bytes),
            _number(used and used.shared_bytes, 1024),
            _number(row.blocks_per_sm),
            _number(row.bytes_in_flight, 1024),
            _number(row.pool_bytes, 2**20),
            _number(row.alias_bytes, 2**20),
            _number(row.pool_copies),
            _number(row.temp_bytes, 2**20),
            _number(row.seconds),
            style="red" if row.broken else None,
        )
    return table


def _number(value: float | None, unit: int = 1) -> str:
    """At most one decimal, and none that says nothing."""
    return "-" if value is None else f"{value / unit:,.1f}".removesuffix(".0")
