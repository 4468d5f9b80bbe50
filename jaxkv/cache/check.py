"""Comparison of a state on the device with its manager, for tests and debugging."""

from __future__ import annotations

import numpy as np

from jaxkv.cache.batch import Batch
from jaxkv.cache.state import PagedState
from jaxkv.errors import StateError
from jaxkv.manager.block_manager import BlockManager


def check_state(state: PagedState, manager: BlockManager, batch: Batch | None = None) -> None:
    """Compares tables, lengths and reservations on the device with the manager's.

    Waits for the state. Call it with all plans taken and applied. A row's length on the device, the
    tokens whose KV is written, is at least what the manager has as committed, and at most what the
    row may write: its tokens and reserved slots.

    Args:
      state: the state.
      manager: its manager.
      batch: a batch about to run: its positions must be ones that their rows may write.

    Raises:
      StateError: names the first difference: the row, its sequence, the column or length, and both
        values.

    Example:
      >>> import jaxkv
      >>> config = jaxkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=3)
      >>> manager, state = jaxkv.BlockManager.for_config(config), jaxkv.init_state(config)
      >>> row = manager.allocate("a", [1, 2, 3]).row
      >>> jaxkv.check_state(state, manager)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      jaxkv.errors.StateError: row 0, column 0 of sequence 'a': block 0 on the device, ...
      >>> state = jaxkv.apply_plan(state, manager.take_plan())
      >>> jaxkv.check_state(state, manager)
    """
    view = manager.table_view()
    tables, lengths = np.asarray(state.block_tables), np.asarray(state.seq_lens)
    rows, columns = view.block_tables.shape
    if tables.shape[0] < rows or tables.shape[1] < columns:
        raise StateError(
            f"the state has a table of {tables.shape}, too small for the manager's {rows, columns}"
        )
    own = np.zeros(tables.shape, np.int32)  # the state may have room for more
    own[:rows, :columns] = view.block_tables
    different = np.argwhere(tables != own)
    if len(different):
        row, column = different[0].tolist()
        raise StateError(
            f"row {row}, column {column} of {_name(view.seq_ids, row)}: block "
            f"{tables[row, column]} on the device, block {own[row, column]} in the manager; was a "
            "plan left out, or applied to another state?"
        )
    for row, seq_id in enumerate(view.seq_ids):
        least, most, length = view.computed[row], view.writable[row], lengths[row]
        if seq_id is not None and not least <= length <= most:
            raise StateError(
                f"row {row} of {_name(view.seq_ids, row)}: the device has written {length} tokens, "
                f"in the manager {least} are committed and {most} slots are its own; "
                + ("was a step left out?" if length < least else "reserve slots before a step")
            )
    if batch is not None:
        _require_slots(batch, view.writable, view.seq_ids)


def _require_slots(batch: Batch, writable: np.ndarray, seq_ids: tuple[object, ...]) -> None:
    """Raises StateError for a token of the batch whose row may not write its position."""
    rows, positions = np.asarray(batch.rows), np.asarray(batch.positions)
    live = (rows >= 0) & (rows < len(writable))
    live[np.asarray(batch.query_start)[-1] :] = False  # padding
    ends = writable[np.where(live, rows, 0)]
    outside = np.flatnonzero(live & ((positions < 0) | (positions >= ends)))
    if len(outside):
        token = int(outside[0])
        row = int(rows[token])
        raise StateError(
            f"token {token} of the batch writes position {positions[token]} of row {row} of "
            f"{_name(seq_ids, row)}, which has {ends[token]} slots of its own; append its tokens "
            "or reserve slots first"
        )


def _name(seq_ids: tuple[object, ...], row: int) -> str:
    seq_id = seq_ids[row] if row < len(seq_ids) else None
    return "no sequence" if seq_id is None else f"sequence {seq_id!r}"
