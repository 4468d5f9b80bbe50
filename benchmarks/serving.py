"""Requests of a trace through jaxkv and through other engines: tokens per second, in one run.

    uv run benchmarks/serving.py --json out.json \
        --llama-cpp "/envs/llama/bin/python" --transformers "/envs/hf/bin/python" --gguf f32.gguf

200 requests of random tokens with the lengths of the Azure conversation trace, divided by 8, all
submitted at the start and decoded greedily by SmolLM2-135M in float32. jaxkv runs them by
continuous batching, in static batches padded to the longest, and one by one. The peers run the same
token ids by continuous batching, each in its own environment (see peers/), one after the other;
they are optional. Compiling, loading and warming up are not counted.
"""

import argparse
import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from turns import machine

import jaxkv
from jaxkv.models import default_model, load
from jaxkv.studies.bench import continuous, one_by_one, static_batches
from jaxkv.studies.traces import load_trace
from jaxkv.studies.workload import Workload

PEERS = Path(__file__).parent / "peers"
# No setting is the fastest everywhere; the best one counts.
LLAMA_CPP = {"": [], ", one cache for all": ["--kv-unified"], ", flash attention": ["--flash-attn"]}


def run_jaxkv(work: Workload, max_seqs: int, chunk: int, modes) -> list[dict]:
    """Result rows of jaxkv's modes."""
    model = load(default_model(), dtype="float32", progress=True).model
    # A static batch is as long as its longest prompt and its longest output together.
    longest = max(map(len, work.prompts)) + max(work.max_tokens)
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=longest, max_seqs=max_seqs)
    scheduler = jaxkv.SchedulerConfig(
        max_tokens_per_step=chunk, prefill_buckets=(64, chunk), decode_buckets=(1, 8, max_seqs)
    )
    engine = jaxkv.Engine(model, cache, scheduler)
    engine.warm_up()
    done = [mode(engine, work, progress=True) for mode in modes]
    return [
        {"name": f"jaxkv, {d.mode}", "tokens_per_s": d.tokens_per_s, **dataclasses.asdict(d)}
        for d in done
    ]


def run_peer(script: str, python: str, options: list[str], work: Workload, how: str = "") -> dict:
    """Result row of a peer, with its setting in the name."""
    with tempfile.TemporaryDirectory() as folder:
        workload, out = Path(folder) / "workload.json", Path(folder) / "out.json"
        work.save(workload)
        command = [python, str(PEERS / script), "--workload", str(workload), "--json", str(out)]
        subprocess.run(command + options, check=True)
        row = json.loads(out.read_text())
    row["settings"].pop("gguf", None)  # a path on this machine
    return {"name": row["version"] + how, **row}


def agreement(rows: list[dict]) -> None:
    """Adds to each row the share of requests with the same tokens as in the first row."""
    first = rows[0]["token_ids"]
    for row in rows:
        same = [a == b for a, b in zip(first, row.pop("token_ids"), strict=True)]
        row["same_as_first"] = sum(same) / len(same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200, help="requests of the trace")
    parser.add_argument("--scale", type=float, default=8, help="divisor of the lengths")
    parser.add_argument("--max-seqs", type=int, default=32, help="sequences at once, at most")
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens per step, at most")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="python of llama.cpp's environment")
    parser.add_argument("--transformers", metavar="PYTHON", help="python of its environment")
    parser.add_argument("--gguf", help="the same weights in float32, for the peers")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if (args.llama_cpp or args.transformers) and not args.gguf:
        parser.error("the peers need --gguf")
    work = Workload.of(
        load_trace("azure-conv"), requests=args.requests, scale=args.scale, vocab_size=49152,
        max_len=2048,
    )  # fmt: skip
    rows = run_jaxkv(work, args.max_seqs, args.chunk, [continuous, static_batches, one_by_one])
    options = ["--gguf", args.gguf, "--max-seqs", str(args.max_seqs)]
    if args.llama_cpp:
        rows += [run_peer("llama_cpp_serve.py", args.llama_cpp, options + more, work, how)
                 for how, more in LLAMA_CPP.items()]  # fmt: skip
    if args.transformers:
        rows.append(run_peer("hf_generate_batch.py", args.transformers, options, work))
    agreement(rows)
    table = Table(title=f"{work.name}: {sum(map(len, work.prompts))} prompt tokens, "
                  f"{sum(work.max_tokens)} generated")  # fmt: skip
    for column in ("", "tokens/s", "seconds", "jaxkv / row", "same tokens"):
        table.add_column(column, justify="right" if column else "left")
    best = rows[0]["tokens_per_s"]
    for row in rows:
        numbers = row["tokens_per_s"], row["seconds"], best / row["tokens_per_s"]
        table.add_row(row["name"], *(f"{x:.2f}" for x in numbers), f"{row['same_as_first']:.0%}")
    table.caption = "targets: 2.0 over static batches, 1.0 over the best peer"
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"meta": machine(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
