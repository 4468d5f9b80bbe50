"""The manager as a prefix cache: hits, eviction order, events."""

import numpy as np
import pytest
import xxhash
from oracle import cache, cached, counts, grow, make, put, read, refuse, run, table

from jaxkv import JaxkvError, OutOfBlocksError
from jaxkv.manager import events
from jaxkv.manager.eviction.policies import POLICIES
from jaxkv.manager.prefix.keys import Media, root_of

both = pytest.mark.parametrize("index", ["hash", "radix"])
any_index = pytest.mark.parametrize("index", ["hash", "radix", None])

P, D1 = 999, bytes(range(16))  # a placeholder token, the digest of an image


def next_blocks(o, count):
    """Blocks of the next one-block prompts; none is computed."""
    return [table(o, o.allocate([10_000 + i]))[0] for i in range(count)]


def victims(o, entries):
    """Eviction order of one-block entries, as blocks are needed one at a time."""
    gone = []
    while len(gone) < len(entries):
        assert o.allocate([10_000 + len(o.tokens)]) is not None
        gone += [n for n, e in entries.items() if n not in gone and not o.m.lookup(e)]
    return gone


def entry(i):
    """Four tokens that no other prompt has."""
    return run(10 * i, 10 * i + 3)


def listen(o, *kinds):
    """Events of these kinds (none: all) from now on."""
    heard = []
    o.m.subscribe(lambda e: heard.append(e) if not kinds or e.kind in kinds else None)
    return heard


# -- free blocks -----------------------------------------------------------------------------


@any_index
def test_a_new_pool_allocates_in_order_and_then_refuses(index):
    o = make(5, index)
    assert next_blocks(o, 5) == [1, 2, 3, 4, 5]
    refuse(o, lambda: o.m.allocate("x", [1]))
    o.free(2)
    assert next_blocks(o, 1) == [3]
    o.finish()


@any_index
def test_free_blocks_are_a_stack_with_tails_on_top(index):
    o = make(8, index)
    a, b = o.allocate(run(1, 12)), o.allocate(run(21, 32))
    assert (table(o, a), table(o, b)) == ([1, 2, 3], [4, 5, 6])
    o.free(a)
    o.free(b)
    assert next_blocks(o, 8) == [6, 5, 4, 3, 2, 1, 7, 8]


@both
def test_free_blocks_are_taken_first_then_tails_of_the_oldest(index):
    o = make(10, index)
    a = put(o, run(1, 18))
    b = put(o, run(101, 118))
    assert (table(o, a), table(o, b)) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    o.free(a)
    o.free(b)
    assert next_blocks(o, 8) == [10, 5, 4, 3, 2, 1, 9, 8]


@both
def test_a_hit_in_the_middle_of_the_queue_moves_to_its_end(index):
    o = make(7, index)
    a = put(o, run(1, 8))
    b = put(o, run(101, 108))
    c = put(o, run(201, 208))
    for s in (a, b, c):
        o.free(s)
    hit = o.allocate([*run(101, 108), 9])
    assert table(o, hit) == [3, 4, 7]
    o.free(hit)
    assert next_blocks(o, 7) == [7, 2, 1, 6, 5, 4, 3]


@both
def test_a_shared_prefix_is_evicted_after_both_of_its_tails(index):
    o = make(6, index)
    a = put(o, run(1, 12))
    b = put(o, [*run(1, 8), *run(50, 57)])
    assert (table(o, a), table(o, b)) == ([1, 2, 3], [1, 2, 4, 5])
    o.free(b)
    o.free(a)  # its own tail is younger than b's, and the prefix youngest
    assert next_blocks(o, 6) == [6, 5, 4, 3, 2, 1]


@both
@pytest.mark.parametrize("eviction", POLICIES)
def test_a_prefix_behind_the_window_does_not_wait_for_its_tail(index, eviction):
    """With a window the head of a chain is evicted before its tail, which is found without it."""
    o = make(4, index, sliding_window=4, eviction=eviction)
    a = put(o, run(1, 12))
    assert counts(o) == (1, 2, 1)
    cache(o, run(50, 53))
    o.free(a)
    found = []
    for i in range(4):
        assert o.allocate([10_000 + i]) is not None
        o.verify()
        found.append((o.m.lookup(run(1, 12)), o.m.lookup(run(50, 53))))
    assert found[-1] == (0, 0)
    if eviction == "lru":  # blocks 2, 1, the block of the other prompt, and the tail
        assert found == [(12, 4), (12, 4), (12, 0), (0, 0)]


def test_the_null_block_cannot_be_evicted():
    o = make(3)
    heard = listen(o)
    cache(o, run(1, 12))
    cache(o, run(21, 32))
    assert all(0 not in e.blocks for e in heard)
    assert [b.block for b in o.m.blocks()] == [1, 2, 3]
    assert counts(o) == (0, 3, 0)
    with pytest.raises(JaxkvError, match="block 0 cannot be evicted"):
        o.m.evict([0])


@both
def test_only_idle_cached_blocks_can_be_evicted_by_hand(index):
    o = make(8, index, copy_on_partial_reuse=True)
    live = table(o, put(o, run(1, 4)))[0]
    idle = put(o, run(11, 18))
    idle, tail = table(o, idle)
    o.free(1)
    pinned = table(o, put(o, run(21, 24)))[0]
    o.free(2)
    o.m.pin(run(21, 24))
    source = put(o, run(31, 34))
    copied = table(o, source)[0]
    o.free(source)
    o.allocate([31, 32, 99])  # its plan has not been taken
    free = o.m._pool.free_blocks().tolist()[0]
    for block in (live, pinned, copied, free, 0, -1, 9):
        before = o.state()
        with pytest.raises(JaxkvError, match=f"block {block} cannot be evicted"):
            o.m.evict([idle, block])
        assert o.state() == before
    o.m.evict([tail])
    assert o.m.lookup(run(11, 18)) == 4
    o.m.evict([idle])
    assert o.m.lookup(run(11, 18)) == 0
    o.verify()


