"""GGUF files as people have them: what llama.cpp reads is read alike, the rest refused by name."""

import struct
import time

import jax
import numpy as np
import pytest
from flax import nnx
from gguf_cases import BYTES, write

from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.models import Tokenizer, load, read_config
from jaxkv.models.errors import CheckpointError
from jaxkv.models.gguf_file import GGUFFile
from jaxkv.models.gguf_loader import load_gguf


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def ends(path, *args, **fields):
    return read_config(write(path, *args, **fields)).eos_token_ids


# -- end tokens ------------------------------------------------------------------------------


def test_end_of_turn_is_known_by_its_text_when_only_the_end_of_text_is_named(path):
    tokens = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>"]
    assert ends(path, tokens, types=[3] * 4, tokenizer__ggml__eos_token_id=258) == (258, 259, 260)


def test_end_tokens_that_fields_name_come_first_whatever_their_texts(path):
    fields = {f"tokenizer__ggml__{name}_token_id": i for name, i in
              dict(eos=260, eot=258, eom=259, fim_pad=257).items()}  # fmt: skip
    assert ends(path, ["<q>", "<x>", "<y>", "<z>"], **fields) == (260, 258, 259, 257)


def test_a_known_end_text_is_a_control_token_whatever_its_type(path):
    tokenizer = load(write(path, ["<|im_end|>"], types=[1])).tokenizer
    assert tokenizer.encode("a<|im_end|>") == [97, 257]
    assert tokenizer.decode([97, 257]) == "a"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<|end|>"], {257}),
        (["<|end|>", "<|return|>", "<|call|>"], {258, 259}),  # there it ends a part of an answer
        (["<|end|>", "<|flush|>", "<|calls|>"], {258, 259}),
        (["</s>"], {257}),
        (["</s>", "<|tool_response>"], {258}),
        (["<fim_pad>", "<|repo_name|>", "<|file_sep|>", "<fim_prefix>"], {257, 258, 259}),
    ],
)
def test_end_texts_with_exceptions_as_in_llama_cpp(path, tokens, expected):
    assert set(ends(path, tokens)) == expected


def test_an_end_token_outside_the_vocabulary_is_refused(path):
    with pytest.raises(CheckpointError, match=r"eos_token_id=999 is outside the vocabulary of 257"):
        ends(path, tokenizer__ggml__eos_token_id=999)
    assert ends(path, tokenizer__ggml__padding_token_id=-1) == ()  # what converters write for none


# -- beginning of text -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "add", "starts"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
     ("llama-bpe", False, False), (None, True, True)],
)  # fmt: skip
def test_prompts_start_with_the_token_that_the_file_says(path, pre, add, starts):
    write(path, ["<s>"], types=[3], pre=pre, tokenizer__ggml__bos_token_id=257,
          tokenizer__ggml__add_bos_token=add)  # fmt: skip
    assert load(path).tokenizer.encode("a") == ([257, 97] if starts else [97])


@pytest.mark.parametrize(("pre", "add"), [("gpt-2", True), ("llama-bpe", None)])
def test_a_beginning_that_no_field_names_is_refused(path, pre, add):
    write(path, pre=pre, tokenizer__ggml__add_bos_token=add)
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.bos_token_id is missing"):
        load(path)


# -- vocabulary ------------------------------------------------------------------------------


def test_a_text_of_two_tokens_is_refused_with_both_ids(path):
    with pytest.raises(CheckpointError, match=r"'<pad>' twice, as 257 and 258"):
        load(write(path, ["<pad>", "<pad>"]))


def test_tokens_without_a_text_get_different_names(path):
    tokenizer = load(write(path, ["", "", "<x>"], types=[3, 3, 3])).tokenizer
    assert tokenizer.decode([257, 258], skip_special=False) == "[EMPTY_257][EMPTY_258]"
    assert tokenizer.encode("<x>") == [259]


