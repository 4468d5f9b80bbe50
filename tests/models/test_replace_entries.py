"""Entries replaced together: a process that ends at any call leaves the old ones or the new."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxkv.models import replace_entries
from jaxkv.models.replace_entries import complete_replacement, replaced_entries

GONE = ("template", "absent")


class Killed(BaseException):
    pass


class Process:
    """Ends at its `last`-th call that changes the file system; nothing after that has an effect."""

    def __init__(self, monkeypatch, last):
        self.calls, self.last = 0, last
        names: dict[Any, tuple[str, ...]] = {
            os: ("rename", "mkdir", "rmdir", "unlink"), shutil: ("rmtree",),
            Path: ("rename", "mkdir", "touch", "unlink", "write_text"),
        }  # fmt: skip
        for owner in names:
            for name in names[owner]:
                monkeypatch.setattr(owner, name, self.guarded(getattr(owner, name)))

    def guarded(self, call):
        def run(*args, **kwargs):
            self.calls += 1
            if self.calls > self.last:
                raise Killed
            return call(*args, **kwargs)

        return run


def fill(folder, text, extra=()):
    (folder / "config").write_text(text)
    (folder / "params").mkdir()
    for name in ("a", "b"):
        (folder / "params" / name).write_text(text)
    for name in extra:
        (folder / name).write_text(text)


def fill_twice(folder):
    fill(folder, "new")
    fill(folder, "new")


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not str(path.relative_to(folder)).startswith(".jaxkv")
    }


def save(folder):
    with replaced_entries(folder, gone=GONE) as new:
        fill(new, "new")


@pytest.mark.parametrize("again", ["complete", "save"])
def test_a_process_killed_at_any_call_leaves_old_or_new(tmp_path, monkeypatch, again):
    seen = set()
    for last in range(200):
        folder = tmp_path / str(last)
        folder.mkdir()
        fill(folder, "old", extra=("template", "other"))
        old = contents(folder)
        new = {name: "new" for name in old} | {"other": "old"}
        del new["template"]
        with monkeypatch.context() as patch:
            Process(patch, last)
            try:
                save(folder)
                done = True
            except Killed:
                done = False
        if again == "save":  # the next save completes the first, and is whole itself
            save(folder)
            assert contents(folder) == new
        else:
            complete_replacement(folder)
            assert contents(folder) in (old, new)
            seen.add(contents(folder) == new)
        if done:
            assert contents(folder) == new
            assert not list(folder.glob(".jaxkv*"))
            break
    else:
        raise AssertionError("the save never ended")
    assert again == "save" or seen == {True, False}


SAVES = """
import sys
from pathlib import Path
from jaxkv.models.replace_entries import replaced_entries
for value in range(10**6):
    with replaced_entries(Path(sys.argv[1])) as new:
        for name in ("config", "other"):
            (new / name).write_text(str(value))
        (new / "params").mkdir()
        (new / "params" / "a").write_text(str(value))
    if value == 3:
        print(flush=True)
"""


def test_a_killed_process_leaves_entries_of_one_save(tmp_path):
    for delay in (0, 0.005, 0.011):
        with subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path)],
                              stdout=subprocess.PIPE) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            process.kill()
        complete_replacement(tmp_path)
        assert sorted(contents(tmp_path)) == ["config", "other", "params/a"]
        assert len(set(contents(tmp_path).values())) == 1


def test_a_completion_killed_at_any_call_is_completed_by_the_next(tmp_path, monkeypatch):
    for last in range(60):
        folder = tmp_path / str(last)
        folder.mkdir()
        fill(folder, "old", extra=("template",))
        with monkeypatch.context() as patch:  # ends before the first entry takes its place
            patch.setattr(replace_entries, "complete_replacement", lambda folder: None)
            save(folder)
        with monkeypatch.context() as patch:
            Process(patch, last)
            try:
                complete_replacement(folder)
                done = True
            except Killed:
                done = False
        complete_replacement(folder)
        assert contents(folder) == {"config": "new", "params/a": "new", "params/b": "new"}
        if done:
            return
    raise AssertionError("the completion never ended")


def test_an_error_while_writing_changes_nothing(tmp_path):
    fill(tmp_path, "old")
    with pytest.raises(FileExistsError), replaced_entries(tmp_path) as new:
        fill_twice(new)
    assert set(contents(tmp_path).values()) == {"old"}
    assert not list(tmp_path.glob(".jaxkv*"))


def test_a_reader_leaves_a_save_under_way_alone(tmp_path):
    fill(tmp_path, "old")
    with replaced_entries(tmp_path) as new:
        fill(new, "new")
        complete_replacement(tmp_path)
        assert set(contents(tmp_path).values()) == {"old"}
    assert set(contents(tmp_path).values()) == {"new"}
