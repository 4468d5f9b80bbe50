"""Text of a growing token sequence: the decoders of `tokenizers`, token by token.

`tokenizers` decodes whole sequences. A stage here holds back only what later tokens can still
change, so that the pieces of a stream join to the decode of the whole, at a cost per token that
does not depend on the length of the text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes -> bytes.

    Bytes that print stand for themselves, others take the code points from 256.
    """
    printable = pre_tokenizers.ByteLevel.alphabet()
    table, spare = {}, 256
    for byte in range(256):
        char = chr(byte)
        if char not in printable or byte in (0x20, 0xA0, 0xAD) or byte < 0x21:
            char, spare = chr(spare), spare + 1
        table[char] = byte
    return table


class Detokenizer:
    """Turns tokens that arrive one by one into text; made by `Tokenizer.stream`.

    Args:
      backend: the `tokenizers` tokenizer.
      decoder: its decoder, as the "decoder" field of a tokenizer.json.
      special: special tokens, left out of the text.
      first_id: token with which texts begin. A stream that starts with it is a text of its own; any
        other continues a text, so that its first space is kept.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: dict[str, Any] | None,
        *,
        special: frozenset[str] = frozenset(),
        first_id: int | None = None,
    ):
        self._backend, self._decoder = backend, decoder
        self._special, self._first_id = special, first_id
        self._stages: list[_Stage] | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that they complete."""
        if self._stages is None:
            if not len(token_ids):
                return ""
            self._stages = _stages(self._decoder, begins=token_ids[0] == self._first_id)
        tokens = [self._backend.id_to_token(i) for i in token_ids]
        parts = [t for t in tokens if t is not None and t not in self._special]
        for stage in self._stages:
            parts = stage.push(parts)
        return "".join(parts)

    def flush(self) -> str:
        """Returns the text held back, incomplete characters included; what follows begins anew."""
        parts: list[str] = []
        for stage in self._stages or []:
            parts = [*stage.push(parts), *stage.flush()]
        self._stages = None
        return "".join(parts)


class _Stage:
    """Part of a decoder. Takes tokens one by one, or the pieces of one that an earlier part fused.

    `first` is the number of the first token, 0 at the beginning of a text.
    """

    def __init__(self, first: int):
        self._count = first

    def push(self, parts: list[str]) -> list[str]:
        """Output that no later input changes."""
        out = []
        for part in parts:
            out += self._one(part)
            self._count += 1
        return out

    def _one(self, part: str) -> Iterable[str]:
        return [part]

    def flush(self) -> list[str]:
        """Output that was held back."""
        return []


class _Each(_Stage):
    """A decoder that treats each token alone, but for the first one."""

    def __init__(self, first: int, decode: Callable[[list[str]], str]):
        super().__init__(first)
        self._decode = decode

    def _one(self, part: str) -> Iterable[str]:
        return [self._decode([part] if self._count == 0 else ["", part])]


class _Spaced(_Stage):
    """No decoder: a space between tokens."""

    def _one(self, part: str) -> Iterable[str]:
        return [f" {part}" if self._count else part]


class _CTC(_Stage):
    """Drops repeated tokens and those that decode to nothing."""

    def __init__(self, decode: Callable[[list[str]], str]):
        super().__init__(0)
        self._decode, self._last = decode, None

    def _one(self, part: str) -> Iterable[str]:
        repeated, self._last = part == self._last, part
        text = "" if repeated else self._decode([part])
        return [text] if text else []


class _Suffix(_Stage):
    """BPEDecoder: the suffix of a word is a space, but for the last token."""

    def __init__(self, decode: Callable[[list[str]], str]):
        super().__init__(0)
        self._decode = decode
        self._held: list[str] = []

    def _one(self, part: str) -> Iterable[str]:
        held, self._held = self._held, [part]
        return [self._decode([token, ""]) for token in held]

    def flush(self) -> list[str]:
        return [self._decode([token]) for token in self._held]


