"""Helpers of benchmarks that compare calls: timing in turn, and a record of the machine."""

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
    """Median milliseconds of each call, up to its result; each is called once in every round.

    A drift of the machine's speed thus affects all alike. Calls that compile must have run before.
    """
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in rounds:
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * float(np.median(t)) for name, t in times.items()}


def machine() -> dict[str, Any]:
    """Versions and load of the machine, to store with a result."""
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
    }
