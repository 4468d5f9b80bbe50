"""Faults reported by users of other KV managers, each as a small story that must end well here.

Sizes are in blocks of four tokens unless said; `Oracle.verify` compares every sequence's KV, as its
table reads it, with the KV of exactly its context.
"""

import itertools

import numpy as np
import pytest
from oracle import cache, cached, counts, grow, make, put, read, refuse, run, table

from jaxkv import BlockManager, JaxkvError
from jaxkv.errors import UnknownSequenceError
from jaxkv.manager.eviction.policies import POLICIES
from jaxkv.manager.prefix.keys import BlockKeys, Media, root_of
from jaxkv.observe.metrics import Metrics

both = pytest.mark.parametrize("index", ["hash", "radix"])
any_index = pytest.mark.parametrize("index", ["hash", "radix", None])


# -- admission -------------------------------------------------------------------------------


@both
def test_a_refused_prompt_leaves_no_reference_on_its_hits(index):
    # vllm-project/vllm#11562
    o = make(4, index)
    cache(o, run(1, 8))
    b = put(o, run(50, 57))
    assert counts(o) == (2, 2, 0)
    for _ in range(3):
        assert o.m.can_allocate(run(1, 16)).verdict == "later"
        refuse(o, lambda: o.m.allocate("c", run(1, 16)))
    o.free(b)
    c = o.allocate(run(1, 16))
    assert cached(o, c) == 8
    o.write(c)
    o.verify()
    o.finish()
    assert counts(o) == (0, 0, 4)


@both
@pytest.mark.parametrize("eviction", POLICIES)
def test_an_allocation_never_evicts_its_own_hits(index, eviction):
    # vllm-project/vllm#10507
    o = make(4, index, eviction=eviction)
    cache(o, run(1, 8))
    cache(o, run(70, 77))
    assert counts(o) == (0, 4, 0)
    c = o.allocate(run(1, 8) + run(30, 37))
    assert cached(o, c) == 8
    assert len(set(table(o, c))) == 4
    assert o.m.lookup(run(70, 77)) == 0
    o.write(c)
    o.verify()


@both
def test_a_hit_on_an_idle_block_counts_as_a_needed_block(index):
    # ROCm/ATOM#902
    o = make(4, index)
    cache(o, run(1, 8))
    put(o, run(50, 53))
    admission = o.m.can_allocate(run(1, 16))
    assert (admission.needed, admission.available, admission.num_cached_tokens) == (4, 3, 8)
    refuse(o, lambda: o.m.allocate("c", run(1, 16)))
    assert o.m.can_allocate(run(1, 12)).verdict == "now"
    assert cached(o, put(o, run(1, 12))) == 12


@both
def test_a_hit_on_an_idle_block_counts_beside_a_pinned_one(index):
    o = make(5, index)
    cache(o, run(1, 8))
    o.m.pin(run(1, 4))
    put(o, run(50, 53))
    admission = o.m.can_allocate(run(1, 16))  # one hit is pinned, the other is not
    assert (admission.needed, admission.available, admission.num_cached_tokens) == (3, 3, 8)
    assert cached(o, o.allocate(run(1, 16))) == 8
    o.finish()
    cache(o, run(1, 8))
    o.m.pin(run(1, 4))
    put(o, run(50, 57))
    refuse(o, lambda: o.m.allocate("c", run(1, 16)))


# -- releases --------------------------------------------------------------------------------


@any_index
def test_blocks_behind_a_window_are_freed_once(index):
    # vllm-project/vllm#42571
    o = make(4, index, sliding_window=8)
    s = put(o, run(1, 8))
    for token in range(24):
        grow(o, s, 100 + token)
        assert counts(o)[0] <= 3
    o.free(s)
    assert counts(o)[0] == 0
    four = [put(o, [200 + i]) for i in range(4)]
    assert sorted(table(o, s)[0] for s in four) == [1, 2, 3, 4]
    refuse(o, lambda: o.m.allocate("fifth", [7]))


