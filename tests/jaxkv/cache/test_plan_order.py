"""Plans that do not follow a state are refused; a state that differs from its manager is found."""

import copy
import dataclasses
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv import BlockManager, CacheConfig, StateError
from jaxkv.cache.batch import Batch
from jaxkv.cache.plan import apply_device_plan, apply_plan, pad_plan

CONFIG = CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=12, block_size=4,
                     max_seqs=3, max_blocks_per_seq=4)  # fmt: skip


def pair():
    return BlockManager.for_config(CONFIG), jaxkv.init_state(CONFIG)


@jax.jit
def step(state):
    """What a model does to a state: another object comes out."""
    return dataclasses.replace(state, seq_lens=state.seq_lens + 0)


@pytest.fixture(params=["at once", "after a step"])
def then(request):
    return step if request.param == "after a step" else lambda state: state


def grown(manager, name: Hashable = "a"):
    """A plan with a new block."""
    manager.allocate(name, [1, 2, 3])
    return manager.take_plan()


def test_plans_in_order_are_applied(then):
    manager, state = pair()
    for i in range(3):
        state = then(apply_plan(state, grown(manager, i)))
        state = then(apply_plan(state, manager.take_plan()))  # nothing changed
    jaxkv.check_state(state, manager)


def test_a_plan_that_was_left_out_is_named(then):
    manager, state = pair()
    state = then(apply_plan(state, grown(manager, "a")))
    grown(manager, "b")
    late = grown(manager, "c")
    with pytest.raises(StateError, match=r"plan 3 of .* follows its plan 2, but .* plan 1"):
        apply_plan(state, late)
    empty = manager.take_plan()
    with pytest.raises(StateError, match=r"plan 3 of .* follows its plan 3, but .* plan 1"):
        apply_plan(state, empty)


def test_the_first_plan_left_out_is_named(then):
    manager, state = pair()
    grown(manager)
    with pytest.raises(StateError, match=r"plan 2 of manager .* follows its plan 1"):
        apply_plan(then(state), grown(manager, "b"))


def test_a_plan_applied_twice_is_named(then):
    manager, state = pair()
    plan = grown(manager)
    state = then(apply_plan(state, plan))
    with pytest.raises(StateError, match=r"plan 1 of .* follows its plan 0, but"):
        apply_plan(state, plan)
    padded = pad_plan(grown(manager, "b"))
    state = apply_plan(state, padded)
    with pytest.raises(StateError, match=r"plan 2 of .* follows its plan 1, but .* plan 2"):
        apply_plan(state, padded)


def test_a_plan_without_changes_may_be_left_out_or_applied_again(then):
    manager, state = pair()
    empty = manager.take_plan()
    state = then(apply_plan(apply_plan(state, empty), empty))
    manager.take_plan()
    state = then(apply_plan(state, grown(manager)))
    manager.take_plan()
    apply_plan(state, grown(manager, "b"))


def test_a_plan_of_another_manager_is_refused():
    (one, state), (other, _) = pair(), pair()
    state = apply_plan(state, grown(one))
    with pytest.raises(StateError, match=r"this state is at plan 1 of manager \d+"):
        apply_plan(state, grown(other))


def test_a_first_plan_of_another_manager_is_refused_after_a_step_too():
    (one, state), (other, _) = pair(), pair()
    state = step(apply_plan(state, grown(one)))
    with pytest.raises(StateError, match=r"plan 1 of .* none was applied"):
        apply_plan(state, grown(other))


def test_caches_that_were_exchanged_are_noticed_when_the_right_one_has_its_turn():
    (one, a), (other, b) = pair(), pair()
    a, b = step(apply_plan(a, grown(one))), step(apply_plan(b, grown(other)))
    wrong = grown(other, "b")
    step(apply_plan(a, wrong))  # not known after the step
    with pytest.raises(StateError, match=r"plan 2 of .* follows its plan 1, but .* plan 2"):
        apply_plan(b, wrong)


