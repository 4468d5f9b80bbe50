"""The oracle: drives a manager and knows the KV of every slot; shared by several test files.

The KV at a position is a function of the namespace, the media and all tokens up to it. `Oracle`
writes it into a model of the pool when tokens are committed, runs the plans' copies on that model,
and reads it back through the tables: a wrong prefix, a stale block, a lost copy or a block with two
writers shows, even where the token itself is right.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxkv import BlockManager, JaxkvError, OutOfBlocksError


def kv(context, tokens):
    """The KV of the last of these tokens. The context: namespace, media and weights."""
    namespace, media, weights = context
    seen = [(start, min(n, len(tokens) - start), i) for start, n, i in media if start < len(tokens)]
    return hash((repr(namespace), repr(seen), weights, tuple(tokens)))


class Oracle:
    """Drives a manager, and knows the KV that every sequence must have."""

    def __init__(self, blocks, size, seqs, columns, **options):
        self.time = 0.0
        self.m = BlockManager(
            blocks + 1, size, max_seqs=seqs, max_blocks_per_seq=columns,
            clock=lambda: self.time, debug=True, **options,
        )  # fmt: skip
        self.size = size
        self.memory = {}  # (block, offset): KV
        self.tokens = {}  # live sequence: its tokens
        self.contexts = {}  # live sequence: namespace, media, weights
        self.computed = {}  # KV: its context and tokens
        self.collides = "hash_function" in options
        self.ids = itertools.count()

    # -- operations ------------------------------------------------------------------------

    def allocate(self, tokens, namespace=None, media=(), **options):
        """The new sequence's id; None where the manager refuses."""
        seq = next(self.ids)
        m, before = self.m, self.state()
        of = {"namespace": namespace, "media": media}
        admission = m.can_allocate(tokens, **of)
        cached_at_most = m.lookup(tokens, **of)
        try:
            a = m.allocate(seq, tokens, **of, **options)
        except JaxkvError:
            assert self.state() == before
            if not options:
                assert admission.verdict != "now"
            return None
        assert admission.verdict == "now" or options or admission.watermark
        assert 0 <= a.num_cached_tokens <= min(cached_at_most, len(tokens) - 1)
        if not options.get("skip_prefix_cache") and m._pool.partial is None:
            whole = (len(tokens) - 1) // self.size * self.size
            assert a.num_cached_tokens == min(cached_at_most, whole)
        self.tokens[seq] = list(tokens)
        self.contexts[seq] = namespace, tuple(media), m.weight_version
        return seq

    def write(self, seq, count=None):
        """A device step: plan, KV of the next tokens (None: all), commit."""
        self.apply_plan()
        count = self._compute(seq, count)
        if self.m.row(seq) % 2:  # either call
            self.m.commit_batch([seq], [count])
        else:
            self.m.commit(seq, count)

    def write_all(self, seqs):
        """A device step of several sequences: all tokens without KV."""
        self.apply_plan()
        self.m.commit_batch(seqs, [self._compute(seq, None) for seq in seqs])

    def _compute(self, seq, count):
        start = self.m.num_computed_tokens(seq)
        count = self.m.length(seq) - start if count is None else count
        table = self.m.block_table(seq)
        for position in range(start, start + count):
            slot = int(table[position // self.size]), position % self.size
            context, tokens = self.contexts[seq], self.tokens[seq][: position + 1]
            self.memory[slot] = value = kv(context, tokens)
            self.computed[value] = context, tuple(tokens)
        return count

    def apply_plan(self):
        plan = self.m.take_plan()
        sources = [
            {o: self.memory.get((int(s), o)) for o in range(self.size)} for s, _ in plan.copies
        ]
        for (_, destination), source in zip(plan.copies, sources, strict=True):
            for offset, value in source.items():
                self.memory[int(destination), offset] = value

    def append(self, seqs, tokens):
        """Forwards the call; whether the manager accepted it."""
        return self.extend(seqs, [[token] for token in tokens], None)

    def extend(self, seqs, tokens, counts):
        """Appends lists of tokens, one per sequence; whether the manager accepted them."""
        before = self.state()
        try:
            self.m.append_batch(seqs, np.array([token for run in tokens for token in run]), counts)
        except JaxkvError:
            assert self.state() == before
            return False
        for seq, more in zip(seqs, tokens, strict=True):
            self.tokens[seq] += more
        return True

    def reserve(self, seqs, num_slots):
        """Reserves slots; if accepted, they are writable at once."""
        m, before = self.m, self.state()
        try:
            given = m.reserve(seqs, num_slots)
        except JaxkvError:
            assert self.state() == before
            return
        assert (given >= num_slots).all()
        for seq, count in zip(seqs, given.tolist(), strict=True):
            first, last = m.length(seq), m.length(seq) + count - 1
            assert (last + 1) % self.size == 0
            blocks = m.block_table(seq)[first // self.size : last // self.size + 1]
            assert len(blocks) == last // self.size - first // self.size + 1
            assert (m._pool.ref_counts[blocks] == 1).all()
            assert not m._pool.indexed[blocks].any()

    def fork(self, seq):
        """The child's id; None where the manager refuses."""
        child, before = next(self.ids), self.state()
        try:
            self.m.fork(seq, child)
        except OutOfBlocksError:
            assert self.state() == before
            return None
        self.tokens[child], self.contexts[child] = list(self.tokens[seq]), self.contexts[seq]
        return child

    def reorder(self, seqs, parents):
        self.m.reorder(seqs, parents)
        tokens, contexts = dict(self.tokens), dict(self.contexts)
        for seq, parent in zip(seqs, parents, strict=True):
            self.tokens[seq] = list(tokens[seqs[parent]])
            self.contexts[seq] = contexts[seqs[parent]]

    def truncate(self, seq, length):
        self.m.truncate(seq, length)
        del self.tokens[seq][length:]

    def free(self, seq):
        self.m.free(seq)
        del self.tokens[seq], self.contexts[seq]

    # -- invariants ------------------------------------------------------------------------

    def state(self):
        """The state that a refused call must not change."""
        m = self.m
        return (
            m.stats(), m._pool.ref_counts.tolist(), sorted(m._pool.free_blocks().tolist()),
            {s: m.block_table(s).tolist() for s in self.tokens}, dict(m._pool.holds),
            m._pool.indexed.tolist(),
        )  # fmt: skip

    def gather(self, seq):
        """The KV that the sequence's queries would see, after the queued copies."""
        m, pending = self.m, dict(self.m._writes.copies)
        row, found = m.row(seq), []
        first = int(m._table.dropped[row]) * self.size
        for position in range(first, m.num_computed_tokens(seq)):
            block = int(m.block_table(seq)[position // self.size])
            slot = block, position % self.size
            if block in pending and position >= self.written_since(seq, block, position):
                slot = pending[block], position % self.size
            found.append(self.memory.get(slot))
        return first, found

    def written_since(self, seq, block, position):
        return 0  # nothing is written between an operation and its plan

    def verify(self):
        m = self.m
        m.check()
        for seq, tokens in self.tokens.items():
            assert m.length(seq) == len(tokens)
            first, found = self.gather(seq)
            context = self.contexts[seq]
            wanted = [kv(context, tokens[: i + 1]) for i in range(first, first + len(found))]
            assert found == wanted, f"sequence {seq}: KV of another context"
            assert m.token_ids(seq).tolist() == tokens[first:]
        stats = m.stats()
        assert stats.active + stats.cached + stats.free == m.num_blocks - 1
        self.verify_index()

    def verify_index(self):
        """Verifies each visible block against the brute-force dictionary of prefixes."""
        pool, cached = self.m._pool, set()
        for block in np.flatnonzero(pool.indexed).tolist():
            source = self.m._writes.copies.get(block, block)
            context, tokens = self.computed[self.memory[source, self.size - 1]]
            assert list(tokens[-self.size :]) == pool.tokens[block].tolist(), f"block {block}"
            assert len(tokens) % self.size == 0
            cached.add(kv(context, tokens))
        if self.collides or pool.partial is not None:
            return
        for seq, tokens in self.tokens.items():
            namespace, media, weights = self.contexts[seq]
            if weights == self.m.weight_version:
                found = self.m.lookup(tokens, namespace=namespace, media=media)
                assert found == self.longest_hit(cached, self.contexts[seq], tokens)

    def longest_hit(self, cached, context, tokens):
        """Tokens of the longest prefix whose next query sees only cached blocks."""
        size, window = self.size, self.m.sliding_window
        for length in range(len(tokens) // size * size, 0, -size):
            seen_from = 0 if window is None else max(0, length - window + 1)
            first = min(seen_from // size, length // size - 1)
            ends = range((first + 1) * size, length + 1, size)
            if all(kv(context, tokens[:end]) in cached for end in ends):
                return length
        return 0

    def finish(self):
        for seq in list(self.tokens):
            self.free(seq)
        self.apply_plan()
        self.m.check()
        assert self.m.stats().active == 0
        self.m.reset_prefix_cache()
        assert self.m.stats().free == self.m.num_blocks - 1


# -- helpers of the test cases -----------------------------------------------------------------


def run(first, last):
    """The tokens `first` to `last`, both included."""
    return list(range(first, last + 1))


def make(blocks, index="hash", size=4, *, seqs=8, columns=40, **options):
    """An oracle's manager with this many usable blocks."""
    return Oracle(blocks, size, seqs, columns, prefix_index=index, **options)


def put(o, tokens, namespace=None, **options):
    """A sequence whose prompt is computed."""
    seq = o.allocate(tokens, namespace, **options)
    assert seq is not None
    o.write(seq)
    o.verify()
    return seq


def cache(o, tokens, namespace=None, **options):
    """Computes a prompt once and frees its sequence."""
    o.free(put(o, tokens, namespace, **options))


def grow(o, seq, *tokens):
    """Decodes: each token reserves its slot and is written."""
    for token in tokens:
        assert o.append([seq], [token])
        o.write(seq)
        o.verify()


def refuse(o, call):
    """The call is refused for lack of blocks and changes nothing."""
    before = o.state()
    with pytest.raises(OutOfBlocksError):
        call()
    assert o.state() == before
    o.verify()


def table(o, seq):
    return o.m.block_table(seq).tolist()


def cached(o, seq):
    """Number of cached tokens of a sequence that was just allocated."""
    return o.m.num_computed_tokens(seq)


def counts(o):
    """(active, cached, free) blocks."""
    s = o.m.stats()
    assert s.active + s.cached + s.free == o.m.num_blocks - 1
    return s.active, s.cached, s.free


def read(o, tokens):
    """Hits cached blocks; takes one more block until it returns."""
    o.free(o.allocate([*tokens, 7777]))
