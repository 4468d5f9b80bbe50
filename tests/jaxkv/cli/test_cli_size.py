"""`jaxkv size`, in process: shapes from files without weights, budgets, lengths, errors."""

import argparse
import json

import gguf
import numpy as np
import pytest
from flax import nnx

from jaxkv.cli import size
from jaxkv.config import DTYPES
from jaxkv.errors import JaxkvError
from jaxkv.models import Llama, LlamaConfig, read_config, save_orbax
from jaxkv.planning.sizing import Shape, cache_size, suggest_block_size
from jaxkv.studies.traces import load_trace

LLAMA2_7B = ["--layers", "32", "--kv-heads", "32", "--head-dim", "128"]
CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=24, intermediate_size=16, num_layers=2, num_heads=6, num_kv_heads=3,
    head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
)  # fmt: skip


def run(capsys, *args):
    """Runs the command as the command line does; returns its output or raises its error."""
    parser = argparse.ArgumentParser()
    size.add_options(parser)
    asked = parser.parse_args(list(map(str, args)))
    status = asked.run(asked)
    out = capsys.readouterr()
    assert status == 0
    assert out.err == ""
    return out.out


def run_json(capsys, *args):
    return json.loads(run(capsys, *args, "--json"))


@pytest.fixture
def hf_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return tmp_path


