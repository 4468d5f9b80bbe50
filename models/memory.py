"""Whether a model's weights fit the memory, asked before they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.errors import CheckpointError

_MEMINFO = Path("/proc/meminfo")
# Limit and use of the control group that a container runs in: version 2, then version 1.
_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
     Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)  # fmt: skip


def check_fits(parameters: int, dtype: Any, source: str) -> None:
    """Refuses weights that are larger than the memory that is available for them.

    Args:
      parameters: elements of all weights.
      dtype: their type once they are loaded.
      source: the checkpoint's name, for the error message.

    Raises:
      CheckpointError: they do not fit; the error has the sizes and what would fit.
    """
    available = available_bytes()
    needed = parameters * jnp.dtype(dtype).itemsize
    if available is None or needed <= available:
        return
    if jnp.dtype(dtype).itemsize > 2 and 2 * parameters <= available:
        advice = f"in bfloat16 they would take {_gib(2 * parameters)} and fit: dtype='bfloat16'"
    else:
        most = available / 2 / 1e9
        advice = f"choose a model of at most {most:.3g} billion parameters, in bfloat16"
    raise CheckpointError(
        f"{source}: its {parameters / 1e9:.3g} billion parameters in {jnp.dtype(dtype).name} take "
        f"{_gib(needed)}, and {_gib(available)} of memory are available; {advice}"
    )


def available_bytes() -> int | None:
    """Bytes that new arrays on JAX's default device can take; None if that is not known."""
    device = jax.config.jax_default_device or jax.local_devices()[0]
    if isinstance(device, str) or device.platform == "cpu":
        return _available_on_host()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _available_on_host() -> int | None:
    found = []
    try:
        for line in _MEMINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):  # not Linux
        pass
    for limit, used in _CONTROL_GROUPS:
        try:
            found.append(int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found, default=None)


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
