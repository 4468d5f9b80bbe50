"""The call of a user's model inside a step, and checks of what it returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache.attention import trace_counts
from jaxkv.cache.batch import Batch
from jaxkv.cache.state import PagedState
from jaxkv.errors import ModelError


class ModelRaised(Exception):
    """Carries the error of a model out of the step that traces it.

    Attributes:
      error: the error, with the model's own traceback.
    """

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def call_model(
    model: Any, tokens: jax.Array, state: PagedState, batch: Batch, *, vocab_size: int
) -> tuple[jax.Array, PagedState]:
    """Calls a model while a step is traced.

    Returns:
      Logits f32[L, vocab_size], and the new state.

    Raises:
      ModelRaised: the model raised, or broke its promise (a `ModelError`).
    """
    calls = trace_counts["attention"]
    try:
        result = model(tokens, state, batch)
        called = trace_counts["attention"] > calls
        return _checked(result, state, len(batch.logit_tokens), vocab_size, called)
    except Exception as error:
        raise ModelRaised(error) from error


def _checked(
    result: Any, given: PagedState, num_logits: int, vocab_size: int, called: bool
) -> tuple[jax.Array, PagedState]:
    if not (isinstance(result, tuple | list) and len(result) == 2):
        raise ModelError(
            f"the model returned a {type(result).__name__}, expected (logits, state): "
            "return logits, jaxkv.advance(state, batch)"
        )
    logits, state = result
    if not isinstance(state, PagedState):
        raise ModelError(
            f"the model returned a {type(state).__name__} as its state, expected a PagedState: "
            "return logits, jaxkv.advance(state, batch)"
        )
    shape, dtype = getattr(logits, "shape", None), getattr(logits, "dtype", None)
    if shape is None or dtype is None:
        raise ModelError(f"the model returned a {type(logits).__name__} as its logits")
    wanted = num_logits, vocab_size
    if shape != wanted:
        raise ModelError(
            f"the model returned logits of shape {tuple(shape)}, expected {wanted}: "
            f"one row for each of batch.logit_tokens, config.vocab_size={vocab_size} wide"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ModelError(f"the model returned logits of dtype {dtype}, expected float32")
    if state.seq_lens is given.seq_lens:
        raise ModelError(
            "the model returned the state that it was given: "
            "return logits, jaxkv.advance(state, batch)"
        )
    if called and state.kv_pages is given.kv_pages:
        raise ModelError(
            "the model dropped the state that jaxkv.attention returned, and with it K and V: "
            "out, state = jaxkv.attention(q, k, v, state, layer, batch)"
        )
    for name in ("kv_pages", "kv_scales", "block_tables", "seq_lens"):
        old, new = getattr(given, name), getattr(state, name)
        if _form(old) != _form(new):
            raise ModelError(
                f"the model returned a state whose {name} is {_form(new)}, it was {_form(old)}"
            )
    return logits.astype(jnp.float32), state


def _form(x: Any) -> str:
    if x is None:
        return "None"
    return f"{getattr(x, 'dtype', type(x).__name__)}{getattr(x, 'shape', '')}"
