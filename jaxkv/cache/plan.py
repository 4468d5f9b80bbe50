"""Plans on the device: tables, lengths and block copies follow the block manager."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxkv._util import next_power_of_two
from jaxkv.cache.order import follow, remember, require_follows
from jaxkv.cache.state import PagedState, is_stale
from jaxkv.errors import JaxkvError
from jaxkv.manager.records import Plan, PlanOrder
from jaxkv.pallas_kernels.copy_blocks import copy_blocks


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["copies", "cells", "lengths"], meta_fields=[], drop_fields=["order"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """A `Plan` padded to a bucket, ready to go into a jitted step.

    Attributes:
      copies: i32[C, 2] (source, destination); padding copies to a block past the pool, dropped.
      cells: i32[E, 3] (row, column, block); padding has a row past the table, dropped.
      lengths: i32[R, 2] (row, length); padding has a row past the table, dropped.
      order: the plan's place among those of its manager; on the host alone.
    """

    copies: jax.Array | np.ndarray
    cells: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray
    order: PlanOrder | None = dataclasses.field(default=None, compare=False)


def bucket(size: int, buckets: Sequence[int] | None = None) -> int:
    """The smallest bucket that holds `size`: of `buckets`, or of the powers of two from 8."""
    if buckets is None:
        return max(8, next_power_of_two(size))
    for candidate in buckets:
        if size <= candidate:
            return candidate
    raise JaxkvError(f"{size} is larger than the largest bucket of {list(buckets)}")


def pad_plan(plan: Plan, *, cells: int | None = None, lengths: int | None = None) -> DevicePlan:
    """Pads a plan to fixed sizes, or to power-of-two buckets, so that its shape rarely changes.

    For a plan that goes into a jitted step, where nothing can check it: its order is checked here,
    and it counts as applied.

    Raises:
      StateError: no state is at the plan that it follows.
    """
    if plan.order is not None:
        follow(plan.order, None)
    return _padded(plan, cells, lengths)


def _padded(plan: Plan, cells: int | None = None, lengths: int | None = None) -> DevicePlan:
    def pad(entries: np.ndarray, size: int | None) -> np.ndarray:
        size = bucket(len(entries)) if size is None else bucket(len(entries), [size])
        out = np.full((size, entries.shape[1]), np.iinfo(np.int32).max, np.int32)
        out[: len(entries)] = entries
        return out

    copies = pad(plan.copies, None if len(plan.copies) else 0)
    copies[len(plan.copies) :, 0] = 0  # the source of a dropped copy is still read
    return DevicePlan(copies, pad(plan.cells, cells), pad(plan.lengths, lengths), plan.order)


def apply_device_plan(state: PagedState, plan: DevicePlan) -> PagedState:
    """`apply_plan` for use inside a jitted step. Block copies first, then tables and lengths."""
    copies = jnp.asarray(plan.copies)
    pages, scales = (  # without scales, None has no leaves
        jax.tree.map(lambda pool: copy_blocks(pool, copies[:, 0], copies[:, 1]), pool)
        for pool in (state.kv_pages, state.kv_scales)
    )
    rows, columns, blocks = (plan.cells[:, i] for i in range(3))
    tables = state.block_tables.at[rows, columns].set(blocks, mode="drop")
    lens = state.seq_lens.at[plan.lengths[:, 0]].set(plan.lengths[:, 1], mode="drop")
    return dataclasses.replace(
        state, kv_pages=pages, kv_scales=scales, block_tables=tables, seq_lens=lens
    )


_apply = jax.jit(apply_device_plan, donate_argnames="state")


def apply_plan(state: PagedState, plan: Plan | DevicePlan) -> PagedState:
    """Updates tables and lengths to the manager's, after running block copies. Donates state.

    For loops that drive the state by hand; an engine's step takes the plan as an argument instead
    and saves a dispatch.

    Args:
      state: the state of the plan's manager.
      plan: from `BlockManager.take_plan()`, or padded by `pad_plan`. Each plan must be applied
        once, in the order taken.

    Raises:
      StaleStateError: the state was donated before.
      StateError: the plan does not follow the last one that was applied: one was left out, or it
        was applied before, or the state follows another manager. Nothing was changed.

    Example:
      >>> import jaxkv
      >>> config = jaxkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=3)
      >>> manager, state = jaxkv.BlockManager.for_config(config), jaxkv.init_state(config)
      >>> row = manager.allocate("a", [1, 2, 3]).row
      >>> state = jaxkv.apply_plan(state, manager.take_plan())
      >>> state.block_tables[row, :2].tolist()
      [1, 0]
    """
    if is_stale(state) or plan.order is None or isinstance(state.block_tables, jax.core.Tracer):
        return _apply(state, plan if isinstance(plan, DevicePlan) else _padded(plan))
    if isinstance(plan, DevicePlan):  # counted as applied by `pad_plan`
        require_follows(state, plan.order)
    else:
        follow(plan.order, state)
        plan = _padded(plan)
    new = _apply(state, plan)
    remember(new, plan.order)
    return new
