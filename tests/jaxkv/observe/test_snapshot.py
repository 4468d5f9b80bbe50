"""Snapshots: stored as CSV without loss, compared by content; made by hand and by a manager."""

import csv
import json

import numpy as np
import pytest
from rich.console import Console

from jaxkv import BlockManager
from jaxkv.manager.records import BlockInfo
from jaxkv.observe.snapshot import Snapshot, SnapshotError, diff, take_snapshot


def info(block, *sequences, hash=None, ref_count=None, tier="device", last_access=None):
    return BlockInfo(
        block=block,
        ref_count=len(sequences) if ref_count is None else ref_count,
        last_access=last_access,
        access_count=0,
        hash=hash,
        sequences=tuple(sequences),
        tier=tier,
    )


def of(*infos):
    return Snapshot(tuple(infos))


def ids(entries):
    return [entry.block for entry in entries]


def render(table):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return console.export_text()


def test_csv_keeps_everything_but_stats_and_configuration(tmp_path):
    odd = ["plain", 7, "7", "", 'a,"b"\n;é', "[]", -(10**20)]
    snapshot = of(
        info(1, *odd, hash="ab" * 16, last_access=1 / 3),
        info(2, ref_count=2, last_access=float(2**60)),
        info(3, tier="host", hash="00"),
    )
    path = tmp_path / "a.csv"
    snapshot.write_csv(path)
    read = Snapshot.read_csv(path)
    assert read == snapshot
    assert [type(seq) for seq in read.blocks[0].sequences] == [type(seq) for seq in odd]
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "block", "ref_count", "last_access", "access_count", "hash", "sequences", "tier",
    ]  # fmt: skip
    assert rows[1]["hash"] == rows[2]["last_access"] == ""


@pytest.mark.parametrize("seq", [("a", 1), None, 1.5, True, np.int64(3)])
def test_other_ids_are_rejected_before_a_file_is_created(tmp_path, seq):
    with pytest.raises(SnapshotError, match=r"block 4: .* str or int"):
        of(info(4, seq)).write_csv(tmp_path / "a.csv")
    assert not list(tmp_path.iterdir())


