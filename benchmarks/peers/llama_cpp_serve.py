"""Measures continuous batching with llama.cpp, through llama-cpp-python's low-level API.

Needs an environment with llama-cpp-python==0.3.36 (built from source, so that it is compiled for
the machine it runs on) and numpy.

Usage::

    python benchmarks/peers/llama_cpp_serve.py --workload workload.json --gguf smollm2-f32.gguf
        [--threads 2] [--max-seqs 32] [--n-batch 512] [--json out.json]

workload.py describes the workload file; tests/data/make_llama_cpp.py makes a float32 GGUF.

It works as llama.cpp's server does: a step is one llama_decode of a batch with one token of every
sequence that is decoding and, up to n_batch tokens in all, prompt tokens of the others, the oldest
request first. The slot of a finished request goes to the next one. The token is NumPy's argmax
of the logits. There is no reuse of common prefixes.

"seconds" is the time from the first step to the last token, after a warm-up with other prompts;
"first_token_s" counts from the same start, so that it includes waiting for a slot. "cpu_share" is
the fraction of the threads' time in which they ran: much below 1 means that other work used the
machine, and that the run should be repeated.

Each slot has its own cache (kv_unified off): with a unified one every sequence's attention runs
over the cells of all of them. llama.cpp then splits a batch into runs of neighbouring slots with
equal numbers of tokens, so batches are ordered by slot here and the lowest free slot is taken
first. --kv-unified measures a unified cache.
"""

from __future__ import annotations

import argparse
import ctypes
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import workload
from llama_cpp_setup import KV_TYPES, flash_attention, load_model


@dataclass
class Sequence:
    """A request that has a slot."""

    index: int
    request: workload.Request
    length: int = 0  # positions in the cache or in the present batch
    tokens: list[int] = field(default_factory=list)

    @property
    def next_ids(self) -> list[int]:
        """Tokens that are ready to be computed: the rest of the prompt, or the newest token."""
        return self.request.prompt_ids[self.length :] if not self.tokens else self.tokens[-1:]


class Server:
    """A llama.cpp context with `max_seqs` slots, and the loop that fills them."""

    def __init__(self, model: Any, positions: int, args: argparse.Namespace) -> None:
        params = llama_cpp.llama_context_default_params()
        # The cells are split evenly between the slots when the cache is not unified, and
        # llama.cpp requires each part to be a multiple of 256.
        params.n_ctx = args.max_seqs * (-(-positions // 256) * 256)
        params.n_batch = params.n_ubatch = args.n_batch
        params.n_seq_max = args.max_seqs
        params.n_threads = params.n_threads_batch = args.threads
        params.type_k = params.type_v = KV_TYPES[args.kv_type]
        params.flash_attn_type = flash_attention(args.flash_attn)
        params.kv_unified = args.kv_unified
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp could not create the context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.max_seqs, self.n_batch = args.max_seqs, args.n_batch
        self.batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        self.steps = 0

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)

    def _put(self, slot: int, sequence: Sequence, count: int) -> bool:
        """Appends the sequence's next `count` tokens; returns whether logits are requested."""
        batch, ids = self.batch, sequence.next_ids
        for token in ids[:count]:
            index = batch.n_tokens
            batch.token[index] = token
            batch.pos[index] = sequence.length
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = slot
            batch.logits[index] = False
            batch.n_tokens += 1
            sequence.length += 1
        batch.logits[batch.n_tokens - 1] = count == len(ids)
        return count == len(ids)

    def _step(self, running: dict[int, Sequence]) -> list[tuple[int, int]]:
        """Runs one llama_decode; returns (slot, token) of every sequence with a new token."""
        counts = {slot: 1 for slot, sequence in running.items() if sequence.tokens}
        room = self.n_batch - len(counts)
        for slot, sequence in running.items():  # the oldest first
            if slot not in counts and room > 0:
                counts[slot] = min(room, len(sequence.next_ids))
                room -= counts[slot]
        self.batch.n_tokens = 0
        slots = [slot for slot in sorted(counts) if self._put(slot, running[slot], counts[slot])]
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with status {status}")
        self.steps += 1
        if not slots:
            llama_cpp.llama_synchronize(self.context)
            return []
        pointer = llama_cpp.llama_get_logits(self.context)  # waits for the results
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(address, shape=(len(slots), self.vocab_size))
        return list(zip(slots, logits.argmax(axis=1).tolist(), strict=True))

    def serve(
        self, requests: list[workload.Request]
    ) -> tuple[list[workload.Served], tuple[float, float]]:
        """Serves all requests; returns their results and the total wall and processor seconds."""
        waiting = deque(enumerate(requests))
        free = list(range(self.max_seqs))
        running: dict[int, Sequence] = {}
        served: dict[int, workload.Served] = {}
        first_token_s: dict[int, float] = {}
        progress = workload.Progress(len(requests))
        self.steps = 0
        clock = workload.Clock()
        while waiting or running:
            while waiting and free:
                running[heapq.heappop(free)] = Sequence(*waiting.popleft())
            for slot, token in self._step(running):
                sequence = running[slot]
                if not sequence.tokens:
                    first_token_s[sequence.index] = clock.read()[0]
                sequence.tokens.append(token)
                if len(sequence.tokens) == sequence.request.max_tokens:
                    llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
                    heapq.heappush(free, slot)
                    del running[slot]
                    served[sequence.index] = workload.Served(
                        sequence.tokens, first_token_s[sequence.index]
                    )
                    progress.finished()
        return [served[i] for i in range(len(requests))], clock.read()


def main() -> None:
    parser = workload.arguments("llama.cpp's continuous batching.")
    parser.add_argument("--n-batch", type=int, default=512, help="most tokens per step")
    parser.add_argument("--kv-type", choices=list(KV_TYPES), default="f32", help="cache type")
    parser.add_argument("--flash-attn", action="store_true", help="use flash attention")
    parser.add_argument("--kv-unified", action="store_true", help="one cache for all slots")
    args = parser.parse_args()
    if args.n_batch < args.max_seqs:
        parser.error(f"{args.n_batch=} must be at least {args.max_seqs=}: one token per sequence")
    requests = workload.read(args.workload)

    model = load_model(args.gguf)

    server = Server(model, max(request.positions for request in requests), args)
    server.serve(workload.warm_up_requests(args.max_seqs, server.vocab_size))
    served, seconds = server.serve(requests)
    settings = {
        "n_batch": args.n_batch,
        "kv_type": args.kv_type,
        "flash_attn": args.flash_attn,
        "kv_unified": args.kv_unified,
        "steps": server.steps,
        "system_info": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "numpy": np.__version__,
    }
    version = f"llama-cpp-python {llama_cpp.__version__}"
    workload.report("llama.cpp", version, args, requests, served, seconds, settings)
    server.close()
    llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main()
