"""What the engine itself costs and saves.

    uv run benchmarks/engine.py --json out.json

Three questions, each answered in one run on this machine:
  host: the host's own work for a decode step of 256 running sequences, part by part, with a model
    so small that the device hardly matters; and for SmolLM2 its share of the step.
  no hits: prefix caching on against off where nothing is ever found, in turn.
  shared: time to the first token of 32 requests that begin with the same 1,500 tokens, with prefix
    caching and without.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table
from turns import machine

import jaxkv
from models import Llama, LlamaConfig, default_model, load

TARGETS = {"host ms": 1.0, "host share": 0.05, "no hits": 1.01, "first token": 10.0}
TINY = LlamaConfig(
    vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=16, max_position_embeddings=512,
)  # fmt: skip


def prompts_of(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts that begin differently."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocab_size, (count, length)).tolist()


def params_of(max_tokens: int) -> jaxkv.SamplingParams:
    """Greedy, to the last token, token ids only."""
    return jaxkv.SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def engine_of(model, *, max_len: int, seqs: int, buckets=(256,), **options) -> jaxkv.Engine:
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=max_len, max_seqs=seqs)
    scheduler = jaxkv.SchedulerConfig(max_tokens_per_step=buckets[-1], prefill_buckets=buckets)
    return jaxkv.Engine(model, cache, scheduler, **options)


def host_work(model, seqs: int, steps: int) -> dict:
    """Milliseconds of a decode step with `seqs` running sequences, by part."""
    engine = engine_of(model, max_len=64 + steps, seqs=seqs)
    for prompt in prompts_of(seqs, 16, model.config.vocab_size):
        engine.submit(prompt, params_of(40 + steps))
    while engine.stats().decode_steps < 5:  # all run, all is compiled
        engine.step()
    before = engine.stats()
    for _ in range(steps):
        engine.step()
    after = engine.stats()
    assert after.steps - before.steps == steps
    assert after.running == seqs
    names = [field.name for field in dataclasses.fields(before.host)]
    parts = {
        name: 1e3 * (getattr(after.host, name) - getattr(before.host, name)) / steps
        for name in names
    }
    host = sum(ms for name, ms in parts.items() if name != "wait")
    step = 1e3 * (after.decode_seconds - before.decode_seconds) / steps
    return {"seqs": seqs, "steps": steps, "parts_ms": parts, "host_ms": host, "step_ms": step}


def no_hits(model, rounds: int) -> dict:
    """Seconds of the same 32 requests with prefix caching and without; every prompt is new."""
    seconds: dict[str, list[float]] = {"hash": [], "none": []}
    engines = {
        name: engine_of(model, max_len=192, seqs=32, prefix_index=None if name == "none" else name)
        for name in seconds
    }
    for i in track(range(rounds + 1), "no hits", console=Console(stderr=True), transient=True):
        prompts = prompts_of(32, 128, model.config.vocab_size, seed=i)
        for name in sorted(seconds, reverse=bool(i % 2)):
            engine = engines[name]
            began = engine.clock()
            engine.generate(prompts, params_of(32), progress=False)
            seconds[name].append(engine.clock() - began)
    on, off = (statistics.median(seconds[name][1:]) for name in ("hash", "none"))
    return {"seconds": {name: x[1:] for name, x in seconds.items()}, "ratio": on / off}


def shared_prefix(model, requests: int, length: int) -> dict:
    """Mean seconds to the first token of requests that begin alike, all submitted at once."""
    system = prompts_of(1, length, model.config.vocab_size)[0]
    tails = prompts_of(2 * requests, 16, model.config.vocab_size, seed=1)
    means = {}
    for name in ("hash", "none"):
        engine = engine_of(
            model, max_len=length + 64, seqs=requests, prefix_index=None if name == "none" else name
        )
        # One request before: everything is compiled, and the system prompt has been seen once.
        engine.generate([system + tails[-1]], params_of(4), progress=False)
        outputs = engine.generate(
            [system + tail for tail in tails[:requests]], params_of(2), progress=False
        )
        times = [sample.timings for (sample,) in outputs]
        means[name] = statistics.mean((t.first_token or 0) - t.submitted for t in times)
    return {"requests": requests, "prefix": length, "seconds": means,
            "ratio": means["none"] / means["hash"]}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1500, help="tokens of the shared prefix")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    tiny = Llama(TINY, rngs=nnx.Rngs(0))
    rows = {"host": [host_work(tiny, 256, args.steps)]}
    model = load(default_model(), progress=True).model
    rows["host"].append(host_work(model, 32, min(args.steps, 30)))
    rows["no hits"] = no_hits(tiny, args.rounds)
    rows["shared"] = shared_prefix(model, args.requests, args.prefix)

    table = Table(title="engine")
    for column in ("what", "measured", "target"):
        table.add_column(column)
    small, large = rows["host"]
    parts = ", ".join(f"{name} {ms:.3f}" for name, ms in small["parts_ms"].items())
    table.add_row("host ms of a step, 256 sequences", f"{small['host_ms']:.3f} ({parts})",
                  f"below {TARGETS['host ms']}")  # fmt: skip
    share = large["host_ms"] / large["step_ms"]
    table.add_row(f"its share, SmolLM2, {large['seqs']} sequences",
                  f"{share:.1%} of {large['step_ms']:.0f} ms",
                  f"below {TARGETS['host share']:.0%}")  # fmt: skip
    table.add_row("caching on / off, no hits", f"{rows['no hits']['ratio']:.3f}",
                  f"below {TARGETS['no hits']}")  # fmt: skip
    table.add_row("first token, off / on", f"{rows['shared']['ratio']:.1f}",
                  f"above {TARGETS['first token']}")  # fmt: skip
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"meta": machine(), **rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
