"""GPUs that steps can be compiled for: one text file each, in the compiler's format."""

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
    """The compiler's description of a GPU; limits are per multiprocessor (SM).

    Attributes:
      name: name of the GPU and its file.
      text: description in the compiler's format.
      compute_capability: (major, minor).
      registers: 32-bit registers.
      threads: maximum of resident threads.
      shared_bytes: bytes of shared memory of all resident thread blocks together.
      shared_bytes_per_block: maximum bytes of shared memory of one thread block.
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
        """Returns the target of this name.

        Raises:
          ConfigError: the name is unknown, or its file lacks a field.

        Example:
          >>> from jaxkv.compile_check.targets import Target
          >>> Target.load("h200").compute_capability
          (9, 0)
        """
        if name not in NAMES:
            raise ConfigError(f"GPU must be one of {', '.join(NAMES)}, got {name!r}")
        text = (_FOLDER / f"{name}.txtpb").read_text(encoding="utf-8")

        def number(field: str) -> int:
            if (match := re.search(rf"^[^#\n]*\b{field}: (\d+)", text, re.MULTILINE)) is None:
                raise ConfigError(f"the description of GPU {name!r} lacks {field}")
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
        """`count` JAX devices for compilation only. Needs the compiler's plugin."""
        from jax.experimental import topologies

        return topologies.get_topology_desc(
            self.name, "cuda", target_config=self.text, topology=f"1x{count}x1"
        ).devices