def test_without_a_pre_tokenizer_the_default_of_llama_cpp_cuts_the_text(path):
    merges = ["1 2", "12 3", "123 4", "\u0120 $", "$ x"]
    tokens = ["12", "123", "1234", "\u0120$", "$x"]
    default = load(write(path, tokens, merges=merges, pre=None)).tokenizer
    other = load(write(path, tokens, merges=merges, pre="gpt-2")).tokenizer
    assert default.encode("1234") == [258, 52]  # digits in threes
    assert other.encode("1234") == [259]
    assert default.encode(" $x") == [32, 36, 120]  # punctuation alone, without its space
    assert other.encode(" $x") == [260, 120]
    assert load(write(path, tokens, merges=merges, pre="default")).tokenizer.encode("1234") == [
        258,
        52,
    ]


def test_the_first_of_two_equal_merges_counts(path):
    merges = ["a b", "b c", "a b"]
    assert load(write(path, ["bc"], merges=merges)).tokenizer.encode("abc") == [256, 99]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(pre="qwen2"), r"tokenizer\.ggml\.pre='qwen2' must be one of default, gpt-2"),
        (dict(tokenizer__ggml__model="llama"), r"tokenizer\.ggml\.model='llama'; only 'gpt2'"),
        (dict(drop=["tokenizer.ggml.merges"]), r"lacks the field tokenizer\.ggml\.merges"),
        (dict(drop=["tokenizer.ggml.tokens"]), r"lacks the field tokenizer\.ggml\.tokens"),
        (dict(merges=["a zz"]), r"merges do not fit tokenizer\.ggml\.tokens"),
        (dict(merges=["ab"]), r"merges has 'ab', which is not two texts"),
        (dict(tokenizer__ggml__token_type=[1, 1]), r"token_type must have .* 257 tokens"),
        (dict(tokenizer__ggml__add_eos_token=True), r"add_eos_token=True is not supported"),
        (dict(tokenizer__ggml__add_space_prefix=True), r"add_space_prefix=True is not supported"),
        (dict(tokenizer__ggml__suppress_tokens=[3]), r"suppress_tokens=\[3\] is not supported"),
        (dict(tokenizer__ggml__new_rule=1), r"field tokenizer\.ggml\.new_rule=1 is not supported"),
        (dict(tokenizer__ggml__bos_token_id="x"), r"bos_token_id='x' must be an integer"),
        (dict(tokenizer__chat_template=3), r"tokenizer\.chat_template=3 must be a text"),
        (dict(tensors={"token_embd.weight": np.ones((300, 16), np.float32)}),
         r"tokens has 257 texts, and token_embd\.weight has 300 rows"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_is_not_understood_is_refused_by_its_field(path, changes, message):
    with pytest.raises(JaxkvError, match=message):
        load(write(path, **changes))


# -- the file --------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused(path, tmp_path):
    data = write(path).read_bytes()
    sizes = [*range(0, 64), *range(64, len(data), 997), len(data) - 1]
    cut = tmp_path / "cut.gguf"
    for size in sizes:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf is not a readable GGUF file"):
            GGUFFile(cut)


def test_bytes_changed_in_the_header_give_one_error_or_another_file(path, tmp_path):
    data = bytearray(write(path).read_bytes())
    rng = np.random.default_rng(1)
    wrong, errors = tmp_path / "wrong.gguf", []
    for _ in range(200):
        changed = bytearray(data)
        for at in rng.integers(0, 9000, 3):
            changed[at] = rng.integers(256)
        wrong.write_bytes(changed)
        try:
            read_config(wrong)
            Tokenizer.from_gguf(GGUFFile(wrong))
        except JaxkvError as error:
            errors.append(error)
    assert len(errors) > 50
    assert not any(error.__cause__ or "\n" in str(error) for error in errors)


def header(fields=b"", count=0, version=3, order="<"):
    return b"GGUF" + struct.pack(order + "IQQ", version, 0, count) + fields


def field(key, kind, value):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04" + bytes(100), "starts with b'PK"),
        (header(version=1), "version, 1, is not supported"),
        (header(order=">"), "big-endian"),
        (header(field(b"a", 99, b""), 1), "a has an unknown type, 99"),
        (header(field(b"a", 5, bytes(4)) * 2, 2), "the field a twice"),
        (header(field(b"a", 8, struct.pack("<Q", 1) + b"\xff"), 1), "text of a is not UTF-8"),
        (header(field(b"a", 8, struct.pack("<Q", 2**63)), 1), "cut short"),
        (header(field(b"a", 9, struct.pack("<IQ", 8, 2**60)), 1), "cut short"),
        (header(field(b"a", 9, struct.pack("<IQ", 5, 2**60)), 1), "cut short"),
        (header(count=2**60), "cut short"),
        (header(field(b"general.alignment", 4, bytes(4)), 1), "alignment=0"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused_with_the_reason(path, data, message):
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def texts(values):
    body = b"".join(struct.pack("<Q", len(x)) + x for x in (value.encode() for value in values))
    return struct.pack("<IQ", 8, len(values)) + body


def test_a_large_vocabulary_opens_in_a_second(path):
    """As many tokens and merges as Llama 3 has."""
    letters = [chr(c) for c in range(97, 123)]
    pairs = [(a, b) for a in letters for b in letters if a + b != "ab"]
    fours = [(a + b, c + d) for a, b in pairs for c, d in pairs][:126_000]
    tokens = [*BYTES, "ab", *(a + b for a, b in pairs + fours)]
    merges = ["a b", *(f"{a} {b}" for a, b in pairs + fours)]
    named = {b"model": (8, struct.pack("<Q", 4) + b"gpt2"), b"tokens": (9, texts(tokens)),
             b"pre": (8, struct.pack("<Q", 5) + b"gpt-2"),
             b"merges": (9, texts(merges + merges + merges[:27_000]))}  # fmt: skip
    fields = [field(b"tokenizer.ggml." + key, *value) for key, value in named.items()]
    path.write_bytes(header(b"".join(fields), len(fields)))
    start = time.process_time()
    tokenizer = Tokenizer.from_gguf(GGUFFile(path))
    spent = time.process_time() - start
    assert tokenizer.encode("aaaa") == [tokens.index("aaaa")]
    assert spent < 3  # measured: 0.5 s; the reader of the package gguf takes 8 s


def test_a_description_that_is_not_utf_8_does_not_matter(path):
    path.write_bytes(header(field(b"general.name", 8, struct.pack("<Q", 1) + b"\xff"), 1))
    assert GGUFFile(path).fields == {"general.name": "\ufffd"}


def test_one_part_of_a_split_file_names_the_parts(tmp_path):
    path = tmp_path / "m-00002-of-00003.gguf"
    write(path, split__no=1, split__count=3)
    parts = r"part 2 of 3 .*m-00001-of-00003\.gguf to m-00003-of-00003\.gguf"
    with pytest.raises(CheckpointError, match=parts + r".*--merge m-00001-of-00003\.gguf m\.gguf"):
        load(path)
    load(write(tmp_path / "whole.gguf", split__no=0, split__count=1))


# -- config ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"llama.expert_count": 0, "llama.expert_used_count": 0},
        {"llama.attention.head_count": [2], "llama.attention.head_count_kv": [1],
         "llama.feed_forward_length": [32]},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0},
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 0.0},
        {"llama.rope.scaling.finetuned": True, "llama.rope.scaling.attn_factor": 1.0},
        {"llama.attention.sliding_window": 0, "llama.attention.causal": True,
         "llama.hidden_activation": "silu", "llama.logit_scale": 1.0},
        {"quantize.imatrix.file": "x", "general.name": "y", "other.thing": 3},
        {"tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.scores": [0.0],
         "tokenizer.chat_template.tools": "x"},
    ],
)  # fmt: skip
def test_what_cannot_change_the_result_is_let_pass(path, tmp_path, fields):
    plain = read_config(write(tmp_path / "plain.gguf"))
    assert load(write(path, add=fields)).model.config == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.factor": 4.0}, r"factor=4\.0 .*missing llama\.rope\.scaling\.type"),
        ({"llama.rope.scale_linear": 2.0}, r"llama\.rope\.scale_linear=2\.0"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, "factor=4.0"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 1.0}, "type='yarn'"),
        ({"llama.rope.scaling.type": 3}, r"type=3 must be a text"),
        ({"llama.expert_count": 8}, r"llama\.expert_count=8: mixtures of experts"),
        ({"llama.attention.head_count": [2, 2]}, r"head_count=\[2, 2\] .*1 layers"),
        ({"llama.attention.head_count": 2.0}, r"head_count=2\.0 must be an integer"),
        ({"llama.attention.head_count": "2"}, r"head_count='2' must be an integer"),
        ({"llama.attention.head_count": True}, r"head_count=True must be an integer"),
        ({"llama.attention.head_count": 3, "llama.attention.head_count_kv": 3},
         r"embedding_length=16 must be a multiple of llama\.attention\.head_count=3"),
        ({"llama.attention.head_count": 0}, r"head_count=0"),
        ({"llama.embedding_length": -16}, r"model\.gguf: hidden_size=-16"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps=nan"),
        ({"llama.rope.freq_base": 0.0}, r"rope_theta=0\.0"),
        ({"llama.rope.dimension_count": 4}, r"dimension_count=4 differs from the head dimension 8"),
        ({"llama.attention.sliding_window": 4096}, r"sliding_window=4096 is not supported"),
        ({"llama.attention.causal": False}, r"causal=False is not supported"),
        ({"llama.attention.temperature_length": 4}, r"temperature_length=4 is not supported"),
        ({"general.type": "adapter"}, r"general\.type='adapter'"),
    ],
)  # fmt: skip
def test_what_may_change_the_result_is_refused_by_its_field(path, fields, message):
    write(path, add=fields)
    for call in (read_config, load):
        with pytest.raises(JaxkvError, match=message) as caught:
            call(path)
        assert str(path) in str(caught.value)


