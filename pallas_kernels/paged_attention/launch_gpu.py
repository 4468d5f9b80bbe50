"""Launches of the GPU kernels, with names of grid and thread axes that no device mesh has.

Inside `shard_map`, Pallas looks up an axis name in the device mesh before the kernel's grid. If a
mesh axis had the name of a grid axis, every thread block would compute the block whose number is
the device's rank, without an error. The names therefore have a prefix, only this module makes them,
and a mesh that has one of them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

# Axes of the grids, and the axis of the warpgroups of a thread block, with their names in Pallas.
_THREADS = "warpgroup"
AXIS_NAMES = {axis: f"jaxkv_{axis}" for axis in ("split", "sequence", "head", "tile", _THREADS)}

# The kernels set layouts explicitly: inferring them takes minutes for kernels of this size.
_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def block_index(*axes: str) -> list[jax.Array]:
    """Position i32[] of the thread block along each of these grid axes."""
    return [lax.axis_index(AXIS_NAMES[axis]) for axis in axes]


def warpgroup_index() -> jax.Array:
    """Number i32[] of the warpgroup in its thread block."""
    return lax.axis_index(AXIS_NAMES[_THREADS])


def launch(
    kernel: Callable[..., None],
    *operands: jax.Array,
    grid: Mapping[str, int],
    warpgroups: int | None = None,
    **options: Any,
) -> Any:
    """Runs a Mosaic GPU kernel.

    Args:
      kernel: body; its parameters are the references to operands, results and scratch.
      *operands: operands of the kernel.
      grid: thread blocks along each axis, by axes of `AXIS_NAMES`.
      warpgroups: warpgroups of a thread block; None: one, without a number.
      **options: further arguments of `plgpu.kernel`.

    Raises:
      ValueError: the mesh of the surrounding `shard_map` has an axis with one of the names.
    """
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    taken = [name for name in AXIS_NAMES.values() if name in mesh_axes]
    if taken:
        raise ValueError(
            f"mesh axes must not be called {', '.join(AXIS_NAMES.values())}, which are axes of the "
            f"GPU kernels of paged attention, got {', '.join(taken)}: rename them"
        )
    if warpgroups is not None:
        options |= dict(num_threads=warpgroups, thread_name=AXIS_NAMES[_THREADS])
    run = plgpu.kernel(
        kernel,
        grid=tuple(grid.values()),
        grid_names=tuple(AXIS_NAMES[axis] for axis in grid),
        compiler_params=_PARAMS,
        **options,
    )
    return run(*operands)
