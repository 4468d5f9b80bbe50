"""The tokenizer rebuilt from a GGUF against llama.cpp's ids for the same file."""

import json
from pathlib import Path

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.models.tokenizer import Detokenizer, Tokenizer

DATA = Path(__file__).parent.parent / "data"


def read(name):
    return json.loads((DATA / name).read_text())


def test_ids_equal_llama_cpp(smollm2):
    cases = read("smollm2_tokens.json")["cases"]
    assert len(cases) >= 50
    assert not [c for c in cases if smollm2.tokenizer.encode(c["text"]) != c["ids"]]


def test_text_equals_llama_cpp(smollm2):
    for case in read("smollm2_tokens.json")["cases"]:
        assert smollm2.tokenizer.decode(case["ids"], skip_special=False) == case["decoded"]


def test_prompts_equal_llama_cpp(smollm2):
    for case in read("smollm2_greedy.json")["prompts"]:
        assert smollm2.tokenizer.encode(case["prompt"]) == case["prompt_ids"]


def test_chat_template(smollm2):
    for case in read("smollm2_chat.json")["conversations"]:
        prompt = smollm2.tokenizer.chat(case["messages"])
        assert prompt == case["prompt"]
        assert smollm2.tokenizer.encode(prompt, add_bos=False) == case["prompt_ids"]


def test_byte_tokenizer_is_the_identity_on_bytes():
    text = "".join(map(chr, range(1, 256))) + "h\u00e9llo \U0001f600\n\t  x"
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.backend.get_vocab_size() == 256


def test_byte_tokenizer_round_trips_through_a_folder(tmp_path):
    Tokenizer.bytes().save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).encode("a \u20ac") == list("a \u20ac".encode())


@pytest.mark.parametrize(
    "text",
    ["caf\u00e9 \U0001f600\U0001f468\u200d\U0001f469 end", "plain text " * 9, "\u65e5\u672c"],
)
def test_detokenizer_returns_whole_characters_and_the_full_text(text):
    tokenizer = Tokenizer.bytes()
    stream = Detokenizer(tokenizer)
    pieces = [stream.push([token]) for token in tokenizer.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


def test_detokenizer_flushes_half_a_character():
    stream = Detokenizer(Tokenizer.bytes())
    assert stream.push([0xE2]) == ""
    assert stream.flush() == "\ufffd"


def test_no_chat_template_is_an_error():
    with pytest.raises(JaxkvError, match="no chat template"):
        Tokenizer.bytes().chat([{"role": "user", "content": "hi"}])
