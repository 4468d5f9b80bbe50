"""Text that commands read: UTF-8 lines."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxkv._util import text_lines
from jaxkv.errors import ConfigError


def read_lines(path: str | Path) -> list[str]:
    """Lines of a UTF-8 text file; of standard input for "-".

    Raises:
      ConfigError: the file is not UTF-8.
      OSError: it cannot be read.
    """
    raw = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    try:
        return text_lines(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        where = "standard input" if str(path) == "-" else str(path)
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{where}, line {line}: not UTF-8 text ({error.reason})") from None
