"""The tokenizer of a GGUF file, rebuilt from its vocabulary, merges and pre-tokenizer."""

from __future__ import annotations

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from jaxkv.errors import ConfigError
from jaxkv.models.byte_level import byte_level
from jaxkv.models.errors import CheckpointError
from jaxkv.models.gguf_file import GGUFFile, brief
from jaxkv.models.gguf_vocabulary import CONTROL, PREFIX, UNKNOWN, USER_DEFINED, GGUFVocabulary

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]
# `tokenizer.ggml.pre` -> the patterns that cut text into words, applied one after the other; and
# whether a word that is a token as it stands skips the merges. A file without the field has
# "default", as in llama.cpp: some texts then differ from those of the tokenizer converted from.
_PRE_TOKENIZERS: dict[str, tuple[list[str], bool]] = {
    "default": (_DEFAULT, False),
    "gpt-2": ([_GPT2], False),
    "smollm": ([r"\p{N}", _GPT2], False),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), ([_LLAMA3], True)),
}


def gguf_backend(file: GGUFFile, vocabulary: GGUFVocabulary) -> Backend:
    """The `tokenizers` tokenizer of a GGUF file.

    Raises:
      CheckpointError: merges that are missing or make no tokens.
      ConfigError: an unknown pre-tokenizer; the error names it.
    """
    pre, tokens = vocabulary.pre, vocabulary.tokens
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(f"{file.path}: {PREFIX}pre={pre!r} must be one of "
                          f"{', '.join(_PRE_TOKENIZERS)}")  # fmt: skip
    patterns, ignore_merges = _PRE_TOKENIZERS[pre]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(file)
    try:
        backend = byte_level(models.BPE(vocab, merges, ignore_merges=ignore_merges), patterns)
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{file.path}: {PREFIX}merges do not fit {PREFIX}tokens: "
                              f"{error}") from None  # fmt: skip
    for types, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        added = [AddedToken(tokens[i], special=special, normalized=False)
                 for i, kind in enumerate(vocabulary.types) if kind in types]  # fmt: skip
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    """Pairs of texts, the earliest of equal ones."""
    key = PREFIX + "merges"
    merges = file.need(key, list)
    if merges and not isinstance(merges[0], str):
        raise CheckpointError(f"{file.path}: {key}={brief(merges)} must be texts")
    pairs = [tuple(merge.split(" ")) for merge in dict.fromkeys(merges)]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise CheckpointError(f"{file.path}: {key} has {' '.join(wrong)!r}, which is not two texts "
                              "with a space between them")  # fmt: skip
    return pairs
