"""Forks, rollbacks, drafts and beams."""

import asyncio
import heapq
from typing import Any

import numpy as np
import pytest
from engine_cases import (
    dense_greedy,
    dense_logprobs,
    engine_of,
    greedy,
    prompt_of,
    run,
    verify_idle,
)
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import (
    AsyncEngine,
    BeamSearchParams,
    ConfigError,
    JaxkvError,
    PromptLookup,
    SamplingParams,
)

# -- forks and rollbacks ---------------------------------------------------------------------


def until(engine, request, count):
    """Steps until a request has that many tokens."""
    tokens = []
    while len(tokens) < count:
        for output in engine.step():
            assert output.error is None
            if output.request_id == request:
                tokens = output.token_ids
    return tokens


def test_a_fork_goes_on_from_where_the_other_is(small_model):
    engine, prompt = engine_of(small_model), prompt_of(9)
    a = engine.submit(prompt, SamplingParams(max_tokens=14, temperature=1.0, seed=1))
    begun = until(engine, a, 5)
    used = engine.manager.stats().active
    b, _c = engine.fork(a, seed=2), engine.fork(a, seed=1, new_id="c")
    assert engine.manager.stats().active == used
    outputs = run(engine)
    assert outputs["c", 0].token_ids == outputs[a, 0].token_ids  # the same seed
    assert outputs[b, 0].token_ids[: len(begun)] == outputs[a, 0].token_ids[: len(begun)]
    assert outputs[b, 0].token_ids != outputs[a, 0].token_ids
    assert [len(o.token_ids) for o in outputs.values()] == [14] * 3


def test_a_fork_has_its_first_token_and_old_outputs_keep_theirs(small_model):
    engine = engine_of(small_model)
    trunk = engine.submit(prompt_of(5), greedy(12))
    held = None
    while held is None or held.num_tokens < 4:
        held = next(iter(engine.step()), held)
    tokens = held.token_ids
    child = engine.fork(trunk)
    engine.rollback(trunk, 2)
    outputs = run(engine)
    assert held.token_ids == tokens
    assert outputs[child, 0].timings.first_token is not None


def test_forks_without_a_row_wait_for_one(small_model):
    engine, prompt = engine_of(small_model, max_seqs=1), prompt_of(9)
    a = engine.submit(prompt, greedy(8))
    until(engine, a, 3)
    forks = [engine.fork(a) for _ in range(3)]
    outputs = run(engine)
    for request in (a, *forks):
        assert outputs[request, 0].token_ids == dense_greedy(small_model, prompt, 8)


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_a_rollback_comes_to_the_same_again(small_model, count):
    engine, prompt = engine_of(small_model), prompt_of(7)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=0)
    a = engine.submit(prompt, params)
    before = until(engine, a, 6)
    engine.rollback(a, count)
    output = run(engine)[a, 0]
    fresh = engine_of(small_model)
    fresh.submit(prompt, params, request_id=a)
    want = run(fresh)[a, 0]
    assert output.token_ids == want.token_ids
    assert output.token_ids[:5] == before[:5]
    assert output.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)


def test_a_rolled_back_fork_takes_another_way(small_model):
    """Tree search: branches of one trunk, pruned and regrown."""
    engine, prompt = engine_of(small_model), prompt_of(10)
    trunk = engine.submit(prompt, SamplingParams(max_tokens=20, temperature=1.5, seed=1))
    until(engine, trunk, 4)
    branches = [engine.fork(trunk, seed=i) for i in range(10, 13)]
    for _ in range(4):
        engine.step()
    engine.abort(branches[0])
    engine.rollback(branches[1], 2)
    grown = engine.fork(branches[1], seed=99)
    outputs = run(engine)
    assert outputs[branches[0], 0].finish_reason == "abort"
    for request in (trunk, branches[1], branches[2], grown):
        assert len(outputs[request, 0].token_ids) == 20