def write_gguf(path):
    """A GGUF file of CONFIG with the one tensor that its config is read from."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_key_length(CONFIG.head_dim)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_tensor("token_embd.weight", np.zeros((CONFIG.vocab_size, 24), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- output ---------------------------------------------------------------------------------


def test_json_is_one_object_with_the_numbers_of_the_library(capsys):
    out = run_json(capsys, *LLAMA2_7B, "--memory", "16GiB", "--length", 1000)
    assert out["memory_bytes"] == 2**34
    assert (out["max_len"], out["length"], out["block_size"]) == (4096, 1000, 16)
    assert (out["model"], out["suggestion"]) == (None, None)
    assert list(out["dtypes"]) == list(DTYPES)
    for dtype, numbers in out["dtypes"].items():
        expected = cache_size(
            Shape(32, 32, 128), memory_bytes=2**34, max_len=4096, length=1000, dtype=dtype
        )
        assert numbers == expected.to_dict()
    assert out["dtypes"]["float16"]["bytes_per_token"] == 512 * 2**10
    assert out["dtypes"]["float16"]["contiguous_bytes"] == 2 * 2**30


def test_tables(capsys):
    out = run(capsys, *LLAMA2_7B, "--memory", "16GiB", "--length", "1000")
    for text in ("32 layers, 32 KV heads of 128", "512 KiB", "8 MiB", "2048", "2 GiB", "504 MiB",
                 "bfloat16", "null block", "reserves 4096"):  # fmt: skip
        assert text in out
    assert "cost least" not in out


def test_lengths_from_a_file(capsys, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("300\n\n 1400 \n2301\n")
    args = [*LLAMA2_7B, "--memory", "16GiB", "--lengths-file", path, "--dtype", "float16"]
    out = run_json(capsys, *args)
    assert out["length"] == 1334  # the mean, rounded up
    seqs = cache_size(
        Shape(32, 32, 128), memory_bytes=2**34, max_len=4096, length=1334, dtype="float16"
    ).paged_concurrency
    expected = suggest_block_size(
        [300, 1400, 2301], num_layers=32, num_kv_heads=32, head_dim=128, dtype="float16",
        max_len=4096, concurrency=seqs,
    )  # fmt: skip
    assert out["suggestion"] == expected.to_dict()
    text = run(capsys, *args)
    assert f"Blocks of {expected.block_size} tokens cost least" in text
    assert "charged" in text
    assert "older" in text


def test_lengths_from_a_trace(capsys):
    args = [*LLAMA2_7B, "--memory", "16GiB", "--trace", "azure-code", "--max-len", "8192"]
    out = run_json(capsys, *args)
    trace = load_trace("azure-code")
    mean = (trace.input_tokens + trace.output_tokens).mean()
    assert out["suggestion"]["mean_length"] == pytest.approx(mean)
    assert out["length"] == np.ceil(mean)
    assert run_json(capsys, *args, "--length", 7)["length"] == 7


# -- models ----------------------------------------------------------------------------------


def test_shape_of_a_folder_with_a_config_and_no_weights(capsys, hf_folder):
    assert read_config(hf_folder) == CONFIG
    out = run_json(capsys, hf_folder, "--memory", "1MiB", "--max-len", 64)
    assert out["model"] == str(hf_folder)
    assert (out["num_layers"], out["num_kv_heads"], out["head_dim"]) == (2, 3, 8)
    assert out["dtypes"]["float32"]["bytes_per_token"] == 2 * 2 * 3 * 8 * 4


def test_shape_of_a_gguf_file(capsys, tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    out = run_json(capsys, path, "--memory", "1MiB", "--max-len", 64)
    assert (out["num_layers"], out["num_kv_heads"], out["head_dim"]) == (2, 3, 8)


def test_shape_of_an_orbax_folder_without_its_weights(capsys, tmp_path):
    save_orbax(tmp_path, Llama(CONFIG, rngs=nnx.Rngs(0)))
    for file in (tmp_path / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")  # no weights to read
    out = run_json(capsys, tmp_path, "--memory", "1MiB", "--max-len", 64)
    assert (out["num_layers"], out["num_kv_heads"], out["head_dim"]) == (2, 3, 8)


# -- sizes of memory -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096), ("4096 B", 4096), ("16GiB", 2**34), ("16gib", 2**34),
        ("1.5 GB", 15 * 10**8), ("0.1MiB", 104857), ("2TiB", 2**41), ("3kb", 3000),
        (" 1 KiB ", 1024), ("999999999999999999", 999999999999999999),
    ],
)  # fmt: skip
def test_sizes_of_memory(text, size_bytes):
    assert size._parse_bytes(text) == size_bytes


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no model; give MODEL, or add --layers, --kv-heads, --head-dim"),
        (["--layers", "3", "--head-dim", "8"], "no model; give MODEL, or add --kv-heads"),
        (["/nowhere/model"], "no such file or folder: /nowhere/model"),
        (["/nowhere/model", "--layers", "3"], "not both"),
        ([*LLAMA2_7B, "--kv-heads", "0"], "num_kv_heads=0 must be a positive integer"),
        ([*LLAMA2_7B, "--max-len", "0"], "max_len=0 must be"),
        ([*LLAMA2_7B, "--block-size", "-3"], "block_size=-3 must be"),
        ([*LLAMA2_7B, "--length", "5000"], "length=5000 is above max_len=4096"),
        ([*LLAMA2_7B, "--trace", "nowhere.csv"], "no such trace"),
        ([*LLAMA2_7B, "--trace", "azure-code"], "a length of 7841 is above max_len=4096"),
        ([*LLAMA2_7B, "--memory=16MiB"], "memory_bytes=16777216 is less than two blocks"),
        ([*LLAMA2_7B, "--memory=0"], "memory_bytes=0 must be"),
        *(
            ([*LLAMA2_7B, f"--memory={text}"], f"--memory {text!r} is not a size")
            for text in ("", "GiB", "16 G", "16GiBs", "1e9", "-1GiB", "1,5GiB", "inf")
        ),
    ],
)
def test_bad_input_names_what_is_wrong(capsys, args, message):
    with pytest.raises(JaxkvError) as error:
        run(capsys, "--memory=1GiB", *args, "--json")
    assert message in str(error.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no lengths"),
        ("\n \n", "holds no lengths"),
        ("5\nmany\n", "line 2: length must be a positive integer, got 'many'"),
        ("5\n7.5\n", "line 2: length must be a positive integer, got '7.5'"),
        ("0\n", "line 1: length must be a positive integer, got '0'"),
        ("5\n-3\n", "line 2: length must be a positive integer, got '-3'"),
        ("9" * 5000, "line 1: length must be a positive integer, got '9999"),
        (b"\xff\xfe\x00", "line 1: "),
    ],
)
def test_bad_lengths_file(capsys, tmp_path, text, message):
    path = tmp_path / "lengths.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JaxkvError) as error:
        run(capsys, *LLAMA2_7B, "--memory", "1GiB", "--lengths-file", path)
    assert message in str(error.value)
    assert len(str(error.value)) < 250


def test_missing_lengths_file(capsys):
    with pytest.raises(OSError, match="/nowhere"):
        run(capsys, *LLAMA2_7B, "--memory", "1GiB", "--lengths-file", "/nowhere/lengths.txt")


def test_the_error_of_an_unsupported_model_says_how_to_size_it(capsys, hf_folder):
    config = CONFIG.to_hf() | {"model_type": "mamba"}
    (hf_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(JaxkvError, match=r"model_type='mamba' is not supported.*give --layers"):
        run(capsys, hf_folder, "--memory", "1GiB")


def test_a_damaged_gguf_file(capsys, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(JaxkvError, match="not a readable GGUF"):
        run(capsys, tmp_path / "m.gguf", "--memory", "1GiB")
