"""Trace files: each format read, each kind of bad line named with file, line and column."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.errors import JaxkvError
from jaxkv.studies.traces import PACKAGED, Trace, TraceError, load_trace

MOONCAKE = [
    {"timestamp": 3000, "input_length": 513, "output_length": 7, "hash_ids": [40, 50]},
    {"timestamp": 1500, "input_length": 512, "output_length": 0, "hash_ids": [40]},
]
BAILIAN = [
    {
        "chat_id": 9, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 40,
        "output_length": 5, "type": "text", "turn": 1, "hash_ids": [10**30, -4],
    },
    {
        "chat_id": 12, "parent_chat_id": 9, "timestamp": 61.75, "input_length": 20,
        "output_length": 6, "type": "text", "turn": 2, "hash_ids": [10**30, 5],
    },
]  # fmt: skip
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_SESSIONS = BURST.replace(",Model", ",Session ID,Elapsed time,Model")


def write(tmp_path, text, name="t.csv"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def json_lines(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def test_mooncake(tmp_path):
    trace = load_trace(write(tmp_path, json_lines(MOONCAKE), "chat.jsonl"))
    assert (trace.name, trace.tokens_per_id, trace.max_len) == ("chat", 512, 520)
    assert trace.arrival.tolist() == [0.0, 1.5]  # milliseconds, out of order
    assert trace.input_tokens.tolist() == [512, 513]
    assert trace.output_tokens.tolist() == [0, 7]
    assert [trace.ids(i).tolist() for i in range(2)] == [[0], [0, 1]]


def test_bailian_seconds_and_any_integer_as_id(tmp_path):
    trace = load_trace(write(tmp_path, json_lines(BAILIAN), "noext"))
    assert trace.arrival.tolist() == [0.0, 0.5]
    assert trace.tokens_per_id == 16
    assert [trace.ids(i).tolist() for i in range(2)] == [[0, 1], [0, 2]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0319600"),
        ("2024-05-12 00:00:00+00:00", "2024-05-12 00:00:00.052000+00:00"),
        ("2024-05-12T23:59:59.980Z", "2024-05-13T00:00:00.032Z"),
    ],
)
def test_azure_of_both_years(tmp_path, first, second):
    path = write(tmp_path, f"{AZURE}\r\n{first},4808,10\r\n\r\n{second},3180,8")
    trace = load_trace(path)
    np.testing.assert_allclose(trace.arrival, [0.0, 0.052], atol=1e-6)
    assert trace.input_tokens.tolist() == [4808, 3180]
    assert trace.output_tokens.tolist() == [10, 8]
    assert not trace.has_ids
    assert len(trace.ids(1)) == 0


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        (BURST, ["5,ChatGPT,472,18,490,Conversation log", "45,GPT-4,1087,230,1317,API log"]),
        (
            BURST_SESSIONS,
            ["19440110.0,1722ac82,43,GPT-4,472,18,490,x", "19440150.0,d5,2,GPT-4,1087,230,1317,x"],
        ),
    ],
)
def test_burstgpt_with_and_without_sessions(tmp_path, header, rows):
    trace = load_trace(write(tmp_path, "\ufeff" + "\n".join([header, *rows])))
    assert trace.arrival.tolist() == [0.0, 40.0]
    assert trace.input_tokens.tolist() == [472, 1087]
    assert trace.output_tokens.tolist() == [18, 230]


def test_packaged_traces():
    code, conv = load_trace("azure-code"), load_trace("azure-conv")
    assert (len(code), len(conv)) == (8819, 19366)
    assert round(code.input_tokens.mean()) == 2048
    assert round(conv.output_tokens.mean()) == 211
    assert (np.diff(conv.arrival) >= 0).all()
    assert 3400 < code.arrival[-1] < 3600  # an hour
    assert set(PACKAGED) == {"azure-code", "azure-conv"}
    licence = (PACKAGED["azure-code"].parent / "README.md").read_text()
    assert "CC-BY-4.0" in licence
    assert "ISCA 2024" in licence


def broken(changes, line=1):
    records = [dict(r) for r in MOONCAKE]
    records[line - 1] |= changes
    return json_lines(records)


BAD = {
    "empty": ("", "holds no requests: it is empty"),
    "blank": ("\n\n", "holds no requests: it is empty"),
    "only a header": (AZURE + "\n", "holds no requests: only a header"),
    "unknown columns": ("a,b\n1,2\n", "line 1, column 1: unknown format 'a,b'"),
    "fraction": (
        f"{AZURE}\n2023-11-16 18:17:03,1,2\n2023-11-16 18:17:04,3.5,2\n",
        "line 3, column ContextTokens: must be a non-negative integer, got '3.5'",
    ),
    "negative": (
        f"{AZURE}\n\n2023-11-16 18:17:03,1,-2\n",
        "line 3, column GeneratedTokens: must be a non-negative integer, got '-2'",
    ),
    "no date": (
        f"{AZURE}\nyesterday,1,2\n",
        "line 2, column TIMESTAMP: must be a time, got 'yesterday'",
    ),
    "empty date": (f"{AZURE}\n,1,2\n", "line 2, column TIMESTAMP: must be a time, got ''"),
    "no time": (f"{BURST}\nnan,M,1,2,3,x\n", "line 2, column Timestamp: must be a time, got 'nan'"),
    "short row": (
        f"{BURST}\n5,M,1\n",
        "line 2, column Response tokens: 3 cells, but the header has 6",
    ),
    "long row": (f"{AZURE}\n1,2,3,4\n", "line 2, column 4: 4 cells, but the header has 3"),
    "cut off": (
        json_lines(MOONCAKE[:1]) + '{"timestamp": 1, "inp',
        "line 2, column 18: not valid JSON",
    ),
    "list": (json_lines(MOONCAKE) + "[1]\n", "line 3: not a JSON object"),
    "missing": (
        '\n{"timestamp": 1, "input_length": 2}\n',
        "line 2, column output_length: missing",
    ),
    "text": (
        broken({"input_length": "7"}, 2),
        "line 2, column input_length: must be a non-negative integer, got '7'",
    ),
    "flag": (
        broken({"output_length": True}),
        "line 1, column output_length: must be a non-negative integer, got True",
    ),
    "infinite": (
        broken({"timestamp": float("inf")}),
        "line 1, column timestamp: must be a finite number, got inf",
    ),
    "null": (
        broken({"timestamp": None}),
        "line 1, column timestamp: must be a finite number, got None",
    ),
    "ids": (broken({"hash_ids": [1, "a"]}), "line 1, column hash_ids: must be a list of integers"),
    "too many ids": (
        broken({"input_length": 512}),
        "line 1, column hash_ids: 2 ids of 512 tokens, but input_length is 512",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_name_file_line_and_column(tmp_path, case):
    text, message = BAD[case]
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as error:
        load_trace(path)
    assert isinstance(error.value, JaxkvError)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_not_text_or_do_not_exist(tmp_path):
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(TraceError, match="is not text"):
        load_trace(tmp_path / "b")
    with pytest.raises(TraceError, match=r"no such trace: azure-cod .*azure-code, azure-conv"):
        load_trace("azure-cod")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([], [], []), "no requests"),
        (([0], [1], [1, 2]), "columns must have the same length, got 1, 1, 2 and 1 rows"),
        (([0, np.nan], [1, 1], [1, 1]), "request 1: the time is not finite"),
        (([0, 1], [1, -1], [1, 1]), "request 1: a count of tokens is negative"),
    ],
)
def test_bad_columns_are_named(columns, message):
    with pytest.raises(TraceError, match=message):
        Trace.of(*columns)


def test_too_many_ids_for_a_prompt():
    with pytest.raises(TraceError, match="request 0: more hash ids"):
        Trace.of([0], [16], [1], hash_ids=[[1, 2]], tokens_per_id=16)


@given(st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(-9, 9))), min_size=1))
def test_sorting_and_renumbering_lose_nothing(requests):
    times, ids = zip(*requests, strict=True)
    counts = list(map(len, ids))
    trace = Trace.of(times, counts, counts, hash_ids=ids)
    original = [ids[i] for i in np.argsort(times, kind="stable")]
    back = dict(zip(trace.hash_ids.tolist(), [h for each in original for h in each], strict=True))
    assert len(set(back.values())) == len(back)
    assert [[back[h] for h in trace.ids(i).tolist()] for i in range(len(trace))] == original
    half = trace.head(len(trace) // 2)
    assert [half.ids(i).tolist() for i in range(len(half))] == [
        trace.ids(i).tolist() for i in range(len(half))
    ]


def test_shared_prefix_ends_with_a_short_prompt():
    trace = Trace.of([0, 1, 2], [100, 40, 3], [1, 1, 1]).with_shared_prefix(64, tokens_per_id=16)
    assert [trace.ids(i).tolist() for i in range(3)] == [[0, 1, 2, 3], [0, 1], []]
    assert trace.input_tokens.tolist() == [100, 40, 3]


@pytest.mark.parametrize("char", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
def test_only_line_feeds_end_lines(tmp_path, char):
    record = {"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1], "note": char}
    line = json.dumps(record).replace(json.dumps(char)[1:-1], char if char > "\x1f" else " ")
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{line}\r\n{line}\n".encode())
    assert len(load_trace(path)) == 2
    path.write_bytes(f"TIMESTAMP,ContextTokens,GeneratedTokens,Note\n0,1,2,a{char}b\n".encode())
    assert len(load_trace(path)) == 1


def test_a_trace_is_a_sequence_of_requests():
    trace = Trace.of([7.0, 5.0], [100, 80], [3, 9], hash_ids=[[4, 9], [4]], tokens_per_id=64)
    requests = [(*request[:3], request.ids.tolist()) for request in trace]
    assert requests == [(0.0, 80, 9, [0]), (2.0, 100, 3, [0, 1])]
