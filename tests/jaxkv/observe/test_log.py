"""Logs replay without a difference; a changed log differs, and other files are rejected."""

import contextlib
import functools
import io
import json
import re
from typing import Any

import numpy as np
import pytest

from jaxkv import BlockManager
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.manager import events
from jaxkv.observe.log import FORMAT, VERSION, ReplayError, record, replay

CONFIG: dict[str, Any] = dict(num_blocks=5, block_size=4, max_seqs=2, max_blocks_per_seq=4)


def header(**changes):
    return {"format": FORMAT, "version": VERSION, "config": CONFIG} | changes


def operation(name, arguments, *, time=0.0, **outcome):
    return {
        "kind": events.OPERATION, "time": time, "seq": None, "blocks": [], "ref_counts": [],
        "free_count": 0, "detail": {"name": name, "arguments": arguments, **outcome},
    }  # fmt: skip


def text(*entries, end="\n"):
    return "\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries) + end


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("", "the log is empty"),
        ("\n", "line 1 is not valid JSON"),
        ("{", "line 1 is not valid JSON"),
        (text([1]), "line 1 is not the header"),
        (text({"kind": "free"}), "line 1 is not the header"),
        (text(header(version=2)), "version 2; this release reads version 1"),
        (text(header(config=None)), "no configuration"),
        (text(header(config={"num_blocks": 5})), "line 1: BlockManager rejects the configuration"),
        (text(header(config=CONFIG | {"shape": 1})), "line 1: .*shape"),
        (text(header(), '{"kind": "fr', operation("take_plan", {})), "line 2 is not valid JSON"),
        (text(header(), "[]"), "line 2 is not an event"),
        (text(header(), {"kind": "free"}), "line 2 is not an event"),
        (text(header(), operation("explode", {})), "line 2: unknown operation 'explode'"),
        (text(header(), operation("to_dict", {})), "unknown operation 'to_dict'"),
        (text(header(), operation("__init__", {})), "unknown operation '__init__'"),
        (text(header(), operation("free", {"who": 1})), r"line 2: free\(who=1\): .*argument"),
        (text(header(), operation("free", [1])), "line 2 is an operation without arguments"),
        (text(header(), operation(7, {})), "line 2 is an operation without a name"),
        (text(header(), operation("take_plan", {}, time="now")), "without a name or a time"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_logs_are_one_clear_error(log, message):
    with pytest.raises(ReplayError, match=message) as error:
        replay(io.StringIO(log))
    assert "\n" not in str(error.value)


def test_an_invalid_configuration():
    with pytest.raises(ConfigError, match="num_blocks=1"):
        replay(io.StringIO(text(header(config=CONFIG | {"num_blocks": 1}))))


def test_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(text(header()).encode() + b"\xff\xfe\n{}\n")
    with pytest.raises(ReplayError, match="line 2 is not valid JSON"):
        replay(path)


# -- a real manager --------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-3
        return self.now


def run_random(manager, rng, steps):
    """Random operations: every kind, with failing ones among them."""
    seqs = []
    for i in range(steps):
        choice = rng.integers(14)
        try:
            if choice < 4 or not seqs:
                prompt = rng.integers(0, 2, int(rng.integers(1, 20)))
                manager.allocate(
                    i, prompt, namespace=[None, "x", {"salt": 1, "b": [2]}][i % 3],
                    skip_prefix_cache=i % 17 == 0, lookahead=i % 3, priority=i % 2 * 50, ttl=3.0,
                )  # fmt: skip
                seqs.append(i)
                continue
            seq = seqs[int(rng.integers(len(seqs)))]
            if choice < 6:
                manager.commit(seq, manager.length(seq) - manager.num_computed_tokens(seq))
            elif choice == 6:
                manager.append(seq, int(rng.integers(2)))
            elif choice == 7:
                manager.append_batch(manager.select(seqs), rng.integers(0, 2, len(seqs)))
            elif choice == 8:
                manager.fork(seq, i)
                seqs.append(i)
            elif choice == 9:
                manager.truncate(seq, int(rng.integers(0, manager.length(seq) + 2)))
            elif choice == 10:
                manager.reorder(seqs, rng.integers(0, len(seqs), len(seqs)).tolist())
            elif choice == 11:
                manager.take_plan()
            elif choice == 12:
                manager.pin(manager.token_ids(seq), ttl=float(rng.exponential()))
                manager.evict([int(rng.integers(1, manager.num_blocks))])
            else:
                manager.free(seq)
                seqs.remove(seq)
                manager.reset_prefix_cache(force=i % 40 == 0)
        except JaxkvError:
            pass


@functools.cache
def recorded(seed=0, steps=400, **options):
    """The log of random operations."""
    sizes: dict[str, Any] = dict(num_blocks=13, block_size=4, max_seqs=4, max_blocks_per_seq=8)
    options = sizes | options
    manager, log = BlockManager(**options, clock=Clock()), io.StringIO()
    record(manager, log)
    run_random(manager, np.random.default_rng(seed), steps)
    return log.getvalue()


def lines_of(log, name=None, kind=events.OPERATION):
    """(index, entry) of the log's events of a kind, or operations of a name."""
    for i, line in enumerate(log.splitlines()):
        entry = json.loads(line)
        if entry.get("kind") == kind and name in (None, entry["detail"].get("name")):
            yield i, entry


@pytest.mark.parametrize("prefix_index", ["hash", "radix", None])
@pytest.mark.parametrize("eviction", ["lru", "decayed"])
def test_random_operations_replay_without_a_difference(prefix_index, eviction):
    log = recorded(prefix_index=prefix_index, eviction=eviction)
    report = replay(io.StringIO(log))
    assert report.difference is None, report
    assert report.note is None
    assert report.events == log.count("\n") - 1
    names = {entry["detail"]["name"] for _, entry in lines_of(log)}
    assert len(names) >= 12
    assert any("error" in entry["detail"] for _, entry in lines_of(log))
    if prefix_index:
        for kind in (events.HIT, events.EVICT, events.COPY, events.STORED, events.REMOVED):
            assert any(lines_of(log, kind=kind)), kind


@pytest.mark.parametrize(
    "options",
    [
        {"copy_on_partial_reuse": True},
        {"sliding_window": 6, "watermark": 0.1},
        {"eviction": "slru", "weight_version": "v2", "debug": True},
        {"eviction": "s3fifo", "num_blocks": 30, "max_seqs": 8},
    ],
)
def test_every_option_is_in_the_header(options):
    report = replay(io.StringIO(recorded(1, **options)))
    assert report.difference is None, report


def test_str_and_int_ids_stay_apart():
    manager, log = BlockManager(**CONFIG, clock=Clock()), io.StringIO()
    record(manager, log)
    manager.allocate("7", [1])
    manager.allocate(7, [2])
    manager.append_batch([7, "7"], np.array([1, 2]))
    manager.free("7")
    with pytest.raises(JaxkvError):
        manager.free("7")
    log.seek(0)
    report = replay(log)
    assert report.difference is None
    assert report.operations == 5


@pytest.mark.parametrize("seq", [("a", 1), 1.5, True, np.int64(3), b"x", frozenset()])
def test_other_ids_are_rejected_and_recording_stops(seq):
    manager, log = BlockManager(**CONFIG), io.StringIO()
    record(manager, log)
    manager.allocate("a", [1])
    with pytest.warns(RuntimeWarning, match="ReplayError: .*str or int"):
        manager.allocate(seq, [1])
    manager.free("a")
    log.seek(0)
    report = replay(log)
    assert (report.operations, report.difference) == (1, None)


@pytest.mark.parametrize("namespace", [b"salt", {1: "x"}, {"a": (b"x",)}])
def test_arguments_that_json_would_change_are_rejected(namespace):
    manager = BlockManager(**CONFIG)
    record(manager, io.StringIO())
    with pytest.warns(RuntimeWarning, match="ReplayError: .*cannot hold namespace="):
        manager.allocate("a", [1], namespace=namespace)


def test_a_used_manager_is_rejected():
    manager = BlockManager(**CONFIG)
    manager.allocate("a", [1])
    manager.free("a")
    with pytest.raises(ReplayError, match="before its first operation"):
        record(manager, io.StringIO())


def test_recording_ends_when_the_listener_is_unsubscribed():
    manager, log = BlockManager(**CONFIG), io.StringIO()
    listener = record(manager, log)
    manager.allocate("a", [1])
    manager.unsubscribe(listener)
    manager.free("a")
    assert [entry["detail"]["name"] for _, entry in lines_of(log.getvalue())] == ["allocate"]


def changed(log, index, change):
    lines = log.splitlines()
    entry = json.loads(lines[index])
    change(entry)
    lines[index] = json.dumps(entry)
    return io.StringIO("\n".join(lines) + "\n")


def test_a_changed_result_is_found_at_its_line():
    log = recorded()
    index, entry = [x for x in lines_of(log, "allocate") if "result" in x[1]["detail"]][5]
    row = entry["detail"]["result"]["row"]
    report = replay(changed(log, index, lambda e: e["detail"]["result"].update(row=row + 1)))
    difference = report.difference
    assert difference is not None
    assert (difference.line, difference.what) == (index + 1, "result")
    seq_id = entry["detail"]["arguments"]["seq_id"]
    assert difference.operation.startswith(f"allocate(seq_id={seq_id}, ")
    assert difference.expected["result"]["row"] == row + 1
    assert difference.got["result"]["row"] == row
    assert report.operations == sum(1 for i, _ in lines_of(log) if i < index)
    for part in (f"line {index + 1}: allocate(", "result differs", "expected", "got"):
        assert part in str(report)
    assert json.loads(json.dumps(report.to_dict()))["same"] is False


def test_an_error_that_did_not_happen_is_found():
    log = recorded()
    index, _ = next(x for x in lines_of(log, "take_plan"))
    broken = changed(log, index, lambda e: e["detail"].update(error="JaxkvError: no"))
    difference = replay(broken).difference
    assert difference is not None
    assert difference.expected["error"] == "JaxkvError: no"
    assert "error" not in difference.got


@pytest.mark.parametrize("kind", [events.ALLOCATE, events.EVICT, events.STORED, events.COPY])
def test_changed_blocks_are_found_at_their_line(kind):
    log = recorded()
    index, entry = list(lines_of(log, kind=kind))[-1]
    broken = changed(log, index, lambda e: e.update(blocks=[b % 12 + 1 for b in e["blocks"]]))
    difference = replay(broken).difference
    assert difference is not None
    assert (difference.line, difference.what) == (index + 1, f"event {kind!r}")
    assert difference.got["blocks"] == entry["blocks"]


@pytest.mark.parametrize("kind", [events.EVICT, events.FREE])
def test_a_missing_or_duplicate_event_is_found(kind):
    log = recorded()
    lines = log.splitlines()
    index, _ = next(lines_of(log, kind=kind))
    for copies in (0, 2):
        some = lines[:index] + lines[index : index + 1] * copies + lines[index + 1 :]
        report = replay(io.StringIO("\n".join(some) + "\n"))
        assert report.difference is not None
        assert abs(report.difference.line - index - 1) <= 1


def test_an_incomplete_last_line_is_accepted(tmp_path):
    log = recorded(steps=60)
    last = log.rstrip("\n").rindex("\n") + 1
    path = tmp_path / "log"
    for cut in (last + 1, (last + len(log)) // 2, len(log) - 2):
        path.write_text(log[:cut])
        report = replay(path)
        assert report.difference is None
        assert report.note is not None
        assert re.search(r"line \d+, the last, is incomplete", report.note)
        assert "note: line" in str(report)
    path.write_text(log[: len(log) - 1])  # only the end of the line is missing
    assert replay(path) == replay(io.StringIO(log))
    assert replay(path).note is None


def test_a_log_that_ends_within_an_operation_says_so():
    log = recorded(steps=60)
    index, _ = list(lines_of(log, kind=events.FREE))[-1]
    report = replay(io.StringIO("\n".join(log.splitlines()[: index + 1]) + "\n"))
    assert report.difference is None
    assert report.note is not None
    assert "ends within an operation" in report.note


def test_an_incomplete_line_in_the_middle_is_an_error():
    lines = recorded(steps=60).splitlines()
    lines[40] = lines[40][:30]
    with pytest.raises(ReplayError, match="line 41 is not valid JSON"):
        replay(io.StringIO("\n".join(lines) + "\n"))


def test_the_clock_is_the_logged_one():
    """Pins expire at their logged time, although the replay takes no time."""
    clock = Clock()
    manager, log = BlockManager(**CONFIG, clock=clock), io.StringIO()
    record(manager, log)
    manager.allocate("a", [1] * 8)
    manager.commit("a", 8)
    manager.free("a")
    manager.pin([1] * 8, ttl=10.0)
    for seq, wait in (("b", 5.0), ("c", 20.0)):
        clock.now += wait
        with contextlib.suppress(JaxkvError):
            manager.allocate(seq, [2] * 16)
    log.seek(0)
    report = replay(log)
    assert report.difference is None
    refused = ["error" in e["detail"] for _, e in lines_of(log.getvalue(), "allocate")]
    assert refused == [False, True, False]


def test_progress_leaves_standard_output_alone(tmp_path, capsys):
    path = tmp_path / "log"
    path.write_text(recorded(steps=30))
    assert replay(str(path), progress=True) == replay(path)
    assert capsys.readouterr().out == ""
