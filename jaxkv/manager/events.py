"""Events of a block manager, sent to subscribed listeners.

Logs (JSON lines) explain why a block was moved; programs such as metrics and routers count events
or mirror the cache. Host code: imports no JAX.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import IO, Any, cast

from jaxkv._util import to_json, to_plain

STORED = "BlockStored"  # a block became visible to lookups
REMOVED = "BlockRemoved"  # a block is no longer visible to lookups
CLEARED = "AllBlocksCleared"  # reset_prefix_cache: no block is visible
ALLOCATE, FREE, COPY, EVICT, HIT = "allocate", "free", "copy", "evict", "hit"
PREEMPT = "preempt"  # an engine preempted a running sequence
OPERATION = "operation"  # a public call with arguments and result, which `jaxkv replay` runs again


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
      kind: one of the names above.
      time: time on the manager's clock, seconds.
      seq: id of the sequence; None: not about one.
      blocks: block ids.
      ref_counts: ref counts of these blocks after the event.
      free_count: blocks that an allocation could take after the event, cached ones included.
      detail: further fields of this kind. BlockStored: hash, parent_hash (hex), token_ids,
        namespace. BlockRemoved: hash, reason. hit: num_tokens, queried_tokens. allocate:
        num_tokens, num_cached_tokens, num_new_blocks (taken for it: neither hits nor null blocks
        behind a window). copy: blocks are (source, destination). evict: age and idle, seconds
        since stored and since last used. preempt: reason. operation: name, arguments, result or
        error.
    """

    kind: str
    time: float
    seq: Hashable | None
    blocks: tuple[int, ...]
    ref_counts: tuple[int, ...]
    free_count: int
    detail: Mapping[str, Any]

    def to_json(self) -> str:
        """The event as one line of JSON."""
        return to_json(_as_json(to_plain(self)))


Listener = Callable[[Event], None]


def json_lines(file: IO[str]) -> Listener:
    """A listener that writes each event as a line of JSON.

    Example:
      >>> import io
      >>> import json
      >>> from jaxkv import BlockManager
      >>> from jaxkv.manager.events import json_lines
      >>> manager, log = BlockManager(4, 2, max_seqs=1, max_blocks_per_seq=3), io.StringIO()
      >>> manager.subscribe(json_lines(log))
      >>> _ = manager.allocate("a", [1, 2, 3])
      >>> [json.loads(line)["kind"] for line in log.getvalue().splitlines()]
      ['allocate', 'operation']
    """
    return lambda event: print(event.to_json(), file=file)


def to_logging(logger: logging.Logger | None = None, level: int = logging.INFO) -> Listener:
    """A listener that logs each event, under the logger `jaxkv.events` by default."""
    logger = logger or logging.getLogger("jaxkv.events")
    return lambda e: logger.log(
        level, "%s seq=%r blocks=%s refs=%s free=%d %s",
        e.kind, e.seq, e.blocks, e.ref_counts, e.free_count, dict(e.detail),
    )  # fmt: skip


def _as_json(value: Any) -> Any:
    """JSON for every value and key that a namespace, an id or a detail may have."""
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return {key if isinstance(key, str) else _key(key): _as_json(item) for key, item in items}
    if isinstance(value, list):
        return [_as_json(item) for item in cast(list[Any], value)]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset):
        return sorted((_as_json(to_plain(item)) for item in cast(set[Any], value)), key=repr)
    return value if isinstance(value, str | int | float | None) else str(value)


def _key(key: Any) -> str:
    plain = _as_json(to_plain(key))
    return plain if isinstance(plain, str) else to_json(plain)
