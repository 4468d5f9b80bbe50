"""Launches of a compiled program, read from XLA's dump: kernels, CUDA graphs, loops, buffers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Self

_ALIGNMENT = 256  # bytes; TMA and wide loads need up to 128, and cudaMalloc gives 256

# Of XLA's names of the steps of a program: they contain steps, or wait for other GPUs.
_NESTING = ("CommandBuffer", "While", "Conditional", "Sequential")
_COLLECTIVE = re.compile(r"All|Collective|ReduceScatter|Nccl|Send|Recv")


def dump_options(folder: str) -> dict[str, str]:
    """Compiler options that write what `Launches.read` reads, whatever XLA_FLAGS say."""
    return {
        "xla_dump_to": folder,
        "xla_dump_hlo_module_re": ".*",
        "xla_dump_emitter_re": "nothing",
    }


@dataclasses.dataclass(frozen=True)
class Launches:
    """Launches of a compiled program.

    Attributes:
      kernels: kernels, copies and library calls of a run; those in a loop count once.
      graphs: CUDA graphs (XLA: command buffers).
      ungraphed: steps between the graphs that the host launches one by one, loops included, but not
        collectives, which XLA keeps out of graphs.
      loops: loops and branches among them; the host waits for each condition.
      unaligned: buffers that do not begin at a multiple of 256 bytes.
    """

    kernels: int
    graphs: int
    ungraphed: int
    loops: int
    unaligned: int

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Reads the dump of one program; None if XLA wrote none."""
        # The second file exists only if there are graphs.
        thunks = sorted(folder.glob("*.thunk_sequence*.txt"), key=lambda file: len(file.name))
        buffers = list(folder.glob("*buffer-assignment.txt"))
        if not thunks or not buffers:
            return None
        return cls.parse(thunks[-1].read_text(), buffers[0].read_text())

    @classmethod
    def parse(cls, thunks: str, buffers: str) -> Self:
        """Parses XLA's list of steps ("thunks"), nested ones indented, and its list of buffers."""
        steps = re.findall(r"^( *)\d+: k(\w+)", thunks, re.MULTILINE)
        outside = [kind for indent, kind in steps if not indent and not _COLLECTIVE.match(kind)]
        offsets = re.findall(r"\(size=\d+,offset=(\d+)\)", buffers)
        return cls(
            kernels=sum(kind not in _NESTING for _, kind in steps),
            graphs=sum(kind == "CommandBuffer" for _, kind in steps),
            ungraphed=sum(kind != "CommandBuffer" for kind in outside),
            loops=sum(kind in ("While", "Conditional") for kind in outside),
            unaligned=sum(int(offset) % _ALIGNMENT > 0 for offset in offsets),
        )
