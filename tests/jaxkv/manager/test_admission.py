"""Admission: one match and one count behind allocate, can_allocate, lookup and pin."""

import pytest
from oracle import cache, make, put, run

from jaxkv import OutOfBlocksError
from jaxkv.errors import JaxkvError

both = pytest.mark.parametrize("index", ["hash", "radix"])


@both
def test_partial_reuse_counts_alike_in_every_query(index):
    o = make(10, index, copy_on_partial_reuse=True)
    cache(o, run(1, 12))
    prompt = [*run(1, 10), 70, 71, 72]  # two whole blocks and half a block
    assert o.m.lookup(prompt) == 10
    admission = o.m.can_allocate(prompt)
    assert admission.num_cached_tokens == 10
    assert admission.needed == 2 + 2 + 1  # new ones, idle hits, the idle source of the copy
    assert o.m.allocate("a", prompt).num_cached_tokens == 10


@both
def test_a_partial_block_that_must_be_evicted_is_computed(index):
    o = make(4, index, copy_on_partial_reuse=True)
    cache(o, run(1, 12))
    prompt = [*run(1, 10), 70, 71, 72]
    admission = o.m.can_allocate(prompt)
    assert (admission.verdict, admission.needed, admission.num_cached_tokens) == ("now", 4, 8)
    assert o.m.allocate("a", prompt).num_cached_tokens == 8


@both
def test_allocate_can_keep_the_watermark(index):
    o = make(10, index, watermark=0.2)
    a = put(o, run(1, 9))
    prompt = run(101, 124)  # 6 blocks of the 7 that are left; 2 are kept back
    assert o.m.can_allocate(prompt).verdict == "later"
    before = o.state()
    with pytest.raises(OutOfBlocksError, match="needs 6 blocks of 4 tokens, but 5 of 10") as caught:
        o.m.allocate("x", prompt, keep_watermark=True)
    assert (caught.value.asked, caught.value.free) == (6, 5)
    assert o.state() == before
    o.m.allocate("x", prompt)  # the watermark is the caller's choice
    o.m.free("x")
    assert o.m.can_allocate(run(101, 120)).verdict == "now"
    o.m.allocate("x", run(101, 120), keep_watermark=True)
    o.m.free("x")
    o.free(a)


# -- holds -----------------------------------------------------------------------------------


@both
def test_a_transfer_keeps_blocks_until_it_is_complete(index):
    o = make(4, index)
    cache(o, run(1, 8))
    blocks = [info.block for info in o.m.blocks() if info.hash]
    transfer = o.m.begin_transfer(blocks)
    o.m.check()
    o.m.take_plan()  # ends the holds of copies, and no other
    assert o.m.can_allocate(run(50, 65)).verdict == "later"
    with pytest.raises(OutOfBlocksError):
        o.m.allocate("x", run(50, 65))
    with pytest.raises(JaxkvError, match=f"block {blocks[0]} cannot be evicted"):
        o.m.evict(blocks[:1])
    assert o.m.lookup(run(1, 8)) == 8
    o.m.complete_transfer(transfer)
    o.m.check()
    o.m.allocate("x", run(50, 65))
    assert o.m.lookup(run(1, 8)) == 0


@both
def test_a_block_in_transfer_is_not_rewritten(index):
    """A sequence that would write into it gets a copy, as from a pinned block."""
    o = make(6, index)
    a = put(o, run(1, 8))
    block = int(o.m.block_table(a)[1])
    transfer = o.m.begin_transfer([block])
    o.truncate(a, 6)
    assert o.append([a], [90])
    copy = int(o.m.block_table(a)[1])
    assert copy != block
    assert o.m.take_plan().copies.tolist() == [[block, copy]]
    o.m.check()
    o.m.complete_transfer(transfer)
    o.m.check()


def test_rejects_invalid_transfers():
    o = make(4)
    cache(o, run(1, 8))
    free = o.m._pool.free_blocks().tolist()[0]
    before = o.state()
    for blocks, message in (
        ([free], "is free"),
        ([0], "not in the pool"),
        ([5], "not in the pool"),
    ):
        with pytest.raises(JaxkvError, match=message):
            o.m.begin_transfer([1, *blocks])
        assert o.state() == before
    with pytest.raises(JaxkvError, match="transfer 7 is not in flight; 0 transfers are"):
        o.m.complete_transfer(7)
    transfer = o.m.begin_transfer([1])
    o.m.complete_transfer(transfer)
    with pytest.raises(JaxkvError, match="not in flight"):
        o.m.complete_transfer(transfer)


def test_a_hold_belongs_to_its_reason():
    o = make(4)
    cache(o, run(1, 4))
    o.m.pin(run(1, 4))
    transfer = o.m.begin_transfer([1, 1])
    assert o.m._pool.held_for == {"copy": {}, "pin": {1: 1}, "transfer": {1: 2}}
    o.m.unpin(run(1, 4))
    assert o.m.stats().pinned == 0
    assert o.m._pool.kept == {1: 2}
    o.m.complete_transfer(transfer)
    assert not o.m._pool.holds
    assert not o.m._pool.kept
