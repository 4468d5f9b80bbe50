"""The vocabulary of a GGUF file: tokens, special tokens, and the tokens that end a generation.

Where a field is missing, the rules are llama.cpp's (src/llama-vocab.cpp), but for one: llama.cpp
falls back on token 11 as beginning and end of text, whatever its text; here no token is assumed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxkv.errors import ConfigError
from jaxkv.models.errors import CheckpointError
from jaxkv.models.gguf_file import GGUFFile, brief

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types

# Fields that are read here or in gguf_tokenizer, or that byte-level BPE does not use.
_KNOWN = {
    "model", "pre", "tokens", "token_type", "merges", "add_bos_token", "bos_token_id",
    "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id", "padding_token_id",
    "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id",
    "scores", "token_type_count", "seperator_token_id", "separator_token_id", "cls_token_id",
    "mask_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id",
    "prefix_token_id", "suffix_token_id", "middle_token_id", "remove_extra_whitespaces",
}  # fmt: skip
# Fields that change ids, texts or choices, and the only value of each that is supported.
_ONLY: dict[str, Any] = {
    "add_eos_token": False,
    "add_sep_token": False,
    "add_space_prefix": False,
    "normalizer.lowercase": False,
    "normalizer.strip_accents": False,
    "suppress_tokens": [],
}
# Texts that end a generation whatever their type: end of text, of a turn, of a message.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# Tokens of code completion that end one, by field or else by text.
_FILL_IN = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}


@dataclasses.dataclass(frozen=True)
class GGUFVocabulary:
    """The vocabulary of a GGUF file.

    Attributes:
      tokens: texts by id, in GPT-2's printable bytes; all different.
      types: token types by id.
      special: ids of bos_token, eos_token, unk_token and pad_token, those that the file names.
      end_token_ids: tokens that end a generation.
      pre: name of the pre-tokenizer.
      bos_token_id: the token that starts a prompt, or None.
    """

    tokens: list[str]
    types: list[int]
    special: dict[str, int]
    end_token_ids: tuple[int, ...]
    pre: str
    bos_token_id: int | None


def read_vocabulary(file: GGUFFile) -> GGUFVocabulary:
    """The vocabulary of a file with a byte-level BPE tokenizer.

    Raises:
      CheckpointError: missing fields, a text that two tokens have, ids outside the vocabulary.
      ConfigError: another tokenizer, or fields that are not supported.
    """
    kind = file.need(PREFIX + "model", str)
    if kind != "gpt2":
        raise ConfigError(f"{file.path}: {PREFIX}model={kind!r}; only 'gpt2' (byte-level BPE) is "
                          "supported")  # fmt: skip
    _refuse_unknown(file)
    tokens = _texts(file)
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) < len(tokens):
        text, other = next((text, i) for i, text in enumerate(tokens) if ids[text] != i)
        raise CheckpointError(
            f"{file.path}: {PREFIX}tokens has {text!r} twice, as {other} and {ids[text]}, so that "
            "one of the two would have no text; convert the model again"
        )
    types = _types(file, len(tokens))
    special = {
        f"{name}_token": i
        for name, field in dict(bos="bos", eos="eos", unk="unknown", pad="padding").items()
        if (i := _token_id(file, f"{field}_token_id", len(tokens))) is not None
    }
    ends = read_end_tokens(file)
    for text in _END_TEXTS:  # texts that mean a control token are one, whatever the file says
        if text in ids and ids[text] in ends:
            types[ids[text]] = CONTROL
    pre = file.get(PREFIX + "pre", str, "default")
    starts = pre in ("llama-bpe", "llama3", "llama-v3")
    bos = special.get("bos_token")
    if file.get(PREFIX + "add_bos_token", bool, starts):
        if bos is None:
            raise CheckpointError(f"{file.path}: prompts start with a token that the file does not "
                                  f"name: {PREFIX}bos_token_id is missing")  # fmt: skip
    else:
        bos = None
    return GGUFVocabulary(tokens, types, special, ends, pre, bos)


def read_end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """Tokens that end a generation: those that fields name, then those with a known text.

    Raises:
      CheckpointError: ids outside the vocabulary, or no vocabulary.
    """
    tokens = _texts(file)
    ids, count = {text: i for i, text in enumerate(tokens)}, len(tokens)
    named = [_token_id(file, f"{name}_token_id", count) for name in ("eos", "eot", "eom")]
    for field, texts in _FILL_IN.items():
        i = _token_id(file, field, count)
        named.append(i if i is not None else next((ids[x] for x in texts if x in ids), None))
    by_text = {text: ids[text] for text in _END_TEXTS if text in ids}
    # Formats in which these texts are part of an answer, or of plain text.
    if {"<|return|>", "<|call|>"} <= by_text.keys() or (
        by_text.keys() >= {"<|flush|>"} and by_text.keys() & {"<|call|>", "<|calls|>"}
    ):
        by_text.pop("<|end|>", None)
    if "<|tool_response>" in by_text:
        by_text.pop("</s>", None)
    ends = [i for i in (*named, *sorted(by_text.values())) if i is not None]
    return tuple(dict.fromkeys(ends))


def _refuse_unknown(file: GGUFFile) -> None:
    for key, value in file.fields.items():
        field = key.removeprefix(PREFIX)
        if field == key or field in _KNOWN:
            continue
        if field not in _ONLY:
            raise ConfigError(f"{file.path}: the field {key}={brief(value)} is not supported")
        if value != _ONLY[field]:
            raise ConfigError(f"{file.path}: {key}={brief(value)} is not supported; only "
                              f"{_ONLY[field]!r} is")  # fmt: skip


def _texts(file: GGUFFile) -> list[str]:
    tokens = file.need(PREFIX + "tokens", list)
    if not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(f"{file.path}: {PREFIX}tokens={brief(tokens)} must be texts")
    # Some files leave tokens without a text; llama.cpp gives them the same names.
    return [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]


def _types(file: GGUFFile, count: int) -> list[int]:
    types = file.get(PREFIX + "token_type", list, [1] * count)
    if len(types) < count or not all(isinstance(x, int) for x in types):
        raise CheckpointError(f"{file.path}: {PREFIX}token_type must have an integer for each of "
                              f"{count} tokens, got {brief(types)}")  # fmt: skip
    return types[:count]


def _token_id(file: GGUFFile, field: str, count: int) -> int | None:
    i = file.get(PREFIX + field, int)
    if i is None or 0 <= i < count:
        return i
    if field in ("unknown_token_id", "padding_token_id"):  # converters write -1 for none
        return None
    raise CheckpointError(f"{file.path}: {PREFIX}{field}={i} is outside the vocabulary of {count} "
                          "tokens")  # fmt: skip