# -- lookups ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("prompt", "found", "taken"),
    [
        ([9, 9, 9, 9, 9], 0, 0),
        ([1, 2, 3], 0, 0),
        (run(1, 4), 4, 0),
        (run(1, 5), 4, 4),
        ([1, 2, 3, 4, 5, 6, 9, 9, 9], 4, 4),
        (run(1, 8), 8, 4),
        (run(1, 9), 8, 8),
        (run(1, 12), 12, 8),
        (run(1, 14), 12, 12),
        (run(1, 15), 12, 12),
        ([2, 2, 3, 4, *run(5, 12)], 0, 0),
        (run(5, 12), 0, 0),
    ],
)
def test_whole_blocks_are_found_and_the_last_token_is_left(index, prompt, found, taken):
    o = make(12, index)
    cache(o, run(1, 14))
    assert o.m.lookup(prompt) == found
    s = o.allocate(prompt)
    assert cached(o, s) == taken
    o.write(s)
    o.verify()
    o.finish()


@both
@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        (run(1, 4), 3),
        (run(1, 6), 5),
        ([1, 2, 3, 9], 3),
        ([1, 2, 3, 4, 5, 9], 5),
        ([*run(1, 8), 9, 10, 99, 99], 10),
        ([*run(1, 4), 50, 51, 7], 6),
        ([9, 1, 2, 3], 0),
        ([1], 0),
        ([1, 2], 1),
        (run(1, 13), 12),
    ],
)
def test_part_of_a_block_is_found_with_copies(index, prompt, taken):
    o = make(12, index, copy_on_partial_reuse=True)
    cache(o, run(1, 14))
    cache(o, [*run(1, 4), *run(50, 53)])
    before = counts(o)
    s = o.allocate(prompt)
    assert cached(o, s) == taken
    assert len(o.m._writes.copies) == (taken % 4 > 0)
    o.write(s)
    o.verify()
    o.free(s)
    assert counts(o)[1] >= before[1]
    o.finish()


@both
def test_a_copy_that_would_not_leave_room_is_not_made(index):
    o = make(2, index, copy_on_partial_reuse=True)
    cache(o, run(1, 8))
    s = o.allocate([*run(1, 4), 5, 6, 9])  # the source is the block that it must take
    assert cached(o, s) == 4
    o.write(s)
    o.verify()
    assert counts(o) == (2, 0, 0)


@both
def test_the_same_tokens_behind_another_prefix_are_other_content(index):
    o = make(12, index)
    cache(o, run(1, 8))
    cache(o, [*run(11, 14), *run(5, 8)])
    cache(o, [*run(5, 8), *run(1, 4)])
    assert counts(o)[1] == 6
    assert o.m.lookup(run(1, 8)) == o.m.lookup([*run(11, 14), *run(5, 8)]) == 8
    assert o.m.lookup([*run(11, 14), *run(1, 4)]) == 4


@both
def test_tokens_are_the_same_in_every_integer_type(index):
    o = make(8, index)
    cache(o, run(1, 8))
    for kind in (np.uint8, np.int16, np.int64, ">i4", "<u8"):
        assert o.m.lookup(np.array(run(1, 8), kind)) == 8
    assert o.m.lookup(np.arange(17)[1:17:2]) == 0
    assert o.m.lookup(np.array([*run(1, 8), 0]).repeat(2)[::2]) == 8
    for wrong in ([1.0, 2.0], [[1], [2]], [2**31], [-(2**31) - 1], ["a"]):
        before = o.state()
        with pytest.raises(JaxkvError):
            o.m.allocate("x", wrong)  # pyright: ignore[reportArgumentType]
        assert o.state() == before


@both
def test_block_hashes_are_chained_and_the_same_everywhere(index):
    """Known values, which other processes, ranks and versions must reproduce."""
    o = make(12, index)
    stored = listen(o, events.STORED)
    cache(o, run(1, 8))
    cache(o, [*run(1, 4), 9, 9, 9, 9])  # splits the run: the hashes stay
    cache(o, run(1, 4), {"adapter": "X"})

    def link(parent, tokens):
        return xxhash.xxh3_128_digest(parent + np.array(tokens, "<i4").tobytes())

    one = link(root_of(None, 0), run(1, 4))
    two, three = link(one, run(5, 8)), link(one, [9] * 4)
    other = link(root_of({"adapter": "X"}, 0), run(1, 4))
    want = [(one, None), (two, one), (three, one), (other, None)]
    assert [(e.detail["hash"], e.detail["parent_hash"]) for e in stored] == [
        (h.hex(), p and p.hex()) for h, p in want
    ]
    assert one.hex() == "65d1a3e7b742ac161d9abee621a70a22"
    assert {b.hash for b in o.m.blocks()} == {h.hex() for h, _ in want} | {None}


@both
def test_a_lookup_leaves_no_trace(index):
    o = make(4, index)
    cache(o, run(1, 4))
    cache(o, run(11, 14))
    heard = listen(o)
    before, infos = o.state(), list(o.m.blocks())
    o.time += 5
    for _ in range(3):
        assert o.m.lookup(run(1, 9)) == 4
        assert o.m.can_allocate(run(1, 9)).num_cached_tokens == 4
    assert (o.state(), list(o.m.blocks()), heard) == (before, infos, [])
    put(o, run(21, 32))
    assert [o.m.lookup(run(1, 4)), o.m.lookup(run(11, 14))] == [0, 4]


@both
def test_a_long_prompt_is_found_to_the_token_where_it_diverges(index):
    o = make(600, index, size=1, columns=600)
    prompt = np.random.default_rng(0).integers(0, 3, 500)
    cache(o, prompt.tolist())
    for at in (0, 1, 15, 16, 17, 255, 499):
        other = prompt.copy()
        other[at] = 7
        assert o.m.lookup(other) == at


