"""The JAX process of the GPU benchmark: this library's kernels, JAX's own, and copies.

A step has one call per layer of the case, each on separate keys and values and with the previous
call's output as queries, so that no call can be dropped, moved or merged with another.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")

import gpu_rows
import jax
import jax.numpy as jnp
import numpy as np
from gpu_rows import AttentionCheck, Case, Copy, NotHere, OperationCheck, PeerCheck
from jax import lax

from jaxkv.pallas_kernels.paged_attention import paged_attention


def start(seed: int, dry: bool) -> gpu_rows.Engine:
    """Returns this process's engine. A dry run computes on the CPU, in XLA, and needs no GPU."""
    if dry:
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "")
    stats = device.memory_stats() or {}
    about = {
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "compute_capability": capability,
        "cuda": getattr(device.client, "platform_version", "").splitlines(),
        "bytes_limit": stats.get("bytes_limit", 2**32),
    }
    # The compute capability of an AMD GPU is a name and not a number.
    about["nvidia"] = device.platform == "gpu" and capability.replace(".", "").isdigit()
    rng = np.random.default_rng(seed)
    return gpu_rows.Engine(
        about,
        functools.partial(_row, rng=rng, dry=dry, limit=int(0.9 * about["bytes_limit"])),
        lambda: jnp.arange(8).sum().block_until_ready(),
    )


def _row(task: gpu_rows.Task, rng: np.random.Generator, dry: bool, limit: int) -> dict:
    match task:
        case Copy():
            return copy_bandwidth(2**22 if dry else 2**32)
        case Case():
            return time_case(task, rng, dry, limit)
        case PeerCheck():
            return check_peer(task.case, rng, dry)
        case AttentionCheck() | OperationCheck():
            import gpu_checks

            return gpu_checks.check(task, rng, "xla" if dry else "mosaic_gpu")
    raise ValueError(f"unknown row {task}")


