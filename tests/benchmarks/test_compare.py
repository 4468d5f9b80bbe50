"""Verdicts of benchmarks/compare.py on result files of every benchmark."""

import copy
import json
from pathlib import Path

import compare
import pytest

RESULTS = Path(compare.__file__).parent / "results"


META = {"jax": "0.12.0", "python": "3.12.1", "cpus": 2, "load_1m": 1.5}
SETTINGS = {"threads": 2, "max_seqs": 32, "flash_attn": False, "steps": 216, "system_info": "SSE3"}
# One small result of each benchmark; benchmarks/results holds measured ones, which change.
DOCUMENTS = {
    "manager": {
        "meta": {"python": "3.12.1", "numpy": "2.5", "cpus": 2, "load_1m": 0.7, "eviction": "lru"},
        "ns": {"append": 50.0, "free": 16_000.0},
        "bytes_per_block": 145.0,
        "bytes_per_sequence": 1152.0,
    },
    "manager_growth": {
        "meta": {"python": "3.12.1", "numpy": "2.5", "cpus": 2, "load_1m": 0.7, "calls": 100},
        "growth": {"append": {"1000": {"median_us": 70.0, "slowest_us": 700.0}}},
    },
    "engine": {
        "meta": META,
        "host": [
            {"seqs": 256, "steps": 100, "parts_ms": {"plan": 0.5}, "host_ms": 1.5, "step_ms": 2.5,
             "rounds_ms": [1.5, 1.51, 1.5]},
            {"seqs": 32, "steps": 16, "parts_ms": {"plan": 0.5, "wait": 130.0}, "host_ms": 3.5,
             "step_ms": 136.0, "rounds_ms": [3.5, 3.6]},
        ],
        "no hits": {"seconds": {"hash": [17.5, 17.1, 16.9], "none": [15.9, 17.0, 16.9]},
                    "ratio": 1.01},
        "shared": {"requests": 32, "prefix": 1500, "seconds": {"hash": 4.0, "none": 88.0},
                   "ratio": 22.0},
    },
    "serving": {
        "meta": META,
        "rows": [
            {"name": "jaxkv, continuous batching", "tokens_per_s": 58.0, "seconds": 100.0,
             "mode": "continuous batching", "generated_tokens": 5875, "first_token_s": [36.0, 88.0],
             "token_s": [0.5, 0.8], "steps": 227, "host_ms": {"plan": 0.3, "wait": 431.0},
             "same_as_first": 1.0},
            {"name": "jaxkv, one by one", "tokens_per_s": 21.0, "seconds": 280.0,
             "mode": "one by one", "generated_tokens": 5875, "same_as_first": 1.0},
            {"name": "llama-cpp-python 0.3.36", "peer": "llama.cpp", "tokens_per_s": 59.0,
             "seconds": 99.0, "first_token_s": {"mean": 48.0}, "settings": SETTINGS,
             "same_as_first": 1.0},
        ],
    },
    "cpu_attention": {
        "meta": META | {"heads": [9, 3, 64]},
        "rows": [
            {"kind": "decode", "sequences": 1, "queries": 1, "length": 256, "block_size": block,
             "dense_ms": 0.14, "paged_ms": 0.17, "ratio": 1.2}
            for block in (16, 32)
        ],
    },
    "cpu_decode": {
        "meta": META,
        "rows": [
            {"engine": "jaxkv", "streams": 8, "kv_type": "float16", "block_size": 16,
             "tokens_per_s": 100.0, "steps": 120, "ms_by_context": {"64": 70.0}},
            {"engine": "llama.cpp", "streams": 8, "kv_type": "f16", "flash_attn": False,
             "kv_unified": False, "tokens_per_s": 120.0, "steps": 120, "cpu_share": 0.99},
        ],
        "ratios": {"8": 0.9},
    },
    "hit_rates": {
        "trace": "mooncake", "block_size": 512, "blocks": [1000, 8000],
        "hit_rate": {"lru": [0.045, 0.178], "Belady": [0.19, 0.37]},
        "seconds_per_replay": {"lru": 7.5},
    },
    "pool_size": {
        "meta": {"jax": "0.12.0", "ratio": 1.0, "in_place": True},
        "rows": [{"pool_mib": 48, "ms_per_step_median": 10.5},
                 {"pool_mib": 384, "ms_per_step_median": 10.6}],
    },
}  # fmt: skip


