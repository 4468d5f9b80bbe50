"""Every parameter is checked for its type and for what its array on the device holds."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from jaxkv import BeamSearchParams, ConfigError, SamplingParams
from jaxkv.sampling.params import LogitsProcessor
from jaxkv.sampling.sampler import SamplerState

NOT_INTEGERS = [1.0, "1", True, np.True_, None, 1 + 0j, [1], b"1", np.float32(1), float("nan")]
NOT_NUMBERS = ["1", True, None, 1j, [1.0], np.ones(1), float("nan"), float("inf"), 1e39, -1e39]
NOT_FLAGS = [0, 1, "yes", None, 1.0]
NOT_TOKEN_IDS = [3, "12", None, (1.0,), ("x",), (-1,), (2**31,), (True,), {1: 2}, b"12", object()]
WRONG = {
    "temperature": [*NOT_NUMBERS, -1e-9, 1e300],
    "top_k": [*NOT_INTEGERS, -1, 2**31],
    "top_p": [*NOT_NUMBERS, 0, -0.1, 1.1, 1e-46],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, 1e-46],
    "presence_penalty": NOT_NUMBERS,
    "frequency_penalty": NOT_NUMBERS,
    "logit_bias": [
        None, [1], {"AI": -100.0}, {2**31: 1.0}, {-1: 1.0}, {1: 1e39}, {1: "x"}, {1.0: 1.0},
        dict.fromkeys(range(65), 1.0),
    ],
    "seed": [*(x for x in NOT_INTEGERS if x is not None), -1, 2**32],
    "n": [*NOT_INTEGERS, 0, 2**31],
    "best_of": [*(x for x in NOT_INTEGERS if x is not None), 0],
    "max_tokens": [*NOT_INTEGERS, -1, 2**31],
    "min_tokens": [*NOT_INTEGERS, -1, 2**31, 65],
    "stop_token_ids": NOT_TOKEN_IDS,
    "stop": [3, None, ("",), (1,), b"x", (None,), {"x": 1}],
    "ignore_eos": NOT_FLAGS,
    "detokenize": NOT_FLAGS,
    "logprobs": [*(x for x in NOT_INTEGERS if x is not None), -1, 65],
    "prompt_logprobs": NOT_FLAGS,
    "logits_processor": [lambda: None, (1, 2), "x"],
}  # fmt: skip
WRONG_BEAMS = {
    "width": [*NOT_INTEGERS, 0, 33],
    "max_tokens": [*NOT_INTEGERS, 0, 2**31],
    "length_penalty": [*NOT_NUMBERS, 17, -17],
    "early_stopping": NOT_FLAGS,
    "stop_token_ids": NOT_TOKEN_IDS,
    "ignore_eos": NOT_FLAGS,
    "detokenize": NOT_FLAGS,
}


@pytest.mark.parametrize(("params", "table"), [
    (SamplingParams, WRONG), (BeamSearchParams, WRONG_BEAMS),
])  # fmt: skip
def test_each_parameter_names_itself_when_it_is_wrong(params, table):
    assert set(table) == {field.name for field in dataclasses.fields(params)}
    for name, values in table.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"^{name}=") as refused:
                params(**{name: value})
            assert len(str(refused.value)) < 600


def test_values_become_plain_python_numbers():
    given: dict[str, Any] = dict(
        temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=np.uint8(9), seed=np.uint32(7),
        stop_token_ids=np.array([1, 2]), stop=["a", "b"], logit_bias={np.int32(4): np.float16(2)},
        ignore_eos=np.True_, min_p=0,
    )  # fmt: skip
    params = SamplingParams(**given)
    expected = SamplingParams(
        temperature=0.5, top_k=3, max_tokens=9, seed=7, stop_token_ids=(1, 2), stop=("a", "b"),
        logit_bias={4: 2.0}, ignore_eos=True,
    )  # fmt: skip
    assert params == expected
    assert {type(params.top_k), type(params.seed), type(params.ignore_eos)} == {int, bool}
    given = dict(stop="end", stop_token_ids={3, 1})
    assert SamplingParams(**given) == SamplingParams(stop=("end",), stop_token_ids=(1, 3))
    assert pickle.loads(pickle.dumps(params)) == params


def test_a_mapping_that_changes_later_changes_no_request():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2**40] = float("nan")
    assert params.logit_bias == {1: 2.0}


def test_a_value_whose_repr_fails_is_refused_by_name_too():
    class Silent:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(ConfigError, match=r"^top_k=<Silent> must be an integer"):
        SamplingParams(top_k=Silent())  # pyright: ignore[reportArgumentType]


EXTREMES = [
    SamplingParams(temperature=3e38, top_k=2**31 - 1, top_p=2e-38, min_p=1),
    SamplingParams(temperature=1e-45, repetition_penalty=3e38, presence_penalty=-3e38,
                   frequency_penalty=3e38, logit_bias={2**31 - 1: -3e38}),
    SamplingParams(max_tokens=2**31 - 1, min_tokens=2**31 - 1, seed=2**32 - 1,
                   stop_token_ids=(2**31 - 1,), repetition_penalty=2e-38),
    SamplingParams(logits_processor=LogitsProcessor(tuple, lambda *args: args[:2])),
]  # fmt: skip


@pytest.mark.parametrize("params", EXTREMES)
def test_every_accepted_value_has_a_place_on_the_device(params):
    state = SamplerState.empty(1, 8)
    with np.errstate(all="raise", under="ignore"):
        state.fill(0, [1, 2, 3], params, num_prompt=3, end=8, stop_ids=params.stop_token_ids,
                   seed=params.seed or 0, sample=0, processor=-1)  # fmt: skip
    assert state.params.min_len[0] <= 8
    assert np.isfinite(state.params.bias).all()