def test_rejects_invalid_forks_and_rollbacks(small_model):
    engine = engine_of(small_model)
    a = engine.submit(prompt_of(5), greedy(6, n=2))
    for call in (engine.fork, lambda r: engine.rollback(r, 1), lambda r: engine.verify(r, [])):
        with pytest.raises(JaxkvError, match="no request 'x' is running"):
            call("x")
        with pytest.raises(JaxkvError, match="has several samples"):
            call(a)
    b = engine.submit(prompt_of(6), greedy(6))
    with pytest.raises(JaxkvError, match="is not computed yet; call step first"):
        engine.verify(b, [1])
    with pytest.raises(JaxkvError, match="cannot roll back 1 tokens: 0 are generated"):
        engine.rollback(b, 1)
    run(engine)


# -- drafts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [
    greedy(20), SamplingParams(max_tokens=20, temperature=1.0, seed=3, top_k=5),
    SamplingParams(max_tokens=20, repetition_penalty=1.4, presence_penalty=0.3, logprobs=2),
], ids=["greedy", "sampled", "penalties"])  # fmt: skip
@pytest.mark.parametrize("blocks", [40, 8])
def test_drafts_change_no_token(small_model, params, blocks):
    prompt = prompt_of(8)
    fresh = engine_of(small_model)
    fresh.submit(prompt, params, request_id="a")
    want = run(fresh)["a", 0].token_ids
    rng = np.random.default_rng(0)
    engine = engine_of(small_model, blocks=blocks)
    engine.submit(prompt, params, request_id="a")
    tokens = until(engine, "a", 1)
    while "a" in engine._loop.requests:
        draft = want[len(tokens) : len(tokens) + 5]
        if draft and rng.random() < 0.6:  # wrong from some point on
            draft[int(rng.integers(len(draft)))] = int(rng.integers(61))
        new = engine.verify("a", draft)
        assert new == want[len(tokens) : len(tokens) + len(new)]
        for output in engine.step() if rng.random() < 0.5 else engine._outputs.take():
            tokens = output.token_ids
    assert tokens == want
    assert engine.stats().steps < 18  # one for each token without drafts, and one for the prompt
    verify_idle(engine)


def test_prompt_lookup():
    lookup = PromptLookup(max_ngram=3, num_tokens=4)
    assert lookup([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]
    assert lookup([5, 1, 9, 5, 2, 7, 5]) == [2, 7, 5, 2]  # the last time, and its repetition
    assert lookup([1, 2, 1, 2]) == [1, 2, 1, 2]
    assert lookup([3, 3]) == [3, 3, 3, 3]
    assert lookup([1, 2, 3]) == []
    assert lookup([1]) == []
    with pytest.raises(ConfigError, match="max_ngram=0"):
        PromptLookup(max_ngram=0)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4))
def test_prompt_lookup_finds_what_a_search_by_hand_finds(tokens, longest):
    want = []
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                want = (tokens[start + size :] * 8)[:8]
                break
        if want:
            break
    assert PromptLookup(max_ngram=longest)(tokens) == want


# -- beams -----------------------------------------------------------------------------------


def brute_force(model, prompt, params, eos):
    """A beam search that computes every hypothesis from its first token, as transformers does."""
    live, ended = [(0.0, list(prompt))], []
    for length in range(len(prompt) + 1, len(prompt) + params.max_tokens + 1):
        candidates = []
        for total, ids in live:
            row = dense_logprobs(model, ids)[-1]
            candidates += [(total + float(x), [*ids, token]) for token, x in enumerate(row)]
        candidates.sort(key=lambda c: -c[0])
        live = []
        for rank, (total, ids) in enumerate(candidates[: 2 * params.width]):
            if ids[-1] in eos or length == len(prompt) + params.max_tokens:
                if rank < params.width:
                    score = total / (length - len(prompt)) ** params.length_penalty
                    ended = heapq.nlargest(params.width, [*ended, (score, ids)])
            elif len(live) < params.width:
                live.append((total, ids))
        if not live:
            break
        if len(ended) == params.width:
            at = len(prompt) + params.max_tokens if params.length_penalty > 0 else length
            best = live[0][0] / (at - len(prompt)) ** params.length_penalty
            if params.early_stopping or best <= ended[-1][0]:
                break
    return [ids[len(prompt) :] for _, ids in ended]


