"""Nothing compiles after a warm-up, wherever the weights live and however they came there."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import run
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv import CacheConfig, ConfigError, Engine, LogitsProcessor, SamplingParams, SchedulerConfig
from jaxkv.models import Llama, LlamaConfig
from jaxkv.models.orbax_checkpoint import load_orbax, save_orbax

COMPILED = "/jax/core/compile/backend_compile_duration"
CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, max_position_embeddings=64,
)  # fmt: skip


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Seconds of each compilation inside the block."""
    seconds: list[float] = []

    def listen(name: str, duration: float, **_: Any) -> None:
        if name == COMPILED:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)  # pyright: ignore[reportArgumentType]
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def tiny() -> Llama:
    return Llama(CONFIG, rngs=nnx.Rngs(3))


def placed(model, place):
    """A copy of a model whose weights were placed by a function of one array."""
    graph, params = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(place, params))


def engine_with(model):
    """Few programs: compiling takes all of these tests' time."""
    cache = CacheConfig.for_model(CONFIG, max_len=16, block_size=4, max_seqs=2, num_blocks=8)
    scheduler = SchedulerConfig(max_tokens_per_step=16, prefill_buckets=(16,), decode_buckets=(2,))
    return Engine(model, cache, scheduler, eos_token_ids=(), seed=3)


def drive(engine):
    """Samples, preemption, an abort, a fork, a rollback, all kinds of limits; all last tokens."""
    for i in range(8):
        params = SamplingParams(max_tokens=1 + i, seed=i, n=1 + i % 2, temperature=i % 3,
                                top_k=i % 2, presence_penalty=i % 2)  # fmt: skip
        last = engine.submit(list(range(1 + i % 5)), params)
        if i == 5:
            engine.abort(last)
        engine.step()
    outputs = run(engine)
    first = engine.submit([5, 6, 7], SamplingParams(max_tokens=10), request_id="first")
    for _ in range(4):
        engine.step()
    engine.drain()
    engine.fork(first, new_id="fork")
    engine.rollback(first, 2)
    outputs |= run(engine)
    return {key: output.token_ids for key, output in outputs.items()}


def on_mesh(explicit: bool, spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    """Two-dimensional weights by this spec, the others whole."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), devices=devices)
    mesh = mesh if explicit else Mesh(np.array(devices), ("x",))
    whole = PartitionSpec()
    return lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else whole))


def in_part(place: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Every other weight, as after an update of some of them."""
    turn = itertools.count()
    return lambda x: place(x) if next(turn) % 2 else x


def on_device(index: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.device_put(x, jax.devices()[index])


def made_on(index: int) -> Callable[[jax.Array], jax.Array]:
    """Not committed, and not on JAX's default device."""

    def place(x):
        with jax.default_device(jax.devices()[index]):
            return jnp.array(np.asarray(x))

    return place


PLACES = {
    "as made": lambda x: x,
    "in NumPy": np.asarray,
    "on the first device": on_device(0),
    "partly on the first device": in_part(on_device(0)),
    "whole on each device of a mesh": on_mesh(True, PartitionSpec()),
}
MORE_PLACES = {
    "on another device": on_device(1),
    "partly on another device": in_part(on_device(1)),
    "made on another device": made_on(1),
    "whole on a mesh, partly": in_part(on_mesh(False, PartitionSpec())),
    "divided over a mesh": on_mesh(False, PartitionSpec(None, "x")),
    "divided over an explicit mesh": on_mesh(True, PartitionSpec("x", None)),
}
slow = [pytest.param(name, marks=pytest.mark.slow) for name in MORE_PLACES]


@pytest.mark.parametrize("place", [*PLACES, *slow])
def test_nothing_compiles_after_a_warm_up_however_the_weights_came(tiny, place):
    engine = engine_with(placed(tiny, (PLACES | MORE_PLACES)[place]))
    engine.warm_up(progress=False)
    before = engine.stats().compile_seconds
    with compilations() as compiled:
        tokens = drive(engine)
    assert not compiled
    assert engine.stats().compile_seconds == before
    assert tokens == drive(engine_with(tiny))


def test_nothing_compiles_after_a_warm_up_of_restored_weights(tiny, tmp_path):
    save_orbax(tmp_path / "saved", tiny)
    engine = engine_with(load_orbax(tmp_path / "saved", dtype=jnp.float32))
    engine.warm_up(progress=False)
    with compilations() as compiled:
        drive(engine)
    assert not compiled


def test_a_lost_cache_is_made_again_in_the_same_form(tiny):
    engine = engine_with(placed(tiny, on_device(0)))
    engine.warm_up(progress=False)
    engine.submit([1, 2], SamplingParams(max_tokens=9))
    engine.step()
    with compilations() as compiled:
        engine._loop.whole.restore()
        run(engine)
        drive(engine)
    assert not compiled


def test_a_processor_compiles_once(tiny):
    processor = LogitsProcessor(
        lambda: np.int32(0), lambda logits, state, tokens, length: (logits, state + 1)
    )
    engine = engine_with(tiny)
    params = SamplingParams(max_tokens=4, logits_processor=processor)
    engine.generate([[1, 2]], params, progress=False)
    with compilations() as compiled:
        engine.generate([[1, 2]], params, progress=False)
    assert not compiled


def test_weights_on_different_devices_are_refused_by_name(tiny):
    apart = placed(placed(tiny, on_device(0)), in_part(on_device(1)))
    with pytest.raises(ConfigError, match=r"different devices, \[0\] and \[1\]; place all of them"):
        engine_with(apart)


def test_what_compiles_after_all_is_counted(tiny):
    """Log-probabilities and a draft, of which the warm-up compiled nothing."""
    engine = engine_with(tiny)
    engine.warm_up(progress=False)
    counted = [engine.stats().compile_seconds]
    first = engine.submit([1, 2, 3], SamplingParams(max_tokens=9))
    engine.step()
    engine.drain()
    assert engine.stats().compile_seconds == counted[0]

    def score():
        engine.submit([1, 2], SamplingParams(max_tokens=1, logprobs=1))
        engine.step()

    for call in (lambda: engine.verify(first, [1, 2]), score):
        with compilations() as compiled:
            call()
        assert compiled
        counted.append(engine.stats().compile_seconds)
    assert all(later > earlier for earlier, later in itertools.pairwise(counted))
