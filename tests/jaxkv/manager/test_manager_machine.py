"""Random operations in any order, against an oracle that knows the KV of every slot."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import Oracle

from jaxkv import BlockManager, JaxkvError
from jaxkv.manager.eviction.policies import POLICIES

TOKENS = st.integers(0, 2)  # few, so that prefixes are shared
NAMESPACES = st.sampled_from([None, "x", {"salt": "x"}])


class Machine(RuleBasedStateMachine):
    """Random operations."""

    @initialize(
        blocks=st.integers(1, 14), size=st.integers(1, 4), seqs=st.integers(1, 5),
        index=st.sampled_from(["hash", "radix"]), eviction=st.sampled_from(POLICIES),
        partial=st.booleans(), window=st.none() | st.integers(1, 9),
        weak=st.booleans(),
    )  # fmt: skip
    def start(self, blocks, size, seqs, index, eviction, partial, window, weak):
        options = {}
        # Four values: contents collide all the time. With a window only the hash tells them apart.
        if weak and index == "hash" and window is None:
            options["hash_function"] = lambda data: bytes(15) + bytes([sum(data) % 4])
        self.o = Oracle(
            blocks, size, seqs, 7, prefix_index=index, eviction=eviction,
            copy_on_partial_reuse=partial, sliding_window=window, **options,
        )  # fmt: skip

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.o.tokens)))

    @rule(
        tokens=st.lists(TOKENS, min_size=1, max_size=16), namespace=NAMESPACES,
        skip=st.booleans(), lookahead=st.sampled_from([0, 0, 3]), data=st.data(),
    )  # fmt: skip
    def allocate(self, tokens, namespace, skip, lookahead, data):
        options = {}
        if data.draw(st.booleans()):
            options = {"skip_prefix_cache": skip, "lookahead": lookahead,
                       "priority": data.draw(st.integers(-1, 2)),
                       "ttl": data.draw(st.none() | st.just(5.0))}  # fmt: skip
        seq = self.o.allocate(tokens, namespace, **options)
        if seq is not None and data.draw(st.booleans()):
            self.o.write(seq, len(tokens) - self.o.m.num_computed_tokens(seq))

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data())
    def write(self, data):
        seq = self.some(data)
        left = self.o.m.length(seq) - self.o.m.num_computed_tokens(seq)
        self.o.write(seq, data.draw(st.integers(0, left)))

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data())
    def append(self, data):
        ids = st.lists(st.sampled_from(sorted(self.o.tokens)), unique=True, min_size=1)
        seqs = data.draw(ids)
        self.o.append(seqs, data.draw(st.lists(TOKENS, min_size=len(seqs), max_size=len(seqs))))

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def decode(self, data, steps):
        ids = st.lists(st.sampled_from(sorted(self.o.tokens)), unique=True, min_size=1)
        seqs = data.draw(ids)
        for _ in range(steps):
            tokens = st.lists(TOKENS, min_size=len(seqs), max_size=len(seqs))
            if self.o.append(seqs, data.draw(tokens)):
                self.o.write_all(seqs)

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data())
    def extend(self, data):
        ids = st.lists(st.sampled_from(sorted(self.o.tokens)), unique=True, min_size=1)
        seqs = data.draw(ids)
        runs = st.lists(TOKENS, min_size=1, max_size=7)
        tokens = data.draw(st.lists(runs, min_size=len(seqs), max_size=len(seqs)))
        if self.o.extend(seqs, tokens, [len(run) for run in tokens]) and data.draw(st.booleans()):
            self.o.write_all(seqs)

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data(), slots=st.integers(1, 9))
    def reserve(self, data, slots):
        ids = st.lists(st.sampled_from(sorted(self.o.tokens)), unique=True, min_size=1)
        seqs = data.draw(ids)
        self.o.reserve(seqs, [max(1, slots - i) for i in range(len(seqs))])

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data())
    def fork(self, data):
        self.o.fork(self.some(data))

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data())
    def reorder(self, data):
        seqs = data.draw(st.permutations(sorted(self.o.tokens)))
        index = st.integers(0, len(seqs) - 1)
        self.o.reorder(seqs, data.draw(st.lists(index, min_size=len(seqs), max_size=len(seqs))))

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data())
    def truncate(self, data):
        seq = self.some(data)
        row = self.o.m.row(seq)
        gone = int(self.o.m._table.dropped[row]) * self.o.size
        least = gone + self.o.m.sliding_window - 1 if gone else 0
        self.o.truncate(seq, data.draw(st.integers(least, self.o.m.length(seq))))

    @precondition(lambda self: self.o.tokens)
    @rule(data=st.data())
    def free(self, data):
        self.o.free(self.some(data))

    @rule()
    def plan(self):
        self.o.apply_plan()

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds):
        self.o.time += seconds

    @rule(tokens=st.lists(TOKENS, max_size=12), namespace=NAMESPACES, ttl=st.none() | st.just(9.0))
    def pin(self, tokens, namespace, ttl):
        self.o.m.pin(tokens, namespace=namespace, ttl=ttl)

    @rule(tokens=st.lists(TOKENS, max_size=12), namespace=NAMESPACES)
    def unpin(self, tokens, namespace):
        with contextlib.suppress(JaxkvError):
            self.o.m.unpin(tokens, namespace=namespace)

    @rule(data=st.data())
    def evict(self, data):
        blocks = data.draw(st.lists(st.integers(0, self.o.m.num_blocks), unique=True, max_size=3))
        before = self.o.state()
        try:
            self.o.m.evict(blocks)
        except JaxkvError:
            assert self.o.state() == before

    @rule(force=st.booleans())
    def reset(self, force):
        done = self.o.m.reset_prefix_cache(force=force)
        assert done == (force or not self.o.tokens)
        if done:
            assert self.o.m.stats().cached == 0

    @invariant()
    def sound(self):
        if hasattr(self, "o"):
            self.o.verify()

    def teardown(self):
        if hasattr(self, "o"):
            self.o.finish()


EXAMPLES = int(os.environ.get("JAXKV_MACHINE_EXAMPLES", "400"))
TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None)


def test_a_commit_of_many_is_the_commit_of_each():
    """Decode steps that fill blocks of equal content at the same time; then forks of them."""
    rng = np.random.default_rng(0)
    together, apart = managers = [
        BlockManager(400, 2, max_seqs=24, max_blocks_per_seq=20) for _ in range(2)
    ]
    for i in range(12):
        for m in managers:
            m.allocate(i, [i % 3, 0, 1][: 1 + i % 3], namespace=(None, "a")[i % 2])
            m.commit(i, m.length(i) - m.num_computed_tokens(i))
    for step in range(30):
        ids = list(range(12 if step < 15 else 24))
        if step == 15:
            for m in managers:
                for i in range(12):
                    m.fork(i, 12 + i)
        tokens = rng.integers(0, 2, len(ids))
        for m in managers:
            m.append_batch(ids, tokens)
        together.commit_batch(ids, [1] * len(ids))
        for i in ids:
            apart.commit(i, 1)
        for m in managers:
            m.check()
        for i in ids:
            assert together.block_table(i).tolist() == apart.block_table(i).tolist()
        assert together.stats() == apart.stats()


@pytest.mark.parametrize("partial", [False, True])
def test_both_indexes_find_what_a_dictionary_of_all_prefixes_finds(partial):
    """The same random requests through both, no eviction: equal to brute force at every step."""
    rng = np.random.default_rng(0)
    size, seen = 4, set()
    managers = [
        BlockManager(4000, size, max_seqs=2, max_blocks_per_seq=16, prefix_index=index,
                     copy_on_partial_reuse=partial)
        for index in ("hash", "radix")
    ]  # fmt: skip
    for i in range(600):
        tokens = rng.integers(0, 2, rng.integers(1, 40)).tolist()
        space = (None, "a")[int(rng.integers(2))]
        step = 1 if partial else size
        longest = max((n for n in range(0, len(tokens), step) if (space, *tokens[:n]) in seen),
                      default=0)  # fmt: skip
        for m in managers:
            assert m.allocate(i, tokens, namespace=space).num_cached_tokens == longest
            m.commit(i, len(tokens) - longest)
            m.check()
            m.free(i)
        whole = len(tokens) // size * size
        seen |= {(space, *tokens[:n]) for n in range(1, whole + 1)}
        assert len({m.lookup(tokens, namespace=space) for m in managers}) == 1
