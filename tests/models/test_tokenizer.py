"""The tokenizer rebuilt from a GGUF against llama.cpp's ids for the same file."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors

from jaxkv.errors import JaxkvError
from jaxkv.models.tokenizer import Tokenizer

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
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in tokenizer.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


def test_detokenizer_flushes_half_a_character():
    stream = Tokenizer.bytes().stream()
    assert stream.push([0xE2]) == ""
    assert stream.flush() == "\ufffd"


def test_no_chat_template_is_an_error():
    with pytest.raises(JaxkvError, match="no chat template"):
        Tokenizer.bytes().chat([{"role": "user", "content": "hi"}])


def backend_with(*tokens, around=None):
    """Bytes, and special tokens from id 256 on."""
    backend = Tokenizer.bytes().backend
    backend.add_special_tokens([AddedToken(token) for token in tokens])
    if around is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[(t, backend.token_to_id(t)) for t in tokens]
        )
    return backend


def loaded(folder, backend, **files):
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return Tokenizer.from_folder(folder)


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = Tokenizer.bytes().backend
    backend.enable_truncation(8)
    backend.enable_padding(length=16, pad_id=0, pad_token="!")
    for tokenizer in (loaded(tmp_path, backend), Tokenizer(backend)):
        assert len(tokenizer.encode("x" * 40)) == 40
        assert tokenizer.encode("ab") == [97, 98]


@pytest.mark.parametrize(
    ("around", "flags", "ids"),
    [
        ("<s> $A", {}, [256, 120]),
        ("<s> $A", {"add_bos_token": False}, [120]),
        ("<s> $A", {"add_eos_token": True}, [256, 120, 257]),
        ("<s> $A </s>", {"add_eos_token": False}, [256, 120]),
        ("$A", {"add_bos_token": True}, [256, 120]),
        (None, {"add_bos_token": True}, [256, 120]),
        (None, {"add_bos_token": True, "add_eos_token": None}, [256, 120]),
        (None, {"add_bos_token": False}, [120]),
        (None, {}, [120]),
    ],
)
def test_flags_decide_about_the_ends_of_a_text(tmp_path, around, flags, ids):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | flags
    backend = backend_with("<s>", "</s>", around=around)
    tokenizer = loaded(tmp_path, backend, tokenizer_config=config)
    assert tokenizer.encode("x") == ids
    assert tokenizer.encode("x", add_bos=False) == [120]
    (tmp_path / "again").mkdir()
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.from_folder(tmp_path / "again").encode("x") == ids


def test_flags_leave_other_ends_alone(tmp_path):
    backend = backend_with("[CLS]", "[SEP]", around="[CLS] $A [SEP]")
    tokenizer = loaded(tmp_path, backend, tokenizer_config={"add_bos_token": False})
    assert tokenizer.encode("x") == [256, 120, 257]


@pytest.mark.parametrize("config", [{}, {"bos_token": "<s>"}])
def test_a_text_that_spells_its_beginning_gets_no_second_one(tmp_path, config):
    folder_tokenizer = loaded(tmp_path, backend_with("<s>", around="<s> $A"),
                              tokenizer_config=config)  # fmt: skip
    like_gguf = Tokenizer(backend_with("<s>"), bos_token_id=256)
    for tokenizer in (folder_tokenizer, like_gguf):
        assert tokenizer.encode("<s>x") == [256, 120]
        assert tokenizer.encode("x") == [256, 120]
        assert tokenizer.encode("") == [256]


def test_special_tokens_come_from_the_config_then_from_the_map(tmp_path):
    tokenizer = loaded(
        tmp_path, backend_with(),
        tokenizer_config={"bos_token": "A", "eos_token": None, "pad_token": {"content": "P"}},
        special_tokens_map={"bos_token": "B", "eos_token": "E", "unk_token": {"content": "U"}},
    )  # fmt: skip
    assert tokenizer.special == {"bos_token": "A", "pad_token": "P", "unk_token": "U"}
    assert tokenizer.special_tokens == {"A": 65, "P": 80, "U": 85}
    assert tokenizer.decode(list(b"xAyPzU")) == "xyz"


def test_added_tokens_of_the_config(tmp_path):
    tokenizer = loaded(
        tmp_path, backend_with(), added_tokens={"<c>": 258},
        tokenizer_config={"added_tokens_decoder": {
            "256": {"content": "<a>", "special": True, "lstrip": True},
            "257": {"content": "<b>", "special": False},
        }},
    )  # fmt: skip
    assert tokenizer.encode("x  <a><b><c>") == [120, 256, 257, 258]
    assert tokenizer.decode([120, 256, 257, 258]) == "x<b><c>"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": 7}, "bos_token must be a string"),
        ({"bos_token": {"text": "<s>"}}, "bos_token must be a string"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true, false or null"),
        ({"add_bos_token": True}, "bos_token=None is not a token"),
        ({"added_tokens_decoder": {"300": {"content": "<a>"}}}, "should have id 300.*256"),
        ({"added_tokens_decoder": ["<a>"]}, "added_tokens_decoder must be an object"),
    ],
)
def test_fields_that_cannot_be_followed_are_refused_by_name(tmp_path, config, message):
    with pytest.raises(JaxkvError, match=message):
        loaded(tmp_path, backend_with(), tokenizer_config=config)


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(Tokenizer.bytes().backend, bos_token_id=65, chat_template="{{ bos_token }}x"),
        Tokenizer(backend_with("<s>", around="<s> $A"), special={"bos_token": "<s>"}),
        Tokenizer(backend_with("<s>"), bos_token_id=256, special={"eos_token": "\u20ac"}),
    ],
)
def test_a_saved_tokenizer_says_the_same(tmp_path, tokenizer):
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "!"}')  # an earlier one's
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.special == tokenizer.special
    assert again.chat_template == tokenizer.chat_template
    assert again.encode("x<s>y") == tokenizer.encode("x<s>y")