def load(name: str) -> dict:
    return copy.deepcopy(DOCUMENTS[name])


@pytest.fixture
def run(tmp_path, capsys):
    """Compares two documents or texts; returns the exit status, stdout and stderr."""

    def run(old, new, *options) -> tuple[str | int | None, str, str]:
        files = []
        for name, document in (("old", old), ("new", new)):
            files.append(tmp_path / f"{name}.json")
            text = document if isinstance(document, str) else json.dumps(document)
            files[-1].write_text(text)
        try:
            status = compare.main([*map(str, files), *options])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def changes(old: dict, new: dict, tmp_path: Path, noise: float = 0.1) -> dict[str, str]:
    """Verdicts by figure."""
    results = []
    for document in (old, new):
        (tmp_path / "results.json").write_text(json.dumps(document))
        results.append(compare.read(tmp_path / "results.json"))
    return {path: verdict for verdict, path, *_ in compare.compare(*results, noise)}  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("name", compare.BENCHMARKS)
def test_a_result_equals_itself(name, run):
    for document in (load(name), json.loads((RESULTS / f"{name}.json").read_text())):
        status, out, _ = run(document, document)
        assert status == 0
        assert f"{name}: 0 of" in out


def scale(document: dict, keys: list, factor: float) -> dict:
    """A copy in which one figure, and its repeats if it is a list, are multiplied."""
    document = copy.deepcopy(document)
    at = document
    for key in keys[:-1]:
        at = at[key]
    was = at[keys[-1]]
    at[keys[-1]] = [x * factor for x in was] if isinstance(was, list) else was * factor
    return document


@pytest.mark.parametrize(
    ("name", "keys", "figure", "higher", "lower"),
    [
        ("manager", ["ns", "append"], "ns.append", "worse", "better"),
        ("manager", ["bytes_per_block"], "bytes_per_block", "worse", "better"),
        ("engine", ["host", 0, "host_ms"], "host.256.host_ms", "worse", "better"),
        ("engine", ["host", 1, "parts_ms", "plan"], "host.32.parts_ms.plan", "worse", "better"),
        ("engine", ["host", 1, "parts_ms", "wait"], "host.32.parts_ms.wait", "changed", "changed"),
        ("engine", ["no hits", "ratio"], "no hits.ratio", "worse", "better"),
        ("engine", ["no hits", "seconds", "hash"], "no hits.seconds.hash", "worse", "better"),
        ("engine", ["shared", "ratio"], "shared.ratio", "better", "worse"),
        ("serving", ["rows", 0, "tokens_per_s"], "rows.jaxkv, continuous batching.tokens_per_s",
         "better", "worse"),
        ("serving", ["rows", 0, "seconds"], "rows.jaxkv, continuous batching.seconds",
         "worse", "better"),
        ("serving", ["rows", 0, "first_token_s", 1],
         "rows.jaxkv, continuous batching.first_token_s.p95", "worse", "better"),
        ("serving", ["rows", 0, "steps"], "rows.jaxkv, continuous batching.steps",
         "changed", "changed"),
        ("serving", ["rows", 2, "tokens_per_s"], "rows.llama-cpp-python 0.3.36.tokens_per_s",
         "changed", "changed"),
        ("cpu_attention", ["rows", 0, "paged_ms"], "rows.decode/1/1/256/16.paged_ms",
         "worse", "better"),
        ("cpu_attention", ["rows", 0, "ratio"], "rows.decode/1/1/256/16.ratio", "worse", "better"),
        ("cpu_attention", ["rows", 0, "dense_ms"], "rows.decode/1/1/256/16.dense_ms",
         "changed", "changed"),
        ("cpu_decode", ["rows", 0, "tokens_per_s"], "rows.jaxkv/8/float16/16.tokens_per_s",
         "better", "worse"),
        ("cpu_decode", ["rows", 0, "ms_by_context", "64"],
         "rows.jaxkv/8/float16/16.ms_by_context.64", "worse", "better"),
        ("cpu_decode", ["rows", 1, "tokens_per_s"],
         "rows.llama.cpp/8/f16/False/False.tokens_per_s", "changed", "changed"),
        ("cpu_decode", ["ratios", "8"], "ratios.8", "better", "worse"),
        ("hit_rates", ["hit_rate", "lru", 1], "hit_rate.lru.8000", "better", "worse"),
        ("hit_rates", ["seconds_per_replay", "lru"], "seconds_per_replay.lru", "worse", "better"),
        ("pool_size", ["rows", 1, "ms_per_step_median"], "rows.384.ms_per_step_median",
         "worse", "better"),
        ("pool_size", ["meta", "ratio"], "meta.ratio", "worse", "better"),
    ],
)  # fmt: skip
def test_direction(name, keys, figure, higher, lower, tmp_path):
    old = load(name)
    assert changes(old, scale(old, keys, 1.5), tmp_path) == {figure: higher}
    assert changes(old, scale(old, keys, 0.5), tmp_path) == {figure: lower}


