"""What benchmarks that compare calls share: the calls take turns, and what machine it was."""

import os
import platform
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np


def median_ms[Name: Hashable](
    calls: dict[Name, Callable[[], Any]], rounds: Iterable[int]
) -> dict[Name, float]:
    """Median milliseconds of each call, results awaited; each is called once in every round.

    So a drift of the machine's speed touches all alike. What compiles must have been called before.
    """
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in rounds:
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * float(np.median(t)) for name, t in times.items()}


def machine() -> dict[str, Any]:
    """What a result is worth nothing without."""
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
    }
