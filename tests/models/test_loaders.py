"""Valid checkpoints load; incomplete, damaged and unsupported ones give a clear error."""

import json
import shutil

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_cases import CASES, state_dict, tokens
from safetensors.flax import save_file as save_flax_file
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from jaxkv.errors import ConfigError
from jaxkv.models import (
    CheckpointError,
    Llama,
    LlamaConfig,
    Tokenizer,
    load,
    read_config,
    save_orbax,
)  # fmt: skip
from jaxkv.models.gguf_file import GGUFFile
from jaxkv.models.gguf_loader import load_gguf
from jaxkv.models.hf_loader import load_hf
from jaxkv.models.orbax_checkpoint import load_orbax

HF = {name: (config, seed) for name, config, seed in CASES}


def folder(path, name="gqa_9_3", *, config=None, drop=(), add=None):
    base, seed = HF[name]
    weights = state_dict(base, seed)
    weights = {k: v for k, v in weights.items() if k not in drop} | (add or {})
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(base | (config or {})))
    save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, path / "model.safetensors")
    return path


def shards(path, name="mha"):
    """The same weights in two files and an index."""
    base, seed = HF[name]
    weights = state_dict(base, seed)
    names = sorted(weights)
    files = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    (path / "config.json").write_text(json.dumps(base))
    for file, part in files.items():
        save_file({k: np.ascontiguousarray(weights[k]) for k in part}, path / file)
    index = {"weight_map": {k: file for file, part in files.items() for k in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def logits(model, name):
    config, seed = HF[name]
    return np.asarray(model.dense(jnp.asarray(tokens(config, seed))))


# -- tied embeddings -------------------------------------------------------------------------


def test_tied_without_head_uses_the_embedding(tmp_path):
    model = load_hf(folder(tmp_path, "gqa_9_3"), dtype=jnp.float32)
    assert not hasattr(model, "lm_head")


def test_tied_with_an_equal_head_stays_tied(tmp_path):
    base, seed = HF["gqa_9_3"]
    head = {"lm_head.weight": state_dict(base, seed)["model.embed_tokens.weight"]}
    model = load_hf(folder(tmp_path, add=head), dtype=jnp.float32)
    assert model.config.tie_word_embeddings
    assert not hasattr(model, "lm_head")


def test_tied_beside_another_head_is_not_tied(tmp_path):
    """transformers 5 unties them: the weights are right, and the config is not."""
    base, seed = HF["gqa_9_3"]
    embedding = state_dict(base, seed)["model.embed_tokens.weight"]
    head = {"lm_head.weight": embedding[::-1]}
    model = load_hf(folder(tmp_path, add=head), dtype=jnp.float32)
    assert not model.config.tie_word_embeddings
    plain = load_hf(folder(tmp_path / "plain"), dtype=jnp.float32)
    want = logits(plain, "gqa_9_3")[..., ::-1]
    np.testing.assert_allclose(logits(model, "gqa_9_3"), want, atol=1e-5)


def test_tied_with_only_a_head_takes_it_as_the_embedding(tmp_path):
    base, seed = HF["gqa_9_3"]
    embedding = state_dict(base, seed)["model.embed_tokens.weight"]
    only = folder(tmp_path, drop=["model.embed_tokens.weight"], add={"lm_head.weight": embedding})
    model = load_hf(only, dtype=jnp.float32)
    np.testing.assert_array_equal(model.embed.embedding[...], embedding)
    assert model.config.tie_word_embeddings


def test_tied_beside_a_head_of_another_shape_is_an_error(tmp_path):
    head = {"lm_head.weight": np.ones((3, 3), np.float32)}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight must have shape .*, got \(3, 3\)"):
        load_hf(folder(tmp_path, add=head), dtype=jnp.float32)


def test_untied_without_head_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"missing \(lm_head.weight\)"):
        load_hf(folder(tmp_path, "mha", drop=["lm_head.weight"]), dtype=jnp.float32)


# -- biases ----------------------------------------------------------------------------------


def test_biases_present_but_flag_false_is_an_error(tmp_path):
    path = folder(tmp_path, "attention_bias", config={"attention_bias": False})
    with pytest.raises(
        CheckpointError, match=r"8 unexpected \(model.layers.0.self_attn.k_proj.bias"
    ):
        load_hf(path, dtype=jnp.float32)


def test_only_some_biases_in_the_file_is_an_error(tmp_path):
    drop = [f"model.layers.{i}.self_attn.o_proj.bias" for i in range(2)]
    with pytest.raises(CheckpointError, match=r"2 missing .*o_proj\.bias"):
        load_hf(folder(tmp_path, "attention_bias", drop=drop), dtype=jnp.float32)


# -- shards ----------------------------------------------------------------------------------


def test_sharded_equals_one_file(tmp_path):
    shards(tmp_path)
    one = load_hf(folder(tmp_path / "one", "mha"), dtype=jnp.float32)
    np.testing.assert_array_equal(
        logits(load_hf(tmp_path, dtype=jnp.float32), "mha"), logits(one, "mha")
    )


def test_two_shards_without_an_index_are_both_read(tmp_path):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    load_hf(tmp_path, dtype=jnp.float32)


def test_missing_shard_is_named(tmp_path):
    shards(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors, which does not exist"):
        load_hf(tmp_path, dtype=jnp.float32)


def test_index_naming_a_tensor_its_shard_lacks(tmp_path):
    index = shards(tmp_path)
    index["weight_map"]["model.norm.weight"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"maps model\.norm\.weight to a\.safetensors"):
        load_hf(tmp_path, dtype=jnp.float32)


def test_tensor_in_two_shards(tmp_path):
    index = shards(tmp_path)
    base, seed = HF["mha"]
    name = next(k for k, f in index["weight_map"].items() if f == "a.safetensors")
    save_file({name: state_dict(base, seed)[name]}, tmp_path / "c.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=f"{name} is in both"):
        load_hf(tmp_path, dtype=jnp.float32)


def test_other_files_beside_the_model_do_not_matter(tmp_path):
    """A stale index, an adapter, and the same weights in Meta's form."""
    path = folder(tmp_path, "mha")
    for name in ("adapter_model", "consolidated", "consolidated.00"):
        save_file({"x": np.ones(3, np.float32)}, path / f"{name}.safetensors")
    stale = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(stale))
    load_hf(path, dtype=jnp.float32)
    (path / "model.safetensors.index.json").unlink()
    (path / "model.safetensors").rename(path / "weights.safetensors")
    load_hf(path, dtype=jnp.float32)


def test_only_other_files_are_no_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF["mha"][0]))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"no \.safetensors .*, only pytorch_model\.bin"):
        load_hf(tmp_path, dtype=jnp.float32)
    save_file({"x": np.ones(3, np.float32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"only adapter_model\.safetensors; it needs"):
        load_hf(tmp_path, dtype=jnp.float32)


@pytest.mark.parametrize(
    "index",
    [{"metadata": {}}, {"weight_map": None}, {"weight_map": ["model.norm.weight"]},
     {"weight_map": {}}, {"weight_map": {"x": 3}}, {"weight_map": {"x": "../a.safetensors"}}],
)  # fmt: skip
def test_an_index_without_files_is_named(tmp_path, index):
    (tmp_path / "config.json").write_text(json.dumps(HF["mha"][0]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map"):
        load_hf(tmp_path, dtype=jnp.float32)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_weights_of_a_quantised_type_are_named(tmp_path, kind):
    """Without their scales they would be other weights."""
    name = "model.layers.0.self_attn.q_proj.weight"
    value = jnp.asarray(state_dict(*HF["mha"])[name]).astype(kind)
    save_flax_file({name: value}, folder(tmp_path, "mha", drop=[name]) / "more.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is stored with type (F8|I8)"):
        load_hf(tmp_path, dtype=jnp.float32)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_weights_of_half_precision_are_read(tmp_path, kind):
    name = "model.norm.weight"
    value = jnp.full(64, 0.5, kind)
    save_flax_file({name: value}, folder(tmp_path, "mha", drop=[name]) / "more.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    weights = nnx.to_pure_dict(nnx.state(load_hf(tmp_path, dtype=jnp.float32)))
    np.testing.assert_array_equal(weights["norm"]["scale"], value)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
     "model.layers.1.self_attn.rotary_emb.cos_cached"],
)  # fmt: skip
def test_buffers_of_old_checkpoints_are_ignored(tmp_path, name):
    load_hf(folder(tmp_path, "mha", add={name: np.ones(4, np.float32)}), dtype=jnp.float32)


def test_files_that_cannot_be_read_are_named(tmp_path):
    path = folder(tmp_path, "mha")
    weights = path / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors (cannot be read|is damaged)"):
        load_hf(path, dtype=jnp.float32)
    weights.rmdir()
    weights.symlink_to(weights)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_hf(path, dtype=jnp.float32)
    weights.unlink()
    weights.touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
        load_hf(path, dtype=jnp.float32)
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    for call in (lambda: load_hf(path, dtype=jnp.float32), lambda: read_config(path)):
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Is a directory"):
            call()


def test_links_to_files_are_followed(tmp_path):
    """The cache of Hugging Face's hub holds links."""
    real = folder(tmp_path / "real", "mha")
    (tmp_path / "link").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "link" / name).symlink_to(real / name)
    load_hf(tmp_path / "link", dtype=jnp.float32)


def test_truncated_file_is_named(tmp_path):
    path = folder(tmp_path, "mha") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_hf(tmp_path, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(b"[]", "holds a list"), (b"{", "not valid"), (b"\xff\xfe", "not valid"), (b"", "not valid")],
)
def test_a_config_that_is_not_an_object_is_named(tmp_path, text, reason):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=reason):
        load_hf(tmp_path, dtype=jnp.float32)