def test_no_verdict_within_noise(run):
    old = load("manager")
    new = scale(old, ["ns", "free"], 1.08)
    assert run(old, new)[0] == 0
    status, out, _ = run(old, new, "--noise", "0.05")
    assert status == 1
    assert "+8.0%" in out


def test_rounds_replace_the_given_noise(tmp_path):
    name = "free"
    old = load("manager")
    old["ns"] = {name: 100.0}
    steady = old | {"rounds": {"ns": {name: [99, 100, 101]}}}
    slower = scale(steady, ["ns", name], 1.03)
    assert changes(steady, slower, tmp_path) == {f"ns.{name}": "worse"}
    assert changes(old, scale(old, ["ns", name], 1.03), tmp_path) == {}
    wide = scale(old, ["ns", name], 1.3) | {"rounds": {"ns": {name: [80, 100, 140]}}}
    assert changes(steady, wide, tmp_path) == {}  # the larger spread of the two files


def test_rounds_of_the_engine(tmp_path):
    old = load("engine")
    old["host"][0] |= {"host_ms": 1.0, "rounds_ms": [1.0, 1.01, 1.0]}
    old["no hits"] |= {"ratio": 1.0, "rounds": {"ratio": [0.7, 1.0, 1.1]}}
    new = scale(old, ["host", 0, "host_ms"], 1.05)
    new["no hits"]["ratio"] = 1.3
    assert changes(old, new, tmp_path) == {"host.256.host_ms": "worse"}


def test_repeated_rows_are_rounds(tmp_path):
    """cpu_decode.py --rounds 2 writes each row twice."""
    old = load("cpu_decode")
    old["rows"].append(old["rows"][0] | {"tokens_per_s": 120.0})
    new = scale(load("cpu_decode"), ["rows", 0, "tokens_per_s"], 0.95)  # of a median of 110
    assert changes(old, new, tmp_path) == {}
    new = scale(load("cpu_decode"), ["rows", 0, "tokens_per_s"], 0.85)
    assert changes(old, new, tmp_path) == {"rows.jaxkv/8/float16/16.tokens_per_s": "worse"}


def test_spread():
    assert compare.spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    outlier = [10.0] * 11 + [30.0]
    assert compare.spread(outlier) == 0
    assert compare.spread([0.0, 0.0]) == 0


def test_exact_figures_have_no_noise(tmp_path):
    old = load("hit_rates")
    new = scale(old, ["hit_rate", "lru", 0], 0.999)
    assert changes(old, new, tmp_path) == {"hit_rate.lru.1000": "worse"}
    old = load("pool_size")
    new = copy.deepcopy(old)
    new["meta"]["in_place"] = False
    assert changes(old, new, tmp_path) == {"meta.in_place": "worse"}


def test_worse_figures_come_first(run):
    old = load("serving")
    new = scale(old, ["rows", 2, "tokens_per_s"], 3)
    new = scale(new, ["rows", 1, "tokens_per_s"], 2)
    new = scale(new, ["rows", 0, "tokens_per_s"], 0.8)
    new = scale(new, ["rows", 0, "seconds"], 1.25)
    status, out, _ = run(old, new)
    assert status == 1
    lines = [line.split()[1] for line in out.splitlines() if line.startswith("│")]
    assert lines == ["worse", "worse", "better", "changed"]
    assert out.index("+25.0%") < out.index("-20.0%")


