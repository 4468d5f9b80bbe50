"""What a model and a tokenizer must have to run in the engine. Host code: imports no JAX.

Any object with these attributes will do; nothing needs to inherit from the classes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxkv.config import ModelShape


class ModelConfig(ModelShape, Protocol):
    """Sizes that an engine reads from `model.config`.

    Attributes:
      num_layers: layers that call `jaxkv.attention`.
      num_kv_heads: KV heads of a layer.
      head_dim: elements of one head.
      vocab_size: tokens of the vocabulary; the width of the logits.
      max_position_embeddings: longest sequence, in tokens.
      eos_token_ids: tokens that end a sequence.

    A model of which every layer attends within a window may declare it as `sliding_window`: the
    manager's window must be at least as long.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...


class Model(Protocol):
    """An NNX module that computes one paged step.

    `model(tokens, state, batch)` takes i32[T] tokens, a `PagedState` and a `Batch`, calls
    `jaxkv.attention` once in each layer, and returns the logits f32[L, vocab_size] of
    `batch.logit_tokens` and the new state, `jaxkv.advance(state, batch)`.
    """

    @property
    def config(self) -> ModelConfig: ...

    def __call__(self, tokens: Any, state: Any, batch: Any, /) -> tuple[Any, Any]: ...


class TextStream(Protocol):
    """A streaming detokenizer: text as far as it is certain."""

    def push(self, token_ids: Sequence[int], /) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """The text that is left at the end."""
        ...


class Tokenizer(Protocol):
    """Text to token ids, and back as a stream.

    For stop texts with special tokens in them, a tokenizer may also have `special_tokens`, the
    texts of its special tokens, and take `stream(skip_special=False)`, which shows them.
    """

    def encode(self, text: str, /) -> Sequence[int]:
        """Token ids of a prompt, with the tokens that every sequence begins with."""
        ...

    def stream(self) -> TextStream:
        """A new detokenizer, for one sequence."""
        ...
