"""Trains a byte-level Llama of just under a million parameters on one text file.

Every step is a function of the settings, the step's number, parameters and optimizer state, so an
interrupted and resumed run ends with the same bits as an uninterrupted one.
"""

import argparse
import dataclasses
import functools
import hashlib
import math
import pydoc_data.topics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.models.config import LlamaConfig
from jaxkv.models.errors import CheckpointError
from jaxkv.models.llama import Llama
from jaxkv.models.orbax_checkpoint import restore_error, save_orbax
from jaxkv.models.tokenizer import Tokenizer


def tiny_config() -> LlamaConfig:
    """A Llama of 0.8 million parameters whose tokens are bytes."""
    return LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4,
        num_kv_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings that determine a run.

    Attributes:
      text: file to train on, read as bytes; None for the help topics that come with Python.
      steps: optimizer steps of the whole run; the learning rate's schedule spans them.
      batch: windows of text per step.
      length: bytes per window.
      lr: peak learning rate, after a warm-up over a tenth of the steps.
      seed: seed of the initial weights and of the order of the text.
      checkpoint_every: steps between checkpoints; the last step writes one too.
    """

    text: Path | None = None
    steps: int = 600
    batch: int = 16
    length: int = 128
    lr: float = 3e-3
    seed: int = 0
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name, least in dict(steps=1, batch=1, length=1, seed=0, checkpoint_every=1).items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.length > (most := tiny_config().max_position_embeddings):
            raise ConfigError(f"length={self.length} exceeds the model's context of {most}")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr={self.lr} must be positive and finite")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A trained model and its losses.

    Attributes:
      model: the trained model.
      losses: training loss of every step, in nats per byte.
      held_out: (steps done, loss on the text's last tenth), about twenty pairs.
    """

    model: Llama
    losses: list[float]
    held_out: list[tuple[int, float]]


