"""Whether a plan follows the state that it is applied to, checked on the host without waiting.

A state that `apply_plan` or `init_state` returned is known by its block table, until a step returns
another. A state that came out of a step is not: for it a plan needs only some state of its manager
that is where the plan follows, as `jaxkv.manager.plans` counts them. So the plan of another manager
is refused at once on a known state, and otherwise at the latest when the right state gets it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import jax
import jax.core
import numpy as np

from jaxkv.manager.records import PlanOrder

if TYPE_CHECKING:
    from jaxkv.cache.state import PagedState

# The last plan of known states, None for new ones, by the identity of their block tables.
_known: dict[int, tuple[weakref.ref[jax.Array], PlanOrder | None]] = {}


def remember(state: PagedState, order: PlanOrder | None) -> None:
    """Notes the last plan of a state; None: it is new."""
    table, key = state.block_tables, id(state.block_tables)
    if not isinstance(table, jax.core.Tracer):
        _known[key] = weakref.ref(table, lambda ref: _forget(key, ref)), order


def _forget(key: int, ref: weakref.ref[jax.Array]) -> None:
    if key in _known and _known[key][0] is ref:
        del _known[key]


def follow(order: PlanOrder, state: PagedState | None) -> None:
    """Counts a plan as applied.

    Args:
      order: place of the plan.
      state: the state that gets it; None: it goes into a jitted step.

    Raises:
      StateError: the state is known and its last plan is not the one before; or it is not, and no
        state is where the plan follows, nor is this one empty.
    """
    chain = order.chain
    if state is not None and is_known(state):
        require_follows(state, order)
        if _known[id(state.block_tables)][1] is not None:
            chain.move(order.before, order.number)
        else:
            chain.begin(order.number)
    elif chain.has(order.before):
        chain.move(order.before, order.number)
    elif order.begins and (state is None or not np.asarray(state.block_tables).any()):
        chain.begin(order.number)
    else:
        raise chain.missing(order.number, order.before)


def is_known(state: PagedState) -> bool:
    """Whether the last plan of a state is known."""
    known = _known.get(id(state.block_tables))
    return known is not None and known[0]() is state.block_tables


def require_follows(state: PagedState, order: PlanOrder) -> None:
    """Raises StateError if the state is known and its last plan is not the one before."""
    if not is_known(state):
        return
    last = _known[id(state.block_tables)][1]
    if last is None:
        if not order.begins:
            raise order.chain.refuse(order.number, order.before, "this state is new and empty")
    elif last.chain is not order.chain or last.number != order.before:
        whose = "" if last.chain is order.chain else f" of {last.chain.name}"
        raise order.chain.refuse(
            order.number, order.before, f"this state is at plan {last.number}{whose}"
        )
