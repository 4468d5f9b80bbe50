"""Simulated server: runs a trace through the production block manager, on the trace's own clock.

A prompt has as many tokens as the trace says. Tokens that its hash ids stand for follow from the
ids, so equal ids give equal tokens, at any block size; all others, and the generated ones, belong
to the request alone. Host code: imports no JAX.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Literal

import numpy as np

from jaxkv._util import ceil_div
from jaxkv.errors import ConfigError, OutOfBlocksError
from jaxkv.manager.block_manager import BlockManager
from jaxkv.studies.traces import Trace

_PLAN_EVERY = 256  # calls between two calls of `take_plan`; no device applies the plan


@dataclasses.dataclass(frozen=True)
class Service:
    """Speed and capacity of a simulated server.

    Time advances in decode steps. In each, every sequence that is past its prompt gets a token.

    Attributes:
      prefill_tokens_per_s: prefill speed of one prompt; cached tokens take no time.
      decode_tokens_per_s: decode speed of one sequence; its inverse is the duration of a step.
      concurrency: maximum number of sequences at once. Other requests wait, in order of arrival.
        When a growing sequence finds no free block, the youngest sequence is preempted: its blocks
        are freed, and it becomes the first to wait.
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 25.0
    concurrency: int = 32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0 < getattr(self, field.name) < float("inf"):
                raise ConfigError(f"{field.name}={getattr(self, field.name)!r} must be positive")
        if not isinstance(self.concurrency, int):
            raise ConfigError(f"concurrency={self.concurrency!r} must be an integer")


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Samples of the pool over time.

    One sample per decode step with a live sequence, and one of zeros when the last sequence ends;
    or one per request, if requests take no time.

    Attributes:
      seconds: f64[S] since the first request.
      active: i64[S] blocks that live sequences reference, each once.
      cached: i64[S] blocks that only a prefix lookup would find.
      used: i64[S] tokens of the live sequences; a shared token counts once per sequence.
      unfilled: i64[S] slots of active blocks that hold no token.
      seqs: i64[S] live sequences.
    """

    seconds: np.ndarray
    active: np.ndarray
    cached: np.ndarray
    used: np.ndarray
    unfilled: np.ndarray
    seqs: np.ndarray


class SimulatedServer:
    """One run: the manager, its clock and the counts. See `simulate`."""

    def __init__(
        self,
        trace: Trace,
        num_blocks: int,
        policy: str,
        block_size: int,
        prefix_index: Literal["hash", "radix"] | None,
        service: Service | None,
    ):
        self.trace, self.num_blocks, self.block_size = trace, num_blocks, block_size
        self.policy, self.service = policy, service
        self.prefix_index: Literal["hash", "radix"] | None = prefix_index
        longest = trace.max_len if service else int(trace.input_tokens.max())
        self.rows = service.concurrency if service else 1
        self.columns = min(ceil_div(longest, block_size), num_blocks)
        extra = 0 if service else 1  # a token that makes the last prompt block visible
        self.now = 0.0
        self.manager = BlockManager(
            1 + num_blocks + extra,
            block_size,
            max_seqs=self.rows,
            max_blocks_per_seq=max(self.columns, 1) + extra,
            prefix_index=prefix_index,
            eviction=policy,
            clock=lambda: self.now,
        )
        self.request_blocks = ceil_div(trace.input_tokens, block_size)
        self.request_hits = np.zeros(len(trace), np.int64)
        self.length = trace.input_tokens.copy()  # tokens of each request up to now
        self.cached = np.full(len(trace), -1)  # cached tokens at admission; -1: not admitted
        self.evictions = self.written = self.rejected = self.preemptions = self.calls = 0
        self.samples: list[tuple[float, int, int, int, int, int]] = []
        self.own = int(trace.hash_ids.max(initial=-1) + 1) * trace.tokens_per_id

    def tokens(self, request: int, length: int) -> np.ndarray:
        """i64[length] tokens of a request: those of its ids, then one that no other request has."""
        tokens = np.full(length, self.own + request)
        per_id, ids = self.trace.tokens_per_id, self.trace.ids(request)
        covered = (ids[:, None] * per_id + np.arange(per_id)).ravel()[:length]
        tokens[: len(covered)] = covered
        return tokens

    def allocate(self, request: int, length: int) -> int:
        """Allocates a request's blocks; returns its cached tokens. Raises the manager's errors."""
        free = self.manager.stats().free
        cached = self.manager.allocate(request, self.tokens(request, length)).num_cached_tokens
        self.count_evictions(free, self.manager.blocks_for(length) - cached // self.block_size)
        return cached

    def count_evictions(self, free: int, taken: int) -> None:
        """Counts evictions after `taken` blocks of `free` ones. (Events would triple the time.)"""
        self.evictions += self.manager.stats().free - free + taken

    def drain(self) -> None:
        """Drops the plan from time to time: no device applies it."""
        self.calls += 1
        if self.calls % _PLAN_EVERY == 0:
            self.manager.take_plan()

    def instant(self) -> Iterator[int]:
        """Runs requests that take no time, one after the other; yields each when done."""
        size, manager = self.block_size, self.manager
        for request, seconds in enumerate(self.trace.arrival.tolist()):
            self.now = seconds
            blocks, used = int(self.request_blocks[request]), int(self.length[request])
            if blocks > self.num_blocks:
                self.rejected += 1
            elif blocks:
                padded = blocks * size
                cached = self.allocate(request, padded + 1)
                manager.commit(request, padded - cached)
                self.request_hits[request] = cached // size
                self.written += blocks - cached // size
                self.samples.append(
                    (seconds, blocks, manager.stats().cached, used, padded - used, 1)
                )
                manager.free(request)
                self.drain()
            yield request

    def live(self) -> Iterator[int]:
        """Runs requests that take time, in steps of one token each; yields each when done."""
        service = self.service
        assert service is not None
        arrival, length = self.trace.arrival, self.length
        final = self.trace.input_tokens + self.trace.output_tokens
        step_s = 1 / service.decode_tokens_per_s
        ready = np.zeros(len(length), np.int64)  # the step in which the prompt is written
        waiting: deque[int] = deque()
        seqs: list[int] = []
        step, arrived, full = 0, 0, False
        while seqs or waiting or arrived < len(length):
            if not seqs and not waiting:  # nothing to do until the next arrival
                step = max(step, int(np.ceil(arrival[arrived] / step_s)))
            self.now = step * step_s
            index = np.array(seqs, np.int64)
            for request in index[ready[index] == step].tolist():
                self.manager.commit(request, int(length[request] - self.cached[request]))
            for request in index[(ready[index] <= step) & (length[index] == final[index])].tolist():
                self.leave(request, seqs)
                full = False
                yield request
            while arrived < len(length) and arrival[arrived] <= self.now:
                fits = self.manager.blocks_for(int(final[arrived])) <= self.num_blocks
                if fits and length[arrived]:
                    waiting.append(arrived)
                else:  # no prompt: nothing to serve
                    self.rejected += not fits
                    yield arrived
                arrived += 1
            while waiting and not full and len(seqs) < service.concurrency:
                missing = self.enter(waiting[0])
                full = missing is None  # until a sequence ends: a retry costs time
                if missing is not None:
                    request = waiting.popleft()
                    seconds = missing / service.prefill_tokens_per_s
                    ready[request] = step + max(1, int(np.ceil(seconds / step_s)))
                    seqs.append(request)
            full &= not self.grow(seqs, waiting, ready, step, final)
            if seqs or (self.samples and self.samples[-1][-1]):  # the last: the server becomes idle
                self.sample(seqs)
            step += 1

    def enter(self, request: int) -> int | None:
        """Admits a request; returns the tokens to compute, or None if the pool is full."""
        length = int(self.length[request])
        try:
            cached = self.allocate(request, length)
        except OutOfBlocksError:
            return None
        if self.cached[request] < 0:  # not a preempted one that is admitted again
            self.request_hits[request] = cached // self.block_size
        self.cached[request] = cached
        return length - cached

    def leave(self, request: int, seqs: list[int], *, written: bool = True) -> None:
        """Ends a sequence; the blocks that it has written stay visible to lookups."""
        if written:
            length = int(self.length[request])
            self.manager.commit(request, length - self.manager.num_computed_tokens(request))
            blocks = self.manager.blocks_for(length)
            self.written += blocks - int(self.cached[request]) // self.block_size
        self.manager.free(request)
        seqs.remove(request)
        self.drain()

    def grow(
        self, seqs: list[int], waiting: deque[int], ready: np.ndarray, step: int, final: np.ndarray
    ) -> bool:
        """Appends a token to each sequence past its prompt; returns whether one was preempted."""
        preempted = False
        while True:
            index = np.array(seqs, np.int64)
            growing = index[(ready[index] <= step) & (self.length[index] < final[index])]
            if not len(growing):
                return preempted
            crossing = int((self.length[growing] % self.block_size == 0).sum())
            free = self.manager.stats().free if crossing else 0
            try:
                self.manager.append_batch(growing.tolist(), self.own + growing)
            except OutOfBlocksError:
                youngest = seqs[-1]
                self.leave(youngest, seqs, written=bool(ready[youngest] <= step))
                waiting.appendleft(youngest)
                self.preemptions += 1
                preempted = True
            else:
                if crossing:
                    self.count_evictions(free, crossing)
                self.length[growing] += 1
                self.drain()
                return preempted

    def sample(self, seqs: list[int]) -> None:
        """Records the state of the pool."""
        lengths, stats = self.length[np.array(seqs, np.int64)], self.manager.stats()
        unfilled = int((-lengths % self.block_size).sum())
        self.samples.append(
            (self.now, stats.active, stats.cached, int(lengths.sum()), unfilled, len(seqs))
        )

    def timeline(self) -> Timeline:
        """The samples, as columns."""
        columns = np.array(self.samples, np.float64).reshape(-1, 6).T
        return Timeline(columns[0], *columns[1:].astype(np.int64))