def test_a_refused_plan_changes_nothing(then):
    manager, state = pair()
    state = then(apply_plan(state, grown(manager)))
    right, late = grown(manager, "b"), grown(manager, "c")
    with pytest.raises(StateError):
        apply_plan(state, late)
    for plan in (right, late):
        state = apply_plan(state, plan)
    jaxkv.check_state(state, manager)


def test_two_states_may_follow_one_manager(then):
    """Such as the caches of a model and of its draft model."""
    manager, first = pair()
    second = jaxkv.init_state(CONFIG)
    for i in range(3):
        plan = grown(manager, i)
        first, second = then(apply_plan(first, plan)), then(apply_plan(second, plan))
        with pytest.raises(StateError):
            apply_plan(second, plan)
    jaxkv.check_state(first, manager)
    jaxkv.check_state(second, manager)


def test_a_new_state_begins_where_the_manager_has_nothing():
    manager, state = pair()
    apply_plan(state, grown(manager))
    with pytest.raises(StateError, match=r"new and empty.*reset_prefix_cache\(\)"):
        apply_plan(jaxkv.init_state(CONFIG), grown(manager, "b"))
    for name in ("a", "b"):
        manager.free(name)
    manager.reset_prefix_cache()
    manager.take_plan()
    state = apply_plan(jaxkv.init_state(CONFIG), grown(manager))
    jaxkv.check_state(state, manager)


def test_a_plan_in_a_jitted_step_is_checked_when_it_is_padded():
    manager, state = pair()
    run = jax.jit(apply_device_plan, donate_argnames="state")
    state = run(state, pad_plan(grown(manager), cells=8, lengths=8))
    left_out = grown(manager, "b")
    with pytest.raises(StateError, match=r"plan 3 of .* follows its plan 2, but"):
        pad_plan(grown(manager, "c"))
    state = run(state, pad_plan(left_out, cells=8, lengths=8))
    with pytest.raises(StateError, match=r"plan 2 of .* follows its plan 1, but"):
        pad_plan(left_out)


def test_the_order_compiles_nothing_and_waits_for_nothing():
    manager, state = pair()
    traces = []

    @jax.jit
    def run(state, plan):
        traces.append(1)
        return apply_device_plan(state, plan)

    for i in range(12):
        state = run(state, pad_plan(grown(manager), cells=8, lengths=8))
        manager.free("a")
        if i % 2:
            state = apply_plan(state, manager.take_plan())
    assert len(traces) == 1


def test_plans_of_a_copied_manager_do_not_move_the_original(then):
    manager, state = pair()
    state = apply_plan(state, grown(manager))
    twin = copy.deepcopy(manager)
    with pytest.raises(StateError):
        apply_plan(state, grown(twin, "b"))
    apply_plan(state, grown(manager, "b"))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["apply", "leave out", "twice", "grow", "free", "step"])))
def test_any_misuse_is_refused_and_any_right_use_is_not(calls):
    """The model: the plans that were taken, and the number of the last one applied."""
    manager, state = pair()
    names, taken, applied = [], [], 0
    for i, call in enumerate(calls):
        if call == "grow" and len(names) < 3:
            manager.allocate(i, [1, 2])
            names.append(i)
        elif call == "free" and names:
            manager.free(names.pop())
        elif call == "step":
            state = step(state)
        elif call in ("apply", "leave out"):
            before = manager.take_plan()
            changes = len(before.cells) or len(before.lengths)
            if changes:
                taken.append(before)
            if call == "leave out":
                continue
            follows = applied == len(taken) - bool(changes)
            try:
                state = apply_plan(state, before)
            except StateError:
                assert not follows
                for plan in taken[applied:]:  # they can still be applied
                    state = apply_plan(state, plan)
            # One left out that changes nothing in the end, on an empty state, may be accepted.
            applied = len(taken)
            jaxkv.check_state(state, manager)
        elif call == "twice" and applied and taken[applied - 1].cells[:, 2].any():
            # One that only clears cells does no harm to a state that is empty.
            with pytest.raises(StateError):
                apply_plan(state, taken[applied - 1])


# -- check_state -----------------------------------------------------------------------------


