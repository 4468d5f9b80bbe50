"""Time of a decode step against the size of a donated pool.

    uv run benchmarks/pool_size.py --json out.json

A four-layer Llama decodes 8 sequences through pools of 48, 384 and 3072 MiB, in turn, so that a
drift of the machine's speed affects all alike. A step that copied its pool would slow down with it.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table
from turns import median_ms

import jaxkv
from jaxkv.cache.batch import Batch
from jaxkv.cache.plan import apply_plan, pad_plan
from jaxkv.engine.steps import make_steps
from jaxkv.models import Llama, LlamaConfig
from jaxkv.sampling.sampler import SamplerState

STREAMS, CONTEXT, BLOCK = 8, 256, 16
CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1408, num_layers=4, num_heads=8,
    num_kv_heads=4, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip


def stepper(model: Llama, mebibytes: int, same: list[bool]):
    """A function that runs a decode step on a pool and records whether it was in place."""
    cache = jaxkv.CacheConfig.for_model(
        CONFIG, memory_bytes=mebibytes * 2**20, max_len=512, max_seqs=STREAMS, block_size=BLOCK
    )
    step = make_steps(model).decode
    manager = jaxkv.BlockManager.for_config(cache)
    rows = [manager.allocate(i, np.zeros(CONTEXT + 1, int)).row for i in range(STREAMS)]
    state = apply_plan(jaxkv.init_state(cache), manager.take_plan())
    batch = Batch.decode(
        np.array(rows), np.full(STREAMS, CONTEXT), num_seqs=STREAMS, padding_row=STREAMS
    )
    sampler = jax.tree.map(jax.numpy.asarray, SamplerState.empty(STREAMS, cache.max_len))
    plan = pad_plan(jaxkv.Plan.empty(), cells=8, lengths=8)
    tokens = np.zeros(STREAMS, np.int32)
    held = [(state, sampler.history)]

    def run() -> None:
        state, history = held.pop()
        pointer = state.kv_pages.unsafe_buffer_pointer()
        out, state, history = step(state, history, sampler.params, plan, tokens, batch, num_steps=1)
        jax.block_until_ready(out)
        held.append((state, history))
        same.append(state.kv_pages.unsafe_buffer_pointer() == pointer)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="48,384,3072", help="pool sizes, in MiB")
    parser.add_argument("--steps", type=int, default=100, help="steps per pool")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    sizes = [int(x) for x in args.sizes.split(",")]
    model = Llama(CONFIG, rngs=nnx.Rngs(0))
    same: dict[int, list[bool]] = {size: [] for size in sizes}
    runs = {size: stepper(model, size, same[size]) for size in sizes}
    for run in runs.values():
        for _ in range(3):
            run()
    rounds = track(range(args.steps), "steps", console=Console(stderr=True), transient=True)
    ms = median_ms(runs, rounds)
    in_place = all(all(found) for found in same.values())
    rows = [{"pool_mib": size, "ms_per_step_median": x} for size, x in ms.items()]
    table = Table(title="decode step against pool size")
    table.add_column("pool, MiB", justify="right")
    table.add_column("ms/step", justify="right")
    for row in rows:
        table.add_row(str(row["pool_mib"]), f"{row['ms_per_step_median']:.2f}")
    console = Console()
    console.print(table)
    ratio = rows[-1]["ms_per_step_median"] / rows[0]["ms_per_step_median"]
    console.print(f"largest / smallest: {ratio:.3f}; same buffer at every step: {in_place}")
    if args.json:
        meta = {"jax": jax.__version__, "ratio": ratio, "in_place": in_place}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
