"""Conversion of text to token ids and back, with the tokenizer of a checkpoint."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from jaxkv.errors import JaxkvError
from jaxkv.models.byte_level import byte_level
from jaxkv.models.files import read_json
from jaxkv.models.gguf_file import GGUFFile
from jaxkv.models.gguf_tokenizer import gguf_backend
from jaxkv.models.gguf_vocabulary import read_vocabulary


class Tokenizer:
    """A tokenizer and, when the checkpoint has one, its chat template.

    Args:
      backend: the `tokenizers` tokenizer.
      chat_template: Jinja source, or None.
      special: special tokens that the template may use, by name, such as bos_token.
      bos_token_id: id to put before a prompt that does not start with it; None to put none.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        special: dict[str, str] | None = None,
        bos_token_id: int | None = None,
    ):
        self.backend = backend
        self.chat_template = chat_template
        self.special = special or {}
        self.bos_token_id = bos_token_id

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Loads `tokenizer.json`, with `tokenizer_config.json` and `chat_template.jinja`."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise JaxkvError(f"{folder} has no tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise JaxkvError(f"{path} is not a readable tokenizer: {error}") from None
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        template_path = folder / "chat_template.jinja"
        template = template_path.read_text() if template_path.exists() else None
        special = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = config.get(name)
            if value is not None:
                special[name] = value["content"] if isinstance(value, dict) else value
        return cls(backend, chat_template=template or config.get("chat_template"), special=special)

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
        printable = pre_tokenizers.ByteLevel.alphabet()
        # GPT-2's table: bytes that print stand for themselves, others take code points from 256.
        vocab, spare = {}, 256
        for byte in range(256):
            char = chr(byte)
            if char not in printable or byte in (0x20, 0xA0, 0xAD) or byte < 0x21:
                char, spare = chr(spare), spare + 1
            vocab[char] = byte
        return cls(byte_level(models.BPE(vocab, []), []))

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of text; special tokens spelled out in the text are recognised.

        Args:
          add_bos: start with the beginning-of-sequence token if the checkpoint uses one. False for
            text from a chat template.
        """
        ids = self.backend.encode(text, add_special_tokens=add_bos).ids
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special)

    def stream(self) -> Detokenizer:
        """A detokenizer for tokens that arrive one by one."""
        return Detokenizer(self)

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """Renders messages with the checkpoint's chat template, as a prompt for a reply.

        Raises:
          JaxkvError: the checkpoint has no template, or the template rejects the messages.
        """
        if self.chat_template is None:
            raise JaxkvError("this checkpoint has no chat template; drop --chat")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: str):
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=True, **self.special
            )
        except jinja2.TemplateError as error:
            raise JaxkvError(f"the chat template rejected the messages: {error}") from None

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and the chat template, for `from_folder`."""
        self.backend.save(str(folder / "tokenizer.json"))
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template)


class Detokenizer:
    """Text of a growing token sequence, piece by piece; holds back incomplete characters.

    Each token decodes a window of recent tokens, not the whole text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []  # tokens since the last clean cut
        self._shown = 0  # characters of the window's text already returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that they complete."""
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window)
        if text.endswith("\ufffd"):
            return ""
        piece = text[self._shown :]
        self._shown = len(text)
        if len(self._window) > 16:
            # A byte-level token's text does not depend on its neighbours: any clean cut will do.
            self._window, self._shown = [], 0
        return piece

    def flush(self) -> str:
        """Returns the text held back, incomplete characters included."""
        text = self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return text
