"""Progress bar of long-running work."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(*, shown: bool = True) -> Progress:
    """A bar on standard error: description, count and elapsed time; erased when it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
