"""Requirements of the implementations of paged attention: one table, read by `supports`.

Nothing is computed and nothing moves here. Supporting a new shape changes a line of the table;
`choose` selects the implementation. Open items and their reasons, as of JAX 0.12.0.1:

    int8 pages in prefill     no kernel converts them yet, on any generation.
    Ampere, head_dim 80, 96   four warps do not divide a small page of such rows (`copy_swizzle`).
    Ampere, prefill of 256    does not fit 255 registers (244 bytes spill), nor does non-causal
                              prefill of 128 (216 bytes).
    Remaining spills          with a window and a soft cap together: 44 bytes in Ampere's decode of
                              int8 pages, head_dim 256, group 16; 4 in Blackwell's prefill of 256.
    Ampere, `cp.async`        Pallas's interpreter rejects copies without a barrier, so no test can
                              detect a missing wait; pages are loaded through registers.
    Blackwell, `tcgen05`      not used: prefill would multiply faster than by `mma.sync`.
    12.x (GeForce)            too little shared memory for the ring; no target to compile for.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.pallas_kernels import target
from jaxkv.pallas_kernels.formats import FORMATS

Form = Literal["decode", "prefill"]

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")  # the first that runs is the default


class PagedAttentionFallbackWarning(UserWarning):
    """Paged attention runs through XLA on a CUDA device, since no kernel supports the call."""


class Call(NamedTuple):
    """Properties of a call that requirements check; None if unknown."""

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


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _generation(call: Call) -> int | None:
    return None if call.compute_capability is None else call.compute_capability[0]


def _float_pages(call: Call) -> bool:
    return call.dtype is None or jnp.dtype(call.dtype) in (jnp.bfloat16, jnp.float16)


def _int8_pages(call: Call) -> bool:
    return call.dtype is not None and jnp.dtype(call.dtype) == FORMATS["int8"].dtype


# Requirements and the reasons if they fail, in order. Unknown properties count as supported.
_REQUIREMENTS: dict[str, tuple[tuple[Callable[[Call], bool], str], ...]] = {
    "mosaic_gpu": (
        (
            lambda call: call.platform in ("gpu", "cuda"),
            "the GPU kernel needs an NVIDIA GPU, got platform {platform!r}",
        ),
        (
            lambda call: _generation(call) in (8, 9, 10),
            "the GPU kernel needs compute capability 8.x (Ampere), 9.x (Hopper) or 10.x "
            "(Blackwell), got {compute_capability}",
        ),
        (
            lambda call: call.head_dim in (None, *HEAD_DIMS),
            f"head_dim={{head_dim}} is not supported (one of {_listed(HEAD_DIMS)})",
        ),
        (
            lambda call: _generation(call) != 8 or call.head_dim in (None, *_AMPERE_HEAD_DIMS),
            "head_dim={head_dim} is not supported on Ampere "
            f"(one of {_listed(_AMPERE_HEAD_DIMS)})",
        ),
        (
            lambda call: _generation(call) != 8 or call.form != "prefill" or call.head_dim != 256,
            "head_dim={head_dim} is not supported in prefill on Ampere: it does not fit the "
            "registers",
        ),
        (
            lambda call: (
                _generation(call) != 8
                or call.form != "prefill"
                or call.causal in (None, True)
                or call.head_dim in (None, 64)
            ),
            "head_dim={head_dim} is not supported in non-causal prefill on Ampere: it does not fit "
            "the registers",
        ),
        (
            lambda call: call.block_size in (None, *BLOCK_SIZES),
            f"block_size={{block_size}} is not supported (one of {_listed(BLOCK_SIZES)})",
        ),
        (
            lambda call: call.group is None or call.group <= 16,
            "{group} query heads per KV head are not supported (at most 16)",
        ),
        (
            lambda call: _float_pages(call) or _int8_pages(call),
            "pages of {dtype} are not supported (one of bfloat16, float16, int8)",
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
            "queries of {query_dtype} are not supported with pages of {dtype}",
        ),
        (
            lambda call: not _int8_pages(call) or call.form in (None, "decode"),
            "int8 pages are not supported in prefill yet",
        ),
        (
            lambda call: not _int8_pages(call) or call.head_dim in (None, *_INT8_HEAD_DIMS),
            "head_dim={head_dim} is not supported with int8 pages "
            f"(one of {_listed(_INT8_HEAD_DIMS)})",
        ),
        (
            # A copy of a page's scales must fill whole pieces of 128 bytes of shared memory.
            lambda call: not _int8_pages(call) or call.block_size in (None, *_INT8_BLOCK_SIZES),
            "block_size={block_size} is not supported with int8 pages "
            f"(one of {_listed(_INT8_BLOCK_SIZES)})",
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
    """Returns whether an implementation can run, and the reason if not.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      head_dim: head_dim of the pages. None, here and below up to `causal`: not checked.
      block_size: tokens per page.
      dtype: dtype of the pages.
      query_dtype: dtype of the queries.
      group: query heads per KV head.
      form: "decode" (one query per sequence) or "prefill".
      causal: whether a query sees only positions up to its own.
      platform: "cpu", "gpu" or "cuda"; None: the platform that is traced for.
      compute_capability: compute capability of the GPU, as in (9, 0); None: that of the GPU that is
        traced for.

    Example:
      >>> from jaxkv.pallas_kernels.paged_attention import supports
      >>> supports("xla", head_dim=128)
      (True, '')
      >>> supports("mosaic_gpu", platform="gpu", compute_capability=(8, 0), head_dim=80)[1]
      "head_dim=80 is not supported on Ampere (one of 64, 128, 256); use 'xla'"
    """
    if implementation not in _REQUIREMENTS:
        return (
            False,
            f"unknown implementation {implementation!r} (one of {_listed(IMPLEMENTATIONS)})",
        )
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
    """Platform and compute capability that kernels are chosen for: those that are traced for.

    Without an NVIDIA GPU, interpreted kernels are Hopper's.
    """
    platform, compute_capability = target.current()
    if interpret and compute_capability is None:
        return "gpu", (9, 0)
    return platform, compute_capability


def choose(implementation: str | None, *, interpret: bool, **call: Any) -> str:
    """Returns the named implementation, or the first one that can run.

    Args:
      implementation: one of `IMPLEMENTATIONS`, or None for the first one that can run.
      interpret: whether GPU kernels run interpreted.
      **call: arguments of `supports`.

    Raises:
      NotImplementedError: the named implementation cannot run; the error gives the reason.
    """
    platform, compute_capability = device_of_kernels(interpret=interpret)
    call |= dict(platform=platform, compute_capability=compute_capability)
    if implementation is not None:
        runs, reason = supports(implementation, **call)
        if not runs:
            raise NotImplementedError(f"paged_attention {implementation=} cannot run: {reason}")
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
        "paged_attention falls back to XLA, which is slower: "
        f"{reason.removesuffix("; use 'xla'")}. Pass implementation='xla' to silence this warning.",
        PagedAttentionFallbackWarning,
        stacklevel=4,
    )


_GPUS = {"Ampere (8.0)": (8, 0), "Hopper (9.0)": (9, 0), "Blackwell (10.0)": (10, 0)}
_FORMS: tuple[Form, ...] = ("decode", "prefill")


def support_table() -> str:
    """Markdown table of the shapes that the kernels support, by GPU generation and kind of step.

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
    return f"kernel: head_dim {_listed(dims)}; block {_listed(blocks)}"