@any_index
def test_a_second_free_is_an_error_and_frees_nothing(index):
    o = make(4, index)
    s = put(o, run(1, 5))
    o.free(s)
    before = o.state()
    with pytest.raises(UnknownSequenceError):
        o.m.free(s)
    assert o.state() == before
    block = next((b.block for b in o.m.blocks() if b.hash), None)
    if block:  # the same block twice in one call
        o.m.evict([block, block])
        assert counts(o) == (0, 0, 4)
        with pytest.raises(JaxkvError, match="not cached"):
            o.m.evict([block])
    o.verify()


@any_index
@pytest.mark.parametrize("child_first", [True, False])
def test_a_fork_and_its_parent_end_in_either_order(index, child_first):
    # apache/tvm#16666
    o = make(6, index)
    s = put(o, run(1, 6))
    f = o.fork(s)
    gone, left = (f, s) if child_first else (s, f)
    o.free(gone)
    o.verify()
    grow(o, left, 7)
    assert o.m.take_plan().copies.size == 0
    o.finish()


@any_index
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_family_of_forks_ends_in_any_order(index, order):
    # apache/tvm#17045
    o = make(12, index)
    p = put(o, run(1, 6))
    c1 = o.fork(p)
    grow(o, c1, 50)
    c2 = o.fork(c1)
    grow(o, c2, 60)
    family = [p, c1, c2]
    for i in order:
        o.free(family[i])
        o.verify()
    assert counts(o)[0] == 0
    assert not o.m._table.rows
    assert not o.m._pool.holds
    assert not o.m._pool.ref_counts.any()
    o.finish()


# -- duplicates and sharing ------------------------------------------------------------------


@both
def test_a_duplicate_is_freed_only_after_its_table_names_the_original(index):
    # sgl-project/mini-sglang#142
    o = make(8, index)
    a, b = o.allocate(run(1, 8)), o.allocate(run(1, 8))
    assert cached(o, b) == 0
    o.write(a)
    o.write(b)
    o.verify()
    assert table(o, b) == table(o, a)
    assert counts(o) == (2, 0, 6)
    grow(o, b, 9)
    put(o, run(60, 75))
    grow(o, b, 10)
    o.finish()


@any_index
def test_a_partly_filled_block_is_copied_before_its_second_writer_writes(index):
    # Avarok-Cybersecurity/atlas#1193
    o = make(6, index)
    a = put(o, run(1, 6))
    b = o.fork(a)
    assert table(o, a) == table(o, b)
    assert o.append([a], [100])
    assert o.append([b], [200])
    plan = o.m.take_plan()
    assert len(plan.copies) == 1  # the last writer keeps the block
    for source, destination in plan.copies:
        for offset in range(2):
            o.memory[destination, offset] = o.memory[source, offset]
    o.write(a)
    o.write(b)
    o.verify()
    assert o.m.token_ids(a).tolist() == [*run(1, 6), 100]
    assert o.m.token_ids(b).tolist() == [*run(1, 6), 200]
    assert table(o, a)[0] == table(o, b)[0]
    assert counts(o)[0] == 3


@any_index
def test_a_fork_at_a_block_boundary_copies_nothing(index):
    o = make(6, index)
    a = put(o, run(1, 8))
    b = o.fork(a)
    assert o.append([a, b], [100, 200])
    assert len(o.m.take_plan().copies) == 0
    o.write(a)
    o.write(b)
    o.verify()
    assert counts(o)[0] == 4


@both
def test_a_prompt_that_diverges_inside_a_cached_block_gets_a_copy(index):
    o = make(6, index, copy_on_partial_reuse=True)
    a = put(o, run(1, 8))
    b = o.allocate([*run(1, 6), 200])
    assert cached(o, b) == 6
    source, destination = table(o, a)[1], table(o, b)[1]
    assert source != destination
    assert o.m._writes.copies == {destination: source}
    grow(o, a, 9)  # a's plan carries the copy
    o.write(b)
    o.verify()
    assert counts(o)[0] == 4


@any_index
def test_an_append_that_needs_a_copy_is_refused_when_the_pool_is_full(index):
    # huggingface/transformers#46117
    o = make(2, index)
    a = put(o, run(1, 6))
    b = o.fork(a)
    assert counts(o)[0] == 2
    refuse(o, lambda: o.m.append(a, 100))
    refuse(o, lambda: o.m.append_batch([b, a], np.array([1, 2])))
    assert [o.m.length(s) for s in (a, b)] == [6, 6]
    o.free(b)
    grow(o, a, 100)
    assert counts(o)[0] == 2


