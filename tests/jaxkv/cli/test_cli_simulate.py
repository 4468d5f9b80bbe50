"""`jaxkv simulate`, in process, on small traces."""

import argparse
import json

import pytest

from jaxkv.cli import simulate
from jaxkv.errors import JaxkvError

FIELDS = {"hit_rate", "belady_hit_rate", "waste", "peak_blocks", "evictions", "blocks_written"}


@pytest.fixture
def chat(tmp_path):
    """Three prompts, the last of which begins like the first."""
    ids = [[1, 2], [3, 4], [1, 2, 5]]
    lines = [
        {"timestamp": 60_000 * i, "input_length": 512 * len(h), "output_length": 40, "hash_ids": h}
        for i, h in enumerate(ids)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "chat.jsonl"


@pytest.fixture
def code(tmp_path):
    """A trace without hash ids."""
    rows = [f"2023-11-16 18:17:{i:02d}.5,{300 * i + 20},{i + 5}" for i in range(8)]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (tmp_path / "code.csv").write_text(text)
    return tmp_path / "code.csv"


def run(*args):
    parser = argparse.ArgumentParser()
    simulate.add_options(parser)
    parsed = parser.parse_args(list(map(str, args)))
    return parsed.run(parsed)


def test_json_is_one_object_and_nothing_else(capsys, chat):
    assert run(chat, "--blocks", 4, "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert set(result) >= FIELDS
    assert (result["hit_rate"], result["evictions"]) == (2 / 7, 1)
    assert (result["peak_blocks"], result["waste"], result["service"]) == (3, 0, None)
    assert err.strip() == ""


def test_the_result_has_the_requested_policy_index_block_size_and_service(capsys, chat):
    run(chat, "--blocks", 64, "--json", "--policy", "decayed", "--block-size", 128,
        "--prefix-index", "radix", "--concurrency", 2, "--decode-rate", 4)  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    assert (result["policy"], result["prefix_index"]) == ("decayed", "radix")
    assert (result["block_size"], result["num_blocks"]) == (128, 64)
    assert result["service"]["concurrency"] == 2
    assert result["service"]["decode_tokens_per_s"] == 4
    assert result["hit_blocks"] == 8
    run(chat, "--blocks", 64, "--json", "--prefix-index", "none")
    assert json.loads(capsys.readouterr().out)["hit_rate"] == 0


def test_without_json_it_prints_a_table(capsys, chat):
    run(chat, "--blocks", 4)
    out = capsys.readouterr().out
    for text in ("chat, 3 requests", "4 blocks of 512 tokens, lru", "28.6%", "evictions"):
        assert text in out


@pytest.mark.parametrize(
    ("trace", "service", "suffix"),
    [
        ("chat", (), "png"),
        ("chat", ("--concurrency", "2"), "svg"),
        ("code", (), "pdf"),
        ("code", ("--concurrency", "2"), "png"),
    ],
)
def test_plots(capsys, request, tmp_path, trace, service, suffix):
    plot = tmp_path / f"out.{suffix}"
    trace = request.getfixturevalue(trace)
    assert run(trace, "--blocks", 8, *service, "--plot", plot, "--json") == 0
    json.loads(capsys.readouterr().out)
    assert plot.stat().st_size > 5000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--blocks", "0"], "num_blocks=0"),
        (["--blocks", "4", "--block-size", "-1"], "block_size=-1"),
        (["--blocks", "4", "--concurrency", "0"], "concurrency=0 must be positive"),
        (["--blocks", "4", "--concurrency", "1", "--decode-rate", "0"], "decode_tokens_per_s=0.0"),
        (["--blocks", "4", "--plot", "out.gif"], "end in one of .png, .pdf, .svg"),
        (["--blocks", "4", "--plot", "/nowhere/out.png"], "must be in an existing folder"),
    ],
)
def test_bad_settings(capsys, chat, args, message):
    with pytest.raises(JaxkvError, match=message):
        run(chat, *args)
    assert capsys.readouterr().out == ""


def test_bad_traces(tmp_path):
    with pytest.raises(JaxkvError, match="no such trace"):
        run(tmp_path / "none.csv", "--blocks", 4)
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1999,x,1\n")
    with pytest.raises(JaxkvError, match="line 2, column ContextTokens"):
        run(tmp_path / "t.csv", "--blocks", 4)


def test_the_command_is_registered_and_errors_are_one_line(capsys, tmp_path):
    from jaxkv.cli import main

    assert main(["simulate", str(tmp_path / "none.csv"), "--blocks", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxkv simulate: error: no such trace")
    assert len(err.strip().splitlines()) == 1
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "azure-code"])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
