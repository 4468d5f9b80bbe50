"""Compiled steps: plan, forward, sample. One program per bucket, and no compilation after warm-up.

A step takes the cache and the sampler's rows and returns both, so that the next step can be
dispatched before the tokens of this one reach the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxkv.cache.batch import Batch
from jaxkv.cache.plan import DevicePlan, apply_device_plan
from jaxkv.cache.state import PagedState
from jaxkv.engine.model_call import call_model
from jaxkv.errors import ConfigError
from jaxkv.pallas_kernels.target import compiler_options
from jaxkv.sampling.params import LogitsProcessor
from jaxkv.sampling.sampler import History, RowParams, Sampled, SamplerState, sample

# Traces of each step shape (tokens, sequences, steps): one per model, and one for each combination
# of log-probabilities and logits processors.
trace_counts: Counter[tuple[int, int, int]] = Counter()


class SampledPositions(NamedTuple):
    """Positions of a batch after which a token is sampled: L of them.

    Attributes:
      rows: i32[L]; sampler rows; `max_seqs` or above for padding.
      keep: bool[L]; whether the sampled token becomes the row's next token.
      targets: i32[L]; token whose log-probability is reported instead of the sampled one's, or -1.
    """

    rows: np.ndarray
    keep: np.ndarray
    targets: np.ndarray


class Steps(NamedTuple):
    """The two steps of a model, bound to its weights. Both donate state and history.

    A step is compiled once for each form of its arguments, and JAX counts the devices that they are
    committed to as part of it. State and history have to start with `placement`, or the second step
    compiles again.

    Attributes:
      step: (state, history, params, plan, tokens i32[T], batch, entries, num_logprobs=None,
        processors=()) -> (Sampled of L, state, history). A token of -1 is read from the history.
      decode: (state, history, params, plan, tokens i32[S], batch, num_steps=k, ...) -> (Sampled of
        k * S, step by step, state, history): k decode steps on the device alone. A row ends at
        a stop token or at its end; its later tokens are -1. Processor states, [S, ...], are those
        after the last step.
      placement: sharding of all that lives beside the weights: their device, or whole on each
        device of their mesh.
    """

    step: Callable[..., tuple[Sampled, PagedState, History]]
    decode: Callable[..., tuple[Sampled, PagedState, History]]
    placement: Sharding


def make_steps(model: Any) -> Steps:
    """Makes the steps of a model.

    The weights are flattened here, once. With graph and parameters as arguments of the step a call
    took 9 to 11 ms to dispatch for SmolLM2, 4 of them to hash the graph.
    """
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    leaves, placement = _placed(leaves)
    # On several devices the compiler would choose how the state comes out.
    out = placement if placement.num_devices > 1 else None
    options = tuple(compiler_options().items())
    compiled = _compiled(graph, tree, model.config.vocab_size, options, out)
    step, decode = (functools.partial(f, leaves) for f in compiled)
    return Steps(step, decode, placement)


def _placed(weights: list[Any]) -> tuple[list[jax.Array], Sharding]:
    """Weights committed to their devices, and the sharding of arrays that live beside them.

    Weights in NumPy are sent to the device here, not at every step. A mesh with explicit axes, as
    `jax.make_mesh` makes it, becomes one where the compiler divides the work: neither the models
    nor the operations on the pool name the sharding of each result.

    Raises:
      ConfigError: weights on different devices, or over several without a mesh.
    """
    leaves: list[jax.Array] = jax.device_put(weights)
    committed = [leaf.sharding for leaf in leaves if leaf.committed]
    shardings = committed or [leaf.sharding for leaf in leaves] or [jnp.zeros(()).sharding]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    if meshes:
        placement = _in_mesh(meshes[0], PartitionSpec())
    elif shardings[0].num_devices == 1:
        (device,) = shardings[0].device_set
        placement = SingleDeviceSharding(device)
    else:
        raise ConfigError(
            f"the weights have a {type(shardings[0]).__name__} over {shardings[0].num_devices} "
            "devices; place them on one device, or by a NamedSharding"
        )
    if any(sharding.device_set != placement.device_set for sharding in committed):
        sets = sorted({str(sorted(d.id for d in sharding.device_set)) for sharding in committed})
        raise ConfigError(
            f"the weights are committed to different devices, {' and '.join(sets)}; place all of "
            "them on one device, or all on one mesh"
        )
    for i, leaf in enumerate(leaves):
        if not leaf.committed:
            leaves[i] = jax.device_put(leaf, placement)
        elif isinstance(leaf.sharding, NamedSharding):
            leaves[i] = jax.device_put(leaf, _in_mesh(leaf.sharding.mesh, leaf.sharding.spec))
    return leaves, placement


def _in_mesh(mesh: Any, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), spec)


@functools.lru_cache(maxsize=8)
def _compiled(
    graph: Any, tree: Any, vocab_size: int, options: tuple[tuple[str, Any], ...],
    placement: Sharding | None,
) -> tuple[Any, Any]:  # fmt: skip
    """Jitted functions of a model structure: models of equal structure share compiled programs.

    Args:
      placement: sharding of the state and history that come out; None: that of the arguments.
    """

    def forward(leaves, state, tokens, batch):
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return call_model(model, tokens, state, batch, vocab_size=vocab_size)

    @functools.partial(
        jax.jit,
        donate_argnames=("state", "history"),
        out_shardings=(None, placement, placement),
        static_argnames=("num_logprobs", "processors"),
        compiler_options=dict(options),
    )
    def step(leaves, state: PagedState, history: History, params: RowParams, plan: DevicePlan,
             tokens, batch: Batch, entries: SampledPositions, *, num_logprobs: int | None = None,
             processors: tuple[LogitsProcessor, ...] = ()):  # fmt: skip
        trace_counts[len(tokens), len(batch.query_start) - 1, 1] += 1
        state = apply_device_plan(state, plan)
        tokens, history = _inputs(history, tokens, batch)
        logits, state = forward(leaves, state, tokens, batch)
        lengths = jnp.asarray(batch.positions)[batch.logit_tokens] + 1
        # A sample that is forked off in this step has what its parent's row has written.
        kept = jnp.where(entries.keep, jnp.asarray(entries.rows), len(state.seq_lens))
        state = dataclasses.replace(
            state, seq_lens=state.seq_lens.at[kept].max(lengths, mode="drop")
        )
        sampled, sampler = sample(
            logits, SamplerState(history, params), jnp.asarray(entries.rows), lengths,
            keep=jnp.asarray(entries.keep), targets=jnp.asarray(entries.targets),
            num_logprobs=num_logprobs, processors=processors,
        )  # fmt: skip
        sampled = _with_processor_states(sampled, sampler.history, entries.rows)
        return sampled, state, sampler.history

    @functools.partial(
        jax.jit,
        donate_argnames=("state", "history"),
        out_shardings=(None, placement, placement),
        static_argnames=("num_steps", "num_logprobs", "processors"),
        compiler_options=dict(options),
    )
    def decode(leaves, state: PagedState, history: History, params: RowParams, plan: DevicePlan,
               tokens, batch: Batch, *, num_steps: int, num_logprobs: int | None = None,
               processors: tuple[LogitsProcessor, ...] = ()):  # fmt: skip
        num_seqs = len(tokens)
        trace_counts[num_seqs, num_seqs, num_steps] += 1
        state = apply_device_plan(state, plan)
        tokens, history = _inputs(history, tokens, batch)
        max_seqs = len(history.token_ids)

        def body(carry):
            i, rows, positions, tokens, state, history, out = carry
            now = Batch(rows, positions, batch.query_start, max_query_len=1)
            logits, state = forward(leaves, state, tokens, now)
            live = rows < max_seqs
            sampled, sampler = sample(
                logits, SamplerState(history, params), rows, positions + 1, keep=live,
                num_logprobs=num_logprobs, processors=processors,
            )  # fmt: skip
            new = sampled.tokens
            found = sampled._replace(tokens=jnp.where(live, new, -1))
            out = jax.tree.map(lambda x, y: x.at[i].set(y), out, found)
            stops = jnp.asarray(params.stop_ids)[jnp.minimum(rows, max_seqs - 1)]
            ends = jnp.asarray(params.end)[jnp.minimum(rows, max_seqs - 1)]
            over = (stops == new[:, None]).any(-1) | (positions + 2 >= ends)
            rows = jnp.where(over, max_seqs, rows)
            return i + 1, rows, positions + 1, new, state, sampler.history, out

        def go_on(carry):
            i, rows, *_ = carry
            return (i < num_steps) & (rows < max_seqs).any()

        shape = (num_steps, num_seqs)
        out = Sampled(jnp.full(shape, -1, jnp.int32))
        if num_logprobs is not None:
            top = (*shape, num_logprobs)
            out = Sampled(out.tokens, jnp.zeros(shape, jnp.float32), jnp.zeros(top, jnp.int32),
                          jnp.zeros(top, jnp.float32))  # fmt: skip
        start = (
            jnp.int32(0), jnp.asarray(batch.rows), jnp.asarray(batch.positions), tokens, state,
            history, out,
        )  # fmt: skip
        *_, state, history, out = lax.while_loop(go_on, body, start)
        flat = num_steps * num_seqs
        out = jax.tree.map(lambda x: x.reshape(flat, *x.shape[2:]), out)
        return _with_processor_states(out, history, batch.rows), state, history

    return step, decode


def _with_processor_states(sampled: Sampled, history: History, rows: Any) -> Sampled:
    """Adds the states of these rows: with them the host can resume a request on another row."""
    rows = jnp.minimum(jnp.asarray(rows), len(history.token_ids) - 1)
    states = jax.tree.map(lambda x: x[rows], history.processor_states)
    return sampled._replace(processor_states=states)


def _inputs(history: History, tokens, batch: Batch) -> tuple[jax.Array, History]:
    """Input tokens: the host's where given (written to the history), the rows' own elsewhere."""
    rows, positions = jnp.asarray(batch.rows), jnp.asarray(batch.positions)
    tokens, held = jnp.asarray(tokens), jnp.asarray(history.token_ids)
    own = held.at[rows, positions].get(mode="fill", fill_value=0)
    given = jnp.where(tokens >= 0, rows, len(held))
    held = held.at[given, positions].set(tokens, mode="drop")
    return jnp.where(tokens >= 0, tokens, own), dataclasses.replace(history, token_ids=held)