@both
def test_decoding_fills_blocks_for_the_next_turn(index):
    o = make(20, index)
    history, turns = [1, 2, 3], []
    for turn in range(6):
        s = o.allocate(history)
        turns.append(cached(o, s))
        o.write(s)
        grow(o, s, *(100 * turn + i for i in range(5)))
        history = [*o.tokens[s], 7]
        o.free(s)
        assert counts(o)[0] == 0
        assert counts(o)[1] == (len(history) - 1) // 4
    assert turns == [(3 + 6 * t - 1) // 4 * 4 for t in range(6)]
    o.finish()


@both
def test_a_prompt_that_skips_the_cache_is_computed_and_merges_with_it(index):
    o = make(8, index)
    cache(o, run(1, 8))
    first = [b.block for b in o.m.blocks() if b.hash]
    s = o.allocate(run(1, 8), skip_prefix_cache=True)
    assert cached(o, s) == 0
    assert not set(table(o, s)) & set(first)
    o.write(s)
    o.verify()
    assert table(o, s) == first
    assert counts(o) == (2, 0, 6)
    fresh = o.allocate(run(11, 18), skip_prefix_cache=True)
    o.write(fresh)
    assert o.m.lookup(run(11, 18)) == 8


@both
def test_duplicate_blocks_are_freed_at_once(index):
    o = make(4, index)
    a, b = o.allocate(run(1, 8)), o.allocate(run(1, 8))
    o.write(a)
    o.write(b, 5)  # one block is full
    o.verify()
    assert table(o, b) == [1, 4]
    assert counts(o) == (3, 0, 1)
    o.free(a)
    assert counts(o) == (2, 1, 1)
    o.write(b)
    o.verify()
    assert (table(o, b), counts(o)) == ([1, 2], (2, 0, 2))


def test_without_an_index_no_block_is_found_or_cached():
    o = make(6, None, copy_on_partial_reuse=True)  # pyright: ignore[reportArgumentType]
    heard = listen(o, events.STORED, events.REMOVED, events.HIT)
    for _ in range(3):
        cache(o, run(1, 8))
        assert o.m.lookup(run(1, 8)) == o.m.pin(run(1, 8)) == 0
        assert counts(o) == (0, 0, 6)
    a, b = put(o, run(1, 8)), put(o, run(1, 8))
    assert not set(table(o, a)) & set(table(o, b))
    assert o.m.reset_prefix_cache(force=True)
    assert heard == []
    o.finish()


@both
def test_other_media_in_the_same_place_split_the_tree(index):
    o = make(16, index)
    for image in (b"one", b"two", b"three"):
        s = put(o, run(1, 12), media=[Media(5, 6, image)])
        assert len(table(o, s)) == 3
        o.free(s)
    assert counts(o)[1] == 1 + 3 * 2
    o.finish()


@both
def test_a_truncated_image_does_not_hit_the_whole_image(index):
    """The model may well sample the placeholder's token: that is text."""
    o = make(16, index)
    image = [Media(4, 4, D1)]
    s = put(o, [1, 2, 3, 4, P, P, P, P], media=image)
    o.truncate(s, 5)
    for _ in range(3):
        o.m.append(s, P)
    o.m.commit(s, 3)
    assert o.m.lookup([1, 2, 3, 4, P, P, P, P], media=image) == 4
    assert o.m.lookup([1, 2, 3, 4, P, P, P, P]) == 4
    o.m.truncate(s, 4)
    for _ in range(4):
        o.m.append(s, P)
    o.m.commit(s, 4)  # all of it is text now
    assert o.m.lookup([1, 2, 3, 4, P, P, P, P], media=image) == 4
    assert o.m.lookup([1, 2, 3, 4, P, P, P, P]) == 8


# -- both indexes ----------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("partial", [False, True])
def test_hash_and_radix_emit_the_same_events(eviction, partial):
    logs = []
    for index in ("hash", "radix"):
        rng = np.random.default_rng(3)
        o = make(12, index, 2, eviction=eviction, copy_on_partial_reuse=partial)
        heard = listen(o)
        for step in range(150):
            o.time += 1.0
            kind, live = rng.integers(6), sorted(o.tokens)
            some = live[int(rng.integers(len(live)))] if live else None
            tokens = rng.integers(0, 2, rng.integers(1, 12)).tolist()
            if kind < 2 or some is None:
                seq = o.allocate(tokens, priority=int(rng.integers(-1, 2)))
                if seq is not None:
                    o.write(seq)
            elif kind == 2:
                if o.append([some], [int(rng.integers(2))]):
                    o.write(some)
            elif kind == 3:
                o.fork(some)
            elif kind == 4:
                o.truncate(some, int(rng.integers(o.m.length(some) + 1)))
            else:
                o.free(some)
            if step % 10 == 0:
                o.verify()
        logs.append(
            [(e.kind, e.seq, e.blocks, e.ref_counts, e.free_count, e.detail) for e in heard]
        )
        o.finish()
    assert len(logs[0]) > 300
    assert logs[0] == logs[1]


@both
def test_evicted_namespaces_leave_no_entries(index):
    o = make(2, index, copy_on_partial_reuse=True)
    for user in range(200):
        cache(o, run(1, 8), {"user": user})
    sizes = [len(x) for x in vars(o.m._pool.index).values() if hasattr(x, "__len__")]
    assert max(sizes) <= 3
    assert len(o.m._pool.partial._children) <= 2  # pyright: ignore[reportOptionalMemberAccess]


# -- sharing ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("cut", [5, 7])
@pytest.mark.parametrize("free_first", [True, False])
def test_rewriting_a_block_that_was_shared_and_found(index, cut, free_first):
    """Truncates into it, frees the other sequence, appends: lookups find the present content."""
    o = make(8, index)
    a = put(o, run(1, 12))
    b = o.fork(a)
    if free_first:
        o.free(b)
    o.truncate(a, cut)
    o.verify()
    if not free_first:
        assert o.m.lookup(run(1, 12)) == 12
        o.free(b)
    grow(o, a, *run(60, 60 + 12 - cut))
    o.verify()
    assert o.m.lookup(run(1, 12)) == 4
    assert o.m.lookup(o.tokens[a]) == 12
    again = put(o, run(1, 12))
    o.verify()
    assert table(o, again)[0] == table(o, a)[0]
    o.finish()


@both
def test_rewriting_a_block_removes_its_descendants_from_the_cache(index):
    o = make(8, index)
    a = put(o, run(1, 8))
    cache(o, run(1, 16))
    assert counts(o) == (2, 2, 4)
    removed = listen(o, events.REMOVED)
    o.truncate(a, 7)
    o.verify()
    assert counts(o) == (2, 0, 6)
    assert [e.blocks for e in removed] == [(4,), (3,), (2,)]
    assert {e.detail["reason"] for e in removed} == {"truncated"}
    grow(o, a, 8)
    assert o.m.lookup(run(1, 16)) == 8


@any_index
@pytest.mark.parametrize("family", [2, 3, 5])
def test_each_writer_of_a_shared_block_but_the_last_gets_a_copy(index, family):
    o = make(1 + family, index)
    beams = [put(o, run(1, 6))]
    beams += [o.fork(beams[0]) for _ in range(family - 1)]
    tail = table(o, beams[0])[1]
    assert o.append(beams, range(100, 100 + family))
    copies = dict(o.m._writes.copies)
    assert set(copies.values()) == {tail}
    assert sorted([*copies, tail]) == sorted(table(o, beam)[1] for beam in beams)
    assert counts(o)[0] == 1 + family
    for beam in beams:
        o.write(beam)
    o.verify()
    o.finish()


@both
def test_forks_of_a_truncated_cached_block_write_with_one_copy(index):
    o = make(2, index, size=3)
    a = put(o, [1, 2, 3, 4])
    b = o.fork(a)
    o.truncate(a, 1)
    o.truncate(b, 1)
    assert counts(o)[2] == 1
    assert o.append([a, b], [8, 9])
    o.write(a)
    o.write(b)
    o.verify()


@any_index
def test_both_blocks_of_a_copy_are_held_until_the_plan(index):
    o = make(4, index)
    a = put(o, run(1, 6))
    b = o.fork(a)
    source = table(o, a)[1]
    o.append([b], [100])
    destination = table(o, b)[1]
    o.free(a)
    o.free(b)
    assert not {source, destination} & set(o.m._pool.free_blocks().tolist())
    assert o.m.stats().active == 2
    refuse(o, lambda: o.m.allocate("x", run(50, 61)))
    plan = o.m.take_plan()
    assert plan.copies.tolist() == [[source, destination]]
    o.m.check()
    assert o.m.stats().active == 0
    assert {source, destination} <= set(o.m._pool.free_blocks().tolist())


@any_index
def test_a_copy_of_a_copy_reads_the_original(index):
    o = make(8, index)
    a = put(o, run(1, 6))
    b = o.fork(a)
    o.append([b], [100])
    c = o.fork(b)
    o.append([c], [101])
    source = table(o, a)[1]
    assert set(o.m._writes.copies.values()) == {source}
    for s in (a, b, c):
        o.write(s)
    o.verify()
    assert o.m.token_ids(c).tolist() == [*run(1, 6), 100, 101]


@any_index
def test_a_fork_does_not_get_the_slots_that_its_parent_reserved(index):
    o = make(6, index)
    a = o.allocate(run(1, 6), lookahead=6)
    o.write(a)
    b = o.fork(a)
    assert (len(table(o, a)), len(table(o, b))) == (3, 2)
    o.append([a, b], [7, 8])
    o.write(a)
    o.write(b)
    grow(o, a, 9, 10, 11, 12)
    assert len(table(o, a)) == 3
    o.finish()


@any_index
def test_beams_do_not_copy_reserved_slots(index):
    o = make(8, index)
    a = o.allocate(run(1, 8), lookahead=4)
    o.write(a)
    b = o.fork(a)
    o.reorder([a, b], [0, 0])
    assert o.append([a, b], [9, 10])
    assert len(o.m.take_plan().copies) == 0
    o.write(a)
    o.write(b)
    o.verify()
    o.finish()


# -- lookahead and admission -----------------------------------------------------------------


@both
def test_reserved_slots_are_used_before_new_blocks_and_are_never_found(index):
    o = make(4, index)
    a = o.allocate(run(1, 4), lookahead=5)
    o.write(a)
    assert (len(table(o, a)), counts(o)) == (3, (3, 0, 1))
    assert o.append([a], [5])
    for draft in (6, 7, 8):
        assert o.append([a], [draft])
    assert o.m.lookup(run(1, 8)) == 4  # drafts: tokens without KV
    o.write(a)
    assert o.m.lookup(run(1, 8)) == 8
    assert (len(table(o, a)), counts(o)[0]) == (3, 3)
    o.truncate(a, 6)
    assert (len(table(o, a)), counts(o)) == (2, (2, 0, 2))
    assert o.m.lookup(run(1, 8)) == 4
    o.verify()


@both
def test_lookahead_counts_for_admission(index):
    o = make(4, index)
    for lookahead, blocks in ((0, 2), (1, 3), (4, 3), (5, 4), (8, 4)):
        assert o.m.can_allocate(run(1, 8), lookahead=lookahead).needed == blocks
    assert o.m.can_allocate(run(1, 8), lookahead=9).verdict == "never"
    with pytest.raises(JaxkvError, match="never fits"):
        o.m.allocate("x", run(1, 8), lookahead=9)
    with pytest.raises(JaxkvError, match="lookahead"):
        o.m.allocate("x", run(1, 8), lookahead=-1)
    put(o, [1])
    refuse(o, lambda: o.m.allocate("x", run(1, 8), lookahead=5))


@both
def test_admission_verdicts_carry_the_numbers(index):
    o = make(10, index, seqs=3, watermark=0.15)
    ask = o.m.can_allocate

    def numbers(a):
        return a.verdict, a.needed, a.available, a.watermark, a.free_rows

    assert ask(run(1, 33)).longest == 32
    assert numbers(ask(run(1, 33))) == ("never", 9, 10, 2, 3)
    assert numbers(ask(run(1, 32))) == ("now", 8, 10, 2, 3)
    assert ask([]).verdict == "never"
    cache(o, run(1, 8))
    assert numbers(ask(run(1, 32))) == ("now", 8, 10, 2, 3)  # the hits are idle
    a = put(o, run(1, 9))
    assert numbers(ask(run(1, 32))) == ("later", 6, 7, 2, 2)
    assert numbers(ask(run(1, 28))) == ("now", 5, 7, 2, 2)
    assert ask(run(1, 28)).num_cached_tokens == 8
    assert numbers(ask(run(101, 128))) == ("later", 7, 7, 2, 2)
    assert put(o, run(101, 128)) is not None  # the running ones may use what is kept back
    o.free(1 + a)
    b, c = put(o, [50]), put(o, [60])
    assert numbers(ask([70])) == ("later", 1, 5, 2, 0)
    with pytest.raises(OutOfBlocksError, match="all 3 rows"):
        o.m.allocate("x", [70])
    o.free(b)
    assert ask([70]).verdict == "now"
    o.free(c)
    o.finish()


def test_the_longest_prompt_is_bounded_by_the_table_too():
    o = make(10, columns=3)
    assert o.m.can_allocate([1]).longest == 12
    assert o.m.can_allocate(run(1, 12)).verdict == "now"
    assert o.m.can_allocate(run(1, 13)).verdict == "never"


# -- pins ------------------------------------------------------------------------------------


def fill(o):
    """Takes every available block, one at a time, then frees them; returns their number."""
    taken = []
    while (s := o.allocate([20_000 + len(taken)])) is not None:
        taken.append(s)
    for s in taken:
        o.free(s)
    o.verify()
    return len(taken)


@both
@pytest.mark.parametrize("eviction", POLICIES)
def test_a_pinned_prefix_stays_until_it_is_unpinned(index, eviction):
    o = make(6, index, eviction=eviction)
    cache(o, run(1, 12))
    assert o.m.pin(run(1, 9)) == 8
    assert (o.m.stats().pinned, counts(o)) == (2, (0, 3, 3))
    assert fill(o) == 4
    assert o.m.lookup(run(1, 12)) == 8
    refuse(o, lambda: o.m.allocate("x", run(50, 66)))
    o.m.unpin(run(1, 9))
    assert o.m.stats().pinned == 0
    assert fill(o) == 6
    assert o.m.lookup(run(1, 12)) == 0
    with pytest.raises(JaxkvError, match="not pinned"):
        o.m.unpin(run(1, 9))


@both
def test_a_pin_ends_with_its_time_and_can_be_renewed(index):
    o = make(3, index)
    cache(o, run(1, 4))
    o.m.pin(run(1, 4), ttl=10)
    o.time = 9.0
    assert fill(o) == 2
    o.m.pin(run(1, 4), ttl=10)  # until 19 now
    o.time = 18.0
    assert (o.m.stats().pinned, fill(o)) == (1, 2)
    o.time = 19.0
    assert o.m.stats().pinned == 0
    assert fill(o) == 3
    assert o.m.lookup(run(1, 4)) == 0


@both
def test_a_pin_without_a_ttl_replaces_one_with(index):
    o = make(3, index)
    cache(o, run(1, 4))
    o.m.pin(run(1, 4), ttl=10)
    o.m.pin(run(1, 4))
    o.time = 1e9
    assert fill(o) == 2


@both
def test_pins_of_nested_prefixes_end_independently(index):
    o = make(4, index)
    cache(o, run(1, 12))
    o.m.pin(run(1, 12))
    o.m.pin(run(1, 4), ttl=5)
    o.m.unpin(run(1, 12))
    assert o.m.stats().pinned == 1
    assert fill(o) == 3
    o.time = 5.0
    assert fill(o) == 4


@both
def test_a_pin_keeps_the_blocks_of_a_sequence_after_its_end(index):
    o = make(3, index)
    a = put(o, run(1, 8))
    assert o.m.pin(run(1, 8)) == 8
    o.free(a)
    assert fill(o) == 1
    assert o.m.lookup(run(1, 8)) == 8
    assert o.m.reset_prefix_cache()
    assert counts(o) == (0, 0, 3)
    assert o.m.stats().pinned == 0


@both
def test_a_pinned_block_is_copied_before_it_is_written(index):
    o = make(4, index)
    a = put(o, run(1, 8))
    o.m.pin(run(1, 8))
    o.truncate(a, 7)
    grow(o, a, 99)
    assert o.m.lookup(run(1, 8)) == 8
    assert o.m.lookup([*run(1, 7), 99]) == 8
    o.free(a)
    assert fill(o) == 2
    assert o.m.lookup(run(1, 8)) == 8


@both
def test_an_expired_pin_costs_nothing_and_frees_blocks_once(index):
    """No call has read the clock since it expired: the blocks count as idle hits, once."""
    o = make(4, index)
    cache(o, run(1, 8))
    o.m.pin(run(1, 8), ttl=5)
    put(o, [9])
    o.time = 6.0
    refuse(o, lambda: o.m.allocate("x", run(1, 16)))
    o.m.pin(run(1, 8), ttl=5)
    o.time = 12.0
    admission = o.m.can_allocate(run(1, 16))
    assert (admission.verdict, admission.needed, admission.available) == ("later", 4, 3)


@both
def test_blocks_of_an_expired_pin_can_be_evicted_by_hand(index):
    o = make(4, index)
    cache(o, run(1, 8))
    first = next(b.block for b in o.m.blocks() if b.hash)
    o.m.pin(run(1, 8), ttl=5)
    o.time = 6.0
    o.m.evict([first])
    assert counts(o) == (0, 0, 4)


@both
def test_a_block_whose_pin_expired_is_written_in_place(index):
    o = make(2, index)
    a = put(o, run(1, 8))
    o.m.pin(run(1, 8), ttl=5)
    o.truncate(a, 7)
    refuse(o, lambda: o.m.append(a, 99))
    o.time = 6.0
    grow(o, a, 99)
    assert o.m.lookup(run(1, 8)) == 4


@both
def test_new_weights_end_the_pins_of_the_old(index):
    """No prompt can hit what they hold; under an older rule they piled up until nothing fitted."""
    o = make(2, index)
    for version in range(1, 5):
        cache(o, run(1, 8))
        assert o.m.pin(run(1, 8)) == 8
        o.m.set_weight_version(version - 1)  # as before: nothing ends
        assert o.m.stats().pinned == 2
        o.m.set_weight_version(version)
        assert o.m.stats().pinned == 0
        assert o.m.pin(run(1, 8)) == 0  # not cached for these weights
        o.verify()
    with pytest.raises(JaxkvError, match="0 prefixes are"):
        o.m.unpin(run(1, 8))
    assert fill(o) == 2


@both
def test_new_weights_end_the_priorities_of_the_old(index):
    """Also those of sequences that still run: what they publish is found by nobody."""
    o = make(6, index)
    cache(o, run(1, 8), priority=9)
    running = put(o, run(11, 16), priority=9, ttl=100.0)
    o.m.set_weight_version(1)
    grow(o, running, 17, 18)
    o.free(running)
    assert not o.m._retention.keeps
    cache(o, run(1, 4), priority=1)  # for the new weights
    o.allocate([*range(100, 120)])  # five blocks: all but the prioritised one
    assert o.m.lookup(run(1, 4)) == 4
    o.finish()


@both
def test_a_pin_that_finds_nothing_is_not_kept(index):
    o = make(3, index)
    for i in range(100):
        assert o.m.pin([i] * 8, ttl=1e9 if i % 2 else None) == 0
    assert len(o.m._pins._pins) == len(o.m._pins._ends) == 0
    cache(o, run(1, 8))
    o.m.pin(run(1, 8), ttl=5.0)
    o.time = 6.0
    o.m.pin([5] * 4)  # any call ends what has expired
    assert (len(o.m._pins._pins), len(o.m._pins._ends), o.m.stats().pinned) == (0, 0, 0)


# -- priorities ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("eviction", POLICIES)
def test_priorities_come_before_any_policy(index, eviction):
    o = make(6, index, eviction=eviction)
    wanted = {"low": -1, "plain": 0, "lower": -2, "high": 7, "mid": 3, "plain too": 0}
    entries = {name: entry(i) for i, name in enumerate(wanted)}
    for name, priority in wanted.items():
        o.time += 10
        cache(o, entries[name], priority=priority)
    assert victims(o, entries) == ["lower", "low", "plain", "plain too", "mid", "high"]


@both
def test_a_priority_ends_with_its_time(index):
    o = make(4, index)
    cache(o, entry(1), priority=5, ttl=100)
    cache(o, entry(2), priority=1)
    cache(o, entry(3))
    cache(o, entry(4), priority=-1, ttl=50)
    o.time = 99.0
    entries = {i: entry(i) for i in range(1, 5)}
    assert victims(o, entries) == [3, 4, 2, 1]  # 4 has lost its low priority at 50

    o = make(4, index)
    cache(o, entry(1), priority=5, ttl=100)
    cache(o, entry(2), priority=1)
    cache(o, entry(3))
    cache(o, entry(4), priority=-1, ttl=50)
    o.time = 100.0
    assert victims(o, entries) == [3, 4, 1, 2]


@both
def test_the_time_of_a_priority_runs_while_its_sequence_lives(index):
    o = make(3, index)
    a = put(o, entry(1), priority=5, ttl=100)
    cache(o, entry(2))
    o.time = 150.0
    o.free(a)
    cache(o, entry(3), priority=1)
    assert victims(o, {i: entry(i) for i in (1, 2, 3)}) == [2, 1, 3]


@both
def test_a_priority_ends_with_its_content(index):
    o = make(2, index)
    cache(o, entry(1), priority=5)
    cache(o, entry(2))
    fill(o)
    assert counts(o) == (0, 0, 2)
    cache(o, entry(1))
    cache(o, entry(2), priority=1)
    assert victims(o, {1: entry(1), 2: entry(2)}) == [1, 2]


@both
@pytest.mark.parametrize("priorities", [(1, 3), (3, 1), (0, -1), (-1, 0), (0, 1), (-2, -1)])
@pytest.mark.parametrize("idle", [True, False])
def test_of_two_priorities_for_the_same_content_the_higher_stays(index, priorities, idle):
    """Two requests computed it; the block of the first is idle or still in use at the second."""
    o = make(4, index)
    a = o.allocate(entry(1), priority=priorities[0])
    b = o.allocate(entry(1), priority=priorities[1])
    o.write(a)
    if idle:
        o.free(a)
    o.write(b)
    o.verify()
    if not idle:
        o.free(a)
    o.free(b)
    above = max(priorities)
    cache(o, entry(2), priority=above)  # used later: evicted later
    cache(o, entry(3), priority=above - 1)
    assert victims(o, {i: entry(i) for i in (1, 2, 3)}) == [3, 1, 2]


@both
@pytest.mark.parametrize("priorities", [(0, 2), (2, 0), (-1, 2), (-1, 0), (0, -1), (1, 2)])
def test_a_hit_raises_a_priority_and_never_lowers_it(index, priorities):
    o = make(4, index)
    first, second = priorities
    cache(o, entry(1), priority=first)
    cache(o, [*entry(1), 99], priority=second)
    cache(o, entry(2), priority=max(priorities))
    cache(o, entry(3), priority=max(priorities) - 1)
    assert victims(o, {i: entry(i) for i in (1, 2, 3)}) == [3, 1, 2]


@both
@pytest.mark.parametrize("how", ["by hand", "rewritten", "reset"])
def test_evicted_content_leaves_no_trace_of_its_priority(index, how):
    o = make(6, index)
    a = put(o, run(1, 8), priority=1)
    blocks = table(o, a)
    cache(o, run(1, 16), priority=1)
    cache(o, run(50, 53), priority=1)
    if how == "rewritten":
        o.truncate(a, 5)
        grow(o, a, 99)
    o.free(a)
    if how == "by hand":
        o.m.evict(blocks[:1])
    elif how == "reset":
        assert o.m.reset_prefix_cache()
    o.verify()
    assert fill(o) == 6
    cache(o, run(1, 24), priority=2)
    assert fill(o) == 6
    o.finish()


@both
def test_low_priority_at_the_head_of_a_chain_is_still_evicted_after_its_tail(index):
    o = make(3, index)
    cache(o, run(1, 4), priority=-1)
    cache(o, run(1, 12), priority=9)
    for left in (8, 4, 0):
        o.allocate([10_000 + left])
        assert o.m.lookup(run(1, 12)) == left
    o.verify()


@both
def test_expiry_entries_of_priorities_and_pins_do_not_accumulate(index):
    o = make(2, index)
    for i in range(300):
        cache(o, [i] * 8, priority=1 + i % 2, ttl=1e9)
        o.m.pin([i] * 8, ttl=1e9)
        o.m.pin([i] * 8, ttl=1e9)
        o.m.unpin([i] * 8)
    _, ends = o.m._retention._levels_and_ends()
    assert len(ends) == 2  # of the two cached blocks of the last request
    assert len(o.m._pins._ends) == len(o.m._pins._pins) == 0


# -- policies --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("eviction", "order"),
    [
        ("lru", "DABCE"),
        ("fifo", "ABCDE"),
        ("slru", "DEABC"),
        ("decayed", "DEBCA"),
        ("s3fifo", "DABCE"),
    ],
)
def test_each_policy_has_its_order(index, eviction, order):
    """A is hit three times, then B and C once, D and E never; E comes last."""
    o = make(6, index, eviction=eviction)
    entries = {name: entry(i) for i, name in enumerate("ABCDE")}
    for name in "ABCD":
        o.time += 10
        cache(o, entries[name])
    for name in "AAABC":
        o.time += 10
        read(o, entries[name])
    o.time += 10
    cache(o, entries["E"])
    assert "".join(victims(o, entries)) == order


