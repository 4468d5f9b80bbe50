"""Measurements of the engine: the same tokens in every mode, and counts that add up."""

import json

import numpy as np
import pytest
from engine_cases import MAX_LEN, engine_of, verify_idle

from jaxkv.cli import main
from jaxkv.errors import JaxkvError
from jaxkv.studies.bench import continuous, one_by_one, static_batches
from jaxkv.studies.traces import Trace
from jaxkv.studies.workload import Workload


@pytest.fixture
def load():
    trace = Trace.of(range(6), [9, 20, 3, 14, 1, 6], [4, 2, 7, 3, 5, 1])
    return Workload.of(trace, requests=6, vocab_size=61, max_len=MAX_LEN)


def test_modes_give_the_same_tokens(small_model, load):
    engine = engine_of(small_model)
    together, alone = continuous(engine, load), one_by_one(engine, load)
    assert together.token_ids == alone.token_ids
    assert [len(ids) for ids in together.token_ids] == load.max_tokens
    assert together.computed_prompt_tokens == sum(map(len, load.prompts))
    assert together.steps < alone.steps
    assert together.tokens_per_s == sum(load.max_tokens) / together.seconds
    assert 0 < together.first_token_s[0] <= together.first_token_s[1] <= together.seconds
    verify_idle(engine)


def test_a_static_batch_computes_its_padding(small_model, load):
    engine = engine_of(small_model, prefix_index=None)
    static = static_batches(engine, load)
    assert static.computed_prompt_tokens == 4 * 20 + 2 * 6  # 4 rows
    assert [len(ids) for ids in static.token_ids] == load.max_tokens
    assert static.generated_tokens == sum(load.max_tokens)
    assert static.steps >= 7 + 5 - 2  # as long as the longest of each batch
    want = continuous(engine, load).token_ids
    longest = [1, 5]  # prompts without padding give the same tokens
    assert [static.token_ids[i] for i in longest] == [want[i] for i in longest]


def test_a_request_that_fails_is_an_error(small_model, load):
    engine = engine_of(small_model)
    engine._device.send = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(JaxkvError, match="continuous batching: TypeError"):
        continuous(engine, load)
    verify_idle(engine)


@pytest.fixture
def checkpoint(tmp_path, small_model):
    from jaxkv.models import Tokenizer, save_orbax

    save_orbax(tmp_path / "model", small_model, Tokenizer.bytes())
    return tmp_path / "model"


def test_the_command_prints_json_or_a_table(capsys, checkpoint, monkeypatch):
    monkeypatch.setattr("jaxkv.cli.options.use_compilation_cache", lambda: None)
    args = ["bench", "--model", str(checkpoint), "--requests", "5", "--scale", "64",
            "--max-seqs", "2", "--chunk", "16", "--compare"]  # fmt: skip
    assert main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    modes = {r["mode"]: r for r in result["results"]}
    assert list(modes) == ["continuous batching", "static batches", "one by one"]
    counts = {tuple(map(len, r["token_ids"])) for r in modes.values()}
    assert len(counts) == 1
    assert np.isfinite([r["tokens_per_s"] for r in modes.values()]).all()
    assert main(args[:-1]) == 0
    out = capsys.readouterr().out
    for text in ("tokens/s", "first token", "schedule", "continuous batching"):
        assert text in out


def test_bad_input_is_one_line(capsys, checkpoint):
    assert main(["bench", "--model", str(checkpoint), "--requests", "0"]) == 2
    assert "leave nothing to run" in capsys.readouterr().err
    assert main(["bench", "--trace", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
