"""The number of programs that JAX has compiled, whatever it compiled them for."""

from __future__ import annotations

import threading
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also of a program from JAX's cache


class _Counter(threading.local):
    count = 0


_here = _Counter()


def _listen(event: str, *_: Any, **__: Any) -> None:
    if event == _COMPILED:
        _here.count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compiled() -> int:
    """Programs that this thread has compiled, or read from JAX's compilation cache."""
    return _here.count