@both
@pytest.mark.parametrize("eviction", POLICIES)
def test_every_policy_evicts_every_block_once(index, eviction):
    o = make(8, index, eviction=eviction, seqs=9)
    rng = np.random.default_rng(1)
    for _ in range(60):
        o.time += float(rng.exponential(100))
        cache(o, rng.integers(0, 2, rng.integers(1, 24)).tolist())
        if rng.random() < 0.1:
            assert fill(o) == 8
            assert counts(o) == (0, 0, 8)


# -- sliding window --------------------------------------------------------------------------


@both
def test_blocks_behind_the_window_become_null_and_stay_findable(index):
    o = make(8, index, sliding_window=6)
    a = o.allocate(run(1, 10))
    o.write(a, 8)  # the query at 8 sees 3 to 8
    assert table(o, a) == [1, 2, 3]
    o.write(a)
    assert table(o, a) == [0, 2, 3]  # the query at 10 sees 5 to 10
    o.verify()
    stats = o.m.stats()
    assert (stats.active, stats.cached, stats.used_slots, stats.allocated_slots) == (2, 1, 6, 8)
    assert o.m.lookup(run(1, 10)) == 8
    assert o.m.token_ids(a).tolist() == run(5, 10)
    grow(o, a, 11, 12)
    assert table(o, a) == [0, 2, 3]  # 7 to 12
    grow(o, a, 13, 14)
    assert table(o, a) == [0, 0, 3, 4]  # 9 to 14
    assert o.m.lookup(run(1, 14)) == 12
    b = o.allocate(run(1, 14))
    assert cached(o, b) == 12
    o.write(b)
    o.verify()
    o.finish()


