"""Paged generation against a dense forward of the same weights, and against llama.cpp."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.cache.batch import Batch
from jaxkv.cache.plan import apply_plan
from jaxkv.engine.generate import default_cache
from jaxkv.errors import ConfigError
from jaxkv.sampling.params import SamplingParams

DATA = Path(__file__).parents[2] / "data"


def prompts_of(*lengths, vocab=61):
    """The same for the same lengths, whichever tests ran before."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def generate(model, prompts, params=None, **options):
    """`jaxkv.generate` over one shape of cache and steps: tests share what is compiled."""
    scheduler = jaxkv.SchedulerConfig(
        max_tokens_per_step=64, prefill_buckets=(64,), decode_buckets=(4,)
    )
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=256, max_seqs=4, num_blocks=65)
    fixed: dict[str, Any] = dict(scheduler=scheduler, cache=cache)
    return jaxkv.generate(model, prompts, params, **(fixed | options))


def dense_logits(model, ids):
    padded = np.zeros(256, np.int32)  # one length: one compile
    padded[: len(ids)] = ids
    return np.asarray(_dense(model, jnp.asarray(padded)[None]))[0, : len(ids)]


@nnx.jit
def _dense(model, tokens):
    return model.dense(tokens)


def paged_logits(model, sequences, block_size, chunk=64):
    """Logits after every position: a prefill of half of each sequence, decode of the rest."""
    config = jaxkv.CacheConfig.for_model(
        model.config, max_len=256, block_size=block_size, max_seqs=len(sequences)
    )
    manager, state = jaxkv.BlockManager.for_config(config), jaxkv.init_state(config)
    graph, params = nnx.split(model)

    @jax.jit
    def step(state, tokens, batch):
        return nnx.merge(graph, params)(tokens, state, batch)

    halves = [max(1, len(ids) // 2) for ids in sequences]
    got = [{} for _ in sequences]
    rows = [
        manager.allocate(i, ids[:h]).row
        for i, (ids, h) in enumerate(zip(sequences, halves, strict=True))
    ]
    at = [0] * len(sequences)
    while any(a < h for a, h in zip(at, halves, strict=True)):
        counts = [min(chunk // len(sequences), h - a) for a, h in zip(at, halves, strict=True)]
        live = [i for i, c in enumerate(counts) if c]
        batch = Batch.ragged(
            [rows[i] for i in live], [at[i] for i in live], [counts[i] for i in live],
            num_tokens=chunk, num_seqs=len(sequences), padding_row=config.max_seqs,
        )  # fmt: skip
        tokens = [t for i in live for t in sequences[i][at[i] : at[i] + counts[i]]]
        state = apply_plan(state, manager.take_plan())
        padded = np.zeros(chunk, np.int32)
        padded[: len(tokens)] = tokens
        logits, state = step(state, padded, batch)
        for s, i in enumerate(live):
            manager.commit(i, counts[i])
            at[i] += counts[i]
            got[i][at[i] - 1] = np.asarray(logits[s])
    while any(a < len(ids) for a, ids in zip(at, sequences, strict=True)):
        live = [i for i, ids in enumerate(sequences) if at[i] < len(ids)]
        tokens = np.array([sequences[i][at[i]] for i in live], np.int32)
        manager.append_batch(live, tokens)
        batch = Batch.decode(
            np.array([rows[i] for i in live]), np.array([at[i] for i in live]),
            num_seqs=len(sequences), padding_row=config.max_seqs,
        )  # fmt: skip
        state = apply_plan(state, manager.take_plan())
        padded = np.zeros(len(sequences), np.int32)
        padded[: len(live)] = tokens
        logits, state = step(state, padded, batch)
        for s, i in enumerate(live):
            manager.commit(i, 1)
            at[i] += 1
            got[i][at[i] - 1] = np.asarray(logits[s])
        manager.check()
    np.testing.assert_array_equal(state.seq_lens, at)
    return got


@pytest.mark.quick
@pytest.mark.parametrize(
    "block_size",
    [1, 16, *(pytest.param(b, marks=pytest.mark.slow) for b in (2, 8, 32, 64, 128))],
)
def test_paged_equals_unpaged(small_model, block_size):
    """Lengths of 1, over, on and one past block edges, and the longest possible."""
    b = block_size
    lengths = sorted({1, 2, b, b + 1, 2 * b - 1, min(2 * b + 1, 255), 200, 256})
    sequences = prompts_of(*lengths)
    for ids, got in zip(sequences, paged_logits(small_model, sequences, block_size), strict=True):
        want = dense_logits(small_model, ids)
        assert got
        for position, logits in got.items():
            np.testing.assert_allclose(logits, want[position], atol=1e-4, rtol=1e-4)


def greedy(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(dense_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.quick
def test_generate_equals_dense_greedy(small_model):
    prompts = prompts_of(1, 5, 16, 17, 33)
    outputs = generate(small_model, prompts, SamplingParams(max_tokens=12)).outputs
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy(small_model, prompt, 12)


def test_more_prompts_than_rows_or_blocks(small_model):
    prompts = prompts_of(9, 3, 20, 7, 12, 30, 2)
    params = SamplingParams(max_tokens=6)
    tight = jaxkv.CacheConfig.for_model(
        small_model.config, max_len=64, block_size=8, max_seqs=2, num_blocks=7
    )
    a = generate(small_model, prompts, params, cache=tight)
    b = generate(small_model, prompts, params)
    assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
    assert a.stats.peak_blocks <= 6
    assert a.stats.contiguous_bytes == 2 * tight.max_len * tight.bytes_per_token


@pytest.mark.parametrize("extra", [1, 8, 9])
def test_a_prompt_that_begins_like_an_earlier_one_computes_only_the_rest(small_model, extra):
    """One row: the second prompt starts after the first has ended, and hits its blocks."""
    system = prompts_of(20)[0]
    prompts = [[*system, 1, 2], system + prompts_of(extra)[0], system[:16], [5, *system]]
    cache = jaxkv.CacheConfig.for_model(small_model.config, max_len=64, block_size=8, max_seqs=1)
    outputs = generate(small_model, prompts, SamplingParams(max_tokens=9), cache=cache).outputs
    # 16 of the 20: whole blocks; of the third prompt all but its last token, so one block.
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 8, 0]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy(small_model, prompt, 9)


def test_long_prompt_is_prefilled_in_chunks(small_model):
    prompt = prompts_of(250)[0]
    small = SamplingParams(max_tokens=7)
    result = generate(small_model, [prompt, prompt[:40]], small)
    assert result.stats.prefill_steps >= 5
    assert result.outputs[0].token_ids[:6] == greedy(small_model, prompt, 6)


def test_a_sequence_of_exactly_the_context(small_model):
    for length in (256, 255, 250):
        prompt = prompts_of(length)[0]
        output = generate(small_model, [prompt], SamplingParams(max_tokens=50)).outputs[0]
        assert len(output.token_ids) == 256 - length
        assert output.finish_reason == "length"


def test_smollm2_equals_llama_cpp(smollm2):
    """Greedy tokens, except after a near tie (top two logits within 1e-3)."""
    cases = json.loads((DATA / "smollm2_greedy.json").read_text())["prompts"]
    assert len(cases) == 20
    params, prompts = (
        SamplingParams(max_tokens=64, ignore_eos=True),
        [c["prompt_ids"] for c in cases],
    )
    tokens = sum(map(len, prompts))
    # One step for all prompts, and one form of all others: compiling is most of this.
    scheduler = jaxkv.SchedulerConfig(
        max_tokens_per_step=tokens, prefill_buckets=(tokens,), defer_shared_prefixes=False
    )
    cache = default_cache(smollm2.model.config, prompts, params)
    outputs = generate(smollm2.model, prompts, params, cache=cache, scheduler=scheduler).outputs
    for case, output in zip(cases, outputs, strict=True):
        assert len(case["token_ids"]) == 64
        same = np.equal(case["token_ids"], output.token_ids)
        if not same.all():
            assert case["margins"][int(same.argmin())] < 1e-3


# -- sampling --------------------------------------------------------------------------------


def test_sampling_does_not_depend_on_the_batch(small_model):
    prompts = prompts_of(4, 9, 6)
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=3)
    together = generate(small_model, prompts, params).outputs
    tight = default_cache(small_model.config, prompts, params, max_seqs=1)
    in_turn = generate(small_model, prompts, params, cache=tight).outputs
    assert [o.token_ids for o in together] == [o.token_ids for o in in_turn]


def test_equal_prompts_draw_differently_and_repeat_with_the_seed(small_model):
    prompts = prompts_of(4) * 4
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7)
    first = [o.token_ids for o in generate(small_model, prompts, params).outputs]
    assert len({tuple(ids) for ids in first}) == 4
    assert first == [o.token_ids for o in generate(small_model, prompts, params).outputs]
    assert first[:2] == [o.token_ids for o in generate(small_model, prompts[:2], params).outputs]
    other = SamplingParams(max_tokens=16, temperature=1.0, seed=8)
    assert first != [o.token_ids for o in generate(small_model, prompts, other).outputs]


# -- stopping --------------------------------------------------------------------------------


def test_end_tokens(small_model):
    prompt = prompts_of(5)[0]
    free = generate(small_model, [prompt], SamplingParams(max_tokens=20)).outputs[0].token_ids
    first = free.index(free[6])

    def run(eos, **kind):
        params = SamplingParams(max_tokens=20, **kind)
        return generate(small_model, [prompt], params, eos_token_ids=eos).outputs[0]

    stopped = run([60, free[6]])
    assert stopped.token_ids == free[: first + 1]
    assert stopped.finish_reason == "stop"
    assert run([free[6]], ignore_eos=True).token_ids == free
    assert run([], stop_token_ids=(free[6],), ignore_eos=True).token_ids == free[: first + 1]
    assert run([free[0]]).token_ids == free[:1]
    assert run(prompt[:1]).token_ids[:1] == free[:1]  # one in the prompt does not stop


def test_no_tokens_asked_for(small_model):
    result = generate(small_model, prompts_of(5), SamplingParams(max_tokens=0))
    assert result.outputs[0].token_ids == []
    assert result.outputs[0].time_to_first_token is None


def test_tokens_arrive_as_they_are_made(small_model):
    seen = []
    outputs = generate(
        small_model, prompts_of(3, 8), SamplingParams(max_tokens=4),
        on_token=lambda i, token: seen.append((i, token)),
    ).outputs  # fmt: skip
    assert [t for i, t in seen if i == 1] == outputs[1].token_ids
    assert len(seen) == 8


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1: the prompt is empty"),
        ([[1] * 257], "257 tokens, the longest sequence has 256"),
        ([[1, 61]], "the vocabulary has 61"),
        ([[-1]], "the vocabulary has 61"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(small_model, prompts, message):
    with pytest.raises(ConfigError, match=message):
        generate(small_model, prompts)


def test_a_request_that_never_fits_is_refused_with_the_numbers(small_model):
    cache = jaxkv.CacheConfig.for_model(small_model.config, num_blocks=3, max_len=256, max_seqs=4)
    with pytest.raises(ConfigError, match="need 4 blocks of 16 tokens; the pool has 2"):
        generate(small_model, prompts_of(40), SamplingParams(max_tokens=10), cache=cache)


@pytest.mark.parametrize(
    "field", [dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=-1),
              dict(top_p=0), dict(top_p=1.5), dict(seed=-1), dict(max_tokens=-1)]
)  # fmt: skip
def test_bad_sampling_parameters_are_named(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        SamplingParams(**field)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_any_batch_equals_each_alone(small_model, lengths):
    prompts = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in lengths]
    params = SamplingParams(max_tokens=5)
    outputs = generate(small_model, prompts, params).outputs
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == generate(small_model, [prompt], params).outputs[0].token_ids
