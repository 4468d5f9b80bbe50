"""The cost of paging: paged attention against dense attention over contiguous K and V, on the CPU.

    uv run benchmarks/cpu_attention.py --json out.json

Both sides compute the same softmax in float32. The dense side is a jitted einsum over K and V
[S, H, len, D]; the paged side reads them through a shuffled block table. The two sides alternate
call by call, so that both run under the same conditions.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from turns import machine, median_ms

from jaxkv.pallas_kernels.paged_attention import paged_attention

TARGET = 1.0  # paged over dense, at block sizes from 16


@jax.jit
def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Dense attention of q [S, C, Hq, D], the last C positions, over K and V [S, H, len, D]."""
    seqs, count, heads, dim = q.shape
    q = q.reshape(seqs, count, k.shape[1], -1, dim)
    s = jnp.einsum("schgd,shtd->shgct", q, k) / np.float32(np.sqrt(dim))
    seen = jnp.arange(k.shape[2]) <= k.shape[2] - count + jnp.arange(count)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
    return jnp.einsum("shgct,shtd->schgd", weights, v).reshape(seqs * count, heads, dim)


def measure(seqs: int, count: int, length: int, block: int, args: argparse.Namespace) -> dict:
    """Median milliseconds of both sides; each of `seqs` sequences has `count` queries."""
    heads, kv_heads, dim = args.heads, args.kv_heads, args.head_dim
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, seqs, kv_heads, length, dim)).astype(np.float32)
    q = rng.normal(size=(seqs, count, heads, dim)).astype(np.float32)
    width = -(-length // block)
    tables = 1 + rng.permutation(seqs * width).reshape(seqs, width).astype(np.int32)
    pages = np.zeros((seqs * width + 1, 1, 2, kv_heads, block, dim), np.float32)
    for i, x in enumerate((k, v)):
        pages[tables, 0, i] = x.reshape(seqs, kv_heads, width, block, dim).swapaxes(1, 2)

    @jax.jit
    def paged(q, pages, tables, lens, start):
        return paged_attention(
            q, pages, tables, lens, start, layer=0, max_query_len=count, implementation="xla"
        )

    start = np.arange(seqs + 1, dtype=np.int32) * count
    lens = np.full(seqs, length, np.int32)
    flat = q.reshape(-1, heads, dim)
    sides = {
        "dense": functools.partial(dense, *jax.device_put((q, k, v))),
        "paged": functools.partial(paged, *jax.device_put((flat, pages, tables, lens, start))),
    }
    want, got = (f() for f in sides.values())
    np.testing.assert_allclose(got, want, atol=1e-4)
    ms = median_ms(sides, range(args.rounds))
    return {
        "kind": "decode" if count == 1 else "prefill",
        "sequences": seqs,
        "queries": count,
        "length": length,
        "block_size": block,
        "dense_ms": ms["dense"],
        "paged_ms": ms["paged"],
        "ratio": ms["paged"] / ms["dense"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=9, help="query heads (SmolLM2-135M's)")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--blocks", default="16,32,64", help="block sizes")
    parser.add_argument("--lengths", default="256,512,1024,2048")
    parser.add_argument("--streams", default="1,8,32", help="sequences of a decode step")
    parser.add_argument("--chunk", type=int, default=256, help="queries of a prefill step")
    parser.add_argument("--rounds", type=int, default=31, help="timed calls of each side")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    shapes = [(seqs, 1) for seqs in numbers(args.streams)] + [(1, args.chunk)]
    cases = [
        (*shape, length, block)
        for shape in shapes
        for length in numbers(args.lengths)
        for block in numbers(args.blocks)
        if length % block == 0 and length >= shape[1]
    ]
    console = Console(stderr=True)
    rows = [measure(*case, args) for case in track(cases, "cases", console=console, transient=True)]
    table = Table(title=f"Paged over dense attention, float32; target {TARGET}")
    for column in ("kind", "sequences", "length", "block", "dense ms", "paged ms", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["kind"], str(row["sequences"]), str(row["length"]), str(row["block_size"]),
            f"{row['dense_ms']:.3f}", f"{row['paged_ms']:.3f}", f"{row['ratio']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if args.json:
        meta = machine() | {"heads": [args.heads, args.kv_heads, args.head_dim]}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