def test_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF["mha"][0]))
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        load_hf(tmp_path, dtype=jnp.float32)


def test_wrong_shape_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"model.norm.weight must have shape .*, got \(7,\)"):
        load_hf(folder(tmp_path, add={"model.norm.weight": np.ones(7, np.float32)}),
                dtype=jnp.float32)  # fmt: skip


# -- unsupported configs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"), ("model_type", "qwen2"),
        ("sliding_window", 4096), ("rope_interleaved", True),
        ("quantization_config", {"bits": 4}),
    ],
)  # fmt: skip
def test_unsupported_field_is_named(field, value):
    with pytest.raises(ConfigError, match=field):
        LlamaConfig.from_hf(HF["mha"][0] | {field: value})


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_types(key):
    config = HF["mha"][0]
    with pytest.raises(ConfigError, match="'yarn'"):
        LlamaConfig.from_hf(config | {"rope_scaling": {key: "yarn", "factor": 2}})
    with pytest.raises(ConfigError, match="low_freq_factor"):
        LlamaConfig.from_hf(config | {"rope_scaling": {key: "llama3", "factor": 2}})


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (4, 8)])
def test_head_counts_that_do_not_divide(heads, kv_heads):
    config = HF["mha"][0] | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    with pytest.raises(ConfigError, match=f"num_heads={heads}"):
        LlamaConfig.from_hf(config)


