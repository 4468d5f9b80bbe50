"""Which implementations of paged attention run where: one table, read by `supports`.

Nothing is computed and nothing moves here. A kernel that learns a shape changes a line of the
table; the choice itself is `choose`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")  # the first that runs is the default


class PagedAttentionFallbackWarning(UserWarning):
    """A CUDA device runs paged attention through XLA, since its kernel does not fit the call."""


class Call(NamedTuple):
    """What a requirement may look at; None where the caller did not say."""

    platform: str
    compute_capability: str | None
    head_dim: int | None
    block_size: int | None
    dtype: DTypeLike | None
    group: int | None


# What must hold, and the reason if it does not, in order. Unknown properties count as fitting.
_REQUIREMENTS: dict[str, tuple[tuple[Callable[[Call], bool], str], ...]] = {
    "mosaic_gpu": (
        (
            lambda call: call.platform in ("gpu", "cuda"),
            "it needs an NVIDIA GPU and the platform is {platform!r}",
        ),
        (
            lambda call: (call.compute_capability or "").split(".")[0] == "9",
            "it needs compute capability 9.x (Hopper), the device has {compute_capability!r}",
        ),
        (lambda call: False, "the kernel is not there yet"),
    ),
    "xla": (),
    "reference": (),
}


def supports(
    implementation: str,
    *,
    head_dim: int | None = None,
    block_size: int | None = None,
    dtype: DTypeLike | None = None,
    group: int | None = None,
    platform: str | None = None,
    compute_capability: str | None = None,
) -> tuple[bool, str]:
    """Whether an implementation can run, and the reason if not.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      head_dim: of the pages.
      block_size: tokens in a page.
      dtype: of the pages.
      group: query heads per KV head.
      platform: "cpu", "gpu" or "cuda"; JAX's default backend when None.
      compute_capability: of the GPU, as in "9.0"; the first device's when None.

    Example:
      >>> from pallas_kernels.paged_attention import supports
      >>> supports("xla", head_dim=128)
      (True, '')
      >>> supports("mosaic_gpu", platform="gpu", compute_capability="8.0")[1]
      "it needs compute capability 9.x (Hopper), the device has '8.0'; use 'xla'"
    """
    if implementation not in _REQUIREMENTS:
        return False, f"unknown implementation {implementation!r}; one of {IMPLEMENTATIONS}"
    platform = platform or jax.default_backend()
    compute_capability = compute_capability or _compute_capability(platform)
    call = Call(platform, compute_capability, head_dim, block_size, dtype, group)
    for holds, reason in _REQUIREMENTS[implementation]:
        if not holds(call):
            return False, f"{reason.format_map(call._asdict())}; use 'xla'"
    return True, ""


def choose(implementation: str | None, **call) -> str:
    """The named implementation if it runs, or the first that does.

    Args:
      implementation: one of `IMPLEMENTATIONS` or None.
      **call: of `supports`.

    Raises:
      NotImplementedError: the named implementation cannot run, with the reason.
    """
    if implementation is not None:
        runs, reason = supports(implementation, **call)
        if not runs:
            raise NotImplementedError(f"paged_attention {implementation=}: {reason}")
        return implementation
    runs, reason = supports("mosaic_gpu", **call)
    if runs:
        return "mosaic_gpu"
    if (_compute_capability(jax.default_backend()) or "")[:1].isdigit():  # ROCm has "gfx90a" there
        _warn_once(reason)
    return "xla"


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"paged_attention does not take its GPU kernel here: {reason.removesuffix("; use 'xla'")}. "
        "It runs through XLA, slower; implementation='xla' says that this is meant.",
        PagedAttentionFallbackWarning,
        stacklevel=4,
    )


def _compute_capability(platform: str) -> str | None:
    """Of the first device, if that is what `platform` names."""
    if platform not in ("gpu", "cuda") or jax.default_backend() != "gpu":
        return None
    return getattr(jax.devices()[0], "compute_capability", None)
