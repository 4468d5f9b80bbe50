"""Snapshots of a pool's blocks: taken from a manager, stored as CSV, compared.

A comparison lists the blocks that leaked, appeared, vanished or moved between two moments. Host
code: imports no JAX.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.markup import escape
from rich.table import Table

from jaxkv.errors import JaxkvError
from jaxkv.manager.block_manager import BlockManager
from jaxkv.manager.records import BlockInfo, Stats

_COLUMNS = ("block", "ref_count", "last_access", "access_count", "hash", "sequences", "tier")


class SnapshotError(JaxkvError, ValueError):
    """A snapshot that cannot be written, read or compared. For a file, names line and column."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All blocks at one moment.

    Attributes:
      blocks: one entry per block.
      stats: counts by use; None in a snapshot from a file, which holds the blocks only.
      config: the manager's constructor arguments; None in a snapshot from a file.

    Example:
      >>> import tempfile
      >>> from jaxkv import BlockManager
      >>> from jaxkv.observe.snapshot import Snapshot, diff, take_snapshot
      >>> manager = BlockManager(4, 2, max_seqs=1, max_blocks_per_seq=3)
      >>> before = take_snapshot(manager)
      >>> _ = manager.allocate("a", [1, 2, 3])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     take_snapshot(manager).write_csv(f"{folder}/after.csv")
      ...     after = Snapshot.read_csv(f"{folder}/after.csv")
      >>> [(info.block, info.sequences) for info in diff(before, after).appeared]
      [(1, ('a',)), (2, ('a',))]
    """

    blocks: tuple[BlockInfo, ...]
    stats: Stats | None = None
    config: Mapping[str, Any] | None = None

    def write_csv(self, path: str | Path) -> None:
        """Writes one line per block.

        Times are in seconds of the manager's clock (empty: never used), the hash is in hex (empty:
        none), the sequences are a JSON list.

        Raises:
          SnapshotError: a sequence id is neither str nor int, which JSON does not preserve.
        """
        rows = []
        for info in self.blocks:
            for seq in info.sequences:
                if type(seq) not in (str, int):
                    raise SnapshotError(
                        f"block {info.block}: sequence ids in a snapshot file must be str or int, "
                        f"got {type(seq).__name__}: {seq!r}"
                    )
            row = {name: getattr(info, name) for name in _COLUMNS}
            rows.append(row | {"sequences": json.dumps(list(info.sequences))})
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(rows)

    @classmethod
    def read_csv(cls, path: str | Path) -> Self:
        """Reads a snapshot that `write_csv` wrote; further columns are ignored.

        Raises:
          SnapshotError: not a snapshot, a cell that cannot be read, or a block listed twice.
          OSError: the file cannot be read.
        """
        with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
            reader = csv.DictReader(file)
            try:
                missing = set(_COLUMNS) - set(reader.fieldnames or ())
                if missing:
                    raise SnapshotError(f"{path} is not a snapshot: no column {min(missing)!r}")
                blocks = [_read_row(row, f"{path}: line {reader.line_num}") for row in reader]
            except csv.Error as error:
                raise SnapshotError(f"{path}: line {reader.line_num}: {error}") from None
        if len(keys := {(i.tier, i.block) for i in blocks}) < len(blocks):
            raise SnapshotError(f"{path}: {len(blocks) - len(keys)} blocks are listed twice")
        return cls(tuple(blocks))

    def table(self, title: str | None = None) -> Table:
        """A table of the blocks in use."""
        table = Table(title=title)
        for column in _COLUMNS:
            table.add_column(column.replace("_", " "))
        for info in self.blocks:
            if _in_use(info):
                last = "" if info.last_access is None else f"{info.last_access:.3f}"
                table.add_row(
                    str(info.block), str(info.ref_count), last, str(info.access_count),
                    (info.hash or "")[:12], _names(info.sequences), info.tier,
                )  # fmt: skip
        return table


def take_snapshot(manager: BlockManager) -> Snapshot:
    """Takes a snapshot of the manager's blocks, stats and configuration."""
    return Snapshot(tuple(manager.blocks()), manager.stats(), manager.to_dict())


