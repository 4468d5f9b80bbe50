"""The tokenizer of a GGUF file, rebuilt from its vocabulary, merges and pre-tokenizer."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from jaxkv.errors import ConfigError
from jaxkv.models.byte_level import byte_level
from jaxkv.models.files import GGUFFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> the patterns that cut text into words, applied one after the other; and
# whether a word that is a token as it stands skips the merges.
_PRE_TOKENIZERS: dict[str, tuple[list[str], bool]] = {
    "gpt-2": ([_GPT2], False),
    "smollm": ([r"\p{N}", _GPT2], False),
    "llama-bpe": ([_LLAMA3], True),
}
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types


def gguf_backend(file: GGUFFile) -> Backend:
    """The `tokenizers` tokenizer of a GGUF file.

    Raises:
      ConfigError: an unknown tokenizer model or pre-tokenizer; the error names it.
    """
    kind, pre = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ConfigError(f"{file.path}: tokenizer.ggml.model={kind!r}; only 'gpt2' (byte-level "
                          "BPE) is supported")  # fmt: skip
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(f"{file.path}: tokenizer.ggml.pre={pre!r} must be one of "
                          f"{', '.join(_PRE_TOKENIZERS)}")  # fmt: skip
    patterns, ignore_merges = _PRE_TOKENIZERS[pre]
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = byte_level(models.BPE(vocab, merges, ignore_merges=ignore_merges), patterns)
    types = file.get("tokenizer.ggml.token_type", [])
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(tokens[i], special=special, normalized=False)
                 for i, t in enumerate(types) if t == kind]  # fmt: skip
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def gguf_special_tokens(file: GGUFFile) -> dict[str, str]:
    """Texts of the special tokens that a chat template may use, by name, such as bos_token."""
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    fields = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {name: file.get(f"tokenizer.ggml.{field}_token_id") for field, name in fields.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}


def gguf_bos_token_id(file: GGUFFile) -> int | None:
    """The token that starts a prompt, or None."""
    default = file.get("tokenizer.ggml.pre", "gpt-2") == "llama-bpe"
    add_bos: Any = file.get("tokenizer.ggml.add_bos_token", default)
    return file.get("tokenizer.ggml.bos_token_id") if add_bos else None
