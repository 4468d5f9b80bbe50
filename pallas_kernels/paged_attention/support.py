"""Which implementations of paged attention run where: one table, read by `supports`.

Nothing is computed and nothing moves here. A kernel that learns a shape changes a line of the
table; the choice itself is `choose`. What is open, and why, as of JAX 0.12.0.1:

    int8 pages in prefill     no kernel converts them yet, on any generation.
    Ampere, head_dim 80, 96   four warps do not divide a small page of such rows (`copy_swizzle`).
    Ampere, prefill of 256    does not fit 255 registers: 244 bytes spill; nor does one of 128 that
                              is not causal: 216 bytes.
    Spills that are left      with a window and a soft cap together: 44 bytes of Ampere's decode of
                              int8 pages, head_dim 256, group 16; 4 of Blackwell's prefill of 256.
    Ampere, `cp.async`        Pallas's interpreter refuses copies without a barrier, so nothing
                              would show that one is awaited; pages come through registers.
    Blackwell, `tcgen05`      not used: prefill would multiply faster than by `mma.sync`.
    12.x (GeForce)            too little shared memory for the ring; no target to compile for.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.pallas_kernels import target
from jaxkv.pallas_kernels.formats import FORMATS

Form = Literal["decode", "prefill"]

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")  # the first that runs is the default


class PagedAttentionFallbackWarning(UserWarning):
    """A CUDA device runs paged attention through XLA, since its kernel does not fit the call."""


class Call(NamedTuple):
    """What a requirement may look at; None where the caller did not say."""

    platform: str
    compute_capability: tuple[int, int] | None
    head_dim: int | None
    block_size: int | None
    dtype: DTypeLike | None
    query_dtype: DTypeLike | None
    group: int | None
    form: Form | None
    causal: bool | None


HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
_AMPERE_HEAD_DIMS = (64, 128, 256)
_INT8_HEAD_DIMS, _INT8_BLOCK_SIZES = (64, 128, 256), (64, 128)


def _generation(call: Call) -> int | None:
    return None if call.compute_capability is None else call.compute_capability[0]


def _float_pages(call: Call) -> bool:
    return call.dtype is None or jnp.dtype(call.dtype) in (jnp.bfloat16, jnp.float16)


def _int8_pages(call: Call) -> bool:
    return call.dtype is not None and jnp.dtype(call.dtype) == FORMATS["int8"].dtype


# What must hold, and the reason if it does not, in order. Unknown properties count as fitting.
_REQUIREMENTS: dict[str, tuple[tuple[Callable[[Call], bool], str], ...]] = {
    "mosaic_gpu": (
        (
            lambda call: call.platform in ("gpu", "cuda"),
            "it needs an NVIDIA GPU and the platform is {platform!r}",
        ),
        (
            lambda call: _generation(call) in (8, 9, 10),
            "it needs compute capability 8.x (Ampere), 9.x (Hopper) or 10.x (Blackwell), the "
            "device has {compute_capability}",
        ),
        (
            lambda call: call.head_dim in (None, *HEAD_DIMS),
            f"head_dim {{head_dim}} is none of {HEAD_DIMS}",
        ),
        (
            lambda call: _generation(call) != 8 or call.head_dim in (None, *_AMPERE_HEAD_DIMS),
            f"on Ampere, head_dim {{head_dim}} is none of {_AMPERE_HEAD_DIMS}",
        ),
        (
            lambda call: _generation(call) != 8 or call.form != "prefill" or call.head_dim != 256,
            "on Ampere, the registers do not hold a prefill of head_dim {head_dim}",
        ),
        (
            lambda call: (
                _generation(call) != 8
                or call.form != "prefill"
                or call.causal in (None, True)
                or call.head_dim in (None, 64)
            ),
            "on Ampere, the registers do not hold a prefill of head_dim {head_dim} that is not "
            "causal",
        ),
        (
            lambda call: call.block_size in (None, *BLOCK_SIZES),
            f"block size {{block_size}} is none of {BLOCK_SIZES}",
        ),
        (
            lambda call: call.group is None or call.group <= 16,
            "{group} query heads share a KV head, more than 16",
        ),
        (
            lambda call: _float_pages(call) or _int8_pages(call),
            "pages of {dtype} are neither bfloat16 nor float16 nor int8",
        ),
        (
            lambda call: (
                call.query_dtype is None
                or (
                    call.dtype is None or jnp.dtype(call.dtype) == jnp.dtype(call.query_dtype)
                    if _float_pages(call)
                    else jnp.dtype(call.query_dtype) in (jnp.bfloat16, jnp.float16)
                )
            ),
            "queries of {query_dtype} do not fit pages of {dtype}",
        ),
        (
            lambda call: not _int8_pages(call) or call.form in (None, "decode"),
            "prefill reads no int8 pages yet",
        ),
        (
            lambda call: not _int8_pages(call) or call.head_dim in (None, *_INT8_HEAD_DIMS),
            f"of int8 pages, head_dim {{head_dim}} is none of {_INT8_HEAD_DIMS}",
        ),
        (
            # A copy of a page's scales must fill whole pieces of 128 bytes of shared memory.
            lambda call: not _int8_pages(call) or call.block_size in (None, *_INT8_BLOCK_SIZES),
            f"of int8 pages, block size {{block_size}} is none of {_INT8_BLOCK_SIZES}",
        ),
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
    query_dtype: DTypeLike | None = None,
    group: int | None = None,
    form: Form | None = None,
    causal: bool | None = None,
    platform: str | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> tuple[bool, str]:
    """Whether an implementation can run, and the reason if not.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      head_dim: of the pages. This and the next six: None where the answer is for any.
      block_size: tokens in a page.
      dtype: of the pages.
      query_dtype: of the queries.
      group: query heads per KV head.
      form: "decode" (one query of each sequence) or "prefill".
      causal: whether queries see no more than what is before them.
      platform: "cpu", "gpu" or "cuda"; None for the device that is traced for.
      compute_capability: of the GPU, as in (9, 0); None likewise.

    Example:
      >>> from jaxkv.pallas_kernels.paged_attention import supports
      >>> supports("xla", head_dim=128)
      (True, '')
      >>> supports("mosaic_gpu", platform="gpu", compute_capability=(8, 0), head_dim=80)[1]
      "on Ampere, head_dim 80 is none of (64, 128, 256); use 'xla'"
    """
    if implementation not in _REQUIREMENTS:
        return False, f"unknown implementation {implementation!r}; one of {IMPLEMENTATIONS}"
    here, capability = target.current()
    platform = platform or here
    if compute_capability is None and platform in ("gpu", "cuda"):
        compute_capability = capability
    call = Call(
        platform, compute_capability, head_dim, block_size, dtype, query_dtype, group, form, causal
    )
    names = {
        name: jnp.dtype(value).name if "dtype" in name and value is not None else value
        for name, value in call._asdict().items()
    }
    for holds, reason in _REQUIREMENTS[implementation]:
        if not holds(call):
            return False, f"{reason.format_map(names)}; use 'xla'"
    return True, ""


def device_of_kernels(*, interpret: bool) -> tuple[str, tuple[int, int] | None]:
    """Platform and compute capability that kernels are chosen for: those of the device.

    Kernels that are interpreted where there is no NVIDIA GPU are those of Hopper.
    """
    platform, compute_capability = target.current()
    if interpret and compute_capability is None:
        return "gpu", (9, 0)
    return platform, compute_capability


def choose(implementation: str | None, *, interpret: bool, **call: Any) -> str:
    """The named implementation if it runs, or the first that does.

    Args:
      implementation: one of `IMPLEMENTATIONS` or None.
      interpret: GPU kernels run interpreted.
      **call: of `supports`.

    Raises:
      NotImplementedError: the named implementation cannot run, with the reason.
    """
    platform, compute_capability = device_of_kernels(interpret=interpret)
    call |= dict(platform=platform, compute_capability=compute_capability)
    if implementation is not None:
        runs, reason = supports(implementation, **call)
        if not runs:
            raise NotImplementedError(f"paged_attention {implementation=}: {reason}")
        return implementation
    runs, reason = supports("mosaic_gpu", **call)
    if runs:
        return "mosaic_gpu"
    if target.current()[1] is not None:
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


_GPUS = {"Ampere (8.0)": (8, 0), "Hopper (9.0)": (9, 0), "Blackwell (10.0)": (10, 0)}
_FORMS: tuple[Form, ...] = ("decode", "prefill")


def support_table() -> str:
    """Markdown: for each GPU generation and kind of step what the kernels take. The rest is XLA's.

    Example:
      >>> print(support_table().splitlines()[3])
      | Hopper (9.0) | kernel: head_dim 64, 80, 96, 128, 256; block 8, 16, 32, 64, 128 | kernel: head_dim 64, 80, 96, 128, 256; block 8, 16, 32, 64, 128 | kernel: head_dim 64, 128, 256; block 64, 128 | XLA |
    """  # noqa: E501
    columns: list[tuple[str, Form]] = [
        (kind, form) for kind in ("bfloat16", "int8") for form in _FORMS
    ]
    names = [f"{form}, {kind.replace('16', '16 or float16')}" for kind, form in columns]
    lines = ["| GPU | " + " | ".join(names) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, capability in _GPUS.items():
        cells = [_cell(capability, jnp.dtype(kind), form) for kind, form in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(capability: tuple[int, int], dtype: DTypeLike, form: Form) -> str:
    device = dict(platform="gpu", compute_capability=capability)

    def kernel(**call: Any) -> bool:
        call |= device
        return supports("mosaic_gpu", dtype=dtype, group=16, form=form, **call)[0]

    dims = [d for d in HEAD_DIMS if kernel(head_dim=d)]
    blocks = [b for b in BLOCK_SIZES if kernel(block_size=b)]
    if not dims or not all(kernel(head_dim=d, block_size=b) for d in dims for b in blocks):
        return "XLA"
    listed = [", ".join(map(str, values)) for values in (dims, blocks)]
    return f"kernel: head_dim {listed[0]}; block {listed[1]}"
