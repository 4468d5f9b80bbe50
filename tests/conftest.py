"""Shared fixtures. Everything runs on the CPU, with warnings as errors and strict promotion."""

import functools
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# Each device brings threads to the host's pool. The threads of an interpreted GPU kernel wait for
# each other in callbacks, and with fewer the compiler found none left and everything stood still.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.models import Checkpoint, Llama, LlamaConfig, default_model, load
from jaxkv.pallas_kernels import target

# Helpers that several test files share.
for folder in ("data", "jaxkv/engine", "jaxkv/manager", "pallas_kernels"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # scripts that are tested

collect_ignore_glob = ["data/make_*.py"]  # run in environments of their own

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tests spend most of their time in the compiler: its results are kept, for other workers and runs.
cache = Path(__file__).parent.parent / ".pytest_cache" / "xla"
jax.config.update("jax_compilation_cache_dir", str(cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
# Small models run as fast without LLVM's optimisations, and compile in two thirds of the time.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(params=["cpu", "gpu"])
def traced_for(request):
    """Operations use another view of the pool on a GPU; the results must be equal."""
    with target.compile_for(request.param):
        yield


def small_config(**changes) -> LlamaConfig:
    base: dict[str, Any] = dict(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaConfig(**(base | changes))


@pytest.fixture(scope="session")
def small_model() -> Llama:
    """Random weights, scaled up so that attention is peaked and a wrong page changes the argmax."""
    model = Llama(small_config(), rngs=nnx.Rngs(7))
    graph, params = nnx.split(model)
    params = jax.tree.map(lambda x: x * 2 if x.ndim == 2 else x, params)
    return nnx.merge(graph, params)


@pytest.fixture
def optimised():
    """Compiles with optimisations, for tests that compute more than they compile."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def loaded() -> Checkpoint:
    return load(default_model(), dtype=jnp.float32)


@pytest.fixture
def smollm2(optimised) -> Checkpoint:
    return loaded()
