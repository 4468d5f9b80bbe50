"""Compiler results in numbers: resources, thread blocks per SM, violated limits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from rich.table import Table

from jaxkv.compile_check.launches import Launches
from jaxkv.compile_check.targets import Target

_WARP = 32
_REGISTERS_OF_WARP = 256  # allocation unit of a warp's registers
_RESERVED_SHARED = 1024  # bytes that the driver reserves per thread block, compute 8.0 and above
_MAX_BLOCKS = 32  # thread blocks resident on one SM, compute 8.0, 9.0 and 10.0


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources of a thread block; with several kernels in one step, the maximum of each.

    Attributes:
      registers: registers per thread.
      spill_bytes: bytes stored and loaded by register spills, summed over all kernels.
      stack_bytes: bytes of local memory that hold arrays or spills, summed over all kernels.
      shared_bytes: bytes of shared memory.
      threads: threads per thread block.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    threads: int

    @classmethod
    def parse(cls, output: str) -> Resources | None:
        """Parses the output of Mosaic GPU and ptxas; None if no kernel was compiled."""
        registers = re.findall(r"Used (\d+) registers", output)
        if not registers:
            return None
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
        threads = re.findall(r"\.(?:max|req)ntid (\d+)(?:, (\d+))?(?:, (\d+))?", output)
        shared = re.findall(r"Resources\(smem_scratch_bytes=(\d+)(.*)", output)
        return cls(
            registers=max(map(int, registers)),
            spill_bytes=sum(int(stores) + int(loads) for stores, loads in spills),
            stack_bytes=sum(map(int, re.findall(r"(\d+) bytes stack frame", output))),
            shared_bytes=max(int(scratch) + _barrier_bytes(rest) for scratch, rest in shared),
            threads=max(math.prod(int(n or 1) for n in sizes) for sizes in threads),
        )

    def blocks_per_sm(self, target: Target) -> int:
        """Thread blocks that fit one SM of the target at once."""
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
    """Bytes of shared memory of the barriers, 8 each, which follow the scratch."""
    return 8 * sum(
        int(barriers) * int(count)
        for barriers, count in re.findall(r"num_barriers=(\d+)[^:]*\): (\d+)", counts)
    )


def count_kernels(hlo: str) -> int:
    """Counts the calls of Mosaic GPU kernels in a compiled module."""
    return hlo.count('custom_call_target="mosaic_gpu')


def count_pool_copies(hlo: str, pool_elements: Collection[int]) -> int:
    """Counts the instructions that copy or transpose an array of the pool's size."""
    moved = re.findall(r"= \(?\w+\[([\d,]+)\][^=]* (?:copy|copy-start|transpose)\(", hlo)
    return sum(_elements(shape) in pool_elements for shape in moved)


def count_atomic_scatters(hlo: str, pool_elements: Collection[int]) -> int:
    """Counts the scatters into the pool whose indices may repeat: XLA then writes elements of fewer
    than 32 bits one by one, each with a compare-and-swap."""
    scatters = re.findall(r"= \w+\[([\d,]+)\]\S* scatter\((.*)", hlo)
    return sum(
        _elements(shape) in pool_elements and "unique_indices=true" not in rest
        for shape, rest in scatters
    )


def count_rematerialised(hlo: str) -> int:
    """Counts the results that XLA computes again where it needs them, to save memory."""
    return len(re.findall(r"^ *(?:ROOT )?%\S*\.remat\S* = ", hlo, re.MULTILINE))


def ptxas_remarks(output: str) -> tuple[str, ...]:
    """Remarks of ptxas about a loss of speed, each once: C7508, registers that were not moved
    between warpgroups; C7510, `wgmma`s that wait for each other."""
    return tuple(sorted(set(re.findall(r"\(C75\d\d\)[^\n]*", output))))


def _elements(shape: str) -> int:
    return math.prod(map(int, shape.split(",")))