HEADER = "block,ref_count,last_access,access_count,hash,sequences,tier\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a snapshot: no column"),
        ("a,b\n1,2\n", "is not a snapshot: no column 'access_count'"),
        (HEADER + "x,1,,0,,[],device\n", "line 2: column 'block' cannot be 'x'"),
        (HEADER + "1,1,,0,,[],device\n2,1,,0\n", "line 3: column 'hash' cannot be None"),
        (HEADER + "1,1,soon,0,,[],device\n", "line 2: column 'last_access' cannot be 'soon'"),
        (HEADER + "1,1,,0,xy,[],device\n", "line 2: column 'hash' cannot be 'xy'"),
        (HEADER + "1,1,,0,,a,device\n", "line 2: column 'sequences' cannot be 'a'"),
        (HEADER + "1,1,,0,,[[1]],device\n", "line 2: column 'sequences'"),
        (HEADER + "1,1,,0,,{},device\n", "line 2: column 'sequences'"),
        (HEADER + "1,1,,0,,[],\n", "line 2: column 'tier' cannot be ''"),
        (HEADER + "1,1,,0,,[],device\n" * 2, "1 blocks are listed twice"),
        (HEADER + '1,1,,0,,"' + "x" * 200_000 + '",device\n', "field larger"),
        ("\x00\xff\xfe" * 9, "is not a snapshot"),
    ],
)
def test_bad_files_are_one_clear_error(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(SnapshotError, match=r"a\.csv") as error:
        Snapshot.read_csv(path)
    assert message in str(error.value)
    assert len(str(error.value)) < 100 + len(str(path))


def test_further_columns_and_a_byte_order_mark_are_ignored(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("﻿" + HEADER.strip() + ",note\n1,1,,0,,[],device,hello\n", encoding="utf-8")
    assert Snapshot.read_csv(path) == of(info(1, ref_count=1))


def test_leaked_blocks_have_more_references_than_sequences():
    a = of(info(1, "a"), info(2, "a", "b"), info(3, "a"), info(4))
    b = of(info(1, ref_count=1), info(2, "b", ref_count=2), info(3), info(4, "c"))
    result = diff(a, b)
    assert ids(result.leaked) == [1, 2]
    assert ids(result.appeared) == [4]
    assert ids(result.vanished) == [3]


def test_contents_appear_vanish_and_move():
    a = of(info(1, "a", hash="aa"), info(2, "a", hash="bb"), info(3, hash="cc"), info(4), info(5))
    b = of(info(1, hash="aa"), info(2, "b", hash="dd"), info(3), info(4, "b", hash="bb"), info(5))
    result = diff(a, b)
    assert [(x.block, y.block, y.hash) for x, y in result.moved] == [(2, 4, "bb")]
    assert ids(result.appeared) == [2]  # other content in the same block
    assert ids(result.vanished) == [3]
    assert [(x.block, x.ref_count, y.ref_count) for x, y in result.ref_changes] == [(1, 1, 0)]
    assert result.leaked == ()


def test_a_block_that_got_its_hash_later_has_not_changed():
    result = diff(of(info(1, "a")), of(info(1, "a", hash="aa")))
    assert result == diff(of(), of())
    assert result.table().row_count == 0


def test_block_numbers_are_per_tier():
    a = of(info(1, hash="aa"), info(1, tier="host"))
    b = of(info(1, "x"), info(1, hash="aa", tier="host"))
    result = diff(a, b)
    assert [(x.tier, y.tier) for x, y in result.moved] == [("device", "host")]
    assert [(x.tier, x.sequences) for x in result.appeared] == [("device", ("x",))]
    assert result.vanished == ()


def test_the_table_names_every_difference():
    a = of(info(1, "a", hash="aa"), info(2, "[red]", 5), info(3, "a", hash="cc"))
    b = of(info(1, ref_count=1), info(2, *range(9)), info(3), info(4, hash="cc"), info(5, "z"))
    text = render(diff(a, b).table())
    for part in ("leaked", "'[red]', 5 → 0, 1, 2, 3 and 5 more", "2 → 9", "3 → 4", "appeared"):
        assert part in text
    assert "'[red]', 5" in render(a.table("before"))


def test_a_difference_as_plain_data():
    a, b = of(info(1, "a", hash="aa")), of(info(1), info(2, "a", 3, hash="aa"), info(3, "z"))
    data = diff(a, b).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {"leaked", "appeared", "vanished", "moved", "ref_changes"}
    assert data["moved"][0]["before"]["block"] == 1
    assert data["moved"][0]["after"]["sequences"] == ["a", 3]


# -- a real manager --------------------------------------------------------------------------


def make(blocks=8, **options):
    return BlockManager(blocks + 1, 4, max_seqs=4, max_blocks_per_seq=8, **options)


def test_snapshots_of_a_real_manager(tmp_path):
    manager = make(clock=lambda: 5.5)
    empty = take_snapshot(manager)
    assert empty.stats == manager.stats()
    assert empty.config == manager.to_dict()
    assert ids(empty.blocks) == list(range(1, 9))
    manager.allocate("a", range(10))
    manager.commit("a", 10)
    manager.allocate(7, [*range(8), 99])
    before = take_snapshot(manager)
    assert ids(diff(empty, before).appeared) == [1, 2, 3, 4]
    assert before.blocks[0].sequences == ("a", 7)
    assert before.blocks[0].last_access == 5.5
    assert before.blocks[0].hash
    before.write_csv(tmp_path / "before.csv")
    manager.free("a")
    after = take_snapshot(manager)
    result = diff(Snapshot.read_csv(tmp_path / "before.csv"), after)
    assert ids(result.vanished) == [3]
    assert [(x.block, x.ref_count, y.ref_count) for x, y in result.ref_changes] == [
        (1, 2, 1), (2, 2, 1),
    ]  # fmt: skip
    assert result.leaked == result.appeared == result.moved == ()


def test_a_reference_that_is_not_released_is_a_leak():
    manager = make()
    before = take_snapshot(manager)
    manager.allocate("a", range(6))
    block = int(manager.block_table("a")[1])
    manager._pool.ref_counts[block] += 1  # as a faulty caller would do
    manager.free("a")
    assert ids(diff(before, take_snapshot(manager)).leaked) == [block]


def test_content_recomputed_in_another_block_has_moved():
    manager = make(blocks=4)
    manager.allocate("a", range(5))
    manager.commit("a", 5)
    manager.free("a")
    before = take_snapshot(manager)
    manager.allocate("b", [50] * 16)  # evicts the cached blocks of "a"
    manager.truncate("b", 8)
    manager.allocate("c", range(5))
    manager.commit("c", 5)
    after = take_snapshot(manager)
    [(x, y)] = diff(before, after).moved
    assert x.hash == y.hash
    assert x.block != y.block


def test_snapshots_of_different_pools_are_rejected():
    with pytest.raises(SnapshotError, match="num_blocks is 9 and 5"):
        diff(take_snapshot(make()), take_snapshot(make(blocks=4)))
