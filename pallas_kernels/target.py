"""Which device a computation is traced for: JAX's default device, or one it is only compiled for.

A kernel is chosen while a step is traced. When the step is compiled ahead of time for a GPU that
this machine does not have, the choice must follow that GPU, and what the chosen kernel keeps in
flight is worth reporting: no compiler knows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

import jax


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The copies into shared memory that one thread block of a kernel keeps in flight.

    Attributes:
      kernel: its name.
      stages: of the ring of tiles.
      tile_bytes: of one stage, K and V together where both are in flight.
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
    """What is traced inside is for this device; gives the pipelines that kernels declare there.

    Example:
      >>> from jaxkv.pallas_kernels import target
      >>> with target.compile_for("gpu", (9, 0)) as pipelines:
      ...     target.declare(target.Pipeline("decode", stages=3, tile_bytes=32768))
      ...     target.current(), pipelines[0].stages
      (('gpu', (9, 0)), 3)
    """
    jax.clear_caches()  # the target is no part of the keys under which JAX keeps its traces
    target = _Target(platform, compute_capability)
    token = _TARGET.set(target)
    try:
        yield target.pipelines
    finally:
        _TARGET.reset(token)
        jax.clear_caches()


def declare(pipeline: Pipeline) -> None:
    """Says what a kernel that is being traced keeps in flight; heard inside `compile_for` only."""
    if (target := _TARGET.get()) is not None:
        target.pipelines.append(pipeline)


def current() -> tuple[str, tuple[int, int] | None]:
    """Platform as JAX's devices name it ("cpu", "gpu", ...), and a GPU's compute capability."""
    if (target := _TARGET.get()) is not None:
        return target.platform, target.compute_capability
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)  # "9.0"; AMD's is no pair of numbers
    if device.platform != "gpu" or not isinstance(capability, str):
        return device.platform, None
    major, _, minor = capability.partition(".")
    return "gpu", (int(major), int(minor)) if minor.isdigit() else None
