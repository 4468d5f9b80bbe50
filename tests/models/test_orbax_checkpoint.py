"""Orbax checkpoints: saved whole or not at all, damaged ones refused with one error."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.models import CheckpointError, Llama, LlamaConfig, Tokenizer, load, save_orbax
from jaxkv.models.orbax_checkpoint import load_orbax

CONFIG = LlamaConfig(vocab_size=256, hidden_size=16, intermediate_size=32, num_layers=1,
                     num_heads=2, num_kv_heads=1, head_dim=8)  # fmt: skip


def model(value):
    """All weights are `value`."""
    graph, state = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, nnx.map_state(lambda path, x: jnp.full_like(x, value), state))


def values(folder):
    state = nnx.to_pure_dict(nnx.state(load_orbax(folder, dtype=jnp.float32)))
    return {float(x) for leaf in jax.tree.leaves(state) for x in np.unique(leaf)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax") / "model"
    save_orbax(folder, model(1), Tokenizer.bytes())
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_a_checkpoint_is_replaced_and_other_files_stay(copy):
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "notes.txt").write_text("mine")
    (copy / "train").mkdir()
    save_orbax(copy, model(2), Tokenizer.bytes())
    assert values(copy) == {2}
    assert load(copy).tokenizer.chat_template is None  # the new tokenizer has none
    assert sorted(path.name for path in copy.iterdir()) == [
        "config.json", "notes.txt", "params", "params.json", "tokenizer.json",
        "tokenizer_config.json", "train"]  # fmt: skip
    save_orbax(copy, model(3))
    assert load(copy).tokenizer.encode("a") == [97]


@pytest.mark.parametrize(
    "call",
    ["orbax.checkpoint.StandardCheckpointer.save", "jaxkv.models.orbax_checkpoint._file_sizes"],
)
def test_an_interrupted_save_leaves_the_old_checkpoint(copy, monkeypatch, call):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_orbax(copy, model(2), Tokenizer.bytes())
    assert values(copy) == {1}
    save_orbax(copy, model(2), Tokenizer.bytes())
    assert values(copy) == {2}


@pytest.mark.parametrize("entry", ["params", "config.json"])
def test_what_is_not_a_checkpoint_of_ours_is_not_replaced(tmp_path, entry):
    if entry == "params":
        (tmp_path / "params").mkdir()
        (tmp_path / "params" / "mine.txt").write_text("mine")
    else:
        (tmp_path / "config.json").write_text('{"mine": 1}')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="choose another folder"):
        save_orbax(tmp_path, model(1))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file: cannot save the model"):
        save_orbax(tmp_path / "file", model(1))


def test_a_file_that_is_missing_or_cut_is_named(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    for path in sorted(x for x in (copy / "params").rglob("*") if x.is_file()):
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match=rf"params/.*{path.name} is missing"):
            load_orbax(copy, dtype=jnp.float32)
        path.write_bytes(data[:-1])
        with pytest.raises(CheckpointError, match=rf"{path.name} has {len(data) - 1} of"):
            load_orbax(copy, dtype=jnp.float32)
        path.write_bytes(data)
    assert values(copy) == {1}


def test_damaged_metadata_is_refused(copy):
    metadata = copy / "params" / "_METADATA"
    metadata.write_bytes(b"x" * metadata.stat().st_size)
    with pytest.raises(CheckpointError, match="not an Orbax checkpoint, or a damaged one"):
        load_orbax(copy, dtype=jnp.float32)


def test_an_error_of_orbax_is_one_line(copy, monkeypatch):
    """The checkpoint comes from Orbax itself, without the sizes of its files."""

    def fail(*args, **kwargs):
        try:
            raise ValueError("NOT_FOUND: d/123" + "\nmore" * 60)
        except ValueError as error:
            raise Exception("Encountered an error" + "\nmore" * 60) from error

    (copy / "params.json").unlink()
    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.restore", fail)
    with pytest.raises(CheckpointError) as caught:
        load_orbax(copy, dtype=jnp.float32)
    assert str(caught.value).endswith("damaged: NOT_FOUND: d/123")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_weights_that_do_not_fit_the_memory_are_refused(saved, monkeypatch):
    monkeypatch.setattr("jaxkv.models.memory.available_bytes", lambda: 1000)
    with pytest.raises(CheckpointError, match="of memory are available"):
        load_orbax(saved, dtype=jnp.float32)


def test_the_config_is_json_that_others_read(saved):
    text = (saved / "config.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
