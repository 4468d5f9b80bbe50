"""The device state: donation, plans, padding, and what a stale state says."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.cache.attention import slots
from jaxkv.cache.batch import Batch
from jaxkv.cache.plan import apply_plan, pad_plan
from jaxkv.engine.steps import make_steps
from jaxkv.errors import JaxkvError, StaleStateError
from jaxkv.manager.records import Plan
from jaxkv.sampling.sampler import SamplerState


@nnx.jit  # op by op, the compiler would take most of the time
def forward(model, tokens, state, batch):
    return model(tokens, state, batch)


def setup(model, max_seqs=4, length=21, sequences=1):
    config = jaxkv.CacheConfig.for_model(model.config, max_len=64, block_size=8, max_seqs=max_seqs)
    manager, state = jaxkv.BlockManager.for_config(config), jaxkv.init_state(config)
    rows = [manager.allocate(i, [1] * length).row for i in range(sequences)]
    return config, manager, apply_plan(state, manager.take_plan()), rows


def decode_args(config, rows, position, num_seqs):
    """Arguments of a decode step beside the state; the sampler is NumPy and cannot go stale."""
    batch = Batch.decode(
        np.array(rows), np.full(len(rows), position), num_seqs=num_seqs,
        padding_row=config.max_seqs,
    )  # fmt: skip
    plan = pad_plan(Plan.empty(), cells=8, lengths=8)
    sampler = SamplerState.empty(config.max_seqs, config.max_len)
    return sampler.history, sampler.params, plan, np.ones(num_seqs, np.int32), batch


def decoder(model, config, rows, position, num_seqs):
    step, args = make_steps(model).decode, decode_args(config, rows, position, num_seqs)
    return lambda state: step(state, *args, num_steps=1)[:2]


@pytest.mark.quick
@pytest.mark.parametrize("num_seqs", [1, 4])
def test_the_step_updates_the_pool_in_place(small_model, num_seqs):
    config, _, state, rows = setup(small_model)
    run = decoder(small_model, config, rows, 20, num_seqs)
    _, state = run(state)
    old, pointer = state, state.kv_pages.unsafe_buffer_pointer()
    _, state = run(old)
    assert state.kv_pages.unsafe_buffer_pointer() == pointer
    assert old.kv_pages.is_deleted()
    step, args = make_steps(small_model).decode, decode_args(config, rows, 20, 1)
    compiled = step.func.lower(*step.args, state, *args, num_steps=3).compile()  # pyright: ignore[reportFunctionMemberAccess]
    assert compiled.memory_analysis().alias_size_in_bytes >= config.pool_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < config.pool_bytes


def test_a_stale_state_explains_itself(small_model):
    config, manager, state, rows = setup(small_model)
    run = decoder(small_model, config, rows, 20, 1)
    run(state)
    for use in (run, lambda s: apply_plan(s, manager.take_plan()),
                lambda s: jax.jit(lambda s: s.seq_lens)(s)):  # fmt: skip
        with pytest.raises(StaleStateError, match="logits, state = decode_step"):
            use(state)


def test_a_failing_step_leaves_the_state_usable(small_model):
    config, _, state, rows = setup(small_model)

    @jax.jit
    def bad(state):
        raise ValueError("in the user's code")

    with pytest.raises(ValueError, match="in the user's code"):
        jax.jit(bad, donate_argnums=0)(state)
    decoder(small_model, config, rows, 20, 1)(state)


def test_padded_and_inactive_rows_change_no_live_page(small_model):
    """Also right after a step in which all rows were live."""
    config, _, state, rows = setup(small_model, sequences=4)
    _, state = decoder(small_model, config, rows, 20, 4)(state)
    before = np.array(state.kv_pages)
    tables = np.array(state.block_tables)
    _, state = decoder(small_model, config, rows[:1], 20, 4)(state)
    after = np.array(state.kv_pages)
    own = tables[rows[0]][2]  # position 20 is in the third block
    changed = np.unique(np.nonzero(before != after)[0])
    assert set(changed.tolist()) <= {own}
    assert (after[0] == 0).all()  # the null block was never written


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_in_every_unused_slot_changes_no_output(small_model, poison):
    def run(poisoned):
        _, _, state, rows = setup(small_model, sequences=2)
        graph, params = nnx.split(small_model)
        tokens = np.arange(16, dtype=np.int32)
        prefill = Batch.ragged(rows, [0, 0], [8, 3], num_tokens=16, num_seqs=4, padding_row=4)
        model = nnx.merge(graph, params)
        if poisoned:
            state = dataclasses.replace(state, kv_pages=jnp.full_like(state.kv_pages, poison))
        logits, state = forward(model, jnp.asarray(tokens), state, prefill)
        decode = Batch.decode(np.array(rows), np.array([8, 3]), num_seqs=4, padding_row=4)
        more, state = forward(model, jnp.asarray(tokens[:4]), state, decode)
        return np.asarray(logits)[:2], np.asarray(more)[:2]

    for clean, dirty in zip(run(False), run(True), strict=True):
        np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize("poison", [0.0, np.nan])
def test_decodes_beside_chunks_are_what_each_is_alone(small_model, poison):
    _, _, state, rows = setup(small_model, sequences=3)
    prompt = Batch.ragged(rows[:2], [0, 0], [8, 5], num_tokens=16, num_seqs=4, padding_row=4)
    state = dataclasses.replace(state, kv_pages=jnp.full_like(state.kv_pages, poison))
    tokens = np.arange(16, dtype=np.int32)
    _, state = forward(small_model, jnp.asarray(tokens), state, prompt)
    one = Batch.decode(np.array(rows[:2]), np.array([8, 5]), num_seqs=2, padding_row=4)
    chunk = Batch.ragged(rows[2:], [0], [6], num_tokens=6, num_seqs=1, padding_row=4)
    decoded, separate = forward(small_model, jnp.asarray(tokens[:2]), state, one)
    prefilled, separate = forward(small_model, jnp.asarray(tokens[2:8]), separate, chunk)
    both = Batch.mixed(
        np.array(rows[:2]), np.array([8, 5]), rows[2:], [0], [6],
        num_decodes=3, num_tokens=8, num_seqs=2, padding_row=4,
    )  # fmt: skip
    mixed = np.zeros(11, np.int32)
    mixed[:2], mixed[3:9] = tokens[:2], tokens[2:8]
    logits, state = forward(small_model, jnp.asarray(mixed), state, both)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[:2], decoded, atol=1e-5)
    np.testing.assert_allclose(logits[3], prefilled[0], atol=1e-5)
    np.testing.assert_allclose(state.kv_pages, separate.kv_pages, atol=1e-5)
    assert state.seq_lens.tolist() == separate.seq_lens.tolist()
    # Logits of any tokens: the chunk's second and its last.
    some = dataclasses.replace(both, logits_at=np.array([4, 8], np.int32))
    again, _ = forward(small_model, jnp.asarray(mixed), state, some)
    np.testing.assert_allclose(again[1], prefilled[0], atol=1e-5)
    assert again.shape == (2, 61)


def test_slots_of_padding_are_outside_the_pool(small_model):
    config, _, state, rows = setup(small_model)
    junk = np.array([rows[0], -1, 4, 10**6, rows[0], rows[0]], np.int32)
    batch = Batch(junk, np.array([9, 0, 0, 0, 10**6, -5], np.int32), np.array([0, 6]), 6)
    blocks, offsets = slots(state, batch)
    assert blocks.tolist() == [int(state.block_tables[rows[0], 1])] + [config.num_blocks] * 5
    assert int(offsets[0]) == 1


def test_device_tables_follow_the_manager(small_model, rng):
    config = jaxkv.CacheConfig.for_model(small_model.config, max_len=64, block_size=4, max_seqs=4)
    manager, state = jaxkv.BlockManager.for_config(config), jaxkv.init_state(config)
    live = []
    for i in range(60):
        if live and (len(live) == 4 or rng.random() < 0.3):
            manager.free(live.pop(int(rng.integers(len(live)))))
        elif live and rng.random() < 0.5:
            seq = live[int(rng.integers(len(live)))]
            if manager.length(seq) < 64:
                manager.append(seq, 1)
        else:
            manager.allocate(i, [1] * int(rng.integers(1, 30)))
            live.append(i)
        if rng.random() < 0.5:
            state = apply_plan(state, manager.take_plan())
            for seq in live:
                table = manager.block_table(seq)
                row = np.asarray(state.block_tables[manager.row(seq)])
                np.testing.assert_array_equal(row[: len(table)], table)
                assert (row[len(table) :] == 0).all()
    for seq in live:
        manager.free(seq)
    state = apply_plan(state, manager.take_plan())
    assert (np.asarray(state.block_tables) == 0).all()


def test_block_copies_come_before_the_tables(small_model):
    _, _, state, rows = setup(small_model)
    state = dataclasses.replace(state, kv_pages=state.kv_pages.at[1].set(3.0))
    plan = Plan(
        np.array([[1, 5]], np.int32), np.array([[rows[0], 0, 5]], np.int32),
        np.array([[rows[0], 2]], np.int32),
    )  # fmt: skip
    state = apply_plan(state, plan)
    assert (np.asarray(state.kv_pages[5]) == 3).all()
    assert int(state.block_tables[rows[0], 0]) == 5
    assert int(state.seq_lens[rows[0]]) == 2


def test_batches_that_do_not_fit():
    with pytest.raises(JaxkvError, match="9 tokens of 1 sequences"):
        Batch.ragged([0], [0], [9], num_tokens=8, num_seqs=1, padding_row=4)
    with pytest.raises(JaxkvError, match="3 sequences"):
        Batch.decode(np.arange(3), np.arange(3), num_seqs=2, padding_row=4)


@pytest.mark.parametrize("bad", ["layer", "k", "v", "heads"])
def test_attention_refuses_shapes_that_do_not_fit(small_model, bad):
    _, _, state, rows = setup(small_model)
    q, kv = jnp.ones((1, 4, 8)), jnp.ones((1, 2, 8))
    batch = Batch.decode(np.array(rows), np.array([0]), num_seqs=1, padding_row=4)
    args: dict[str, Any] = dict(q=q, k=kv, v=kv, layer=0)
    args |= dict(layer=dict(layer=2), k=dict(k=jnp.ones((1, 2, 4))), v=dict(v=jnp.ones((2, 2, 8))),
                 heads=dict(q=jnp.ones((1, 3, 8))))[bad]  # fmt: skip
    with pytest.raises(ValueError, match=r"layer|must be|grouped"):
        jaxkv.attention(args["q"], args["k"], args["v"], state, args["layer"], batch)


def test_a_prefill_of_one_token_among_padding(small_model):
    _, _, state, rows = setup(small_model)
    batch = Batch.ragged(rows, [0], [1], num_tokens=1, num_seqs=4, padding_row=4)
    logits, state = forward(small_model, jnp.ones(1, jnp.int32), state, batch)
    assert logits.shape == (4, 61)
    np.testing.assert_allclose(
        logits[0], small_model.dense(jnp.ones((1, 1), jnp.int32))[0, 0], atol=1e-5
    )


def test_a_device_loop_takes_its_positions_from_the_state(small_model):
    """Four greedy tokens by `lax.scan` and `Batch.following`, as with the host between them."""
    graph, params = nnx.split(small_model)
    config = jaxkv.CacheConfig.for_model(small_model.config, max_len=32, max_seqs=3, block_size=4)
    prompts = {"a": [5, 6, 7, 8, 9], "b": [11, 12]}

    def start():
        manager, state = jaxkv.BlockManager.for_config(config), jaxkv.init_state(config)
        rows = [manager.allocate(name, ids).row for name, ids in prompts.items()]
        state = apply_plan(state, manager.take_plan())
        batch = Batch.ragged(rows, [0, 0], [5, 2], num_tokens=8, num_seqs=2, padding_row=3)
        flat = np.zeros(8, np.int32)
        flat[:7] = prompts["a"] + prompts["b"]
        logits, state = nnx.merge(graph, params)(jnp.asarray(flat), state, batch)
        manager.commit_batch(list(prompts), [5, 2])
        return manager, state, jnp.array(rows), logits.argmax(-1).astype(jnp.int32)

    manager, state, rows, first = start()
    manager.reserve(list(prompts), 4)
    state = apply_plan(state, manager.take_plan())

    @jax.jit
    def loop(params, state, tokens):
        def step(carry, _):
            state, tokens = carry
            batch = Batch.following(state, rows)
            logits, state = nnx.merge(graph, params)(tokens, state, batch)
            chosen = logits.argmax(-1).astype(jnp.int32)
            return (state, chosen), chosen

        return jax.lax.scan(step, (state, tokens), length=4)

    (state, _), chosen = loop(params, state, first)
    np.testing.assert_array_equal(state.seq_lens[rows], [5 + 4, 2 + 4])

    manager, state, rows, tokens = start()
    for i in range(4):
        manager.append_batch(list(prompts), np.asarray(tokens))
        state = apply_plan(state, manager.take_plan())
        positions = np.array([5, 2]) + i
        batch = Batch.decode(np.asarray(rows), positions, num_seqs=2, padding_row=3)
        logits, state = nnx.merge(graph, params)(tokens, state, batch)
        manager.commit_batch(list(prompts), [1, 1])
        tokens = logits.argmax(-1).astype(jnp.int32)
        np.testing.assert_array_equal(tokens, chosen[i])


def test_padding_rows_follow_nothing():
    config = jaxkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=3, max_seqs=2)
    state = jaxkv.init_state(config)
    state = dataclasses.replace(state, seq_lens=jnp.array([3, 7], jnp.int32))
    batch = Batch.following(state, np.array([1, -1, 2, 0]))
    assert batch.positions.tolist() == [7, 0, 0, 3]
