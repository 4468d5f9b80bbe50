"""Sampling on the device: from logits to the next token.

A row of `SamplerState`, with the number of the sequence's row of the block table, holds everything
that a draw depends on: tokens, parameters, seed. A step reads its input tokens there and writes the
new ones back, so that the next step can start before they reach the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.errors import JaxkvError
from jaxkv.sampling.params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKENS,
    LogitsProcessor,
    SamplingParams,
)

NO_TOKEN = -1  # drawn where the logits allow none: all are -inf, or one is NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """State that steps change, one row for each sequence. A PyTree; steps donate it.

    Attributes:
      token_ids: i32[R, max_len]; tokens of the sequence, prompt included; arbitrary past its end.
      processor_states: state of each logits processor, with a leading axis R.
    """

    token_ids: Any
    processor_states: tuple[Any, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParams:
    """Parameters that steps only read, one row for each sequence. A PyTree.

    Attributes:
      num_prompt: i32[R]; number of prompt tokens.
      end: i32[R]; length at which the sequence ends.
      min_len: i32[R]; length before which no stop token is sampled.
      stop_ids: i32[R, MAX_STOP_TOKENS]; -1 where unused.
      seed: u32[R].
      sample: u32[R]; number of the sample in its request.
      temperature: f32[R].
      top_k: i32[R].
      top_p: f32[R].
      min_p: f32[R].
      repetition: f32[R]; repetition penalty.
      presence: f32[R]; presence penalty.
      frequency: f32[R]; frequency penalty.
      bias_ids: i32[R, MAX_LOGIT_BIAS]; -1 where unused.
      bias: f32[R, MAX_LOGIT_BIAS]; addends.
      processor: i32[R]; index of the logits processor, -1 for none.
    """

    num_prompt: Any
    end: Any
    min_len: Any
    stop_ids: Any
    seed: Any
    sample: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    bias_ids: Any
    bias: Any
    processor: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """R rows. A PyTree.

    Attributes:
      history: state that steps change.
      params: parameters that steps read. They are separate because an array that a step returns
        costs the host more than one that it only reads.
    """

    history: History
    params: RowParams

    @classmethod
    def empty(cls, rows: int, max_len: int) -> SamplerState:
        """Greedy rows without tokens, as NumPy arrays."""
        i32, f32 = np.int32, np.float32
        params = RowParams(
            num_prompt=np.zeros(rows, i32), end=np.zeros(rows, i32), min_len=np.zeros(rows, i32),
            stop_ids=np.full((rows, MAX_STOP_TOKENS), -1, i32),
            seed=np.zeros(rows, np.uint32), sample=np.zeros(rows, np.uint32),
            temperature=np.zeros(rows, f32), top_k=np.zeros(rows, i32), top_p=np.ones(rows, f32),
            min_p=np.zeros(rows, f32), repetition=np.ones(rows, f32),
            presence=np.zeros(rows, f32), frequency=np.zeros(rows, f32),
            bias_ids=np.full((rows, MAX_LOGIT_BIAS), -1, i32),
            bias=np.zeros((rows, MAX_LOGIT_BIAS), f32), processor=np.full(rows, -1, i32),
        )  # fmt: skip
        return cls(History(np.zeros((rows, max_len), i32)), params)

    def fill(
        self,
        row: int,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        num_prompt: int,
        end: int,
        stop_ids: Sequence[int],
        seed: int,
        sample: int,
        processor: int,
    ) -> None:
        """Fills a row, in place; for states of NumPy arrays only."""
        self.history.token_ids[row, : len(token_ids)] = token_ids
        to = self.params
        to.num_prompt[row], to.end[row] = num_prompt, end
        to.min_len[row] = min(num_prompt + params.min_tokens, end)  # int32 holds it
        to.stop_ids[row, : len(stop_ids)] = stop_ids
        to.seed[row], to.sample[row], to.processor[row] = seed, sample, processor
        to.temperature[row], to.top_k[row] = params.temperature, params.top_k
        to.top_p[row], to.min_p[row] = params.top_p, params.min_p
        to.repetition[row] = params.repetition_penalty
        to.presence[row] = params.presence_penalty
        to.frequency[row] = params.frequency_penalty
        for i, (token, bias) in enumerate(params.logit_bias.items()):
            to.bias_ids[row, i], to.bias[row, i] = token, bias

    def with_processor_states(self, states: tuple[Any, ...]) -> SamplerState:
        """The state with these processor states."""
        history = dataclasses.replace(self.history, processor_states=states)
        return dataclasses.replace(self, history=history)


@functools.partial(jax.jit, donate_argnames="state")
def set_rows(state: SamplerState, rows: jax.Array, new: SamplerState) -> SamplerState:
    """Writes the rows of `new` to rows i32[A]; rows out of range are dropped. Donates state."""
    return jax.tree.map(lambda old, x: old.at[rows].set(x, mode="drop"), state, new)


class ProcessorError(JaxkvError):
    """A user's logits processor raised, or returned something else than it must.

    Attributes:
      processor: the processor.
    """

    def __init__(self, processor: LogitsProcessor, problem: str):
        super().__init__(f"the logits processor {problem}")
        self.processor = processor

    @classmethod
    def raised(cls, processor: LogitsProcessor, error: Exception) -> ProcessorError:
        """The error of a processor that raised."""
        return cls(processor, f"raised {type(error).__name__}: {error}")


class Sampled(NamedTuple):
    """Sampled tokens of L rows.

    Attributes:
      tokens: i32[L]; sampled tokens; NO_TOKEN where the logits allow none.
      logprobs: f32[L]; log-probability of the token, or of the target where one is given; None
        unless requested.
      top_ids: i32[L, K]; most likely tokens.
      top_logprobs: f32[L, K]; their log-probabilities.
      processor_states: the rows' states of each logits processor after the token, with a leading
        axis L; filled in by the steps.
    """

    tokens: Any
    logprobs: Any = None
    top_ids: Any = None
    top_logprobs: Any = None
    processor_states: tuple[Any, ...] = ()


def sample(
    logits: jax.Array,
    state: SamplerState,
    rows: jax.Array,
    lengths: jax.Array,
    *,
    keep: jax.Array,
    targets: jax.Array | None = None,
    num_logprobs: int | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[Sampled, SamplerState]:
    """Samples the next token of each row.

    Args:
      logits: f32[L, vocab_size].
      state: R rows; the logits follow the tokens `history.token_ids[rows, :lengths]`.
      rows: i32[L]; rows of the state; R or above for padding.
      lengths: i32[L]; positions of the new tokens.
      keep: bool[L]; whether the token, and the new state of a processor, is written to the state.
      targets: i32[L]; tokens whose log-probability is reported instead of the sampled one's, or -1.
      num_logprobs: static; most likely tokens to report. None: no log-probabilities.
      processors: static; logits processors of the state.

    Returns:
      The sampled tokens, and the new state, of which only the history has changed. A token whose
      logit is -inf is never sampled.
    """
    raw, history = logits, state.history
    R = len(history.token_ids)
    read = _Rows(state, jnp.minimum(rows, R - 1), rows < R)
    logits = _biased(logits, read, lengths)
    logits = _penalised(logits, read, lengths)
    states = []
    for i, (processor, old) in enumerate(zip(processors, history.processor_states, strict=True)):
        logits, changed = _processed(logits, read, lengths, i, processor, old, keep)
        states.append(changed)
    tokens = _drawn(logits, read, lengths)
    written = jnp.where(keep & read.live, rows, R)
    token_ids = history.token_ids.at[written, lengths].set(tokens, mode="drop")
    state = dataclasses.replace(state, history=History(token_ids, tuple(states)))
    if num_logprobs is None:
        return Sampled(tokens), state
    logprobs = jax.nn.log_softmax(raw, axis=-1)
    named = tokens if targets is None else jnp.where(targets >= 0, targets, tokens)
    top = lax.top_k(logprobs, min(num_logprobs, logprobs.shape[1]))
    chosen = jnp.take_along_axis(logprobs, named[:, None], axis=1)[:, 0]
    return Sampled(tokens, chosen, top[1].astype(jnp.int32), top[0]), state


class _Rows(NamedTuple):
    """Rows of a state in batch order; padding is greedy, without limits or penalties."""

    state: SamplerState
    at: jax.Array  # i32[L], in range
    live: jax.Array  # bool[L]

    @property
    def token_ids(self) -> jax.Array:
        """i32[L, max_len]."""
        return jnp.asarray(self.state.history.token_ids)[self.at]

    def __call__(self, name: str, padding: float) -> jax.Array:
        value = jnp.asarray(getattr(self.state.params, name))[self.at]
        live = self.live.reshape(-1, *[1] * (value.ndim - 1))
        return jnp.where(live, value, jnp.asarray(padding, value.dtype))


def _biased(logits: jax.Array, read: _Rows, lengths: jax.Array) -> jax.Array:
    """Adds biases, and masks stop tokens before the minimum length."""
    vocab_size, at = logits.shape[1], jnp.arange(len(logits))[:, None]

    def add(logits):
        ids = read("bias_ids", -1)
        ids = jnp.where(ids >= 0, ids, vocab_size)
        return logits.at[at, ids].add(read("bias", 0), mode="drop")

    def ban(logits):
        ids = read("stop_ids", -1)
        ids = jnp.where((ids >= 0) & (lengths < read("min_len", 0))[:, None], ids, vocab_size)
        return logits.at[at, ids].set(-jnp.inf, mode="drop")

    logits = lax.cond((read("bias_ids", -1) >= 0).any(), add, lambda x: x, logits)
    return lax.cond((lengths < read("min_len", 0)).any(), ban, lambda x: x, logits)


def _penalised(logits: jax.Array, read: _Rows, lengths: jax.Array) -> jax.Array:
    repetition, presence = read("repetition", 1), read("presence", 0)
    frequency = read("frequency", 0)

    def apply(logits):
        tokens = read.token_ids
        position = jnp.arange(tokens.shape[1])
        held = position < lengths[:, None]
        made = held & (position >= read("num_prompt", 0)[:, None])
        at = jnp.arange(len(logits))[:, None]

        def counts(which):
            zeros = jnp.zeros(logits.shape, jnp.float32)
            return zeros.at[at, tokens].add(which.astype(jnp.float32), mode="drop")

        seen = counts(held) > 0
        factor = repetition[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
        made = counts(made)
        logits = logits - jnp.where(made > 0, presence[:, None], 0)
        return logits - frequency[:, None] * made

    used = (repetition != 1) | (presence != 0) | (frequency != 0)
    return lax.cond(used.any(), apply, lambda x: x, logits)


def _processed(logits, read: _Rows, lengths, i: int, processor: LogitsProcessor, old, keep):
    """Applies a logits processor to the rows that use it; returns logits and states.

    It sees no row of another request: where rows are others' it gets one of its own again, and
    without a row of its own it does not run.
    """
    mine = read("processor", -1) == i
    source = jnp.where(mine, jnp.arange(len(mine)), jnp.argmax(mine))

    def run():
        states = jax.tree.map(lambda x: x[read.at[source]], old)
        own = logits[source], states, read.token_ids[source], lengths[source]
        try:
            changed, states = jax.vmap(processor.apply)(*own)
            changed = jnp.broadcast_to(changed, logits.shape).astype(logits.dtype)
        except Exception as error:
            raise ProcessorError.raised(processor, error) from error
        rows = jnp.where(mine & keep, read.at, len(read.state.history.token_ids))
        new = jax.tree.map(lambda x, s: x.at[rows].set(s, mode="drop"), old, states)
        return jnp.where(mine[:, None], changed, logits), new

    return lax.cond(mine.any(), run, lambda: (logits, old))


def _drawn(logits: jax.Array, read: _Rows, lengths: jax.Array) -> jax.Array:
    """The next tokens, i32[L]; NO_TOKEN where no logit is above -inf, or one is NaN."""
    greedy = _argmax(logits)
    best = jnp.take_along_axis(logits, greedy[:, None], axis=1)  # NaN if any is
    temperature = read("temperature", 0)
    # Below the least normal number, which some processors flush to 0, all processors are greedy.
    random = temperature >= np.finfo(np.float32).tiny
    top_k, top_p, min_p = read("top_k", 0), read("top_p", 1), read("min_p", 0)

    def draw() -> jax.Array:
        # Below the best logit, so that a low temperature overflows to -inf alone, and the best stay
        # at 0 also where they are infinite.
        below = jnp.where(logits == best, 0, logits - best)
        divisor = jnp.where(random, temperature, 1)[:, None]
        least = jnp.log(min_p)[:, None]  # of 0: -inf
        below = jnp.where(_divided(below, divisor) >= least, below, -jnp.inf)
        limited = random & ((top_k > 0) | (top_p < 1))
        # Top-k and top-p sort the vocabulary: only if a row uses them.
        below = lax.cond(limited.any(), lambda: _limit(below, top_k, top_p, divisor), lambda: below)
        scaled = _divided(below, divisor)

        def row(seed, sample, position, logits):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
            return jax.random.categorical(key, logits)

        seeds, samples = read("seed", 0), read("sample", 0)
        return jax.vmap(row)(seeds, samples, lengths, scaled).astype(jnp.int32)

    tokens = lax.cond(random.any(), lambda: jnp.where(random, draw(), greedy), lambda: greedy)
    return jnp.where(best[:, 0] > -jnp.inf, tokens, NO_TOKEN)


def _divided(logits: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """Logits by temperature. The compiler may multiply by an inverse, which is 0 for a huge one:
    -inf stays -inf."""
    return jnp.where(logits > -jnp.inf, logits / temperature, -jnp.inf)


def _argmax(x: jax.Array) -> jax.Array:
    """The first maximum of each row, i32[S], by pieces of 128.

    Only the pieces' maxima are searched for a position, which XLA's CPU code does one element at a
    time: for 32 rows of 49152, 0.5 ms against 3.6.
    """
    width = 128
    pieces = jnp.pad(x, ((0, 0), (0, -x.shape[1] % width)), constant_values=-jnp.inf)
    pieces = pieces.reshape(len(x), -1, width)
    piece = pieces.max(axis=-1).argmax(axis=-1)
    inside = jnp.take_along_axis(pieces, piece[:, None, None], axis=1)[:, 0].argmax(axis=-1)
    return (piece * width + inside).astype(jnp.int32)


def _limit(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, temperature: jax.Array | float = 1.0
) -> jax.Array:
    """Masks what top-k and top-p exclude with -inf; rows without limits keep every bit.

    Tokens are ranked by logit, equal ones by id. A limit keeps the first of this order, the most
    likely one always. They are ranked before the temperature (f32[L, 1]) divides them, which makes
    equals of different logits if it is high.
    """
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    ranked, ranked_ids = lax.sort((-logits, ids), num_keys=1, is_stable=True)
    ranked = -ranked
    k = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[1]), logits.shape[1])
    weights = jnp.exp(_divided(ranked - ranked[:, :1], temperature))
    weights = jnp.where(ids < k[:, None], weights, 0)
    count = jnp.where(top_p < 1, jnp.minimum(k, _num_within(weights, top_p)), k)
    last = jnp.maximum(count, 1)[:, None] - 1
    lowest = jnp.take_along_axis(ranked, last, axis=1)
    last_id = jnp.take_along_axis(ranked_ids, last, axis=1)
    kept = (logits > lowest) | ((logits == lowest) & (ids <= last_id))
    return jnp.where(kept, logits, -jnp.inf)


def _num_within(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """The fewest leading weights of each row that reach the share top_p of their sum, i32[L].

    A sum of many weights is rounded to its own size. From one half on the tail is summed and
    compared with 1 - p, so that small weights are not lost behind the large ones.
    """
    most = top_p >= 0.5
    sums = jnp.cumsum(jnp.where(most[:, None], weights[:, ::-1], weights), axis=1)
    total = sums[:, -1:]
    before = jnp.pad(sums[:, :-1], ((0, 0), (1, 0)))
    within = jnp.where(
        most[:, None], sums > (1 - top_p)[:, None] * total, before < top_p[:, None] * total
    )
    return within.sum(axis=1, dtype=jnp.int32)
