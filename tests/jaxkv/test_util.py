"""JSON that jaxkv writes is JSON that others read."""

import ast
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

import jaxkv
from jaxkv._util import to_json
from jaxkv.manager.block_manager import BlockManager
from jaxkv.manager.events import Event, json_lines
from jaxkv.observe.log import ReplayError, record


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


def test_numbers_that_json_does_not_have_become_null():
    value = {"a": [math.nan, 1.5], "b": (np.float32("inf"), {"c": -math.inf}), "d": np.arange(2)}
    assert strict(to_json(value)) == {"a": [None, 1.5], "b": [None, {"c": None}], "d": [0, 1]}


def test_every_writer_of_json_refuses_or_replaces_them():
    """json.dumps by itself writes NaN, which Python alone reads back."""
    root = Path(jaxkv.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump"):
                strings = "sequences" in ast.unparse(node) or "jobs" in ast.unparse(node)
                named = {keyword.arg for keyword in node.keywords}
                safe = "allow_nan" in named or strings
                assert safe, f"{path}, line {node.lineno}: use jaxkv._util.to_json"


def test_events_of_a_clock_that_has_no_number_are_json():
    file = io.StringIO()
    json_lines(file)(Event("allocate", math.inf, "a", (1,), (1,), 3, {"rate": math.nan}))
    assert strict(file.getvalue())["detail"] == {"rate": None}


def test_a_log_cannot_hold_what_json_does_not_preserve():
    file = io.StringIO()
    manager = BlockManager(8, 2, max_seqs=2, max_blocks_per_seq=4)
    listener = record(manager, file)
    event = Event("operation", 0.0, "a", (), (), 8,
                  {"name": "allocate", "arguments": {"ttl": math.inf}})  # fmt: skip
    with pytest.raises(ReplayError, match="cannot hold ttl=inf"):
        listener(event)
    for line in file.getvalue().splitlines():
        strict(line)