def test_layers_of_different_sizes_are_refused(path):
    write(path, layers=2, add={"llama.attention.head_count_kv": [1, 2]})
    with pytest.raises(ConfigError, match=r"head_count_kv=\[1, 2\]: layers of different sizes"):
        load(path)


# -- tensors ---------------------------------------------------------------------------------


def test_biases_of_some_modules_and_layers_are_used_and_the_others_are_zero(path, tmp_path):
    values = [("attn_q", 16, 0.5), ("attn_k", 8, 0.25), ("attn_v", 8, 1), ("attn_output", 16, 0),
              ("ffn_up", 32, 2), ("ffn_gate", 32, 0), ("ffn_down", 16, 0)]  # fmt: skip
    bias = {f"blk.{i}.{name}.bias": np.full(size, value, np.float32)
            for name, size, value in values for i in (0, 1)}  # fmt: skip
    bias["blk.1.ffn_up.bias"] *= 0
    some = {name: value for name, value in bias.items() if value.any()}
    assert len(some) < len(bias) / 1.5
    want = load(write(tmp_path / "all.gguf", layers=2, tensors=bias)).model
    got = load(write(path, layers=2, tensors=some)).model
    for x, y in zip(*(jax.tree.leaves(nnx.state(m)) for m in (got, want)), strict=True):
        np.testing.assert_array_equal(x, y)
    mlp = nnx.to_pure_dict(nnx.state(got))["layers"][0]["mlp"]
    assert np.any(mlp["gate_up_proj"]["bias"])
    assert not np.any(mlp["down_proj"]["bias"])