@any_index
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
def test_the_blocks_that_the_next_query_sees_are_live(index, window):
    o = make(8, index, sliding_window=window)
    a = put(o, run(1, 3))
    for token in range(4, 30):
        grow(o, a, token)
        seen_from = max(0, token - window + 1)
        gone = seen_from // 4
        if index is not None:  # the last full block stays: the next is found through it
            gone = max(0, min(gone, token // 4 - 1))
        assert table(o, a)[:gone] == [0] * gone
        assert 0 not in table(o, a)[gone:]
        assert counts(o)[0] <= -(-window // 4) + 1


@any_index
def test_truncation_keeps_the_tokens_that_the_window_needs(index):
    o = make(8, index, sliding_window=8)
    a = put(o, run(1, 20))  # the next query sees 13 to 20: blocks 0 to 2 are freed
    assert table(o, a)[:3] == [0, 0, 0]
    for length in (0, 11, 12, 13, 18):  # the query at 18 would see 11 to 18
        before = o.state()
        with pytest.raises(JaxkvError, match=f"cannot truncate to {length}"):
            o.m.truncate(a, length)
        assert o.state() == before
    o.truncate(a, 19)
    grow(o, a, 99)
    b = put(o, run(1, 12))  # all tokens that its window needs are cached
    assert table(o, b)[0] == 0
    o.truncate(b, 11)
    grow(o, b, 98)


@any_index
def test_forks_and_beams_under_a_window_free_each_block_once(index):
    o = make(12, index, sliding_window=5)
    beams = [put(o, run(1, 10))]
    beams += [o.fork(beams[0]), o.fork(beams[0])]
    for step in range(8):
        assert o.append(beams, [100 + step, 200 + step, 300 + step])
        for beam in beams:
            o.write(beam)
        o.verify()
        o.reorder(beams, [2, 0, 0])
        o.verify()
    o.finish()


@both
def test_a_hit_needs_only_the_blocks_of_the_window(index):
    o = make(12, index, sliding_window=6)
    a = put(o, run(1, 20))
    assert table(o, a) == [0, 0, 0, 4, 5]  # the query at 20 sees 15 to 20
    o.free(a)
    gone = [1, 2, 3]
    o.m.evict(gone)
    o.verify()
    assert o.m.lookup(run(1, 20)) == 20
    assert o.m.lookup(run(1, 19)) == 0  # at 16 it would see 11 to 16, of which block 3 is evicted
    admission = o.m.can_allocate([*run(1, 20), 77])
    assert (admission.verdict, admission.num_cached_tokens, admission.needed) == ("now", 20, 3)
    b = o.allocate([*run(1, 20), 77])
    assert table(o, b)[:5] == [0, 0, 0, 4, 5]
    assert o.m.token_ids(b).tolist() == [*run(13, 20), 77]
    o.write(b)
    o.verify()
    c = o.fork(b)
    grow(o, c, 78, 79, 80, 81)
    o.finish()


@both
def test_filling_a_gap_connects_both_parts_of_a_chain(index):
    """A prompt that computes the evicted middle of a chain connects to the rest of the chain."""
    o = make(12, index, sliding_window=8)
    cache(o, run(1, 24))
    o.m.evict([2, 3])
    assert o.m.lookup(run(1, 16)) == 4  # the query at 16 would see 9 to 16
    assert o.m.lookup(run(1, 24)) == 24
    heard = listen(o, events.STORED)
    a = put(o, run(1, 19))  # its blocks 1 to 3: the last of them is cached already
    assert [e.detail["token_ids"] for e in heard] == [run(5, 8), run(9, 12)]
    o.free(a)
    assert o.m.lookup(run(1, 16)) == 16
    b = put(o, [*run(1, 8), *run(50, 60)])  # a branch beside it
    assert o.m.lookup([*run(1, 8), *run(50, 57)]) == 16
    o.free(b)
    o.m.evict([b.block for b in o.m.blocks() if b.hash][::2])
    o.verify()
    o.finish()


@both
def test_the_end_of_a_chain_grows_without_its_beginning(index):
    """A window leaves the head of a chain idle while its tail is still in use."""
    o = make(5, index, sliding_window=4)
    a = put(o, run(1, 12))
    assert table(o, a) == [0, 0, 3]
    assert counts(o) == (1, 2, 2)
    o.m.evict([1, 2])
    o.verify()
    assert (o.m.lookup(run(1, 8)), o.m.lookup(run(1, 12))) == (0, 12)
    grow(o, a, 13, 14, 15, 16)
    assert o.m.lookup(run(1, 16)) == 16
    o.free(a)
    assert counts(o) == (0, 2, 3)


@both
def test_a_pin_under_a_window_holds_what_a_hit_needs(index):
    o = make(8, index, sliding_window=4)
    cache(o, run(1, 12))
    assert o.m.pin(run(1, 12)) == 12
    assert o.m.stats().pinned == 1
    assert o.allocate(run(101, 128)) is not None  # evicts all else
    o.verify()
    assert o.m.lookup(run(1, 12)) == 12
    o.m.unpin(run(1, 12))


# -- events ----------------------------------------------------------------------------------


@both
def test_a_block_is_removed_before_it_is_stored_again(index):
    o = make(2, index)
    heard = listen(o, events.STORED, events.REMOVED, events.EVICT, events.HIT, events.ALLOCATE)
    cache(o, run(1, 8))
    o.time = 7.0
    b = o.allocate(run(21, 28))
    o.write(b)
    kinds = [(e.kind, e.blocks) for e in heard]
    assert kinds == [
        (events.ALLOCATE, (1, 2)),
        (events.STORED, (1,)),
        (events.STORED, (2,)),
        (events.REMOVED, (2,)),
        (events.EVICT, (2,)),
        (events.REMOVED, (1,)),
        (events.EVICT, (1,)),
        (events.ALLOCATE, (1, 2)),
        (events.STORED, (1,)),
        (events.STORED, (2,)),
    ]
    assert [e.detail["reason"] for e in heard if e.kind == events.REMOVED] == ["evicted"] * 2
    assert [e.detail["age"] for e in heard if e.kind == events.EVICT] == [7.0, 7.0]


@both
def test_a_hit_event_lists_the_blocks(index):
    o = make(6, index, copy_on_partial_reuse=True)
    cache(o, run(1, 12))
    heard = listen(o, events.HIT, events.ALLOCATE)
    s = o.allocate([*run(1, 10), 99])
    hit, allocate = heard
    assert (hit.seq, hit.blocks, hit.ref_counts) == (s, (1, 2), (1, 1))
    assert (hit.detail["num_tokens"], hit.detail["queried_tokens"]) == (10, 11)
    assert (allocate.seq, list(allocate.blocks)) == (s, table(o, s))
    assert allocate.free_count == o.m.can_allocate([1]).available
    o.allocate(run(50, 51))
    assert [e.kind for e in heard[2:]] == [events.ALLOCATE]


@both
def test_a_refusal_emits_only_its_own_event(index):
    o = make(2, index)
    cache(o, run(1, 8))
    put(o, [1])
    heard = listen(o)
    refuse(o, lambda: o.m.allocate("x", run(1, 8)))
    assert [(e.kind, e.detail["name"]) for e in heard] == [(events.OPERATION, "allocate")]
    assert heard[0].detail["error"].startswith("OutOfBlocksError")


class Mirror:
    """A mirror of the cache in another program, from events alone."""

    def __init__(self, window):
        self.window = window
        self.blocks = {}  # hash: (parent hash, tokens, namespace)

    def __call__(self, event):
        d = event.detail
        if event.kind == events.STORED:
            assert d["hash"] not in self.blocks
            assert d["parent_hash"] is None or d["parent_hash"] in self.blocks
            parent, tokens = d["parent_hash"], tuple(d["token_ids"])
            start = bytes.fromhex(parent) if parent else root_of(d["namespace"], 0)
            data = start + np.array(tokens, "<i4").tobytes()
            assert d["hash"] == xxhash.xxh3_128_hexdigest(data)
            self.blocks[d["hash"]] = parent, tokens, d["namespace"]
        elif event.kind == events.REMOVED:
            del self.blocks[d["hash"]]
            if self.window is None:
                assert d["hash"] not in [parent for parent, _, _ in self.blocks.values()]
        elif event.kind == events.CLEARED:
            self.blocks.clear()

    def lookup(self, tokens, namespace, size):
        parent, ends = root_of(namespace, 0), []
        for end in range(size, len(tokens) + 1, size):
            data = parent + np.array(tokens[end - size : end], "<i4").tobytes()
            parent = xxhash.xxh3_128_digest(data)
            if parent.hex() in self.blocks:
                ends.append(end)
        for length in ends[::-1]:
            seen_from = 0 if self.window is None else max(0, length - self.window + 1)
            first = min(seen_from // size * size, length - size)
            if set(range(first + size, length + 1, size)) <= set(ends):
                return length
        return 0


@both
@pytest.mark.parametrize("eviction", ["lru", "decayed"])
@pytest.mark.parametrize("window", [None, 5])
def test_events_rebuild_the_cache(index, eviction, window):
    rng = np.random.default_rng(5)
    o = make(10, index, 2, eviction=eviction, sliding_window=window)
    mirror = Mirror(window)
    o.m.subscribe(mirror)
    for step in range(200):
        o.time += 1.0
        space = (None, "x")[int(rng.integers(2))]
        tokens = rng.integers(0, 2, rng.integers(1, 12)).tolist()
        kind, live = int(rng.integers(8)), sorted(o.tokens)
        if kind < 3 or not live:
            seq = o.allocate(tokens, space)
            if seq is not None:
                o.write(seq)
        elif kind == 3:
            o.fork(live[0])
        elif kind == 4 and window is None:
            o.truncate(live[-1], int(rng.integers(o.m.length(live[-1]) + 1)))
        elif kind == 5 and step % 5 == 0:
            o.m.reset_prefix_cache(force=True)
        elif kind < 7:
            if o.append(live[-1:], [int(rng.integers(2))]):
                o.write(live[-1])
        else:
            o.free(live[0])
        assert mirror.lookup(tokens, space, 2) == o.m.lookup(tokens, namespace=space)
        held = {h for b in o.m.blocks() if (h := b.hash)}
        assert held == set(mirror.blocks)


@both
def test_a_reset_emits_one_event(index):
    o = make(4, index)
    cache(o, run(1, 8))
    r = put(o, run(50, 53))
    heard = listen(o, events.CLEARED, events.REMOVED, events.STORED)
    assert not o.m.reset_prefix_cache()
    assert heard == []
    assert o.m.reset_prefix_cache(force=True)
    assert [e.kind for e in heard] == [events.CLEARED]
    grow(o, r, 54, 55, 56, 57)
    o.free(r)
    assert [e.kind for e in heard] == [events.CLEARED]


def test_an_unsubscribed_listener_gets_no_events():
    o = make(4)
    heard = []
    o.m.subscribe(heard.append)
    cache(o, run(1, 4))
    count = len(heard)
    o.m.unsubscribe(heard.append)
    cache(o, run(11, 14))
    assert count == len(heard) > 0
