"""The trainer: resumes bit for bit, learns, and writes a checkpoint that loads."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import jaxkv.models.train as train_module
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.models import CheckpointError, load
from jaxkv.models.train import TrainConfig, main, train

CONFIG = TrainConfig(steps=30, batch=4, length=32, checkpoint_every=10)


def leaves(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An uninterrupted run: its folder and result."""
    out = tmp_path_factory.mktemp("run") / "model"
    return out, train(CONFIG, out)


def test_loss_falls(run):
    _, result = run
    assert len(result.losses) == CONFIG.steps
    assert result.losses[-1] < 0.7 * result.losses[0]
    assert result.held_out[-1][0] == CONFIG.steps
    assert result.held_out[-1][1] < 0.7 * result.losses[0]


def test_interrupted_run_resumes_bit_for_bit(run, tmp_path, monkeypatch):
    _, straight = run
    windows, calls = train_module._windows, iter(range(26))

    def interrupt(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return windows(*args)

    monkeypatch.setattr(train_module, "_windows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["10", "20"]
    resumed = train(CONFIG, tmp_path, resume=True)
    assert resumed.losses == straight.losses
    assert resumed.held_out == straight.held_out
    for a, b in zip(leaves(resumed.model), leaves(straight.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_resuming_a_finished_run_changes_nothing(run):
    out, result = run
    again = train(dataclasses.replace(CONFIG, checkpoint_every=7), out, resume=True)
    assert again.losses == result.losses
    for a, b in zip(leaves(again.model), leaves(result.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_finished_checkpoint_loads(run):
    out, result = run
    checkpoint = load(out)
    tokens = np.array([checkpoint.tokenizer.encode("The import statement")], np.int32)
    logits = nnx.jit(lambda model: model.dense(tokens))
    np.testing.assert_array_equal(logits(checkpoint.model), logits(result.model))


def test_loss_plot_is_a_png(run):
    out, _ = run
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_refuses_to_overwrite(run):
    out, _ = run
    with pytest.raises(ConfigError, match="already holds a model or a run"):
        train(CONFIG, out)


@pytest.mark.parametrize(
    ("field", "value"), [("steps", 31), ("batch", 5), ("length", 33), ("lr", 1e-4), ("seed", 1)]
)
def test_resume_with_other_settings(run, field, value):
    out, _ = run
    with pytest.raises(ConfigError, match=rf"^{field}={value}, but .* {field}="):
        train(dataclasses.replace(CONFIG, **{field: value}), out, resume=True)


def test_resume_with_another_text(run, tmp_path):
    out, _ = run
    text = tmp_path / "text"
    text.write_bytes(bytes(1000))
    with pytest.raises(ConfigError, match=r"^text="):
        train(dataclasses.replace(CONFIG, text=text), out, resume=True)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match="nothing to resume"):
        train(CONFIG, tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "train").mkdir()
    with pytest.raises(CheckpointError, match="nothing to resume"):
        train(CONFIG, tmp_path, resume=True)


@pytest.mark.parametrize("item", ["history", "arrays"])
def test_damaged_checkpoint(run, tmp_path, item):
    out, _ = run
    shutil.copytree(out / "train", tmp_path / "train")
    shutil.rmtree(tmp_path / "train" / "30" / item)
    with pytest.raises(CheckpointError, match="step 30: "):
        train(CONFIG, tmp_path, resume=True)


def test_too_short_text(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(329))
    with pytest.raises(ConfigError, match="329 bytes; length=32 needs 330"):
        train(dataclasses.replace(CONFIG, text=text), tmp_path / "out")


def test_diverged_run_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "_step", lambda g, c, arrays, t: (arrays, float("nan")))
    with pytest.raises(JaxkvError, match=r"loss=nan at step 1; lower lr=0.003"):
        train(CONFIG, tmp_path)


@pytest.mark.parametrize(
    "change",
    [dict(steps=0), dict(batch=0), dict(length=0), dict(length=9999), dict(checkpoint_every=0),
     dict(lr=0.0), dict(lr=float("nan")), dict(seed=-1)],
)  # fmt: skip
def test_bad_settings_are_named(change):
    with pytest.raises(ConfigError, match=f"^{next(iter(change))}="):
        TrainConfig(**change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "{tmp}/none"], "No such file"),
        (["--text", "{tmp}"], "directory"),
        (["--steps", "0"], "steps=0"),
        (["--steps", "many"], "--steps"),
        (["--stride", "3"], "--stride"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, arguments, message):
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    assert main(["--out", str(tmp_path / "out"), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_command_line(run, tmp_path, capsys):
    _, result = run
    options = ["--steps", "30", "--batch", "4", "--length", "32", "--checkpoint-every", "10"]
    assert main(["--out", str(tmp_path), *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{tmp_path}: loss {result.losses[-1]:.3f}, held out ")
    assert "tokens/s" in captured.err
    assert load(tmp_path).model.config == train_module.tiny_config()


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_short_runs_have_a_learning_rate_schedule(steps):
    train_module._optimizer(TrainConfig(steps=steps)).init({})