def test_frequencies_of_old_files_are_ignored(path):
    load(write(path, tensors={"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(drop=["blk.0.ffn_up.weight"]), r"1 missing \(model\.layers\.0\.mlp\.up_proj"),
        (dict(drop=["token_embd.weight"]), r"lacks the tensor token_embd\.weight"),
        (dict(tensors={"blk.0.attn_qkv.weight": np.ones((4, 4), np.float32)}),
         r"1 unexpected \(blk\.0\.attn_qkv\.weight\)"),
        (dict(tensors={"output_norm.weight": np.ones(8, np.float32)}),
         r"model\.norm\.weight must have shape \(16,\), got \(8,\)"),
        (dict(tensors={"output_norm.weight": np.ones(16, np.int32)}),
         r"model\.norm\.weight is stored with quantisation I32"),
        (dict(tensors={"rope_freqs.weight": np.ones(3, np.float32)}), r"have head_dim // 2 = 4"),
        (dict(tensors={"rope_freqs.weight": np.zeros(4, np.float32)}), r"rope_divisors=0\.0"),
        (dict(tensors={"rope_freqs.weight": np.ones(4, np.int32)}), r"freqs\.weight is stored"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named_before_any_is_read(path, changes, message):
    with pytest.raises(JaxkvError, match=message):
        load(write(path, **changes))


def test_float64_tensors_are_read(path):
    load_gguf(GGUFFile(write(path, tensors={"output_norm.weight": np.ones(16)})), dtype="float32")
