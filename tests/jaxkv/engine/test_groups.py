"""Samples and hypotheses of a request stand and fall together; forks and rollbacks stay in step."""

import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, run, tokens_of

from jaxkv import BeamSearchParams, SamplingParams


def test_two_beam_searches_that_need_each_others_rows(small_model):
    engine = engine_of(small_model, 48, max_seqs=3)
    widths = {"three": 3, "two": 2}
    for name, width in widths.items():
        params = BeamSearchParams(width=width, max_tokens=6)
        engine.submit([1, 2, 3], params, request_id=name)
    together = tokens_of(run(engine))
    for name, width in widths.items():
        engine = engine_of(small_model, 48, max_seqs=3)
        engine.submit([1, 2, 3], BeamSearchParams(width=width, max_tokens=6), request_id=name)
        alone = tokens_of(run(engine))
        assert len(alone) == width
        assert {key: value for key, value in together.items() if key[0] == name} == alone


@pytest.mark.parametrize("blocks", [13, 18, 40])
def test_beam_searches_under_pressure_equal_each_alone(small_model, blocks):
    requests = {i: (prompt_of(3 + 2 * i), BeamSearchParams(width=2 + i % 2, max_tokens=7))
                for i in range(4)}  # fmt: skip
    engine = engine_of(small_model, blocks)
    for name, (prompt, params) in requests.items():
        engine.submit(prompt, params, request_id=name)
        engine.submit(prompt, greedy(9), request_id=("plain", name))
    together = tokens_of(run(engine, 2000))
    for name, (prompt, params) in requests.items():
        engine = engine_of(small_model)
        engine.submit(prompt, params, request_id=name)
        alone = tokens_of(run(engine))
        assert {key: value for key, value in together.items() if key[0] == name} == alone


def test_a_step_that_fails_for_a_part_of_a_search_ends_all_of_it(small_model, monkeypatch):
    engine = engine_of(small_model)
    engine.submit(prompt_of(9), BeamSearchParams(width=3, max_tokens=8), request_id="beams")
    engine.submit(prompt_of(8), greedy(4, n=2), request_id="samples")
    other = engine.submit(prompt_of(7), greedy(9))
    for _ in range(3):
        engine.step()
    send = engine._device.send

    def fails(work, plan):
        monkeypatch.setattr(engine._device, "send", send)
        work.decodes.sequences[:] = [
            s for s in work.decodes.sequences if s.sample == 0 and s.request.id != other
        ]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._device, "send", fails)
    outputs = run(engine)
    ends = {key: output.finish_reason for key, output in outputs.items()}
    assert {reason for (name, _), reason in ends.items() if name != other} == {"error"}
    assert {name for name, _ in ends} == {"beams", "samples", other}
    assert outputs[other, 0].token_ids == dense_greedy(small_model, prompt_of(7), 9)


def test_a_failed_step_leaves_no_fork_behind(small_model, monkeypatch):
    """What a fork had begun must not reach the row of another request."""
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    alone = engine_of(small_model)
    alone.submit(prompt_of(6), drawn, request_id="kept")
    expected = run(alone)["kept", 0].token_ids
    engine = engine_of(small_model)
    two = SamplingParams(max_tokens=9, temperature=1.0, n=2)
    engine.submit(prompt_of(5), two, request_id="two")
    fill = engine._device.fill_rows

    def fails(sequences):
        monkeypatch.setattr(engine._device, "fill_rows", fill)
        raise RuntimeError("while rows are filled")

    monkeypatch.setattr(engine._device, "fill_rows", fails)
    engine.submit(prompt_of(8), two, request_id="three")
    engine.step()
    engine.submit(prompt_of(6), drawn, request_id="kept")
    outputs = run(engine)
    assert outputs["kept", 0].token_ids == expected
    assert not engine._scheduler.unfilled


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_rollback_keeps_what_is_computed_and_not_told_yet(small_model, block_size):
    """Blocks whose KV is computed must not be given back because the manager hears of them late."""
    for at in range(3, 12):
        engine = engine_of(small_model, block_size=block_size)
        engine.submit([9], greedy(14), request_id="first")
        engine.submit([7], greedy(14), request_id="second")
        seen = {}
        while len(seen.get("second", [])) < at:
            for output in engine.step():
                seen[output.request_id] = output.token_ids
        engine.drain()
        engine.rollback("second", 1)
        last = {}
        for output in engine.stream():
            last[output.request_id] = output.token_ids
        assert last["first"] == dense_greedy(small_model, [9], 14)
        assert last["second"] == dense_greedy(small_model, [7], 14)
