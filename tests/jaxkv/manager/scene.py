"""A manager in the middle of its work, and every public call on it, for several test files."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from oracle import run

from jaxkv import BlockManager


def scene(index="hash", **options: Any) -> BlockManager:
    """Live, forked and cached sequences, pins, priorities, a transfer, a queued copy; 4 free."""
    base: dict[str, Any] = dict(
        prefix_index=index, copy_on_partial_reuse=index == "hash", debug=True
    )
    m = BlockManager(17, 4, max_seqs=6, max_blocks_per_seq=8, **(base | options))
    for first, priority, ttl in ((1, 0, None), (21, 2, 50.0), (41, -1, None)):
        m.allocate(first, run(first, first + 8), priority=priority, ttl=ttl)
        m.commit(first, 9)
        m.free(first)
    m.pin(run(1, 8), ttl=40.0)
    m.pin(run(1, 4))
    m.allocate("a", run(61, 70), namespace={"salt": b"x"}, lookahead=3)
    m.commit("a", 10)
    m.fork("a", "b")
    m.allocate("c", run(81, 83))
    m.append("b", 7)  # copies the last block
    m.begin_transfer([int(m.block_table("a")[0])])
    return m


def block_of(m: BlockManager, tokens) -> int:
    """The cached block of the last of these tokens."""
    wanted = m.block_hashes(tokens)[-1].hex()
    return next(info.block for info in m.blocks() if info.hash == wanted)


CHANGES: dict[str, Callable[[BlockManager], Any]] = {
    "allocate": lambda m: m.allocate("new", [*run(1, 8), *run(101, 106)], namespace=None),
    "allocate: evicts": lambda m: m.allocate("new", run(101, 125)),
    "allocate: part of a block": lambda m: m.allocate("new", [*run(41, 46), 9, 9]),
    "allocate: refused": lambda m: m.allocate("new", run(201, 232)),
    "commit": lambda m: m.commit("b", 1),
    "commit: publishes": lambda m: m.append_batch(["c"], [84, 85], [2]) or m.commit("c", 4),
    "commit_batch": lambda m: m.commit_batch(["b", "c"], [1, 3]),
    "append": lambda m: m.append("a", 3),
    "append_batch": lambda m: m.append_batch(["a", "c"], [3] * 9, [4, 5]),
    "reserve": lambda m: m.reserve(["a", "b", "c"], [1, 6, 2]).tolist(),
    "fork": lambda m: m.fork("b", "d"),
    "reorder": lambda m: m.reorder(["a", "b", "c"], [2, 2, 0]),
    "truncate": lambda m: m.truncate("a", 6),
    "free": lambda m: m.free("a"),
    "pin": lambda m: m.pin(run(21, 28), ttl=3.0),
    "unpin": lambda m: m.unpin(run(1, 4)),
    "end_pins": lambda m: m.end_pins(),
    "begin_transfer": lambda m: m.begin_transfer([block_of(m, run(21, 24))]),
    "complete_transfer": lambda m: m.complete_transfer(0),
    "evict": lambda m: m.evict([block_of(m, run(41, 44))]),
    "set_weight_version": lambda m: m.set_weight_version("next"),
    "reset_prefix_cache": lambda m: m.reset_prefix_cache(force=True),
    "reset": lambda m: m.reset(),
    "note": lambda m: m.note("preempt", "a", {"reason": "test"}),
    "take_plan": lambda m: len(m.take_plan().copies),
}
QUERIES: dict[str, Callable[[BlockManager], Any]] = {
    "row": lambda m: m.row("a"),
    "select": lambda m: m.select(["b", "a"]).rows.tolist(),
    "length": lambda m: m.length("a"),
    "num_computed_tokens": lambda m: m.num_computed_tokens("a"),
    "token_ids": lambda m: m.token_ids("b").tolist(),
    "block_table": lambda m: m.block_table("b").tolist(),
    "locate": lambda m: m.locate(np.array([0, 1]), np.array([5, 2]))[0].tolist(),
    "blocks_for": lambda m: m.blocks_for(9),
    "lookup": lambda m: m.lookup(run(1, 9)),
    "block_hashes": lambda m: m.block_hashes(run(1, 9)),
    "can_allocate": lambda m: m.can_allocate(run(1, 30)),
    "stats": lambda m: m.stats(),
    "blocks": lambda m: list(m.blocks()),
    "check": lambda m: m.check(),
    "table_view": lambda m: m.table_view().block_tables.tolist(),
    "to_dict": lambda m: m.to_dict(),
}
CALLS = CHANGES | QUERIES


NOT_STATE = ("clock", "_listeners", "listening", "version", "name")


def digest(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Everything that an object holds, for comparison; functions and the clock left out."""
    seen = {} if seen is None else seen
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, int | float | str | bytes | None):
        return value
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type):
        return None
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return [(digest(k, seen), digest(v, seen)) for k, v in value.items()]
    if isinstance(value, tuple | list | set | deque) or type(value).__name__ == "SortedList":
        return type(value).__name__, [digest(item, seen) for item in value]
    names = [*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ())]
    return type(value).__name__, [(n, digest(getattr(value, n), seen)) for n in sorted(names)
                                  if n not in NOT_STATE]  # fmt: skip