def test_missing_field_is_named():
    config = {k: v for k, v in HF["mha"][0].items() if k != "vocab_size"}
    with pytest.raises(ConfigError, match="vocab_size"):
        LlamaConfig.from_hf(config)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), ([2, 3], None, (2, 3)), (None, [5, 2], (5, 2)), (2, [7, 2], (7, 2))],
)
def test_end_tokens_come_from_both_files(config, generation, expected):
    got = LlamaConfig.from_hf(
        HF["mha"][0] | {"eos_token_id": config}, generation={"eos_token_id": generation}
    )
    assert got.eos_token_ids == expected


@pytest.mark.parametrize("name", list(HF))
def test_config_round_trip(name):
    config = LlamaConfig.from_hf(HF[name][0])
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


# -- GGUF ------------------------------------------------------------------------------------


def write_gguf(path, name, *, quantise=None, fields=None, architecture="llama"):
    """The case's weights as llama.cpp's converter would write them."""
    config, seed = HF[name]
    c = LlamaConfig.from_hf(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    for key, value in (fields or {}).items():
        writer.add_uint32(key, value)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
             "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, value in state_dict(config, seed).items():
        stem, kind = key.rsplit(".", 1)
        if stem in top:
            new = f"{top[stem]}.{kind}"
        else:
            _, _, i, rest = stem.split(".", 3)
            new = f"blk.{i}.{names[rest]}.{kind}"
            heads = {"attn_q": c.num_heads, "attn_k": c.num_kv_heads}.get(names[rest])
            if heads:  # halves to neighbours, the layout of GGUF's llama
                halves = value.reshape(heads, 2, -1, *value.shape[1:])
                value = halves.swapaxes(1, 2).reshape(value.shape)
        if quantise is not None and value.ndim == 2 and value.shape[1] % 32 == 0:  # pyright: ignore[reportGeneralTypeIssues]
            writer.add_tensor(new, gguf.quantize(value, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(new, np.ascontiguousarray(value))
    if c.rope_scaling is not None:
        from jaxkv.models.rope import inverse_frequencies

        scaled = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        ratio = inverse_frequencies(c.head_dim, c.rope_theta) / scaled
        writer.add_tensor("rope_freqs.weight", ratio.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["mha", "gqa_9_3", "both_biases_tied", "llama3_small_original"])
def test_gguf_equals_hugging_face(tmp_path, name):
    model = load_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", name)), dtype=jnp.float32)
    hf = load_hf(folder(tmp_path / "hf", name), dtype=jnp.float32)
    np.testing.assert_allclose(logits(model, name), logits(hf, name), atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_quantised_tensors(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    config, seed = HF["gqa_32_8"]
    rounded = {
        name: gguf.dequantize(gguf.quantize(value, kind), kind)
        for name, value in state_dict(config, seed).items()
        if value.ndim == 2 and value.shape[1] % 32 == 0
    }
    assert len(rounded) > 8
    path = write_gguf(tmp_path / "m.gguf", "gqa_32_8", quantise=kind)
    got = load_gguf(GGUFFile(path), dtype=jnp.float32)
    want = load_hf(folder(tmp_path / "hf", "gqa_32_8", add=rounded), dtype=jnp.float32)
    np.testing.assert_allclose(logits(got, "gqa_32_8"), logits(want, "gqa_32_8"), atol=1e-5)


def test_gguf_with_an_unsupported_field(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "mha", fields={"llama.expert_count": 8})
    with pytest.raises(ConfigError, match=r"llama\.expert_count"):
        load_gguf(GGUFFile(path), dtype=jnp.float32)


def test_gguf_of_another_architecture(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "mha", architecture="qwen2")
    with pytest.raises(ConfigError, match="'qwen2'"):
        load_gguf(GGUFFile(path), dtype=jnp.float32)


@pytest.mark.parametrize("size", [0, 3, 500, -1000])
def test_damaged_gguf(tmp_path, size):
    path = write_gguf(tmp_path / "m.gguf", "mha")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="readable GGUF"):
        load(path)


# -- Orbax -----------------------------------------------------------------------------------


def test_orbax_round_trip(tmp_path, small_model):
    save_orbax(tmp_path / "m", small_model, Tokenizer.bytes())
    loaded = load(tmp_path / "m")
    assert loaded.model.config == small_model.config
    ids = jnp.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(loaded.model.dense(ids), small_model.dense(ids))
    assert loaded.tokenizer.encode("ab") == [97, 98]


def test_orbax_weights_of_another_config(tmp_path, small_model):
    save_orbax(tmp_path, small_model)
    other = Llama(
        LlamaConfig(**(vars(small_model.config) | {"hidden_size": 16})), rngs=nnx.Rngs(0)
    ).config
    (tmp_path / "config.json").write_text(json.dumps(other.to_hf()))
    with pytest.raises(CheckpointError, match=r"weights do not match .*: must be \(.*, got \("):
        load_orbax(tmp_path, dtype=jnp.float32)
    shutil.rmtree(tmp_path / "params")
    with pytest.raises(CheckpointError, match="no weights"):
        load_orbax(tmp_path, dtype=jnp.float32)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "nope")
    with pytest.raises(Exception, match=r"no tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "bf16", "float8_e4m3fn", jnp.int32])
def test_a_type_in_which_the_model_cannot_compute_is_refused(tmp_path, dtype):
    with pytest.raises(ConfigError, match=r"dtype=.* float32, bfloat16 and float16"):
        load_hf(folder(tmp_path, "mha"), dtype=dtype)


def test_a_path_that_may_not_be_entered_is_named(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.is_file", refuse)
    for call in (load, read_config):
        with pytest.raises(CheckpointError, match=r"locked cannot be read: Permission denied"):
            call(tmp_path / "locked")


def test_a_file_of_a_folder_says_to_give_the_folder(tmp_path):
    path = folder(tmp_path, "mha") / "model.safetensors"
    with pytest.raises(CheckpointError, match="give the folder"):
        load(path)


@pytest.mark.parametrize(("config", "generation", "end", "expected"), [
    (5, None, None, {5}), (5, [5, 6], None, {5, 6}), (None, None, "<|turn|>", {10}),
    (5, 6, "<|turn|>", {5, 6, 10}), ([5, 10], None, "<|turn|>", {5, 10}), (5, None, "absent", {5}),
])  # fmt: skip
def test_end_tokens_of_all_files_of_a_folder(tmp_path, config, generation, end, expected):
    path = folder(tmp_path / "model", config=dict(eos_token_id=config))
    if generation is not None:
        text = json.dumps({"eos_token_id": generation})
        (path / "generation_config.json").write_text(text)
    backend = Backend(WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    backend.add_special_tokens(["<|turn|>"])
    Tokenizer(backend).save(path)
    tokenizer_config = {} if end in (None, "absent") else {"eos_token": {"content": end}}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert set(load(path).model.config.eos_token_ids) == expected
