"""Cascade attention against plain paged attention, on sequences that share a prefix.

    uv run benchmarks/cascade.py --json out.json

One layer of a decode step on this device, in float32 on a CPU and bfloat16 elsewhere; each sequence
has some tokens after the shared prefix. The two sides alternate call by call, so that both run
under the same conditions.
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

import jaxkv
from jaxkv.pallas_kernels.paged_attention import paged_attention
from jaxkv.pallas_kernels.paged_attention.cascade import cascade_attention


def measure(seqs: int, prefix: int, args: argparse.Namespace) -> dict:
    """Median milliseconds of both sides for `seqs` sequences that share `prefix` tokens."""
    block, own = args.block, -(-args.own // args.block)
    shared = prefix // block
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    rng = np.random.default_rng(0)
    ids = 1 + rng.permutation(shared + seqs * own).astype(np.int32)
    tables = np.concatenate(
        [np.broadcast_to(ids[:shared], (seqs, shared)), ids[shared:].reshape(seqs, own)], axis=1
    )
    lens = np.full(seqs, shared * block + args.own, np.int32)
    found = jaxkv.shared_prefix_groups(tables, lens, block_size=block, min_tokens=block)
    shape = len(ids) + 1, 1, 2, args.kv_heads, block, args.head_dim
    pages = jnp.asarray(rng.normal(size=shape), dtype)
    q = jnp.asarray(rng.normal(size=(seqs, args.heads, args.head_dim)), dtype)

    @jax.jit
    def plain(q, pages, tables, lens, found):
        return paged_attention(q, pages, tables, lens, layer=0)

    @jax.jit
    def cascade(q, pages, tables, lens, found):
        return cascade_attention(q, pages, tables, lens, **found._asdict(), layer=0)

    x = jax.device_put((q, pages, tables, lens, found))
    calls = {"plain": plain, "cascade": cascade}
    sides = {name: functools.partial(f, *x) for name, f in calls.items()}
    want, got = (np.asarray(f(), np.float32) for f in sides.values())
    np.testing.assert_allclose(got, want, atol=1e-4 if dtype == jnp.float32 else 2e-2)
    ms = median_ms(sides, range(args.rounds))
    return {
        "sequences": seqs,
        "prefix": shared * block,
        "plain_ms": ms["plain"],
        "cascade_ms": ms["cascade"],
        "ratio": ms["cascade"] / ms["plain"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=9, help="query heads (SmolLM2-135M's)")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block", type=int, default=16, help="tokens in a block")
    parser.add_argument("--sequences", default="2,8,32")
    parser.add_argument("--prefixes", default="256,1500", help="shared tokens, to full blocks")
    parser.add_argument("--own", type=int, default=100, help="further tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=31, help="timed calls of each side")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    cases = [(n, prefix) for prefix in numbers(args.prefixes) for n in numbers(args.sequences)]
    console = Console(stderr=True)
    rows = [measure(*case, args) for case in track(cases, "cases", console=console, transient=True)]
    table = Table(title=f"Cascade over plain attention, {jax.devices()[0].device_kind}")
    for column in ("sequences", "prefix", "plain ms", "cascade ms", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["sequences"]), str(row["prefix"]), f"{row['plain_ms']:.3f}",
            f"{row['cascade_ms']:.3f}", f"{row['ratio']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if args.json:
        heads = [args.heads, args.kv_heads, args.head_dim]
        meta = machine() | {"heads": heads, "own": args.own}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