class _ByteLevel(_Stage):
    """Characters that stand for bytes, decoded as UTF-8; bytes of no character become U+FFFD."""

    _TABLE = byte_alphabet()

    def __init__(self):
        super().__init__(0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def _one(self, part: str) -> Iterable[str]:
        try:
            raw = bytes([self._TABLE[char] for char in part])
        except KeyError:
            raw = part.encode()
        return [self._utf8.decode(raw)]

    def flush(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _ByteFallback(_Stage):
    """Runs of <0x..> tokens: text if the whole run is UTF-8, else one U+FFFD for each byte.

    A run is held back until it ends, or until a byte makes it invalid.
    """

    def __init__(self):
        super().__init__(0)
        self._start()

    def _start(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._run: list[str] = []
        self._bytes, self._invalid = 0, False

    def _one(self, part: str) -> Iterable[str]:
        match = _BYTE_TOKEN.fullmatch(part)
        if match is None:
            return [*self.flush(), part]
        self._bytes += 1
        if self._invalid:
            return ["\ufffd"]
        try:
            self._run.append(self._utf8.decode(bytes([int(match[1], 16)])))
            return []
        except UnicodeDecodeError:
            self._invalid = True
            return ["\ufffd"] * self._bytes

    def flush(self) -> list[str]:
        out: list[str] = []
        if self._bytes and not self._invalid:
            try:
                out = ["".join(self._run) + self._utf8.decode(b"", final=True)]
            except UnicodeDecodeError:
                out = ["\ufffd"] * self._bytes
        self._start()
        return out


class _FusedStrip(_Stage):
    """Strip of a fused text: `start` characters at the beginning, `stop` at the end."""

    def __init__(self, content: str, start: int, stop: int):
        super().__init__(0)
        self._content, self._start, self._stop = content, start, stop
        self._tail = ""

    def _one(self, part: str) -> Iterable[str]:
        while self._start and part:
            if part[0] != self._content:
                self._start = 0
            else:
                part, self._start = part[1:], self._start - 1
        text = self._tail + part
        kept = min(self._stop, len(text) - len(text.rstrip(self._content)))
        self._tail = text[len(text) - kept :]
        return [text[: len(text) - kept]]


class _FusedReplace(_Stage):
    """Replacement of a string in a fused text; holds back what could begin one."""

    def __init__(self, old: str, new: str):
        super().__init__(0)
        self._old, self._new, self._tail = old, new, ""

    def _one(self, part: str) -> Iterable[str]:
        *done, rest = (self._tail + part).split(self._old)
        held = next(k for k in range(min(len(self._old) - 1, len(rest)), -1, -1)
                    if rest.endswith(self._old[:k]))  # fmt: skip
        self._tail = rest[len(rest) - held :]
        return [self._new.join([*done, rest[: len(rest) - held]])]

    def flush(self) -> list[str]:
        return [self._tail]


class _Whole(_Stage):
    """A part that needs the whole of a fused text, such as a regular expression."""

    def __init__(self, decode: Callable[[list[str]], str], first: int):
        super().__init__(first)
        self._decode, self._before = decode, [""] * first
        self._parts: list[str] = []

    def _one(self, part: str) -> Iterable[str]:
        self._parts.append(part)
        return []

    def flush(self) -> list[str]:
        return [self._decode([*self._before, "".join(self._parts)])]


def _stages(decoder: dict[str, Any] | None, *, begins: bool) -> list[_Stage]:
    first = 0 if begins else 1
    if decoder is None:
        return [_Spaced(first)]
    stages: list[_Stage] = []
    fused = False
    for part in _flat(decoder):
        kind = part["type"]
        if kind == "Fuse":
            fused = True
            continue
        if fused and kind == "Strip":
            stages.append(_FusedStrip(part["content"], part["start"] * begins, part["stop"]))
            continue
        if fused and kind == "Replace" and part["pattern"].get("String"):
            stages.append(_FusedReplace(part["pattern"]["String"], part["content"]))
            continue
        if kind == "ByteFallback" and not fused:
            stages.append(_ByteFallback())
            continue
        if kind == "ByteLevel" and not fused:
            stages.append(_ByteLevel())
            fused = True
            continue
        decode = _library(part)
        if fused:
            stages.append(_Whole(decode, first if kind in ("Metaspace", "WordPiece") else 0))
        elif kind == "CTC":
            stages.append(_CTC(decode))
        elif kind == "BPEDecoder":
            stages.append(_Suffix(decode))
        elif kind in ("Metaspace", "WordPiece"):
            stages.append(_Each(first, decode))
        elif kind == "Strip":  # the library panics where both ends meet
            ends = part["content"], part["start"], part["stop"]
            stages.append(_Each(0, lambda tokens, ends=ends: _strip(tokens[-1], *ends)))
        else:  # Replace treats all tokens alike
            stages.append(_Each(0, lambda tokens, decode=decode: decode(tokens[-1:])))
    return stages


def _strip(text: str, content: str, start: int, stop: int) -> str:
    left = min(start, len(text) - len(text.lstrip(content)))
    right = min(stop, len(text) - len(text.rstrip(content)))
    return text[left : max(left, len(text) - right)]


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flat(inner)]


_LIBRARY: dict[str, Callable[[list[str]], str]] = {}


def _library(part: dict[str, Any]) -> Callable[[list[str]], str]:
    """The library's own decoder of one part; made once."""
    key = json.dumps(part, sort_keys=True)
    if key not in _LIBRARY:
        model = {"type": "BPE", "vocab": {}, "merges": []}
        backend = Backend.from_str(json.dumps({"model": model, "decoder": part}))
        assert backend.decoder is not None
        _LIBRARY[key] = backend.decoder.decode
    return _LIBRARY[key]
