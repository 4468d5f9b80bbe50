"""What users expect: scores without tokens, priorities, the last slot, many open requests."""

import numpy as np
import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, run, tokens_of
from following import Following

import jaxkv
from jaxkv import BeamSearchParams, ConfigError, SamplingParams
from jaxkv.engine import scheduler


def test_a_prompt_is_scored_without_generating(small_model):
    scores = {}
    for max_tokens in (0, 1):
        engine = engine_of(small_model)
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=True, logprobs=2)
        engine.submit(prompt_of(21), params, request_id="a")
        engine.submit(prompt_of(5), greedy(3), request_id="beside")
        outputs = run(engine)
        assert len(outputs["a", 0].token_ids) == max_tokens
        assert outputs["a", 0].finish_reason == "length"
        scores[max_tokens] = outputs["a", 0].prompt_logprobs
    assert len(scores[0]) == 20
    assert scores[0] == scores[1]


@pytest.mark.parametrize("length", [1, 63, 64])
def test_prompts_up_to_the_longest_sequence_are_scored(small_model, length):
    engine = engine_of(small_model)
    params = SamplingParams(max_tokens=5, prompt_logprobs=True)
    engine.submit(prompt_of(length), params, request_id="a")
    output = run(engine)["a", 0]
    assert len(output.prompt_logprobs or []) == length - 1
    assert len(output.token_ids) == min(5, 64 - length)


def test_each_sample_ends_where_no_token_is_requested(small_model):
    engine = engine_of(small_model)
    engine.submit([1, 2], SamplingParams(max_tokens=0, n=3), request_id="a")
    assert tokens_of(run(engine)) == {("a", i): ([], "length") for i in range(3)}


def test_a_prompt_that_fills_the_last_block_with_one_token_to_come(small_model):
    engine = engine_of(small_model, 4)  # 16 slots; the 17th token is never written
    request = engine.submit(prompt_of(16), greedy(1))
    assert run(engine)[request, 0].token_ids == dense_greedy(small_model, prompt_of(16), 1)
    with pytest.raises(ConfigError, match="need 5 blocks"):
        engine.submit(prompt_of(16), greedy(2))


@pytest.mark.parametrize(("max_seqs", "blocks"), [(2, 40), (4, 12)])
def test_a_higher_priority_preempts_lower_ones(small_model, max_seqs, blocks):
    engine = engine_of(small_model, blocks, max_seqs=max_seqs, scheduler=dict(policy="priority"))
    low = [prompt_of(9, i) for i in range(2)]
    for i, prompt in enumerate(low):
        engine.submit(prompt, greedy(14), request_id=f"low{i}")
    for _ in range(4):
        engine.step()
    engine.submit(prompt_of(17), greedy(3), request_id="urgent", priority=10)
    ended, last = [], {}
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output.token_ids
            ended += [output.request_id] if output.finished else []
    assert ended[0] == "urgent"
    assert engine.stats().preemptions >= 1
    for i, prompt in enumerate(low):
        assert last[f"low{i}"] == dense_greedy(small_model, prompt, 14)


def test_equal_priorities_do_not_preempt(small_model):
    engine = engine_of(small_model, max_seqs=1, scheduler=dict(policy="priority"))
    engine.submit(prompt_of(4), greedy(9), request_id=0, priority=3)
    engine.step()
    engine.submit(prompt_of(5), greedy(3), request_id=1, priority=3)
    run(engine)
    assert engine.stats().preemptions == 0


def test_beams_go_on_beside_several_end_tokens():
    """Two ends are a little likelier than going on, after which all is certain."""
    table = np.zeros((8, 8))
    table[1, [6, 7, 2]] = 3.0, 2.9, 2.8
    table[2, 3] = table[3, 4] = table[4, 5] = table[5, 6] = 20.0
    model = Following(table, eos_token_ids=(6, 7))
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=32, block_size=4, max_seqs=2)
    params = BeamSearchParams(width=1, max_tokens=8, length_penalty=2.0)
    ((output,),) = jaxkv.Engine(model, cache).generate([[1]], params, progress=False)
    assert output.token_ids == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=3, logprobs=64), BeamSearchParams(max_tokens=3, width=8),
])  # fmt: skip
def test_more_candidates_than_the_vocabulary_has(params):
    model = Following(np.random.default_rng(0).normal(size=(8, 8)))
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=32, block_size=4, max_seqs=8)
    outputs = jaxkv.Engine(model, cache).generate([[1, 2]], params, progress=False)[0]
    for output in outputs:
        assert output.finish_reason == "length"
        assert all(len(one.top) == 8 for one in output.logprobs or [])


def test_the_end_of_a_request_costs_the_same_however_many_are_open(small_model, monkeypatch):
    """Counts what an abort reads: neither the open requests nor the waiting list are searched."""
    order, read = scheduler._order, []

    def counted(sequence):
        read.append(sequence)
        return order(sequence)

    counts = []
    for num_open in (10, 1000):
        engine = engine_of(small_model)
        for i in range(num_open):
            engine.submit([1, 2, 3], greedy(4), request_id=i)
        read.clear()
        monkeypatch.setattr(scheduler, "_order", counted)
        engine.abort(num_open // 2)
        monkeypatch.setattr(scheduler, "_order", order)
        counts.append(len(read))
    assert 1 <= counts[0] <= counts[1] <= counts[0] + 8
