"""Measures llama.cpp's batched decode speed, through llama-cpp-python's low-level API.

Needs an environment with llama-cpp-python==0.3.36 (built from source, so that it is compiled for
the machine it runs on) and numpy.

Usage::

    python benchmarks/peers/llama_cpp_decode.py --gguf smollm2-f32.gguf [--streams 1,8,32]
        [--context-start 64] [--context-end 512] [--threads 2] [--json rows.json]

tests/data/make_llama_cpp.py makes a float32 GGUF. Every stream is its own sequence of random
tokens; one step is one llama_decode of one token for each stream. Steps are measured in windows
spread over the context range; between windows one stream is prefilled and copied to the others,
which is not timed. "tokens_per_s" and "ms_per_step_median" are llama_decode alone; the "full_"
numbers add fetching the logits and the argmax in NumPy. Each KV type is measured with flash
attention off, then the faster of them with flash attention on.

"cpu_share" is the fraction of the threads' time in which they ran: much below 1 means that other
work used the machine, and that the row should be measured again.

Each stream has its own cache (kv_unified off): with a unified one every stream's attention runs
over the cells of all streams. --kv-unified measures that instead.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp_setup import KV_TYPES, flash_attention, load_model

UBATCH = 512


class Decoder:
    """A llama.cpp context with `streams` sequences of equal length."""

    def __init__(
        self,
        model: Any,
        streams: int,
        context: int,
        kv_type: str,
        flash_attn: bool,
        kv_unified: bool,
        threads: int,
        seed: int,
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        # The cells are split evenly between the sequences when the cache is not unified, and
        # llama.cpp requires each part to be a multiple of 256.
        params.n_ctx = streams * (-(-context // 256) * 256)
        params.n_batch = params.n_ubatch = UBATCH
        params.n_seq_max = streams
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[kv_type]
        params.flash_attn_type = flash_attention(flash_attn)
        params.kv_unified = kv_unified
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp could not create the context")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.streams = streams
        self.unified = kv_unified
        self.length = 0
        self.batch = llama_cpp.llama_batch_init(UBATCH, 0, 1)
        self.rng = np.random.default_rng(seed)
        self.next = self.rng.integers(0, self.vocab_size, streams)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)

    def _set(self, index: int, token: int, position: int, stream: int, logits: bool) -> None:
        batch = self.batch
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = stream
        batch.logits[index] = logits

    def _decode(self, count: int) -> None:
        self.batch.n_tokens = count
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with status {status}")
        llama_cpp.llama_synchronize(self.context)

    def fill(self, length: int) -> None:
        """Extends every stream to `length` with random tokens; no logits are computed."""
        # Separate caches can be copied, which saves minutes of prefill and does not change the
        # work of a step. In a unified cache a copy would share its cells.
        streams = range(self.streams if self.unified else 1)
        chunk = max(1, UBATCH // len(streams))
        while self.length < length:
            size = min(chunk, length - self.length)
            index = 0
            for stream in streams:
                for offset, token in enumerate(self.rng.integers(0, self.vocab_size, size)):
                    self._set(index, int(token), self.length + offset, stream, False)
                    index += 1
            self._decode(index)
            self.length += size
        memory = llama_cpp.llama_get_memory(self.context)
        for stream in range(len(streams), self.streams):
            llama_cpp.llama_memory_seq_cp(memory, 0, stream, -1, -1)

    def step(self) -> tuple[float, float]:
        """Decodes one token per stream; returns seconds in llama_decode, and with the argmax."""
        start = time.perf_counter()
        for stream, token in enumerate(self.next):
            self._set(stream, int(token), self.length, stream, True)
        before = time.perf_counter()
        self._decode(self.streams)
        after = time.perf_counter()
        pointer = llama_cpp.llama_get_logits(self.context)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(address, shape=(self.streams, self.vocab_size))
        self.next = logits.argmax(axis=1)
        end = time.perf_counter()
        self.length += 1
        return after - before, end - start


def windows(start: int, end: int, steps: int, count: int) -> list[int]:
    """Contexts at which the windows of `steps` steps begin, from `start` up to `end` - `steps`."""
    return [round(n) for n in np.linspace(start, end - steps, count)]


def measure(
    make: Callable[..., Decoder], args: argparse.Namespace, **setting: Any
) -> dict[str, Any]:
    decoder = make(**setting)
    contexts = windows(args.context_start, args.context_end, args.window_steps, args.windows)
    decode_s: list[float] = []
    full_s: list[float] = []
    by_context: dict[int, float] = {}
    wall_s = cpu_s = 0.0
    for context in contexts:
        decoder.fill(context - 1)
        decoder.step()  # not timed: llama.cpp defers the copies of fill() to this step
        wall, cpu = time.perf_counter(), time.process_time()
        times = [decoder.step() for _ in range(args.window_steps)]
        wall_s += time.perf_counter() - wall
        cpu_s += time.process_time() - cpu
        decode_s += [decode for decode, _ in times]
        full_s += [full for _, full in times]
        by_context[context] = round(1e3 * statistics.median(decode for decode, _ in times), 3)
    decoder.close()
    tokens = setting["streams"] * len(decode_s)
    return {
        "engine": "llama.cpp",
        **setting,
        "tokens_per_s": round(tokens / sum(decode_s), 2),
        "ms_per_step_median": round(1e3 * statistics.median(decode_s), 3),
        "full_tokens_per_s": round(tokens / sum(full_s), 2),
        "full_ms_per_step_median": round(1e3 * statistics.median(full_s), 3),
        "steps": len(decode_s),
        "ms_by_context": by_context,
        "cpu_share": round(cpu_s / wall_s / args.threads, 2),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="llama.cpp's batched decode speed.")
    parser.add_argument("--gguf", type=Path, required=True, help="float32 weights")
    parser.add_argument("--streams", default="1,8,32", help="comma-separated numbers of streams")
    parser.add_argument("--context-start", type=int, default=64, help="first context, in tokens")
    parser.add_argument("--context-end", type=int, default=512, help="last context, in tokens")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--windows", type=int, default=5, help="windows over the context range")
    parser.add_argument("--window-steps", type=int, default=24, help="timed steps per window")
    parser.add_argument("--kv-types", default="f32,f16", help="comma-separated cache types")
    parser.add_argument(
        "--flash-attn", choices=["best", "all", "none"], default="best",
        help="cache types to measure with flash attention, too",
    )  # fmt: skip
    parser.add_argument("--kv-unified", action="store_true", help="one cache for all streams")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random tokens")
    parser.add_argument("--json", type=Path, default=None, help="write settings and rows here")
    args = parser.parse_args()

    model = load_model(args.gguf)

    def make(streams: int, kv_type: str, flash_attn: bool, kv_unified: bool) -> Decoder:
        return Decoder(
            model,
            streams=streams,
            context=args.context_end,
            kv_type=kv_type,
            flash_attn=flash_attn,
            kv_unified=kv_unified,
            threads=args.threads,
            seed=args.seed,
        )

    rows: list[dict[str, Any]] = []

    def add(streams: int, kv_type: str, flash_attn: bool) -> dict[str, Any]:
        row = measure(
            make,
            args,
            streams=streams,
            kv_type=kv_type,
            flash_attn=flash_attn,
            kv_unified=args.kv_unified,
        )
        rows.append(row)
        print(json.dumps(row), flush=True)
        return row

    kv_types = args.kv_types.split(",")
    begin = time.perf_counter()
    for streams in (int(n) for n in args.streams.split(",")):
        plain = [add(streams, kv_type, False) for kv_type in kv_types]
        best = max(plain, key=lambda row: row["tokens_per_s"])["kv_type"]
        for kv_type in {"best": [best], "all": kv_types, "none": []}[args.flash_attn]:
            add(streams, kv_type, True)
    print(f"took {time.perf_counter() - begin:.0f} s")

    if args.json:
        meta = {
            "engine": "llama.cpp",
            "llama_cpp_python": llama_cpp.__version__,
            "system_info": llama_cpp.llama_print_system_info().decode().strip(" |"),
            "gguf": args.gguf.name,
            "threads": args.threads,
            "context_start": args.context_start,
            "context_end": args.context_end,
            "window_steps": args.window_steps,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main()