@any_index
def test_a_fork_without_a_row_is_refused(index):
    o = make(4, index, seqs=1)
    a = put(o, run(1, 6))
    refuse(o, lambda: o.m.fork(a, "child"))


@any_index
@pytest.mark.parametrize("window", [None, 3])
def test_a_beam_step_moves_every_history(index, window):
    # huggingface/transformers#46612
    o = make(24, index, sliding_window=window)
    beams = [put(o, run(1, 6))]
    beams += [o.fork(beams[0]), o.fork(beams[0])]
    o.append(beams, [10, 20, 30])
    for beam in beams:
        o.write(beam)
    used = counts(o)[0]
    o.reorder(beams, [1, 1, 0])
    o.verify()
    assert counts(o)[0] == used - 1  # the dropped beam's tail
    o.append(beams, [41, 42, 43])
    for beam in beams:
        o.write(beam)
    o.verify()
    want = [[*run(1, 6), 20, 41], [*run(1, 6), 20, 42], [*run(1, 6), 10, 43]]
    assert [o.tokens[beam] for beam in beams] == want
    tails = [table(o, beam)[1] for beam in beams]
    assert len(set(tails)) == 3
    o.finish()


# -- lengths ---------------------------------------------------------------------------------


@any_index
@pytest.mark.parametrize("start", [3, 4, 8])
def test_a_block_is_added_exactly_when_its_first_slot_is_written(index, start):
    # GeeeekExplorer/nano-vllm#240
    o = make(4, index)
    s = put(o, run(1, start))
    seen = {}
    for position in range(start, 9):
        grow(o, s, 100 + position)
        seen[position] = len(table(o, s))
    assert seen == {p: p // 4 + 1 for p in range(start, 9)}
    assert counts(o)[0] == 3


@any_index
def test_only_lookahead_takes_a_block_early_and_it_is_counted(index):
    o = make(4, index)
    s = o.allocate(run(1, 4), lookahead=1)
    stats = o.m.stats()
    assert (len(table(o, s)), stats.used_slots, stats.allocated_slots) == (2, 4, 8)
    o.write(s)
    grow(o, s, 5, 6, 7, 8)
    assert len(table(o, s)) == 2


@any_index
def test_truncating_to_nothing_keeps_nothing(index):
    # huggingface/transformers#47433
    o = make(4, index)
    s = put(o, run(1, 7))
    o.truncate(s, 0)
    o.verify()
    assert o.m.length(s) == o.m.num_computed_tokens(s) == 0
    assert table(o, s) == []
    assert counts(o)[0] == 0
    grow(o, s, 9)
    assert o.m.token_ids(s).tolist() == [9]


@any_index
@pytest.mark.parametrize("length", [100, 8, -1])
def test_truncating_past_the_length_is_an_error(index, length):
    o = make(4, index)
    s = put(o, run(1, 7))
    before = o.state()
    with pytest.raises(JaxkvError, match=f"cannot truncate to {length}"):
        o.m.truncate(s, length)
    assert o.state() == before
    o.truncate(s, 7)
    assert o.m.length(s) == 7
    o.verify()


# -- lifetime of a key -----------------------------------------------------------------------


@both
def test_a_key_ends_when_its_block_is_taken_for_other_content(index):
    # vllm-project/vllm#4764
    o = make(2, index)
    cache(o, run(1, 8))
    b = put(o, run(20, 27))
    assert o.m.lookup(run(1, 8)) == o.m.lookup(run(1, 4)) == 0
    o.free(b)
    a2 = o.allocate(run(1, 8))
    assert cached(o, a2) == 0
    o.write(a2)
    o.verify()


@both
@pytest.mark.parametrize("eviction", POLICIES)
def test_bookkeeping_does_not_grow_with_the_number_of_prompts(index, eviction):
    m = BlockManager(
        3, 4, max_seqs=2, max_blocks_per_seq=4, prefix_index=index, eviction=eviction,
        copy_on_partial_reuse=True,
    )  # fmt: skip
    for i in range(1000):
        m.allocate("s", np.arange(8) + 8 * i)
        m.commit("s", 8)
        m.free("s")
        assert len(m._pool.index) <= 2  # pyright: ignore[reportArgumentType]
        assert sum(b.hash is not None for b in m.blocks()) <= 2
    m.check()
    policy = m._retention.policy
    sizes = [len(m._pool.partial._entries), len(m._pool.partial._children)]  # pyright: ignore[reportOptionalMemberAccess]
    sizes += [len(x) for x in vars(policy).values() if hasattr(x, "__len__")]
    sizes += [len(x) for x in vars(m._pool.index).values() if hasattr(x, "__len__")]
    assert not m._retention.keeps
    assert max(sizes) <= 4 * 3 + 1  # ghosts are the most: four pools


@both
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("partial", [False, True])
def test_a_prompt_that_is_all_cached_has_its_last_token_to_compute(index, length, size, partial):
    # vllm-project/vllm#9972
    o = make(40, index, size, copy_on_partial_reuse=partial)
    cache(o, run(1, 12))
    twice = [o.allocate(run(1, length)), o.allocate(run(1, length))]
    for s in twice:
        whole = (length - 1) // size * size
        assert cached(o, s) == (length - 1 if partial else whole)
    for s in twice:
        assert o.m.length(s) > cached(o, s)
        o.write(s)
        o.verify()
        grow(o, s, 70, 71, 72)
    o.finish()


@both
def test_rejected_drafts_are_not_visible_to_lookups(index):
    # vllm-project/vllm#12333
    o = make(6, index)
    s = put(o, run(1, 6))
    grow(o, s, 7, 8, 9)
    assert o.m.lookup(run(1, 8)) == 8
    o.truncate(s, 7)
    grow(o, s, 70)
    assert o.m.lookup(run(1, 8)) == 4
    assert o.m.lookup([*run(1, 7), 70]) == 8
    assert counts(o) == (2, 0, 4)


@both
def test_rejected_drafts_keep_other_sequences_right(index):
    """The rejection cuts into a shared block: its key stays, and a copy is written."""
    o = make(8, index)
    s = put(o, run(1, 8))
    other = put(o, run(1, 9))
    assert table(o, other)[:2] == table(o, s)
    o.truncate(s, 7)
    grow(o, s, 70)
    assert o.m.lookup(run(1, 8)) == 8
    assert o.m.lookup([*run(1, 7), 70]) == 8
    assert table(o, other)[0] == table(o, s)[0]
    assert table(o, other)[1] != table(o, s)[1]


@both
def test_a_block_counts_as_full_when_its_kv_is_written(index):
    # sgl-project/sglang-jax#994: the last sampled token is never fed back.
    t, u = 80, 81
    o = make(8, index)
    s = put(o, run(1, 3))
    o.append([s], [t])
    o.free(s)
    assert o.m.lookup([1, 2, 3, t, 9]) == 0
    s = put(o, run(1, 3))
    grow(o, s, t)
    o.append([s], [u])
    o.free(s)
    assert o.m.lookup([1, 2, 3, t, 9]) == 4
    follow_up = o.allocate([1, 2, 3, t, 50])
    assert cached(o, follow_up) == 4
    o.write(follow_up)
    o.verify()


@both
@pytest.mark.parametrize("chunks", [(3, 5), (4, 4), (1, 6, 1), (8,)])
def test_keys_follow_the_chunks_of_a_prefill(index, chunks):
    # ROCm/ATOM#902
    o = make(4, index)
    s = o.allocate(run(1, 8))
    done = 0
    for chunk in chunks:
        assert o.m.lookup(run(1, 8)) == done // 4 * 4
        o.write(s, chunk)
        o.verify()
        done += chunk
    assert o.m.lookup(run(1, 8)) == 8


@both
@pytest.mark.parametrize("abort", ["first", "second"])
def test_tokens_without_kv_are_not_visible_to_lookups(index, abort):
    # GeeeekExplorer/nano-vllm#208
    o = make(6, index)
    a, b = o.allocate(run(1, 8)), o.allocate(run(1, 8))
    assert cached(o, b) == 0
    gone, left = (a, b) if abort == "first" else (b, a)
    o.free(gone)
    assert o.m.lookup(run(1, 8)) == 0
    assert counts(o) == (2, 0, 4)
    o.write(left)
    o.verify()
    assert o.m.lookup(run(1, 8)) == 8


# -- contents of a key -----------------------------------------------------------------------


@both
@pytest.mark.parametrize("partial", [False, True])
def test_namespaces_of_different_kinds_never_collide(index, partial):
    # vllm-project/vllm#44701
    o = make(16, index, copy_on_partial_reuse=partial)
    spaces = [
        None, "X", b"X", 0, False, "", "0", ("X",), {"adapter": "X"}, {"salt": "X"},
        {"adapter": "X", "salt": "X"}, ("ab", "c"), ("a", "bc"), ("abc",), {"X": "adapter"},
    ]  # fmt: skip
    for space in spaces:
        cache(o, run(1, 8), space)
        for other in spaces:
            same = repr(other) == repr(space)
            assert o.m.lookup(run(1, 8), namespace=other) == (8 if same else 0), (space, other)
        assert o.m.reset_prefix_cache()
    cache(o, run(1, 8), {"salt": "s", "adapter": "a"})
    assert o.m.lookup(run(1, 8), namespace={"adapter": "a", "salt": "s"}) == 8


P = 999  # placeholder token of every image
D1 = bytes(range(16))
D2 = bytes(14) + D1[-2:]  # its last 16 bits are those of D1


@both
@pytest.mark.parametrize("partial", [False, True])
def test_equal_placeholders_of_other_media_do_not_collide(index, partial):
    # LMCache/LMCache#4086
    o = make(8, index, copy_on_partial_reuse=partial)
    prompt = [1, 2, P, P, P, P, 3, 4]
    cache(o, prompt, media=[Media(2, 4, D1)])
    found = {
        "same": o.m.lookup(prompt, media=[Media(2, 4, D1)]),
        "other": o.m.lookup(prompt, media=[Media(2, 4, D2)]),
        "shifted": o.m.lookup(prompt, media=[Media(3, 4, D1)]),
        "longer": o.m.lookup(prompt, media=[Media(2, 5, D1)]),
        "second block only": o.m.lookup(prompt, media=[Media(4, 2, D1)]),
        "none": o.m.lookup(prompt),
        "text of another kind": o.m.lookup(prompt, media=[Media(2, 4, D1.hex())]),
    }
    assert found == dict.fromkeys(found, 0) | {"same": 8}
    for media in ([Media(2, 4, D1)], [Media(2, 4, D2)], [Media(3, 4, D1)], []):
        put(o, prompt, media=media)
        o.finish()


@both
@pytest.mark.parametrize("partial", [False, True])
def test_an_image_does_not_hit_text_of_the_same_tokens(index, partial):
    o = make(8, index, copy_on_partial_reuse=partial)
    prompt = [1, 2, P, P, P, P, 3, 4]
    cache(o, prompt)
    assert o.m.lookup(prompt, media=[Media(2, 4, D1)]) == 0
    s = o.allocate(prompt, media=[Media(2, 4, D1)])
    assert cached(o, s) == 0
    o.write(s)
    o.verify()


@both
@pytest.mark.parametrize("partial", [False, True])
def test_blocks_before_the_first_image_are_shared(index, partial):
    o = make(12, index, copy_on_partial_reuse=partial)
    prompt = [1, 2, 3, 4, P, P, 5, 6, 7, 8, 9, 10]
    cache(o, prompt, media=[Media(4, 2, D1)])
    other = o.allocate(prompt, media=[Media(4, 2, D2)])
    assert cached(o, other) == 4
    o.write(other)
    o.verify()
    o.free(other)
    for digest in (D1, D2):
        assert o.m.lookup(prompt, media=[Media(4, 2, digest)]) == 12
        same = o.allocate(prompt, media=[Media(4, 2, digest)])
        o.write(same)
        o.verify()
        grow(o, same, 11)


@pytest.mark.parametrize("hashed", [lambda d: bytes(15) + b"\7",
                                    lambda d: bytes(15) + bytes([sum(d) % 4])])  # fmt: skip
def test_colliding_hashes_cost_hits_and_nothing_else(hashed):
    # openvinotoolkit/openvino.genai#3722
    o = make(8, "hash", hash_function=hashed)
    rng = np.random.default_rng(0)
    live = []
    for _ in range(50):
        seq = o.allocate(rng.integers(0, 5, 12).tolist())
        while seq is None:
            o.free(live.pop(0))
            seq = o.allocate(rng.integers(0, 5, 12).tolist())
        o.write(seq)
        o.verify()
        live.append(seq)
        if len(live) > 1 and rng.random() < 0.5:
            o.free(live.pop(int(rng.integers(len(live)))))
            o.verify()
    o.finish()


def test_block_hashes_do_not_collide():
    rng = np.random.default_rng(0)
    blocks = np.unique(rng.integers(0, 50_000, (100_000, 4)).astype("<i4"), axis=0)
    root = root_of(None, 0)
    hashes = {BlockKeys(root, block[None]).hashes()[0] for block in blocks}
    assert len(hashes) == len(blocks)
    assert {len(h) for h in hashes} == {16}
    # Vectors that a sum, an xor or a polynomial would confuse.
    twins = [[1, 2, 3, 4], [4, 3, 2, 1], [2, 1, 3, 4], [0, 0, 0, 10], [5, 5, 0, 0], [1, 0, 0, 0],
             [0, 1, 0, 0], [256, 0, 0, 0], [-1, -1, -1, -1]]  # fmt: skip
    twins = np.array(twins, "<i4")
    assert len({BlockKeys(root, t[None]).hashes()[0] for t in twins}) == len(twins)


@both
@pytest.mark.parametrize("partial", [False, True])
def test_lookups_and_publication_stay_within_the_namespace(index, partial):
    # sgl-project/sglang#19746
    o = make(12, index, copy_on_partial_reuse=partial)

    def other_namespaces_are_empty():
        for other in ("B", None, {"A": "A"}, ""):
            assert o.m.lookup(run(1, 8), namespace=other) == 0
            assert o.m.can_allocate(run(1, 9), namespace=other).num_cached_tokens == 0
            assert o.m.pin(run(1, 8), namespace=other) == 0
            with pytest.raises(JaxkvError, match="not pinned"):
                o.m.unpin(run(1, 8), namespace=other)

    s = put(o, run(1, 6), "A")
    other_namespaces_are_empty()
    child = o.fork(s)
    grow(o, child, 7, 8)  # fills a block while decoding
    assert o.m.lookup(run(1, 8), namespace="A") == 8
    other_namespaces_are_empty()
    o.truncate(s, 3)
    grow(o, s, 4)
    o.free(s)
    o.free(child)
    other_namespaces_are_empty()
    resumed = put(o, run(1, 9), "A")  # after preemption
    assert o.m.num_computed_tokens(resumed) == 9
    other = o.allocate(run(1, 8), "B")
    assert cached(o, other) == 0
    o.write(other)
    o.verify()


# -- reset and new weights -------------------------------------------------------------------


@both
def test_a_reset_reports_whether_it_was_done(index):
    # vllm-project/vllm#12284
    o = make(8, index)
    cache(o, run(1, 8))
    r = put(o, run(60, 63))
    before = o.state()
    assert o.m.reset_prefix_cache() is False
    assert o.state() == before
    assert o.m.lookup(run(1, 8)) == 8
    o.free(r)
    assert o.m.reset_prefix_cache() is True
    assert o.m.lookup(run(1, 8)) == o.m.lookup(run(60, 63)) == 0
    assert counts(o) == (0, 0, 8)


@both
def test_a_forced_reset_leaves_running_sequences_alone_and_never_finds_them(index):
    o = make(8, index)
    cache(o, run(1, 8))
    r = put(o, run(60, 65))
    held = table(o, r)
    child = o.fork(r)
    assert o.m.reset_prefix_cache(force=True) is True
    assert table(o, r) == held
    o.verify()
    assert counts(o) == (2, 0, 6)
    grow(o, r, 66, 67, 68)
    grow(o, child, 76, 77, 78)
    grandchild = o.fork(r)
    grow(o, grandchild, 69, 70, 71)
    for s in (r, child, grandchild):
        o.free(s)
    for prompt in (run(1, 8), run(60, 71), [*run(60, 65), 76, 77]):
        assert o.m.lookup(prompt) == 0
    assert counts(o) == (0, 0, 8)


@both
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_sequences_from_before_a_forced_reset_are_never_found(index, length):
    """Even a block that fills up later has slots from before the reset."""
    o = make(8, index)
    r = put(o, run(1, length))
    assert o.m.reset_prefix_cache(force=True)
    grow(o, r, *run(length + 1, 12))
    o.truncate(r, length)
    grow(o, r, *run(length + 1, 13))
    assert o.m.lookup(run(1, 12)) == 0
    o.free(r)
    assert o.m.lookup(run(1, 12)) == 0
    cache(o, run(1, 12))  # computed again
    assert o.m.lookup(run(1, 12)) == 12


@both
def test_blocks_of_old_weights_are_never_found_for_new_ones(index):
    # InternLM/lmdeploy#4917
    o = make(12, index)
    cache(o, run(1, 8))
    r2 = put(o, run(60, 65))
    o.m.set_weight_version(1)
    assert o.m.lookup(run(1, 8)) == 0
    grow(o, r2, 66, 67, 68)
    o.free(r2)
    assert o.m.lookup(run(60, 67)) == 0
    new = o.allocate(run(60, 67))
    assert cached(o, new) == 0
    o.write(new)
    o.verify()
    assert o.m.lookup(run(60, 67)) == 8
    o.m.set_weight_version("1")  # a string, not the number
    assert o.m.lookup(run(60, 67)) == 0


# -- eviction --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("partial", [False, True])
def test_nothing_is_found_behind_a_hole(index, partial):
    # llm-d/llm-d-inference-sim#705
    o = make(6, index, copy_on_partial_reuse=partial)
    s = put(o, run(1, 12))
    first = table(o, s)[0]
    o.free(s)
    metrics = Metrics(o.m)
    o.m.evict([first])
    assert o.m.lookup(run(1, 12)) == 0
    again = o.allocate(run(1, 12))
    assert cached(o, again) == 0
    assert metrics.to_dict()["prefix_cache_hits"] == 0
    o.write(again)
    o.verify()


@both
def test_evicting_a_middle_block_keeps_its_predecessors(index):
    o = make(6, index)
    s = put(o, run(1, 12))
    middle = table(o, s)[1]
    o.free(s)
    o.m.evict([middle])
    o.verify()
    assert o.m.lookup(run(1, 12)) == 4
    assert counts(o) == (0, 1, 5)


@both
@pytest.mark.parametrize("size", [1, 4])
def test_totals_agree_with_the_tree_when_prefixes_diverge(index, size):
    # UbiquitousLearning/mllm#656
    def prompt(*tokens):
        return [size * t + i for t in tokens for i in range(size)]

    o = make(32, index, size)
    path = prompt(*run(1, 4), *run(9, 12))
    cache(o, prompt(*run(1, 8)))
    assert counts(o) == (0, 8, 24)
    cache(o, path)
    assert counts(o) == (0, 12, 20)
    locked = put(o, path)
    assert counts(o) == (8, 4, 20)
    o.free(locked)
    assert counts(o) == (0, 12, 20)
    cache(o, prompt(1, 2, 20))
    assert counts(o) == (0, 13, 19)
    taken = o.allocate(prompt(*run(100, 123)))
    assert counts(o) == (24, 8, 0)
    o.free(taken)
    assert counts(o) == (0, 8, 24)
    twins = [o.allocate(prompt(*run(30, 33))), o.allocate(prompt(*run(30, 33)))]
    assert counts(o) == (8, 8, 16)
    for s in twins:
        o.write(s)
        o.verify()
    assert counts(o) == (4, 8, 20)
    for s in twins:
        o.free(s)
    assert counts(o) == (0, 12, 20)
    o.finish()


@both
def test_a_sequence_protects_exactly_the_prefix_that_it_hit(index):
    # sgl-project/mini-sglang#46
    o = make(12, index, size=1)
    cache(o, run(1, 10))
    h = o.allocate([*run(1, 6), 99])
    x = o.allocate(run(50, 54))
    assert counts(o) == (12, 0, 0)
    assert o.m.lookup(run(1, 10)) == o.m.lookup(run(1, 6)) == 6
    refuse(o, lambda: o.m.allocate("y", [7]))
    o.free(x)
    o.free(h)
    assert counts(o) == (0, 6, 6)
    everything = o.allocate(run(50, 61))
    assert o.m.lookup(run(1, 6)) == 0
    o.free(everything)
    assert counts(o) == (0, 0, 12)
    assert len(o.m._pool.index) == 0  # pyright: ignore[reportArgumentType]


@both
def test_a_partial_match_renews_the_part_that_matched(index):
    # sgl-project/mini-sglang#124
    o = make(16, index, size=1)
    cache(o, run(1, 8))
    cache(o, run(20, 27))
    o.free(o.allocate([*run(1, 4), 99]))
    taken = o.allocate(run(50, 53))
    assert taken is not None
    assert o.m.lookup(run(1, 8)) == 4
    assert o.m.lookup(run(20, 27)) == 8


@both
@pytest.mark.parametrize("eviction", POLICIES)
def test_the_end_of_a_chain_is_evicted_before_its_beginning(index, eviction):
    # llm-d/llm-d-inference-sim#704
    rng = np.random.default_rng(0)
    for _ in range(50):
        o = make(3, index, eviction=eviction)
        chain = rng.choice(1000, 12, replace=False).tolist()
        cache(o, chain)
        put(o, [2000, 2001])
        assert o.m.lookup(chain) == 8
        o.finish()


@both
def test_a_new_entry_is_younger_than_earlier_reads(index):
    # LMCache/LMCache#460
    o = make(4, index)
    a, b, c, d, e = (run(10 * i, 10 * i + 3) for i in range(1, 6))
    for entry in (a, b, c):
        cache(o, entry)
    read(o, a)
    read(o, b)
    put(o, [8888])  # takes the spare block
    cache(o, d)
    assert [o.m.lookup(x) for x in (a, b, c, d)] == [4, 4, 0, 4]
    cache(o, e)
    assert [o.m.lookup(x) for x in (a, b, d, e)] == [0, 4, 4, 4]


@both
def test_under_decay_a_new_entry_outlives_entries_read_long_ago(index):
    o = make(4, index, eviction="decayed")
    a, b, c, d, e = (run(10 * i, 10 * i + 3) for i in range(1, 6))
    for entry in (a, b, c):
        cache(o, entry)
    o.time += 10
    read(o, a)
    o.time += 10
    read(o, b)
    put(o, [8888])
    o.time += 600  # two half-lives: two uses are worth half a fresh one
    cache(o, d)
    assert [o.m.lookup(x) for x in (a, b, c, d)] == [4, 4, 0, 4]
    o.time += 10
    cache(o, e)
    assert [o.m.lookup(x) for x in (a, b, d, e)] == [0, 4, 4, 4]


@both
@pytest.mark.parametrize("epoch", [0.0, 1e9])
def test_under_decay_a_once_hot_entry_fades(index, epoch):
    # sgl-project/sglang#21045
    half_life = 300.0
    o = make(3, index, eviction="decayed")
    a, b, c, d = (run(10 * i, 10 * i + 3) for i in range(1, 5))
    o.time = epoch
    cache(o, a)
    for _ in range(100):
        o.time += 1.5
        read(o, a)
    o.time = epoch + 50 * half_life
    cache(o, b)
    for _ in range(5):
        o.time += 1.5
        read(o, b)
    o.time = epoch + 51 * half_life
    cache(o, c)
    assert [o.m.lookup(x) for x in (a, b, c)] == [4, 4, 4]
    o.time = epoch + 52 * half_life
    cache(o, d)
    assert [o.m.lookup(x) for x in (a, b, c, d)] == [0, 4, 4, 4]
    assert np.isfinite(o.m._retention.policy.score[1:]).all()  # pyright: ignore[reportAttributeAccessIssue]


@both
@pytest.mark.parametrize("epoch", [0.0, 1e9])
def test_under_decay_ties_go_by_recency_and_then_tail_first(index, epoch):
    o = make(4, index, eviction="decayed")
    o.time = epoch  # the clock stands still
    a, b = run(1, 8), run(11, 18)
    cache(o, a)
    cache(o, b)
    found = []
    for i in range(4):
        s = o.allocate(run(100 + 10 * i, 103 + 10 * i))
        assert s is not None
        found.append((o.m.lookup(a), o.m.lookup(b)))
    assert found == [(4, 8), (0, 8), (0, 4), (0, 0)]