@pytest.mark.parametrize(("blocks", "params"), [
    (40, BeamSearchParams(width=3, max_tokens=9)),
    (40, BeamSearchParams(width=4, max_tokens=12, length_penalty=0.0)),
    (40, BeamSearchParams(width=2, max_tokens=12, early_stopping=True)),
    (14, BeamSearchParams(width=3, max_tokens=12, length_penalty=2.0)),
    (40, BeamSearchParams(width=1, max_tokens=7)),
    (40, BeamSearchParams(width=3, max_tokens=1)),
])  # fmt: skip
def test_beams_equal_brute_force(small_model, blocks, params):
    prompt, eos = prompt_of(6), (3, 17, 30, 44)
    want = brute_force(small_model, prompt, params, eos)
    engine = engine_of(small_model, blocks=blocks, eos_token_ids=eos)
    other = engine.submit(prompt_of(11), greedy(15, ignore_eos=True))
    engine.submit(prompt, params, request_id="beams")
    outputs = run(engine)
    assert [o.token_ids for (r, _), o in sorted(outputs.items(), key=str) if r == "beams"] == want
    assert outputs[other, 0].token_ids == dense_greedy(small_model, prompt_of(11), 15)
    scores = [
        outputs["beams", i].cumulative_logprob / len(tokens) ** params.length_penalty
        for i, tokens in enumerate(want)
    ]
    assert scores == sorted(scores, reverse=True)


def test_beams_that_are_aborted_or_never_fit(small_model):
    engine = engine_of(small_model, blocks=12)
    engine.submit(prompt_of(6), BeamSearchParams(width=3, max_tokens=8), request_id="a")
    for _ in range(4):
        engine.step()
    engine.abort("a")
    (output,) = [o for o in engine.step() if o.request_id == "a"]
    assert output.finish_reason == "abort"
    engine.step()
    verify_idle(engine)
    with pytest.raises(ConfigError, match="a beam search of width 9 needs 9 rows"):
        engine.submit([1], BeamSearchParams(width=9, max_tokens=4))
    with pytest.raises(ConfigError, match="may need 25 blocks, the pool has 12"):
        engine.submit(prompt_of(6), BeamSearchParams(width=4, max_tokens=20))
    wrong: tuple[dict[str, Any], ...] = (
        dict(width=0), dict(max_tokens=0), dict(length_penalty=float("nan")),
    )  # fmt: skip
    for changes in wrong:
        with pytest.raises(ConfigError, match=next(iter(changes))):
            BeamSearchParams(**changes)  # pyright: ignore[reportArgumentType]


# -- coroutines ------------------------------------------------------------------------------


def test_coroutines_share_an_engine(small_model):
    engine = engine_of(small_model)

    async def collect(shared, prompt, params, most=99):
        tokens = []
        async for output in shared.generate(prompt, params):
            tokens += output.new_token_ids
            if len(tokens) >= most:
                break
        return tokens

    async def main():
        shared = AsyncEngine(engine)
        with pytest.raises(ConfigError):
            await collect(shared, [], greedy(3))
        prompts = [prompt_of(4 + i) for i in range(6)]
        calls = [collect(shared, p, greedy(8), most=8 if i else 3) for i, p in enumerate(prompts)]
        return prompts, await asyncio.gather(*calls)

    prompts, results = asyncio.run(main())
    for i, (prompt, tokens) in enumerate(zip(prompts, results, strict=True)):
        assert tokens[: 8 if i else 3] == dense_greedy(small_model, prompt, 8 if i else 3)
    while engine.has_work:
        engine.step()
    verify_idle(engine)


def test_coroutines_get_all_hypotheses(small_model):
    engine = engine_of(small_model)

    async def main():
        beams = AsyncEngine(engine).generate([1, 2], BeamSearchParams(width=3, max_tokens=4))
        return [output.sample async for output in beams]

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_fork_of_a_prompt_that_is_being_computed_waits(small_model):
    engine, prompt = engine_of(small_model), prompt_of(40)
    a = engine.submit(prompt, greedy(3))
    engine.step()  # 16 of its tokens
    b = engine.fork(a)
    outputs = run(engine)
    assert outputs[a, 0].token_ids == outputs[b, 0].token_ids
    assert engine.stats().prompt_tokens == 40 + 4  # the last block's, for their logits
