"""`jaxkv snapshot diff` and `jaxkv replay`, in process, on files of real managers."""

import json

import pytest

from jaxkv import BlockManager
from jaxkv.cli import main
from jaxkv.observe.log import record
from jaxkv.observe.snapshot import take_snapshot


def run(capsys, *args):
    status = main([*map(str, args)])
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.fixture
def files(tmp_path):
    """Snapshots before, during and after operations that leak a block, and their log."""
    manager = BlockManager(9, 4, max_seqs=2, max_blocks_per_seq=4, clock=lambda: 1.0)
    with open(tmp_path / "log", "w") as log:
        listener = record(manager, log)
        take_snapshot(manager).write_csv(tmp_path / "before.csv")
        manager.allocate("a", range(10))
        manager.commit("a", 10)
        take_snapshot(manager).write_csv(tmp_path / "during.csv")
        manager.unsubscribe(listener)
    manager._pool.ref_counts[3] += 1
    manager.free("a")
    take_snapshot(manager).write_csv(tmp_path / "leak.csv")
    return tmp_path


def test_differences_as_a_table(capsys, files):
    status, out, _ = run(capsys, "snapshot", "diff", files / "before.csv", files / "during.csv")
    assert status == 0
    assert out.count("appeared") == 3 + 1
    assert "3 appeared" in out
    assert "leaked" not in out


def test_a_leak_is_status_1(capsys, files):
    status, out, _ = run(capsys, "snapshot", "diff", files / "during.csv", files / "leak.csv")
    assert status == 1
    assert "1 leaked, 2 ref changes" in out


def test_no_differences(capsys, files):
    same = files / "during.csv"
    assert run(capsys, "snapshot", "diff", same, same)[:2] == (0, "no differences\n")


def test_differences_as_json(capsys, files):
    status, out, err = run(
        capsys, "snapshot", "diff", files / "during.csv", files / "leak.csv", "--json"
    )
    result = json.loads(out)
    assert (status, err) == (1, "")
    assert [block["block"] for block in result["leaked"]] == [3]
    assert [x["after"]["ref_count"] for x in result["ref_changes"]] == [0, 0]
    assert result["moved"] == result["appeared"] == result["vanished"] == []


def test_a_log_that_replays(capsys, files):
    status, out, _ = run(capsys, "replay", files / "log")
    assert (status, out) == (0, "2 operations, 5 events: all as logged\n")
    status, out, err = run(capsys, "replay", files / "log", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "operations": 2, "events": 5, "difference": None, "note": None, "same": True,
    }  # fmt: skip


def test_a_log_that_differs(capsys, files):
    log = files / "log"
    log.write_text(log.read_text().replace('"num_cached_tokens": 0}', '"num_cached_tokens": 8}'))
    status, out, _ = run(capsys, "replay", log)
    assert status == 1
    assert "line 3: allocate(seq_id='a', token_ids=[0, 1, 2," in out
    status, out, _ = run(capsys, "replay", log, "--json")
    assert status == 1
    difference = json.loads(out)["difference"]
    assert (difference["line"], difference["what"]) == (3, "result")
    assert difference["expected"]["result"]["num_cached_tokens"] == 8
    assert difference["got"]["result"]["num_cached_tokens"] == 0


def test_an_incomplete_log_is_noted(capsys, files):
    log = files / "log"
    log.write_text(log.read_text()[:-20])
    status, out, _ = run(capsys, "replay", log)
    assert status == 0
    assert "note: line 6, the last, is incomplete" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["replay", "none"], "No such file"),
        (["replay", "."], "Is a directory"),
        (["replay", "before.csv"], "line 1 is not valid JSON"),
        (["snapshot", "diff", "none", "before.csv"], "No such file"),
        (["snapshot", "diff", "before.csv", "log"], "is not a snapshot"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, files, monkeypatch, args, message):
    monkeypatch.chdir(files)
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("args", [["snapshot"], ["snapshot", "show"], ["replay"]])
def test_missing_arguments_are_one_line_and_status_2(capsys, args):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
