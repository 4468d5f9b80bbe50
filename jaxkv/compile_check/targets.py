"""The GPUs that steps are compiled for: one text file each, in the compiler's own format."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Self

from jaxkv.errors import ConfigError

_FOLDER = Path(__file__).parent / "targets"

NAMES = tuple(sorted(file.stem for file in _FOLDER.glob("*.txtpb")))


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU as the compiler knows it; the limits are those of one multiprocessor (SM).

    Attributes:
      name: of its file.
      text: what the compiler is given.
      compute_capability: (major, minor).
      registers: 32-bit registers.
      threads: that can be resident.
      shared_bytes: shared memory of all resident thread blocks together.
      shared_bytes_per_block: the most that one thread block can have.
    """

    name: str
    text: str
    compute_capability: tuple[int, int]
    registers: int
    threads: int
    shared_bytes: int
    shared_bytes_per_block: int

    @classmethod
    def load(cls, name: str) -> Self:
        """The target of this name.

        Raises:
          ConfigError: there is no such target, or its file lacks a field.

        Example:
          >>> from jaxkv.compile_check.targets import Target
          >>> Target.load("h200").compute_capability
          (9, 0)
        """
        if name not in NAMES:
            raise ConfigError(f"unknown GPU {name!r}; one of {', '.join(NAMES)}")
        text = (_FOLDER / f"{name}.txtpb").read_text()

        def number(field: str) -> int:
            if (match := re.search(rf"^[^#\n]*\b{field}: (\d+)", text, re.MULTILINE)) is None:
                raise ConfigError(f"the description of {name} lacks {field}")
            return int(match[1])

        return cls(
            name=name,
            text=text,
            compute_capability=(
                number(r"cuda_compute_capability {.*\bmajor"),
                number(r"cuda_compute_capability {.*\bminor"),
            ),
            registers=number("registers_per_core_limit"),
            threads=number("threads_per_core_limit"),
            shared_bytes=number("shared_memory_per_core"),
            shared_bytes_per_block=number("shared_memory_per_block_optin"),
        )

    def devices(self, count: int) -> list[Any]:
        """`count` JAX devices, to compile for and not to run on. Needs the compiler's plugin."""
        from jax.experimental import topologies

        return topologies.get_topology_desc(
            self.name, "cuda", target_config=self.text, topology=f"1x{count}x1"
        ).devices
