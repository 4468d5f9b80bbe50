"""`config.json`: each field is read, harmless, or refused by its name."""

import dataclasses
import json

import numpy as np
import pytest
from hf_cases import CASES

from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.models import Llama3Scaling, LlamaConfig, read_config

BASE = CASES[0][1]
PLAIN = LlamaConfig.from_hf(BASE)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"pretraining_tp": 2},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1},
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        {"hidden_act": "swish"},
        {"rope_scaling": {"type": "linear", "factor": 1.0}},
        {"rope_scaling": {"rope_type": "default", "type": "default", "factor": 1}},
        {"rope_scaling": {"rope_type": "default", "attention_factor": None}},
        {"rope_scaling": {}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "default"}},
        {"attention_dropout": 0.1, "use_cache": False, "temperature": 0.6, "max_length": 4096},
        {"_name_or_path": "x", "unsloth_version": "2024.9", "transformers.js_config": {}},
        {"quantization_config": None, "something_new": None},
        {"is_llama_config": True, "rope_interleaved": False, "logits_scaling": 1.0},
        {"architectures": None}, {"model_type": None}, {"num_key_value_heads": None},
        {"eos_token_id": [2, 10**6, -1]},  # ids that no model of this vocabulary produces
    ],
)  # fmt: skip
def test_what_cannot_change_the_result_is_let_pass(fields):
    assert LlamaConfig.from_hf(BASE | fields) == PLAIN


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"something_new": 0}, "something_new=0 is not supported: the field is unknown"),
        ({"use_something": False}, "use_something=False"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
        ({"residual_multiplier": 0.22}, r"residual_multiplier=0\.22 .*only 1 is"),
        ({"attention_multiplier": 1.0}, "attention_multiplier=1.0 .*only null is"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures=.*LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures=.* must be a list"),
        ({"architectures": None, "model_type": None}, "model_type is missing"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window=4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        *[({field: value}, rf"{field}={value!r} must be")
          for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                        "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
          for value in ("64", 64.0, True, 0, -64)],
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"head_dim": "16"}, "head_dim='16' must be"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size=64 must be a multiple"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be"),
        ({"rope_theta": 0}, "rope_theta=0.0 must be a positive number"),
        ({"rope_theta": "10000"}, "rope_theta='10000' must be"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"attention_bias": 0}, "attention_bias=0 must be true or false"),
        ({"mlp_bias": "no"}, "mlp_bias='no' must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id='2' must be a token id"),
        ({"eos_token_id": [2, 2.5]}, "eos_token_id=.* must be a token id"),
        ({"eos_token_id": True}, "eos_token_id=True must be a token id"),
        ({"rope_divisors": 3}, "rope_divisors=3 must be a list"),
        ({"rope_divisors": [1.0]}, "rope_divisors must have"),
        ({"rope_divisors": [0.0] * 8}, "rope_divisors=0.0"),
    ],
)  # fmt: skip
def test_what_may_change_the_result_is_refused_by_its_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_hf(BASE | fields)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("linear", "='linear' must be an object"),
        (["linear"], "must be an object"),
        ({"factor": 4.0}, r"factor=4\.0 without a rope_type"),
        ({"type": "linear", "factor": 4.0}, "of type 'linear' is not supported"),
        ({"type": "linear"}, "of type 'linear' is not supported"),
        ({"rope_type": "yarn", "factor": 1.0}, "of type 'yarn' is not supported"),
        ({"rope_type": 3}, "of type 3 is not supported"),
        ({"rope_type": "llama3", "type": "linear"}, "rope_type='llama3' contradicts type='linear'"),
        (LLAMA3 | {"beta_fast": 32}, "beta_fast=32 in type 'llama3' is not supported"),
        (LLAMA3 | {"factor": "8"}, "factor='8' must be a finite number"),
        (LLAMA3 | {"factor": 0}, "factor=0 must be a positive number"),
        (LLAMA3 | {"high_freq_factor": 1.0}, r"high_freq_factor=1\.0 must exceed"),
        (LLAMA3 | {"original_max_position_embeddings": 8192.0}, "must be a positive integer"),
        (LLAMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (LLAMA3 | {"rope_theta": 5.0}, r"rope_theta=5\.0, which contradicts rope_theta=10000"),
    ],
)  # fmt: skip
def test_rope_fields_that_are_not_understood_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_hf(BASE | {key: value})


def test_two_rope_fields_that_contradict_each_other_are_refused():
    both = {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 2.0}}
    with pytest.raises(ConfigError, match=r"rope_scaling=.* contradicts rope_parameters="):
        LlamaConfig.from_hf(BASE | both)
    config = LlamaConfig.from_hf(BASE | {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3})
    assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"sliding_window": 3}))
    with pytest.raises(ConfigError, match=r"config\.json: sliding_window=3"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id='x'"):
        read_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(JaxkvError, match=r"generation_config\.json holds a list"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"rms_norm_eps": float("nan")}, {"rope_theta": 0}, {"rope_divisors": (float("nan"),) * 8},
     {"tie_word_embeddings": 1}, {"eos_token_ids": (2.0,)}, {"num_layers": 2.0}],
)  # fmt: skip
def test_a_config_that_json_or_the_model_cannot_hold_is_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(PLAIN, **change)


def test_numpy_sizes_are_integers():
    config = dataclasses.replace(PLAIN, num_layers=np.int64(2))  # pyright: ignore[reportArgumentType]
    assert json.dumps(config.to_hf()) == json.dumps(PLAIN.to_hf())