@dataclasses.dataclass(frozen=True)
class SnapshotDiff:
    """Differences between two snapshots. A block is in use if referenced or visible to lookups.

    Attributes:
      leaked: blocks of the second snapshot with more references than sequences that hold them, so
        that no sequence will release the rest.
      appeared: blocks of the second snapshot whose content was not in use in the first.
      vanished: blocks of the first snapshot whose content is not in use in the second.
      moved: (before, after) pairs of a content, identified by its hash, that changed its block.
      ref_changes: (before, after) pairs of blocks that stayed but changed their reference count.
    """

    leaked: tuple[BlockInfo, ...]
    appeared: tuple[BlockInfo, ...]
    vanished: tuple[BlockInfo, ...]
    moved: tuple[tuple[BlockInfo, BlockInfo], ...]
    ref_changes: tuple[tuple[BlockInfo, BlockInfo], ...]

    def to_dict(self) -> dict[str, Any]:
        """The differences as plain data; pairs as {"before", "after"}."""

        def pairs(changes: Iterable[tuple[BlockInfo, BlockInfo]]) -> list[dict[str, Any]]:
            return [{"before": _plain(a), "after": _plain(b)} for a, b in changes]

        return {
            "leaked": [_plain(info) for info in self.leaked],
            "appeared": [_plain(info) for info in self.appeared],
            "vanished": [_plain(info) for info in self.vanished],
            "moved": pairs(self.moved),
            "ref_changes": pairs(self.ref_changes),
        }

    def table(self) -> Table:
        """A table with one line per difference, the leaks first."""
        table = Table("what", "block", "refs", "hash", "sequences")
        for info in self.leaked:
            table.add_row("leaked", *_cells(info), style="bold red")
        for info in self.appeared:
            table.add_row("appeared", *_cells(info))
        for info in self.vanished:
            table.add_row("vanished", *_cells(info))
        for what, changes in (("moved", self.moved), ("refs changed", self.ref_changes)):
            for before, after in changes:
                table.add_row(what, *map(_arrow, _cells(before), _cells(after)))
        return table


def diff(a: Snapshot, b: Snapshot) -> SnapshotDiff:
    """Compares two snapshots, of which `b` is the later one.

    Raises:
      SnapshotError: their configurations are known and describe pools of different shape.
    """
    if a.config is not None and b.config is not None:
        for name in ("num_blocks", "block_size"):
            if a.config[name] != b.config[name]:
                raise SnapshotError(
                    f"cannot compare snapshots of different pools: {name} is {a.config[name]} and "
                    f"{b.config[name]}"
                )
    before = {(info.tier, info.block): info for info in a.blocks if _in_use(info)}
    after = {(info.tier, info.block): info for info in b.blocks if _in_use(info)}
    contents_a = {info.hash: info for info in a.blocks if info.hash}
    contents_b = {info.hash: info for info in b.blocks if info.hash}

    def same(old: BlockInfo, new: BlockInfo) -> bool:
        # A block that is not full, or not yet computed, gets its hash later and keeps its place.
        return old.hash == new.hash or (not old.hash and new.hash not in contents_a)

    stayed = {key for key in before.keys() & after.keys() if same(before[key], after[key])}
    gone = [info for key, info in before.items() if key not in stayed]
    come = [info for key, info in after.items() if key not in stayed]
    changes = [(before[key], after[key]) for key in before if key in stayed]
    return SnapshotDiff(
        leaked=tuple(info for info in b.blocks if info.ref_count > len(info.sequences)),
        appeared=tuple(info for info in come if info.hash not in contents_a),
        vanished=tuple(info for info in gone if info.hash not in contents_b),
        moved=tuple((info, contents_b[info.hash]) for info in gone if info.hash in contents_b),
        ref_changes=tuple((x, y) for x, y in changes if x.ref_count != y.ref_count),
    )


def _in_use(info: BlockInfo) -> bool:
    return info.ref_count > 0 or bool(info.hash)


def _read_row(row: Mapping[str, Any], where: str) -> BlockInfo:
    def cell(name: str, read: Any) -> Any:
        try:
            return read(row[name])
        except (ValueError, TypeError):  # TypeError: the line ends before this column
            shown = repr(row[name])[:60]
            raise SnapshotError(f"{where}: column {name!r} cannot be {shown}") from None

    return BlockInfo(
        block=cell("block", int),
        ref_count=cell("ref_count", int),
        last_access=cell("last_access", lambda text: float(text) if text != "" else None),
        access_count=cell("access_count", int),
        hash=cell("hash", lambda text: bytes.fromhex(text).hex() or None),
        sequences=cell("sequences", _read_sequences),
        tier=cell("tier", _read_text),
    )


def _read_sequences(text: str) -> tuple[Hashable, ...]:
    ids = json.loads(text)
    if not isinstance(ids, list) or any(type(seq) not in (str, int) for seq in ids):
        raise ValueError
    return tuple(ids)


def _read_text(text: str | None) -> str:
    if not text:
        raise ValueError
    return text


def _plain(info: BlockInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in _COLUMNS} | {"sequences": list(info.sequences)}


def _cells(info: BlockInfo) -> tuple[str, ...]:
    tier = "" if info.tier == "device" else f" ({info.tier})"
    return (
        f"{info.block}{tier}",
        str(info.ref_count),
        (info.hash or "")[:12],
        _names(info.sequences),
    )


def _names(sequences: Sequence[Hashable]) -> str:
    """At most four sequences by name: a block of a system prompt may have hundreds."""
    rest = f" and {len(sequences) - 4} more" if len(sequences) > 4 else ""
    return escape(", ".join(repr(seq) for seq in sequences[:4]) + rest)


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before or '-'} → {after or '-'}"