@dataclasses.dataclass(frozen=True)
class Row:
    """One program compiled for one target. Values that do not apply or are unknown are None.

    Attributes:
      target: name of the GPU.
      program: name of the program.
      num_devices: GPUs that the program runs on.
      pool_bytes: bytes of the pool on one GPU; all byte counts here are per GPU.
      attention: implementation of attention, "mosaic_gpu" or "xla"; None without attention.
      kernels: calls of Mosaic GPU kernels.
      fallback: reason why attention does not use a kernel.
      error: reason why the program does not compile.
      resources: resources of the kernels.
      launches: launches of a program with attention.
      max_launches: limit of the kernels among them.
      rematerialised: results that are computed more than once.
      remarks: remarks of ptxas about a loss of speed.
      blocks_per_sm: thread blocks that fit one SM.
      bytes_in_flight: bytes in flight per SM: those that the kernel declares, times the thread
        blocks that fit.
      alias_bytes: bytes of the arguments that are reused for the results.
      pool_copies: instructions that copy the pool.
      atomic_scatters: scatters into the pool that compare and swap each element.
      temp_bytes: bytes of temporary memory, without arguments and results.
      seconds: time to trace and compile, while other programs compile too.
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
    launches: Launches | None = None
    max_launches: int | None = None
    rematerialised: int | None = None
    remarks: tuple[str, ...] = ()
    blocks_per_sm: int | None = None
    bytes_in_flight: int | None = None
    alias_bytes: int | None = None
    pool_copies: int | None = None
    atomic_scatters: int | None = None
    temp_bytes: int | None = None
    seconds: float | None = None

    @property
    def broken(self) -> list[str]:
        """Limits that this row violates, each with its numbers."""
        if self.error is not None:
            return [f"does not compile: {self.error.splitlines()[0]}"]
        broken = []
        if self.attention is not None and self.fallback is None and not self.kernels:
            broken.append("a kernel supports this call, but the step calls none")
        if self.kernels and self.resources is None:
            broken.append("the compiler did not report the resources of its kernels")
        if self.resources and self.resources.spill_bytes:
            broken.append(f"registers spill {self.resources.spill_bytes} bytes")
        elif self.resources and self.resources.stack_bytes:
            broken.append(f"{self.resources.stack_bytes} bytes of arrays in local memory")
        broken += [f"ptxas: {remark}" for remark in self.remarks]
        if self.attention is not None and self.fallback is None:
            broken += self._broken_launches()
        if self.rematerialised:
            broken.append(f"{self.rematerialised} results are computed again to save memory")
        if self.blocks_per_sm == 0:
            broken.append("its thread block does not fit an SM")
        if self.alias_bytes is not None and self.alias_bytes < self.pool_bytes:
            broken.append(
                f"only {self.alias_bytes} of the pool's {self.pool_bytes} bytes are aliased"
            )
        if self.pool_copies:
            broken.append(f"{self.pool_copies} copies of the pool")
        if self.atomic_scatters:
            broken.append(f"{self.atomic_scatters} scatters compare and swap each element")
        if self.temp_bytes is not None and self.temp_bytes >= self.pool_bytes:
            broken.append(f"{self.temp_bytes} temporary bytes, not less than the pool")
        return broken

    def _broken_launches(self) -> list[str]:
        found, broken = self.launches, []
        if found is None:
            return ["the compiler did not report its launches"]
        if found.loops:
            broken.append(f"{found.loops} loops end a CUDA graph and wait for the host")
        elif self.num_devices == 1:  # collectives end graphs too
            if found.ungraphed:
                broken.append(f"{found.ungraphed} launches are in no CUDA graph")
            if found.graphs != 1:
                broken.append(f"{found.graphs} CUDA graphs instead of one")
        if self.max_launches is not None and found.kernels > self.max_launches:
            broken.append(f"{found.kernels} launches, more than {self.max_launches}")
        if found.unaligned:
            broken.append(f"{found.unaligned} buffers do not begin at a multiple of 256 bytes")
        return broken

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as a dict for JSON."""
        return dataclasses.asdict(self) | {"broken": self.broken}


def table(target: Target, rows: Sequence[Row]) -> Table:
    """Table of the rows of one target."""
    major, minor = target.compute_capability
    reasons = sorted({row.fallback for row in rows if row.fallback})
    table = Table(
        title=f"{target.name}, compute capability {major}.{minor}",
        caption="\n".join(f"xla: {reason}" for reason in reasons),
    )
    for name in ("step", "GPUs", "compiled", "attention"):
        table.add_column(name)
    for name in ("launch-\nes", "regis-\nters", "spilled\nB", "shared\nKiB", "blocks\nper SM",
                 "in flight\nKiB/SM", "pool\nMiB", "aliased\nMiB", "pool\ncopies", "temp\nMiB",
                 "s"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        used = row.resources
        table.add_row(
            row.program,
            str(row.num_devices),
            "yes" if row.error is None else "no",
            f"{row.attention} x{row.kernels}" if row.kernels else row.attention or "-",
            _number(row.launches and row.launches.kernels),
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
    """Formats a value with at most one decimal, dropping ".0"; "-" for None."""
    return "-" if value is None else f"{value / unit:,.1f}".removesuffix(".0")
