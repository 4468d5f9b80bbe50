"""The PyTorch process of the GPU benchmark, used if PyTorch is installed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import gpu_rows
import numpy as np
import torch
from gpu_rows import Case, NotHere, PeerCheck
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.experimental._paged_attention import PagedAttention


def start(seed: int, dry: bool) -> gpu_rows.Engine:
    """Returns this process's engine; a dry run computes on the CPU and compiles nothing."""
    if not dry and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU")
    torch.manual_seed(seed)
    device = torch.device("cpu" if dry else "cuda")
    about = {
        "torch": torch.__version__,
        "device": "cpu" if dry else torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
    }
    run = functools.partial(_row, device=device, rng=np.random.default_rng(seed))
    return gpu_rows.Engine(
        about, torch.no_grad()(run), lambda: torch.arange(8, device=device).sum().item()
    )


def _row(task: Case | PeerCheck, device: torch.device, rng: np.random.Generator) -> dict:
    if isinstance(task, PeerCheck):
        return _check(task.case, device, rng)
    case, free = task, 2**32
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    if case.resident_bytes > 0.8 * free:
        needed, there = (f"{x / 2**30:.0f} GiB" for x in (case.resident_bytes, free))
        raise NotHere(f"keys and values need {needed}, more than 80 % of the free {there}")
    layers, sets = case.rotation
    attend, place = _attention(case, device, rng)
    inputs = [tuple(place(_noise(case, device)) for _ in range(2)) for _ in range(layers * sets)]
    shape = (case.batch, case.heads, case.queries, case.dim)
    q = torch.randn(shape, device=device, dtype=getattr(torch, case.dtype))
    began = time.perf_counter()
    out = attend(q, *inputs[0])
    _wait(device)
    compiled = time.perf_counter() - began
    if not out.isfinite().all():
        raise ValueError("the output is not finite")
    times = gpu_rows.measure(
        lambda i: attend(q, *inputs[i]), lambda _: _wait(device), len(inputs), 1
    )
    seconds = times["us"] / 1e6
    return times | {
        "compile_s": compiled,
        "bytes": case.read_bytes,
        "bytes_per_s": case.read_bytes / seconds,
        "flops_per_s": case.flops / seconds,
        "rotation": [1, len(inputs)],
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _noise(case: Case, device: torch.device):
    """Keys or values [batch, KV heads, context, dim]."""
    shape = (case.batch, case.kv_heads, case.context, case.dim)
    return torch.randn(shape, device=device, dtype=getattr(torch, case.dtype))


def _attention(
    case: Case, device: torch.device, rng: np.random.Generator
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(attend, place): attention of (q [batch, heads, queries, dim], k, v), and the conversion of k
    or v [batch, KV heads, context, dim] to its layout."""
    causal = case.form == "prefill"
    grouped = case.heads != case.kv_heads
    if case.engine == "torch_sdpa":
        attend = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=grouped
        )
        return attend, lambda x: x
    # Not compiled on a CPU, where only the result matters.
    function = flex.flex_attention
    if device.type == "cuda":
        torch.compiler.reset()  # recompilations of a function are limited
        function = torch.compile(function, dynamic=False)
    if case.engine == "torch_flex":
        if not causal:
            raise NotHere("decode is measured by torch_flex_paged")
        mask = flex.create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, case.queries, case.context, device=device
        )
        return functools.partial(function, block_mask=mask, enable_gqa=grouped), lambda x: x
    if causal:
        raise NotHere("only decode is implemented here")
    mask, slots = _pages(case, device, rng)
    attend = functools.partial(function, block_mask=mask, enable_gqa=grouped)

    def place(x):
        """Keys or values as [1, KV heads, slots, dim]."""
        x = x.transpose(0, 1).reshape(case.kv_heads, -1, case.dim)
        return torch.empty_like(x).index_copy_(1, slots, x)[None]

    return attend, place


def _pages(case: Case, device: torch.device, rng: np.random.Generator):
    """The mask of shuffled pages, and the slot of each token in the order of the sequences."""
    width = case.context // case.block
    paged = PagedAttention(case.batch * width, case.block, case.batch, device=str(device))
    paged.empty_pages = rng.permutation(case.batch * width).tolist()
    for s in range(case.batch):
        sequence = torch.tensor(s, device=device)
        paged.reserve(sequence, torch.tensor(case.context, device=device))
    mask = flex.create_block_mask(
        flex.noop_mask, case.batch, None, 1, case.context, device=device,
        BLOCK_SIZE=(flex._DEFAULT_SPARSE_BLOCK_SIZE, case.block),
    )  # fmt: skip
    table = paged.page_table[:, :width]
    slots = table[:, :, None] * case.block + torch.arange(case.block, device=device)
    return paged.convert_logical_block_mask(mask), slots.reshape(-1)


def _check(case: Case, device: torch.device, rng: np.random.Generator) -> dict:
    """Compares with attention in float32."""
    attend, place = _attention(case, device, rng)
    k, v = _noise(case, device), _noise(case, device)
    shape = (case.batch, case.heads, case.queries, case.dim)
    q = torch.randn(shape, device=device, dtype=getattr(torch, case.dtype))
    got = attend(q, place(k), place(v)).float()
    group = case.heads // case.kv_heads
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = q.float() @ k.transpose(-1, -2) * case.dim**-0.5
    if case.form == "prefill":
        later = torch.ones(case.queries, case.context, dtype=torch.bool, device=device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    want = logits.softmax(-1) @ v
    return gpu_rows.verdict(float((got - want).abs().max()), 2e-2)
