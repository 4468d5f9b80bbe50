"""Batched decode of SmolLM2-135M in float32 on the CPU: jaxkv against llama.cpp, in one run.

    uv run benchmarks/cpu_decode.py --json out.json
    uv run benchmarks/cpu_decode.py --peer-python PYTHON --peer-gguf smollm2-f32.gguf

The peer needs its own environment (see benchmarks/peers/llama_cpp_decode.py) and the weights as an
F32 GGUF (tests/data/make_llama_cpp.py writes one). Every step includes block manager, plan,
dispatch, forward pass, greedy choice, and the transfer of the tokens to the host.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from turns import machine

import jaxkv
from jaxkv.cache.batch import Batch
from jaxkv.cache.plan import apply_plan, pad_plan
from jaxkv.engine.steps import make_steps
from jaxkv.manager.block_manager import BlockManager
from jaxkv.models import default_model, load
from jaxkv.sampling.sampler import SamplerState

PEER = Path(__file__).parent / "peers" / "llama_cpp_decode.py"
TARGETS = {1: 0.8, 8: 1.0, 32: 1.2}  # relative to llama.cpp's rate


def contexts(start: int, end: int, window: int, count: int = 5) -> list[int]:
    """Contexts at which windows begin, evenly spaced; the first at `start`, the last ends at `end`.

    Each is one untimed step and then `window` timed ones.
    """
    return [int(x) for x in np.linspace(start, end - window - 1, count)]


def measure(model, streams: int, dtype: str, args: argparse.Namespace) -> dict:
    """Tokens per second of `streams` sequences, over windows of steps between two contexts."""
    start, end, window = args.start, args.end, args.window
    config = jaxkv.CacheConfig.for_model(
        model.config, max_len=end, max_seqs=streams, block_size=args.block_size, dtype=dtype
    )
    step = make_steps(model).decode
    sampler = jax.tree.map(jax.numpy.asarray, SamplerState.empty(streams, config.max_len))
    history = sampler.history
    rng = np.random.default_rng(0)
    seconds: dict[int, list[float]] = {}
    for context in contexts(start, end, window):
        manager = BlockManager.for_config(config)
        state = jaxkv.init_state(config)
        # The time depends on the number of cached keys and values, not on their values.
        ids = list(range(streams))
        rows = np.array([manager.allocate(i, np.zeros(context, int)).row for i in ids])
        for i in ids:
            manager.commit(i, context)
        state = apply_plan(state, manager.take_plan())
        tokens = rng.integers(0, model.config.vocab_size, streams).astype(np.int32)
        times = []
        for i in range(window + 1):
            began = time.perf_counter()
            manager.append_batch(ids, tokens)
            batch = Batch.decode(
                rows, np.full(streams, context + i), num_seqs=streams, padding_row=config.max_seqs
            )
            plan = pad_plan(manager.take_plan(), cells=max(8, streams), lengths=max(8, streams))
            out, state, history = step(
                state, history, sampler.params, plan, tokens, batch, num_steps=1
            )
            tokens = np.asarray(out.tokens)
            manager.commit_batch(ids, [1] * streams)
            times.append(time.perf_counter() - began)
        seconds[context] = times[1:]  # the first step compiles, or finds caches cold
    steps = [t for times in seconds.values() for t in times]
    return {
        "engine": "jaxkv",
        "streams": streams,
        "kv_type": dtype,
        "block_size": args.block_size,
        "tokens_per_s": streams * len(steps) / sum(steps),
        "ms_per_step_median": 1e3 * float(np.median(steps)),
        "steps": len(steps),
        "ms_by_context": {str(c): 1e3 * float(np.median(t)) for c, t in seconds.items()},
    }


def peer_rows(python: str, gguf: str, args: argparse.Namespace, streams: int) -> list[dict]:
    """llama.cpp's rows, from its own environment, with F32 weights."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        subprocess.run(
            [python, str(PEER), "--gguf", gguf, "--streams", str(streams),
             "--context-start", str(args.start), "--context-end", str(args.end),
             "--threads", "2", "--kv-types", "f32,f16", "--flash-attn", "none", "--json", str(out)],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        return json.loads(out.read_text())["rows"]


def _best(rows: list[dict], engine: str, streams: int) -> tuple[float, str]:
    """Rate and page dtype of an engine's fastest setting, by the median of its rounds."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row["engine"] == engine and row["streams"] == streams:
            rates.setdefault(row["kv_type"], []).append(row["tokens_per_s"])
    return max(((float(np.median(r)), kv) for kv, r in rates.items()), default=(0.0, ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="1,8,32", help="numbers of sequences")
    parser.add_argument("--start", type=int, default=64, help="first context, in tokens")
    parser.add_argument("--end", type=int, default=512, help="last context, in tokens")
    parser.add_argument("--window", type=int, default=24, help="timed steps at each context")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of both sides in turn")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--kv-dtypes", default="float32,float16", help="dtypes of the pages")
    parser.add_argument("--peer-python", help="python of an environment with llama-cpp-python")
    parser.add_argument("--peer-gguf", help="SmolLM2 as an F32 GGUF")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    streams = [int(x) for x in args.streams.split(",")]
    model = load(default_model(), progress=True).model
    rows: list[dict] = []
    for _ in range(args.rounds):
        for n in track(streams, "streams", console=Console(stderr=True), transient=True):
            rows += [measure(model, n, dtype, args) for dtype in args.kv_dtypes.split(",")]
            if args.peer_python:
                rows += peer_rows(args.peer_python, args.peer_gguf, args, n)

    best = {(name, n): _best(rows, name, n) for name in ("jaxkv", "llama.cpp") for n in streams}
    table = Table(title=f"SmolLM2-135M F32, decode from {args.start} to {args.end}, tokens/s")
    for column in ("streams", "jaxkv", "ms/step", "llama.cpp", "ratio", "target"):
        table.add_column(column, justify="right")
    ratios = {}
    for n in streams:
        (own, own_kv), (peer, peer_kv) = best["jaxkv", n], best["llama.cpp", n]
        ratios[n] = own / peer if peer else None
        table.add_row(
            str(n), f"{own:.1f} ({own_kv})", f"{1e3 * n / own:.1f}",
            f"{peer:.1f} ({peer_kv})" if peer else "-", f"{own / peer:.2f}" if peer else "-",
            f"{TARGETS.get(n, '-')}",
        )  # fmt: skip
    Console().print(table)
    if args.json:
        args.json.write_text(
            json.dumps({"meta": machine(), "rows": rows, "ratios": ratios}, indent=1)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