def copy_bandwidth(size: int) -> dict:
    """Bytes read and written per second by copies of `size` bytes, the better of two methods."""
    start = noise((size // 4,), "float32", 0)
    ways = {
        "kernel": jax.jit(lambda x: x * jnp.float32(0.5)),
        "memcpy": jax.jit(lambda x: jnp.array(x, copy=True)),
        "read": jax.jit(lambda x: x.max()),
    }
    rates = {}
    for name, way in ways.items():
        row = gpu_rows.measure(
            lambda _, way=way: way(start), lambda out: out.block_until_ready(), 1, 1
        )
        rates[name] = (1 if name == "read" else 2) * size / row["us"] * 1e6
    return {"bytes_per_s": max(rates["kernel"], rates["memcpy"]), "ways": rates, "bytes": size}


def time_case(case: Case, rng: np.random.Generator, dry: bool, limit: int) -> dict:
    """Times a case; returns its times and rates."""
    if case.resident_bytes > limit:
        needed, there = (f"{x / 2**30:.0f} GiB" for x in (case.resident_bytes, limit))
        raise NotHere(f"keys and values need {needed}, the limit per row is {there}")
    layers, sets = case.rotation
    step, q, inputs = (own if case.engine == "jaxkv" else peer)(case, rng, dry)
    step = jax.jit(step)
    began = time.perf_counter()
    out = step(q, inputs[0]).block_until_ready()
    compiled = time.perf_counter() - began
    if not bool(jax.jit(lambda x: jnp.isfinite(x).all())(out)):
        raise ValueError("the output is not finite")
    times = gpu_rows.measure(
        lambda i: step(q, inputs[i]), lambda out: out.block_until_ready(), sets, layers
    )
    seconds = times["us"] / 1e6
    return times | {
        "compile_s": compiled,
        "bytes": case.read_bytes,
        "bytes_per_s": case.read_bytes / seconds,
        "flops_per_s": case.flops / seconds,
        "rotation": [layers, sets],
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def noise(shape: tuple[int, ...], dtype: str, seed) -> jax.Array:
    """Uniform noise of variance 1 (int8: all codes), hashed from each element's index.

    One pass without temporaries, hashed per axis: a pool has more than 2^32 elements.
    """
    x = jnp.full(shape, seed, jnp.uint32)
    for axis in range(len(shape)):
        x = (x ^ lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(0x9E3779B1)
        x ^= x >> 15
    if dtype == "int8":
        return lax.bitcast_convert_type((x >> 24).astype(jnp.uint8), jnp.int8)
    unit = x.astype(jnp.float32) * jnp.float32(2**-31) - jnp.float32(1)
    return (unit * jnp.float32(3**0.5)).astype(dtype)


def _seed(rng: np.random.Generator) -> jax.Array:
    return jnp.uint32(rng.integers(2**32, dtype=np.uint32))


def own(case: Case, rng: np.random.Generator, dry: bool):
    """This library's step, its queries [T, Hq, D] and its sets: one pool, one table per set."""
    layers, sets = case.rotation
    width = -(-case.context // case.block)
    num_blocks = sets * case.batch * width + 1
    shape = (num_blocks, layers, 2, case.kv_heads, case.block, case.dim)
    pages = noise(shape, case.dtype, _seed(rng))
    scales = None
    if case.dtype == "int8":
        scales = jnp.abs(noise(shape[:-1], "float32", _seed(rng))) * jnp.float32(0.01)
    tables = rng.permutation(num_blocks - 1).reshape(sets, case.batch, width) + 1
    lens = jnp.asarray(case.lengths)
    starts = jnp.arange(case.batch + 1, dtype=jnp.int32) * case.queries
    inputs = [(pages, scales, jnp.asarray(t, jnp.int32), lens, starts) for t in tables]
    q = noise((case.batch * case.queries, case.heads, case.dim), case.query_dtype, _seed(rng))
    implementation = "xla" if dry else "mosaic_gpu"

    def step(q, inputs):
        pages, scales, table, lens, starts = inputs
        for layer in range(layers):
            q = paged_attention(
                q, pages, table, lens, starts, layer=layer, kv_scales=scales,
                max_query_len=case.queries, implementation=implementation,
            )  # fmt: skip
        return q

    return step, q, inputs


# -- peers -----------------------------------------------------------------------------------


class Peer(NamedTuple):
    """Another implementation.

    Attributes:
      layout: layout of its keys and values, "dense" or one of `_LAYOUTS`.
      attend: function of (case, dry, q [S, queries, Hq, D], k, v, table i32[S, blocks]) with an
        output of q's shape.
    """

    layout: str
    attend: Callable[..., jax.Array]


def _cudnn_dense(case: Case, dry: bool, q, k, v, table):
    implementation: Any = "xla" if dry else "cudnn"
    causal = case.form == "prefill"
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)


def _cudnn_paged(case: Case, dry: bool, q, k, v, table, heads_first=False):
    from jax._src.cudnn.fused_attention_stablehlo import MaskType
    from jax._src.cudnn.fused_attention_stablehlo import paged_attention as cudnn_paged_attention

    lens = jnp.asarray(case.lengths)
    pages = table[:, None, :, None]
    if heads_first:
        q = q.swapaxes(1, 2)
    out = cudnn_paged_attention(
        q, k, v, jnp.full_like(lens, case.queries), lens, pages, pages,
        scale=case.dim**-0.5,
        mask_type=MaskType.PADDING if case.form == "decode" else MaskType.PADDING_CAUSAL,
        qkv_layout="BNTH" if heads_first else "BTNH",
    )  # fmt: skip
    return out.swapaxes(1, 2) if heads_first else out


def _pallas_triton(case: Case, dry: bool, q, k, v, table):
    with warnings.catch_warnings():  # its deprecation is why it is compared
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as op
    if case.form != "decode":
        raise NotHere("only decode is supported")
    splits = 16 if case.batch > 1 else 64  # its default is 16; a single sequence needs more
    scale = jnp.asarray(case.dim**-0.5, q.dtype)  # it does not scale logits
    return op.paged_attention(
        q[:, 0] * scale, k, v, table, jnp.asarray(case.lengths),
        k_splits=min(splits, table.shape[1]),
        pages_per_compute_block=max(1, 128 // case.block),  # its default at blocks of 16
        interpret=dry,
    )[:, None]  # fmt: skip


_PEERS = {
    "cudnn_dense": Peer("dense", _cudnn_dense),
    "cudnn_paged": Peer("block first", _cudnn_paged),
    "cudnn_paged_bnth": Peer("heads in block", functools.partial(_cudnn_paged, heads_first=True)),
    "pallas_triton": Peer("heads first", _pallas_triton),
}
# Where the axes (block, token in block, KV head) of pages lie.
_LAYOUTS = {"block first": (0, 1, 2), "heads in block": (0, 2, 1), "heads first": (2, 0, 1)}


def _shape(case: Case, layout: str) -> tuple[int, ...]:
    if layout == "dense":
        return case.batch, case.context, case.kv_heads, case.dim
    axes = case.batch * (case.context // case.block), case.block, case.kv_heads
    return (*(axes[i] for i in _LAYOUTS[layout]), case.dim)


def _table(case: Case, rng: np.random.Generator) -> jax.Array:
    """Block table i32[S, blocks] in which every block of the pages appears once."""
    if not case.block:
        return jnp.zeros((case.batch, 0), jnp.int32)
    width = case.context // case.block
    return jnp.asarray(rng.permutation(case.batch * width).reshape(-1, width), jnp.int32)


def peer(case: Case, rng: np.random.Generator, dry: bool):
    """As `own`, for another implementation: each layer of each set has separate arrays."""
    other = _PEERS[case.engine]
    layers, sets = case.rotation
    shape = _shape(case, other.layout)

    def keys_or_values():
        return noise(shape, case.dtype, _seed(rng))

    inputs = [
        [(keys_or_values(), keys_or_values(), _table(case, rng)) for _ in range(layers)]
        for _ in range(sets)
    ]
    q = noise((case.batch, case.queries, case.heads, case.dim), case.query_dtype, _seed(rng))

    def step(q, inputs):
        for k, v, table in inputs:
            q = other.attend(case, dry, q, k, v, table)
        return q

    return step, q, inputs


def check_peer(case: Case, rng: np.random.Generator, dry: bool) -> dict:
    """Compares a peer with dense attention in float32, on keys and values in the peer's layout."""
    other = _PEERS[case.engine]
    k, v = (
        noise((case.batch, case.context, case.kv_heads, case.dim), case.dtype, _seed(rng))
        for _ in range(2)
    )
    q = noise((case.batch, case.queries, case.heads, case.dim), case.query_dtype, _seed(rng))
    table = _table(case, rng)

    def laid_out(x):
        if other.layout == "dense":
            return x
        blocks = x.reshape(-1, case.block, case.kv_heads, case.dim)
        pages = jnp.zeros_like(blocks).at[table.reshape(-1)].set(blocks)
        return pages.transpose(*_LAYOUTS[other.layout], 3)

    @jax.jit
    def difference(got, q, k, v):
        want = jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in (q, k, v)),
            is_causal=case.form == "prefill", implementation="xla",
        )  # fmt: skip
        return jnp.abs(got.astype(jnp.float32) - want).max()

    k_pages, v_pages = jax.jit(laid_out)(k), jax.jit(laid_out)(v)
    got = jax.jit(functools.partial(other.attend, case, dry))(q, k_pages, v_pages, table)
    with jax.default_matmul_precision("highest"):
        error = float(difference(got, q, k, v))
    return gpu_rows.verdict(error, 2e-2)
