"""Byte-level BPE: the backend that GGUF vocabularies and the byte tokenizer share."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend


def byte_level(model: models.BPE, patterns: Sequence[str]) -> Backend:
    """A backend that cuts text by `patterns`, one after the other, then encodes the words' bytes.

    Args:
      model: merges and vocabulary, in GPT-2's printable bytes.
      patterns: regular expressions; each match is a word, and so is the text between two.
    """
    backend = Backend(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    backend.decoder = decoders.ByteLevel()
    return backend
