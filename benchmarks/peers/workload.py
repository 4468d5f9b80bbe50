"""Helpers of the peers that serve a workload: its file, the warm-up, and the report of a run.

A workload is a JSON file, ``{"requests": [{"prompt_ids": [...], "max_tokens": n}, ...]}``. All its
requests are submitted at the start and served in the file's order; each gets exactly max_tokens
greedily chosen tokens, end tokens included.

No third-party imports: this module runs in the environment of every peer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    max_tokens: int

    @property
    def positions(self) -> int:
        """Number of cache positions needed; the last token is never an input."""
        return len(self.prompt_ids) + self.max_tokens - 1


@dataclass
class Served:
    """A request's tokens, and the seconds from the start to the first token."""

    token_ids: list[int]
    first_token_s: float


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options of all peers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", type=Path, required=True, help="workload file, JSON")
    parser.add_argument("--gguf", type=Path, required=True, help="float32 weights")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--max-seqs", type=int, default=32, help="sequences at once, at most")
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    return parser


def read(path: Path) -> list[Request]:
    rows = json.loads(path.read_text())["requests"]
    requests = [Request(row["prompt_ids"], row["max_tokens"]) for row in rows]
    for i, request in enumerate(requests):
        if not request.prompt_ids or request.max_tokens < 1:
            raise SystemExit(f"request {i} of {path} has an empty prompt or max_tokens below 1")
    if not requests:
        raise SystemExit(f"{path} has no requests")
    return requests


def warm_up_requests(count: int, vocab_size: int) -> list[Request]:
    """Short requests with random prompts: prefill, then a few steps of `count` sequences."""
    rng = random.Random(0)
    return [Request([rng.randrange(vocab_size) for _ in range(16)], 4) for _ in range(count)]


class Progress:
    """Progress as a line on standard error every few seconds."""

    def __init__(self, requests: int, every_s: float = 5.0) -> None:
        self.requests = requests
        self.every_s = every_s
        self.done = 0
        self.began = self.last = time.perf_counter()

    def finished(self) -> None:
        """Counts a finished request."""
        self.done += 1
        now = time.perf_counter()
        if now - self.last >= self.every_s or self.done == self.requests:
            self.last = now
            text = f"{self.done} of {self.requests} requests, {now - self.began:.1f} s"
            print(text, file=sys.stderr, flush=True)


class Clock:
    """Wall and processor time of this process since the creation of the object."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that `percent` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def report(
    peer: str,
    version: str,
    args: argparse.Namespace,
    requests: list[Request],
    served: list[Served],
    wall_and_cpu_s: tuple[float, float],
    settings: dict[str, Any],
) -> None:
    """Prints the result of a run without its tokens; writes all of it to args.json, if given."""
    for i, (request, one) in enumerate(zip(requests, served, strict=True)):
        if len(one.token_ids) != request.max_tokens:
            raise SystemExit(
                f"request {i}: {len(one.token_ids)} tokens, expected {request.max_tokens}"
            )
    seconds, cpu_s = wall_and_cpu_s
    generated = sum(request.max_tokens for request in requests)
    first = [one.first_token_s for one in served]
    result = {
        "peer": peer,
        "version": version,
        "seconds": round(seconds, 3),
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
        "generated_tokens": generated,
        "tokens_per_s": round(generated / seconds, 2),
        "first_token_s": {
            "mean": round(sum(first) / len(first), 3),
            "p50": round(percentile(first, 50), 3),
            "p95": round(percentile(first, 95), 3),
        },
        "settings": {
            "gguf": args.gguf.name,
            "threads": args.threads,
            "max_seqs": args.max_seqs,
            **settings,
        },
        "cpu_share": round(cpu_s / seconds / args.threads, 2),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        result["token_ids"] = [one.token_ids for one in served]
        args.json.write_text(json.dumps(result) + "\n")