@functools.partial(jax.jit, static_argnums=0)
def loss_fn(graph: nnx.GraphDef[Llama], params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats, of the next tokens in i32[batch, length + 1] tokens."""
    logits = nnx.merge(graph, params).dense(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(
    config: TrainConfig, out: Path, *, resume: bool = False, progress: bool = False
) -> TrainResult:
    """Trains a model and writes it to `out`, ready for `jaxkv.models.load`.

    Args:
      config: settings of the run.
      out: folder for the model, `loss.png`, and the run's checkpoints in `train/`.
      resume: continue from the last checkpoint; all settings but `checkpoint_every` must be the
        same.
      progress: show a progress bar on standard error.

    Raises:
      ConfigError: the text is missing or too short, `out` holds a run already, or the settings
        differ from those of the run to resume.
      CheckpointError: there is no run to resume, or its checkpoint is damaged.
      JaxkvError: the loss is no longer finite.
    """
    text = _read_text(config)
    folder = out.absolute() / "train"
    if not resume and ((out / "config.json").exists() or any(folder.glob("*"))):
        raise ConfigError(f"{out} already holds a model or a run; resume it or give another folder")
    if resume and not folder.is_dir():
        raise CheckpointError(f"nothing to resume: {folder} does not exist")

    seen, rest = np.split(text, [len(text) - len(text) // 10])
    spread = np.linspace(0, len(rest) - config.length - 1, 16, dtype=int)
    unseen = _windows(rest, spread, config.length)
    graph, state = nnx.split(Llama(tiny_config(), rngs=nnx.Rngs(config.seed)))
    params = nnx.to_pure_dict(state)
    arrays = {"params": params, "optimizer": _optimizer(config).init(params)}
    # All settings that the result depends on; a digest of the text, as its file may have moved.
    settings = dataclasses.asdict(config) | {"text": hashlib.sha256(text).hexdigest()}
    del settings["checkpoint_every"]
    history: dict[str, Any] = {"settings": settings, "losses": [], "held_out": []}
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(2),
        cleanup_tmp_directories=True,  # left by a run that was killed during a save
        enable_async_checkpointing=False,  # the next step donates arrays that a save still reads
    )
    bar = Progress(console=Console(stderr=True), disable=not progress)
    with ocp.CheckpointManager(folder, options=options) as manager, bar:
        if resume:
            history, arrays = _restore(manager, settings, arrays)
        task = bar.add_task("compiling", total=config.steps, completed=len(history["losses"]))
        for done in range(len(history["losses"]) + 1, config.steps + 1):
            # The text's order depends on seed and step alone: there is no reader state to restore.
            rng = np.random.default_rng([config.seed, done])
            starts = rng.integers(0, len(seen) - config.length, config.batch)
            arrays, value = _step(graph, config, arrays, _windows(seen, starts, config.length))
            history["losses"].append(value := _finite(value, done, config))
            if done % max(1, config.steps // 20) == 0 or done == config.steps:
                held_out = loss_fn(graph, arrays["params"], unseen)
                history["held_out"].append((done, _finite(held_out, done, config)))
            if done % config.checkpoint_every == 0 or done == config.steps:
                log, tree = ocp.args.JsonSave(history), ocp.args.StandardSave(arrays)
                manager.save(done, args=ocp.args.Composite(history=log, arrays=tree))
            speed = (bar.tasks[0].speed or 0) * config.batch * config.length
            bar.update(task, completed=done, description=f"loss {value:.3f}, {speed:,.0f} tokens/s")

    pairs = [(done, value) for done, value in history["held_out"]]  # JSON makes lists of them
    result = TrainResult(nnx.merge(graph, arrays["params"]), history["losses"], pairs)
    save_orbax(out, result.model, Tokenizer.bytes())
    _plot(result, out / "loss.png")
    return result


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _step(graph, config: TrainConfig, arrays, tokens):
    """One optimizer step. DONATES arrays."""
    params, state = arrays["params"], arrays["optimizer"]
    loss, grads = jax.value_and_grad(loss_fn, argnums=1)(graph, params, tokens)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        updates, state = _optimizer(config).update(grads, state, params)
    return {"params": optax.apply_updates(params, updates), "optimizer": state}, loss


def _finite(loss: jax.Array, step: int, config: TrainConfig) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise JaxkvError(f"loss={value} at step {step}; lower lr={config.lr}")
    return value


def _read_text(config: TrainConfig) -> np.ndarray:
    """u8[bytes] of the text, equal to the ids of `Tokenizer.bytes`."""
    try:
        topics = "\n".join(pydoc_data.topics.topics.values())
        data = config.text.read_bytes() if config.text else topics.encode()
    except OSError as error:
        raise ConfigError(f"text={config.text}: {error.strerror}") from None
    if len(data) < (needed := 10 * (config.length + 1)):  # the tenth held out must hold a window
        raise ConfigError(f"text has {len(data)} bytes; length={config.length} needs {needed}")
    return np.frombuffer(data, np.uint8)


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> jax.Array:
    """i32[len(starts), length + 1]: inputs, and targets shifted by one."""
    return jnp.asarray(text[starts[:, None] + np.arange(length + 1)], jnp.int32)


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    warmup = max(1, config.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        config.lr / warmup, config.lr, warmup, config.steps + 1, config.lr / 10
    )  # steps + 1: a run of one step is all warm-up, and optax requires some decay
    matrices = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _restore(manager: ocp.CheckpointManager, settings: dict[str, Any], like: Any):
    """The history and the arrays, shaped like `like`, of the latest checkpoint."""
    latest = manager.latest_step()
    if latest is None:
        raise CheckpointError(f"nothing to resume: {manager.directory} has no complete checkpoint")
    for item in ("history", "arrays"):  # a failed restore leaks threads
        if not (Path(manager.directory) / str(latest) / item).is_dir():
            raise CheckpointError(f"{manager.directory}, step {latest}: {item} is missing")
    arrays = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
    items = ocp.args.Composite(history=ocp.args.JsonRestore(), arrays=arrays)
    try:
        saved = manager.restore(latest, args=items)
    except Exception as error:
        raise restore_error(Path(manager.directory) / str(latest), error) from None
    for name, ours in settings.items():
        if (theirs := saved["history"]["settings"].get(name)) != ours:
            raise ConfigError(f"{name}={ours}, but the run to resume has {name}={theirs}")
    return saved["history"], saved["arrays"]


def _plot(result: TrainResult, path: Path) -> None:
    figure = Figure(layout="constrained")  # not pyplot: no global state, and Agg draws it anywhere
    axes = figure.subplots()
    axes.plot(range(1, len(result.losses) + 1), result.losses, label="train", alpha=0.6)
    axes.plot(*zip(*result.held_out, strict=True), label="held out", marker=".")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


_HELP = {
    "steps": "optimizer steps of the whole run",
    "batch": "windows of text per step",
    "length": "bytes per window",
    "lr": "peak learning rate",
    "seed": "seed of the initial weights and of the order of the text",
    "checkpoint_every": "steps between checkpoints",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)  # argparse would also print its usage


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = _Parser(prog="python -m jaxkv.models.train", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("tiny-llama"), metavar="FOLDER",
        help="folder for the model and its checkpoints (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--text", type=Path, metavar="FILE",
        help="text to train on, read as bytes (default: Python's help topics)",
    )  # fmt: skip
    for field in dataclasses.fields(TrainConfig)[1:]:
        flag, kind = "--" + field.name.replace("_", "-"), type(field.default)
        parser.add_argument(
            flag, type=kind, default=field.default, metavar="X" if kind is float else "N",
            help=f"{_HELP[field.name]} (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    try:
        options = vars(parser.parse_args(argv))
        out, resume = options.pop("out"), options.pop("resume")
        result = train(TrainConfig(**options), out, resume=resume, progress=True)
    except (JaxkvError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    print(f"{out}: loss {result.losses[-1]:.3f}, held out {result.held_out[-1][1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
