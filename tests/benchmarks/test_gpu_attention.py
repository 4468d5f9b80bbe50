"""The flow of the GPU benchmark, without a GPU: rows, processes and verdicts."""

import argparse
import json
import subprocess
import sys

import gpu_attention
import gpu_plan
import pytest
from gpu_rows import AttentionCheck, Case

from jaxkv.pallas_kernels.paged_attention.support import BLOCK_SIZES, HEAD_DIMS


def run(*args):
    command = [sys.executable, gpu_attention.__file__, *args]
    return subprocess.run(command, capture_output=True, text=True)


def test_dry_run(tmp_path):
    before = gpu_attention.RESULTS.read_bytes() if gpu_attention.RESULTS.exists() else None
    file = tmp_path / "rows.json"
    only = ("chunks", "scatter_kv", "decode jaxkv 64x2 block 16", "decode jaxkv 1073741824x2",
            "decode cudnn")  # fmt: skip
    done = run("--dry-run", "--json", str(file), *(x for text in only for x in ("--only", text)))
    assert done.returncode == 0, done.stderr
    assert "no measurement" in done.stdout
    document = json.loads(file.read_text())
    assert document["complete"]
    assert document["meta"]["dry_run"]
    assert all(row["dry_run"] for row in document["rows"])
    status = {row["name"]: row["status"] for row in document["rows"]}
    cudnn = next(row for row in document["rows"] if row["engine"] == "cudnn_paged")
    assert "cuDNN" in cudnn["reason"]
    assert status.pop(cudnn["name"]) == "failed"
    assert status.pop("decode jaxkv 1073741824x2 block 16 4/2 bfloat16 layers 2") == "skipped"
    assert len(status) == 7
    assert set(status.values()) == {"ok"}
    timed = next(row for row in document["rows"] if row["kind"] == "decode")
    assert timed["bytes"] == 2 * 64 * 2 * 2 * 16 * 2  # sequences, tokens, K and V, heads, dim, size
    assert timed["us_min"] <= timed["us"] <= timed["us_p90"]
    after = gpu_attention.RESULTS.read_bytes() if gpu_attention.RESULTS.exists() else None
    assert after == before


def test_without_a_gpu_the_error_names_the_dry_run():
    done = run()
    assert done.returncode == 2
    assert done.stderr == (
        "gpu_attention needs an NVIDIA GPU, but JAX finds cpu (cpu); --dry-run runs without one\n"
    )


ENGINE = """
import os, time
from gpu_rows import Engine

def run(task):
    if task.context == 1: os._exit(3)
    if task.context == 2: time.sleep(60)
    if task.context == 3: raise ValueError("a bad row\\nof two lines")
    return {"us": 1.0}

def start(seed, dry):
    return Engine({"device": "none"}, run, lambda: None)
"""


def test_rows_are_reported_when_their_process_ends(tmp_path, monkeypatch):
    (tmp_path / "gpu_jax.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(gpu_attention.SECONDS, "gpu_jax", (0, 2))
    args = argparse.Namespace(seed=0, dry_run=False, seconds=60)
    filler = gpu_attention.Filler(args, str(tmp_path / "log"))

    def fill(context, form="decode"):
        row = filler.fill(Case("jaxkv", form, context, 1))  # pyright: ignore[reportArgumentType]
        return row["status"], row.get("reason")

    try:
        assert fill(9) == ("ok", None)
        assert fill(3) == ("failed", "ValueError: a bad row")
        assert fill(1) == ("failed", "the process ended with 3")
        assert fill(9) == ("ok", None)
        assert fill(2) == ("failed", "no row within 2 s: the process was ended")
        ended = "2 rows of 'jaxkv decode' ended their process"
        assert fill(9) == ("skipped", ended)
        assert fill(9, "prefill") == ("ok", None)
        monkeypatch.setattr(filler, "ends", 0.0)
        assert fill(9, "prefill") == ("skipped", "the 60 s are used up")
    finally:
        filler.close()
    assert "of two lines" in (tmp_path / "log").read_text()


def test_the_plan_checks_all_supported_shapes_and_times_all_targets():
    tasks = gpu_plan.full()
    assert len({task.name for task in tasks}) == len(tasks)
    for form in ("decode", "prefill"):
        checks = [t for t in tasks if isinstance(t, AttentionCheck) and t.form == form]
        assert {t.dim for t in checks} == set(HEAD_DIMS)
        assert {t.block for t in checks} == set(BLOCK_SIZES)
    own = [t for t in tasks if isinstance(t, Case) and t.engine == "jaxkv"]
    grid = {(t.context, t.batch) for t in own if t.block == 16 and t.form == "decode"}
    assert grid >= {(c, b) for c in gpu_plan.CONTEXTS for b in gpu_plan.BATCHES}
    rows = [t.__dict__ | {"kind": t.form, "status": "ok", "us": 1.0, "bytes_per_s": 1.0}
            for t in tasks if isinstance(t, Case)]  # fmt: skip
    assert all(target.rows for target in gpu_plan.targets(rows, 1.0))


def test_bytes_and_operations_of_a_case():
    decode = Case("jaxkv", "decode", 100, 3)
    assert decode.read_bytes == 3 * 100 * 2 * 8 * 128 * 2
    assert decode.flops == 3 * 4 * 32 * 128 * 100
    assert Case("jaxkv", "decode", 100, 3, dtype="int8").read_bytes == 3 * 100 * 2 * 8 * (128 + 4)
    prefill = Case("jaxkv", "prefill", 4, 1, queries=3)
    assert prefill.flops == 4 * 32 * 128 * (2 + 3 + 4)
    layers, sets = Case("jaxkv", "decode", 4096, 1).rotation
    assert layers * sets * 4096 * decode.bytes_per_token >= 2**30
    ragged = Case("jaxkv", "decode", 4096, 64, ragged=True).lengths
    assert (ragged.min(), ragged.max()) == (512, 4096)


def test_targets_take_the_worst_row():
    case = Case("jaxkv", "decode", 4096, 64)
    row = case.__dict__ | {"kind": "decode", "status": "ok", "us": 10.0, "bytes_per_s": 95.0}
    slower = row | {"context": 16384, "bytes_per_s": 90.0}
    other = row | {"engine": "cudnn_paged", "us": 12.0}
    triton = row | {"engine": "pallas_triton", "us": 25.0, "block": 32}
    by_what = {t.what: t for t in gpu_plan.targets([row, slower, other, triton], 100.0)}
    share = by_what["decode, context from 4096, batch from 32, block 16"]
    assert (share.got, share.rows, share.met) == (0.9, 2, False)
    assert by_what["decode against cuDNN paged"].got == pytest.approx(1.2)
    assert by_what["decode against JAX's deprecated op"].met is None  # other page size
