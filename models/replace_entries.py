"""Entries of a folder replaced together: a process killed at any point leaves the old or the new.

The new entries are written to a folder of their own inside the folder. One rename of it is the
moment from which they count; after that each takes its place, and an interrupted replacement is
completed by whoever reads or writes the folder next.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxkv.models.errors import CheckpointError

# Folders inside the folder: entries being written, entries that count, entries replaced, and,
# inside the first two, names of entries that go without a successor.
_WRITING, _READY, _REPLACED = ".jaxkv-writing", ".jaxkv-ready", ".jaxkv-replaced"
_GONE = ".jaxkv-gone"


@contextlib.contextmanager
def replaced_entries(folder: Path, *, gone: Iterable[str] = ()) -> Iterator[Path]:
    """A folder to write new entries of `folder` to; they take their places when the block ends.

    Args:
      folder: an existing folder; its other entries stay as they are.
      gone: names of entries to remove, unless the block writes them.

    Raises:
      OSError: the folder cannot be written to.
    """
    complete_replacement(folder)
    writing = folder / _WRITING
    if writing.is_dir():
        shutil.rmtree(writing)  # of a save that was interrupted
    (writing / _GONE).mkdir(parents=True)
    try:
        yield writing
        for name in gone:
            if not (writing / name).exists() and (folder / name).exists():
                (writing / _GONE / name).touch()
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    writing.rename(folder / _READY)
    complete_replacement(folder)


def complete_replacement(folder: Path) -> None:
    """Completes a replacement that was interrupted once its entries were whole.

    Raises:
      CheckpointError: there is one, and the folder cannot be written to.
    """
    ready, replaced = folder / _READY, folder / _REPLACED
    try:
        if ready.is_dir():
            replaced.mkdir(exist_ok=True)
            for entry in [x for x in ready.iterdir() if x.name != _GONE]:
                _set_aside(folder / entry.name, replaced)
                entry.rename(folder / entry.name)
            for mark in (ready / _GONE).iterdir() if (ready / _GONE).is_dir() else ():
                _set_aside(folder / mark.name, replaced)
            shutil.rmtree(ready)
    except OSError as error:
        raise CheckpointError(f"{folder}: a save was interrupted and must be completed, which "
                              f"failed: {error}") from None  # fmt: skip
    if replaced.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)


def _set_aside(entry: Path, replaced: Path) -> None:
    if not entry.exists() and not entry.is_symlink():
        return
    old = replaced / entry.name
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)
    entry.rename(old)
