"""The device that a computation is traced for: JAX's default device, or a compilation target.

A kernel is chosen while a step is traced. When the step is compiled ahead of time for a GPU that
this machine does not have, the choice must follow that GPU. The bytes that the chosen kernel keeps
in flight are reported here, since the compiler does not report them. The options that a step needs
of the compiler depend on the device too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The copies into shared memory that one thread block of a kernel keeps in flight.

    Attributes:
      kernel: name of the kernel.
      stages: stages of the ring of tiles.
      tile_bytes: bytes of one stage, K and V together where both are in flight.
    """

    kernel: str
    stages: int
    tile_bytes: int


@dataclasses.dataclass(frozen=True)
class _Target:
    platform: str
    compute_capability: tuple[int, int] | None
    pipelines: list[Pipeline] = dataclasses.field(default_factory=list)


_TARGET: ContextVar[_Target | None] = ContextVar("target", default=None)


@contextlib.contextmanager
def compile_for(
    platform: str, compute_capability: tuple[int, int] | None = None
) -> Iterator[list[Pipeline]]:
    """Context in which traces are for this device; yields the pipelines that kernels declare.

    Example:
      >>> from jaxkv.pallas_kernels import target
      >>> with target.compile_for("gpu", (9, 0)) as pipelines:
      ...     target.declare(target.Pipeline("decode", stages=3, tile_bytes=32768))
      ...     target.current(), pipelines[0].stages
      (('gpu', (9, 0)), 3)
    """
    jax.clear_caches()  # JAX's keys of cached traces do not include the target
    target = _Target(platform, compute_capability)
    token = _TARGET.set(target)
    try:
        yield target.pipelines
    finally:
        _TARGET.reset(token)
        jax.clear_caches()


def declare(pipeline: Pipeline) -> None:
    """Records the pipeline of a kernel that is being traced; no effect outside `compile_for`."""
    if (target := _TARGET.get()) is not None:
        target.pipelines.append(pipeline)


def current() -> tuple[str, tuple[int, int] | None]:
    """Returns the platform under JAX's name ("cpu", "gpu", ...) and a GPU's compute capability."""
    if (target := _TARGET.get()) is not None:
        return target.platform, target.compute_capability
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)  # "9.0"; AMD's is not two numbers
    if device.platform != "gpu" or not isinstance(capability, str):
        return device.platform, None
    major, _, minor = capability.partition(".")
    return "gpu", (int(major), int(minor)) if minor.isdigit() else None


def compiler_options() -> dict[str, Any]:
    """Returns compiler options for `jax.jit` of a step; empty unless it is traced for a GPU.

    XLA counts a donated pool twice. With a pool of half the memory it believes that none is left
    and computes small results anew in each layer: 90 of the 547 kernels of a decode step of
    Llama-3-8B. The factor (percent of the memory that may be used, 95 by default) ends that; it
    does not change how much memory is allocated.

    Example:
      >>> from jaxkv.pallas_kernels import target
      >>> target.compiler_options()
      {}
      >>> with target.compile_for("gpu", (9, 0)):
      ...     target.compiler_options()
      {'xla_gpu_memory_limit_slop_factor': 1000}
    """
    return {"xla_gpu_memory_limit_slop_factor": 1000} if current()[0] == "gpu" else {}