def test_from_zero(tmp_path):
    old = load("pool_size")
    old["meta"]["ratio"] = 0
    new = scale(old, ["meta", "ratio"], 1)
    assert changes(old, new, tmp_path) == {}
    new["meta"]["ratio"] = 1
    assert changes(old, new, tmp_path) == {"meta.ratio": "worse"}


def test_figures_of_one_file(run):
    old, new = load("pool_size"), load("pool_size")
    new["rows"].pop()
    status, out, _ = run(old, new)
    assert status == 0
    assert "only in one of the files: rows.384.ms_per_step_median" in out
    new["rows"], new["meta"] = [{"pool_mib": 1, "ms_per_step_median": 1.0}], {}
    status, _, err = run(old, new)
    assert status == 2
    assert "no figure in common" in err


def test_other_machine(run):
    old, new = load("engine"), load("engine")
    new["meta"]["cpus"] = 64
    new["shared"]["ratio"] = 1
    status, out, err = run(old, new)
    assert (status, out) == (2, "")
    assert "the machines differ: meta.cpus 2 -> 64 (see --other-machine)" in err
    status, out, _ = run(old, new, "--other-machine")
    assert status == 1
    assert "meta.cpus 2 -> 64" in out


def test_versions_may_differ(run):
    new = load("engine")
    new["meta"]["jax"] = "0.13.0"
    status, out, _ = run(load("engine"), new)
    assert status == 0
    assert "differs: meta.jax 0.12.0 -> 0.13.0" in out


@pytest.mark.parametrize(
    ("name", "keys", "value", "named"),
    [
        ("manager", ["meta", "eviction"], "fifo", "meta.eviction lru -> fifo"),
        ("engine", ["host", 0, "steps"], 4, "host.256.steps 100 -> 4"),
        ("engine", ["shared", "prefix"], 64, "shared.prefix 1500 -> 64"),
        ("serving", ["rows", 0, "generated_tokens"], 10, "generated_tokens 5875 -> 10"),
        ("serving", ["rows", 2, "settings", "flash_attn"], True, "flash_attn False -> True"),
        ("serving", ["rows", 2, "settings", "max_seqs"], 8, "settings.max_seqs 32 -> 8"),
        ("cpu_attention", ["meta", "heads", 1], 9, "meta.heads.1 3 -> 9"),
        ("cpu_decode", ["rows", 0, "steps"], 60, "rows.jaxkv/8/float16/16.steps 120 -> 60"),
        ("hit_rates", ["trace"], "other", "trace mooncake -> other"),
        ("hit_rates", ["block_size"], 16, "block_size 512 -> 16"),
    ],
)
def test_other_configuration(name, keys, value, named, run):
    old, new = load(name), load(name)
    at = new
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    status, out, err = run(old, new)
    assert (status, out) == (2, "")
    assert "the configurations differ: " in err
    assert named in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a result of manager, engine"),
        ("{}", "is not a result of manager, engine"),
        ('{"rows": {"a": 1}}', "is not a result of manager, engine"),
        ('{"rows": [1]}', "is not a result of manager, engine"),
        ('{"ns": {"a": NaN}, "bytes_per_block": 1}', "ns.a is nan, not a finite number"),
        ('{"hit_rate": {"lru": [1]}, "seconds_per_replay": {}}', "form that hit_rates.py writes"),
        ('{"hit_rate": {"lru": [1]}, "blocks": [], "seconds_per_replay": {}}', "hit_rates.py"),
        (json.dumps({"rows": [{"pool_mib": 1}]}), "the benchmarks differ: pool_size and manager"),
    ],
)
def test_bad_input(text, message, run):
    status, out, err = run(text, load("manager"))
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("error:") == 1


def test_unreadable_file(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(tmp_path / "none.json"), str(RESULTS / "manager.json")])
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("noise", ["-1", "nan"])
def test_noise_is_a_share(noise, run):
    status, _, err = run(load("manager"), load("manager"), "--noise", noise)
    assert status == 2
    assert "--noise must be 0 or more" in err