def filled():
    manager, state = pair()
    manager.allocate("a", [1] * 6)
    manager.allocate("b", [2] * 3)
    return manager, apply_plan(state, manager.take_plan())


def changed(state, **arrays):
    return dataclasses.replace(state, **arrays)


def test_a_state_that_follows_is_accepted():
    manager, state = filled()
    jaxkv.check_state(state, manager)
    written = Batch.ragged([0, 1], [0, 0], [6, 3], num_tokens=16, num_seqs=3, padding_row=3)
    jaxkv.check_state(state, manager, written)
    state = jaxkv.advance(state, written)
    jaxkv.check_state(state, manager)  # written, and not committed yet
    manager.commit_batch(["a", "b"], [6, 3])
    jaxkv.check_state(state, manager)


def test_a_larger_state_is_compared_as_far_as_the_manager_goes():
    manager = BlockManager(8, 4, max_seqs=2, max_blocks_per_seq=3)
    state = apply_plan(jaxkv.init_state(CONFIG), grown(manager))
    jaxkv.check_state(state, manager)
    stray = state.block_tables.at[2, 3].set(7)
    with pytest.raises(StateError, match="row 2, column 3 of no sequence: block 7 on the device"):
        jaxkv.check_state(changed(state, block_tables=stray), manager)


def test_the_first_difference_is_named():
    manager, state = filled()
    wrong = state.block_tables.at[1, 0].set(9).at[2, 0].set(9)
    with pytest.raises(StateError, match=(
        r"row 1, column 0 of sequence 'b': block 9 on the device, block 3 in the manager"
    )):  # fmt: skip
        jaxkv.check_state(changed(state, block_tables=wrong), manager)


def test_a_step_that_was_left_out_is_named():
    manager, state = filled()
    manager.commit("a", 6)
    message = (
        "row 0 of sequence 'a': the device has written 0 tokens, in the manager 6 are committed"
    )
    with pytest.raises(StateError, match=message):
        jaxkv.check_state(state, manager)


def test_a_decode_past_the_reserved_slots_is_named_before_and_after():
    manager, state = filled()
    manager.commit_batch(["a", "b"], [6, 3])
    state = changed(state, seq_lens=jnp.array([6, 3, 0], jnp.int32))
    batch = Batch.decode(np.array([0, 1]), np.array([6, 4]), num_seqs=3, padding_row=3)
    with pytest.raises(StateError, match=(
        "token 1 of the batch writes position 4 of row 1 of sequence 'b', which has 4 slots"
    )):  # fmt: skip
        jaxkv.check_state(state, manager, batch)
    with pytest.raises(StateError, match="row 1 of sequence 'b': the device has written 5 tokens"):
        jaxkv.check_state(jaxkv.advance(state, batch), manager)
    manager.reserve(["a", "b"], [1, 2])
    state = apply_plan(state, manager.take_plan())
    jaxkv.check_state(state, manager, batch)
    jaxkv.check_state(jaxkv.advance(state, batch), manager)


def test_slots_reserved_at_allocation_may_be_written():
    manager, state = pair()
    manager.allocate("a", [1] * 6, lookahead=4)
    state = apply_plan(state, manager.take_plan())
    positions = np.array([9])
    batch = Batch.decode(np.array([0]), positions, num_seqs=1, padding_row=3)
    jaxkv.check_state(state, manager, batch)
    batch = Batch.decode(np.array([0]), positions + 3, num_seqs=1, padding_row=3)
    with pytest.raises(StateError, match=r"position 12 .* 12 slots"):
        jaxkv.check_state(state, manager, batch)


def test_a_forked_row_may_not_write_the_block_it_shares():
    manager, state = filled()
    manager.commit("a", 6)
    manager.fork("a", "c")
    state = apply_plan(state, manager.take_plan())
    state = changed(state, seq_lens=state.seq_lens.at[0].set(6))
    for row in (0, manager.row("c")):
        batch = Batch.decode(np.array([row]), np.array([6]), num_seqs=1, padding_row=3)
        with pytest.raises(StateError, match=r"position 6 .* 6 slots of its own"):
            jaxkv.check_state(state, manager, batch)
