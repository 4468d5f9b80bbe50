"""Conversion of text to token ids and back, with the tokenizer of a checkpoint."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend

from jaxkv.errors import JaxkvError
from jaxkv.models import chat
from jaxkv.models.byte_level import byte_level
from jaxkv.models.detokenizer import Detokenizer, byte_alphabet
from jaxkv.models.files import read_json
from jaxkv.models.gguf_file import GGUFFile
from jaxkv.models.gguf_tokenizer import gguf_backend
from jaxkv.models.gguf_vocabulary import read_vocabulary

_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


class Tokenizer:
    """A tokenizer and, when the checkpoint has one, its chat template.

    Args:
      backend: the `tokenizers` tokenizer. Its truncation and padding are switched off.
      chat_template: Jinja source, or sources by name ("default", "tool_use" ...), or None.
      special: special tokens that the template may use, by name, such as bos_token.
      bos_token_id: id to put before a prompt that does not start with it; None to put none but what
        the backend itself puts.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: chat.Templates | None = None,
        special: dict[str, str] | None = None,
        bos_token_id: int | None = None,
    ):
        # Trainers save both with the tokenizer; they are no part of what a text's tokens are.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.special = special or {}
        self.bos_token_id = bos_token_id
        if bos_token_id is not None:
            self.special.setdefault("bos_token", backend.id_to_token(bos_token_id) or "")

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Loads `tokenizer.json` with what stands beside it.

        `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` name special and
        added tokens and say whether texts begin with BOS or end with EOS; for chat templates see
        `jaxkv.models.chat.read_templates`.

        Raises:
          JaxkvError: a file is missing or cannot be read, or a field has a value of another type;
            the error names it.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise JaxkvError(f"{folder} has no tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise JaxkvError(f"{path} is not a readable tokenizer: {error}") from None
        config_path = folder / "tokenizer_config.json"
        config = _read_object(config_path)
        special_map = _read_object(folder / "special_tokens_map.json")
        special = {}
        for name in _NAMES:
            token = config[name] if name in config else special_map.get(name)
            if token is not None:
                special[name] = _content(token, config_path, name)
        _add_tokens(backend, folder, config, special_map, special)
        _set_ends(backend, config, special, config_path)
        return cls(backend, chat_template=chat.read_templates(folder, config), special=special)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Rebuilds the tokenizer from the vocabulary, merges and pre-tokenizer of a GGUF file.

        Raises:
          CheckpointError: a vocabulary that is incomplete or contradicts itself.
          ConfigError: an unknown tokenizer, pre-tokenizer or field; the error names it.
        """
        vocabulary = read_vocabulary(file)
        return cls(
            gguf_backend(file, vocabulary),
            chat_template=file.get("tokenizer.chat_template", str),
            special={name: vocabulary.tokens[i] for name, i in vocabulary.special.items()},
            bos_token_id=vocabulary.bos_token_id,
        )

    @classmethod
    def bytes(cls) -> Tokenizer:
        """A tokenizer with one token per byte, whose id is the byte."""
        return cls(byte_level(models.BPE(byte_alphabet(), []), []))

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of text; special tokens spelled out in the text are recognised.

        Args:
          add_bos: add the tokens that the checkpoint puts around a text. A text that spells out the
            beginning-of-sequence token, as chat templates do, gets no second one.
        """
        ids = self.backend.encode(text, add_special_tokens=add_bos).ids
        first = self._first_id if add_bos else None
        if first is None:
            return ids
        if ids[:2] == [first, first]:  # the text's own, and the backend's
            return ids[1:]
        return ids if ids[:1] == [first] else [first, *ids]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Ids that start with a token that `encode` puts first are a text of their own. Others
        continue a text: they keep the space before their first word, so that the texts of a prompt
        and of its output join.
        """
        stream = self.stream(skip_special=skip_special)
        return stream.push(token_ids) + stream.flush()

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        """A detokenizer for tokens that arrive one by one; its pieces join to `decode` of them all.

        Args:
          skip_special: leave special tokens out of the text. False shows them, to look for stop
            texts that contain some.
        """
        decoder = self.backend.decoder
        state: Any = None if decoder is None else decoder.__getstate__()
        return Detokenizer(
            self.backend,
            None if state is None else json.loads(state),
            special=frozenset(self.special_tokens) if skip_special else frozenset(),
            first_id=self._first_id,
        )

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are left out of decoded text, by their text."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Renders messages with the checkpoint's chat template, by default as a prompt for a reply.

        Args:
          messages: messages with their role and content, as the template expects them.
          tools: JSON schemas of functions that the model may call.
          documents: documents for templates that retrieve.
          add_generation_prompt: end with the beginning of the assistant's reply.
          template: name of the template, of several; by default "tool_use" if there are tools and
            such a template, else "default".
          **variables: further variables of the template, such as enable_thinking.

        Raises:
          JaxkvError: the checkpoint has no template, or the template rejects the messages.

        Example:
          >>> tokenizer = Tokenizer.bytes()
          >>> tokenizer.chat_template = "{{ messages[0].role }}: {{ messages[0].content }}"
          >>> tokenizer.chat([{"role": "user", "content": "hello"}])
          'user: hello'
        """
        source = chat.choose(self.chat_template, template, tools=tools)
        given = dict(messages=messages, tools=tools, documents=documents,
                     add_generation_prompt=add_generation_prompt)  # fmt: skip
        return chat.render(source, self.special | given | variables)

    def save(self, folder: Path) -> None:
        """Writes the tokenizer for `from_folder`, which then encodes, decodes and renders alike."""
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = dict(self.special)
        if self.bos_token_id is not None:
            config |= {"bos_token": self.backend.id_to_token(self.bos_token_id),
                       "add_bos_token": True}  # fmt: skip
        for stale in ("special_tokens_map.json", "added_tokens.json"):
            (folder / stale).unlink(missing_ok=True)
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        chat.write_templates(folder, self.chat_template)

    @functools.cached_property
    def _first_id(self) -> int | None:
        """Id of the token that texts begin with, if they do."""
        if self.bos_token_id is not None:
            return self.bos_token_id
        around = self.backend.encode("", add_special_tokens=True).ids[:1]
        begins = around and around == self.backend.encode("a", add_special_tokens=True).ids[:1]
        return around[0] if begins else None


def _read_object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _content(token: Any, path: Path, name: str) -> str:
    """Text of a special token, written as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise JaxkvError(f"{path}: {name} must be a string, an object with content, or null, got "
                         f"{token!r}")  # fmt: skip
    return content


def _add_tokens(
    backend: Backend,
    folder: Path,
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    special: Mapping[str, str],
) -> None:
    """Adds the added tokens that tokenizer.json lacks, and marks special tokens as such."""
    path = folder / "tokenizer_config.json"
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
        raise JaxkvError(f"{path}: added_tokens_decoder must be an object of tokens by id")
    wanted: list[tuple[int, AddedToken]] = []
    for key, token in listed.items():
        text = _content(token, path, f"added_tokens_decoder[{key!r}]")
        given = token if isinstance(token, dict) else {}
        wanted.append((int(key), AddedToken(text, **{f: bool(given.get(f)) for f in _FLAGS})))
    legacy = _read_object(folder / "added_tokens.json")
    wanted += [(i, AddedToken(text, normalized=True)) for text, i in legacy.items()]
    for i, token in sorted(wanted, key=lambda entry: entry[0]):
        if token.content:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if token.content and backend.token_to_id(token.content) != i:
            raise JaxkvError(
                f"{folder}: the added token {token.content!r} should have id {i}, but "
                f"tokenizer.json gives it {backend.token_to_id(token.content)}"
            )
    names = list(special.values())
    for field in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(field) or special_map.get(field) or []
        entries = more.values() if isinstance(more, dict) else more
        names += [_content(token, path, field) for token in entries]
    known = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    # Others than these would get ids that the model does not have.
    marked = [AddedToken(name, special=True, normalized=False) for name in dict.fromkeys(names)
              if name not in known and backend.token_to_id(name) is not None]  # fmt: skip
    backend.add_special_tokens(marked)


def _set_ends(
    backend: Backend, config: Mapping[str, Any], special: Mapping[str, str], path: Path
) -> None:
    """Follows add_bos_token and add_eos_token, if given, instead of what tokenizer.json puts."""
    flags = {name: config.get(f"add_{name}_token") for name in ("bos", "eos")}
    if all(flag is None for flag in flags.values()):
        return
    around = backend.encode("", add_special_tokens=True).ids
    ends = {}
    for name, flag in flags.items():
        if flag not in (None, True, False):
            raise JaxkvError(f"{path}: add_{name}_token must be true, false or null, got {flag!r}")
        token = special.get(f"{name}_token")
        token_id = None if token is None else backend.token_to_id(token)
        if flag and token_id is None:
            raise JaxkvError(f"{path}: add_{name}_token is true, but {name}_token={token!r} is not "
                             "a token of tokenizer.json")  # fmt: skip
        ends[name] = (token, token_id) if (token_id in around if flag is None else flag) else None
    kept = [end for end in ends.values() if end is not None]
    if around == [token_id for _, token_id in kept]:
        return
    bos_eos = {backend.token_to_id(special[f"{n}_token"]) for n in flags if f"{n}_token" in special}
    if not set(around) <= bos_eos:  # such as [CLS] and [SEP]: not what the flags speak of
        return
    bos, eos = ends["bos"], ends["eos"]
    single = f"{bos[0] + ' ' if bos else ''}$A{' ' + eos[0] if eos else ''}"
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=kept)
