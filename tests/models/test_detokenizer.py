"""Streamed text against the decoders of `tokenizers`, which decode whole sequences."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, processors
from tokenizers import Tokenizer as Backend

from jaxkv.models.tokenizer import Tokenizer

PIECES = [
    "\u2581the", "\u2581", "a", "aa", "##ing", "##", "low</w>", "</w>", "|", "<pad>", " ", "  b ",
    "n't", ".", "do", "not", "'", "\u20ac", "\u0120caf\u00c3\u00a9", "\u00e2", "\u0124", "\u00ac",
    "\ufffd", "\u0120", "x<0x41>", "<0x4G>",
]  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0xE2, 0x82, 0xAC, 0xFF, 0xC3, 0xF0, 0x9F, 0x98, 0x80)]
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "metaspace": decoders.Metaspace(),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "word piece": decoders.WordPiece(),
    "word piece raw": decoders.WordPiece(prefix="a", cleanup=False),
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "ctc raw": decoders.CTC(cleanup=False),
    "byte fallback": decoders.ByteFallback(),
    "fuse": decoders.Fuse(),
    "strip": decoders.Strip(" ", 1, 0),
    "replace": decoders.Replace("a", "bb"),
    "regex": decoders.Replace(Regex("a+"), "b"),
    "llama": decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]),
    "fused replace": decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", " ")]),
    "fused regex": decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex("a+"), "-")]),
    "ctc, then words": decoders.Sequence([decoders.CTC(), decoders.WordPiece()]),
    "nested": decoders.Sequence([
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), decoders.BPEDecoder(),
    ]),
    "fused spaces": decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
    "bytes after fuse": decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
}  # fmt: skip


def tokenizer_with(decoder, pieces=(*PIECES, *BYTES)):
    """Begins texts with <s>, so that a whole sequence is a text of its own."""
    vocab = {piece: i for i, piece in enumerate(["<s>", "<end>", *pieces])}
    backend = Backend(models.WordLevel(vocab, unk_token="<s>"))
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("<end>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


def token_id(tokenizer, token) -> int:
    found = tokenizer.backend.token_to_id(token)
    assert found is not None
    return found


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=25, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(PIECES) + len(BYTES) + 3), max_size=30),
    sizes=st.lists(st.integers(0, 4), max_size=30),
    skip=st.booleans(),
)
def test_pieces_join_to_the_decode_of_the_whole(name, ids, sizes, skip):
    tokenizer = tokenizer_with(DECODERS[name])
    ids, stream, text, at = [0, *ids], tokenizer.stream(skip_special=skip), "", 0
    for size in [*sizes, len(ids)]:
        text += stream.push(ids[at : at + size])
        at += size
    text += stream.flush()
    assert text == tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert text == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=10, deadline=None)
@given(ids=st.lists(st.integers(2, len(PIECES) + len(BYTES) + 1), max_size=12))
def test_any_split_of_a_continuation_gives_the_same_text(name, ids):
    tokenizer = tokenizer_with(DECODERS[name])
    stream = tokenizer.stream()
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("name", "pieces", "output"),
    [
        ("metaspace", ["\u2581cat", "\u2581sat"], " sat"),
        ("llama", ["\u2581cat", "\u2581sat"], " sat"),
        ("word piece", ["cat", "sat"], " sat"),
        ("word piece", ["cat", "##s"], "s"),
        ("none", ["cat", "sat"], " sat"),
        ("byte level", ["cat", "\u0120sat"], " sat"),
    ],
)
def test_the_text_of_an_output_joins_its_prompts(name, pieces, output):
    tokenizer = tokenizer_with(DECODERS[name], pieces)
    assert tokenizer.decode([0, 2]) == "cat"
    assert tokenizer.decode([3]) == output
    assert tokenizer.decode([0, 2, 3]) == "cat" + output


@pytest.mark.parametrize("byte", [0xFF, 0xC0, 0x80])
def test_bytes_that_begin_no_character_hold_nothing_back(byte):
    stream = Tokenizer.bytes().stream()
    assert stream.push([byte]) == "\ufffd"
    assert stream.push(list(b"ab")) == "ab"


def test_a_character_cut_by_another_is_shown_at_once():
    stream = Tokenizer.bytes().stream()
    assert stream.push([0xE2, 0x82]) == ""
    assert stream.push([0x61]) == "\ufffda"


def test_a_run_of_byte_tokens_is_shown_when_it_ends_or_is_invalid():
    tokenizer = tokenizer_with(DECODERS["llama"])
    tokens = (("<0xE2>", "<0x82>", "<0xAC>"), ("a",), ("<0xFF>",))
    euro, letter, wrong = ([token_id(tokenizer, t) for t in run] for run in tokens)
    stream = tokenizer.stream()
    assert stream.push(euro) == ""
    assert stream.push(letter) == "\u20aca"
    assert stream.push(euro + wrong) == "\ufffd" * 4
    assert stream.push(wrong) == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = tokenizer_with(DECODERS["byte level"])
    letter = token_id(tokenizer, "a")
    assert tokenizer.special_tokens == {"<s>": 0, "<end>": 1}
    assert tokenizer.stream().push([letter, 1, letter]) == "aa"
    assert tokenizer.stream(skip_special=False).push([letter, 1, letter]) == "a<end>a"


def test_a_token_of_a_long_text_costs_as_much_as_one_of_a_short_text():
    tokenizer = tokenizer_with(DECODERS["llama"])
    byte = token_id(tokenizer, "<0x41>")  # a run that is held back throughout

    def seconds(count):
        stream, begin = tokenizer.stream(), time.process_time()
        for _ in range(count):
            stream.push([byte])
        return time.process_time() - begin

    short = min(seconds(1000) for _ in range(3))
    assert min(seconds(20_000) for _ in range(2)) < 20 * short * 4


def test_a_token_of_spaces_is_stripped_from_both_ends():
    tokenizer = tokenizer_with(decoders.Strip(" ", 1, 1), [" ", "  b ", "   "])
    assert tokenizer.decode([0, 2, 3, 4]) == " b "
    whole = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)])
    stream = tokenizer_with(whole, [" ", "  b ", "   "]).stream()
    assert [stream.push([i]) for i in (0, 2, 3, 4)] == ["", "", "  b", "   "]
    assert stream.flush() == ""
