"""Every number is checked: a bad one is one clear error, and changes nothing."""

from typing import Any, cast

import numpy as np
import pytest
from oracle import run
from scene import CALLS, digest, scene

from jaxkv import BlockManager, JaxkvError
from jaxkv.errors import ConfigError
from jaxkv.manager.prefix.keys import Media, as_tokens

HUGE = 10**400  # above the largest float
NOT_INTEGERS = [0.5, 1.0, True, None, "1", [1], np.float32(2), np.bool_(True), 2**63, -(2**63) - 1,
                HUGE, -HUGE, float("nan"), 1j, object()]  # fmt: skip
NOT_COUNTS = [*NOT_INTEGERS, -1, np.int8(-1)]
NOT_SECONDS = [-1, -0.5, True, "1", [1], float("nan"), float("inf"), HUGE, np.float32("nan"), 1j]
NOT_TOKENS = [[-1], [1.0], [0.9, 1], [1, True], [True], [2**31], [2**63], [2**70], ["1"], [None],
              [[1, 2]], [[1], [1, 2]], 5, "12", None, np.array([-1]), np.array([-1], np.int8),
              np.array([1.5]), np.array([2**31]), np.array([2**63], np.uint64), np.array([True]),
              np.array([[1]]), np.array(1), np.array([-1], np.int32), (1, HUGE)]  # fmt: skip
NOT_SLOTS = [[1.5], [True], [0], [-1], [2**63], [33], [], [1, 2], [[1]], "1", 0, 33, 1.0, True,
             2**63 - 1, np.array([1.5]), np.array([1], bool), [np.iinfo(np.int64).max]]  # fmt: skip
MEDIA: Any = Media
NOT_MEDIA = [
    MEDIA(-1, 1, "x"),
    Media(0, 0, "x"),
    MEDIA(0.5, 1, "x"),
    MEDIA(0, 1.5, "x"),
    MEDIA(0, 2**40, "x"),
    Media(2**40, 1, "x"),
    Media(True, 1, "x"),
    MEDIA(0, 1, 1.5),
]
NOT_IDS = [[], {}, {1}, np.zeros(1)]
FREE_BLOCK = 16

# (call, name of the argument, bad values)
TABLE: list[tuple[Any, str, list[Any]]] = [
    (lambda m, x: m.allocate("new", x), "token_ids", NOT_TOKENS),
    (lambda m, x: m.allocate("new", run(1, 9), lookahead=x), "lookahead", NOT_COUNTS),
    (lambda m, x: m.allocate("new", run(1, 9), priority=x), "priority", [*NOT_INTEGERS, 2**31]),
    (lambda m, x: m.allocate("new", run(1, 9), priority=1, ttl=x), "ttl", NOT_SECONDS),
    (lambda m, x: m.allocate("new", run(1, 9), media=[x]), "", NOT_MEDIA),
    (lambda m, x: m.allocate(x, [1]), "seq_id", NOT_IDS),
    (lambda m, x: m.can_allocate(x), "token_ids", NOT_TOKENS),
    (lambda m, x: m.can_allocate([1], lookahead=x), "lookahead", NOT_COUNTS),
    (lambda m, x: m.lookup(x), "token_ids", NOT_TOKENS),
    (lambda m, x: m.lookup([1], media=[x]), "", NOT_MEDIA),
    (lambda m, x: m.block_hashes(x), "token_ids", NOT_TOKENS),
    (lambda m, x: m.pin(x), "token_ids", NOT_TOKENS),
    (lambda m, x: m.pin(run(1, 4), ttl=x), "ttl", NOT_SECONDS),
    (lambda m, x: m.unpin(x), "token_ids", NOT_TOKENS),
    (lambda m, x: m.commit("c", x), "num_tokens", NOT_COUNTS),
    (lambda m, x: m.commit("c", x), "cannot commit", [4, 2**63 - 1, np.int64(2**63 - 1)]),
    (lambda m, x: m.commit(x, 1), "seq_id", NOT_IDS),
    (
        lambda m, x: m.commit_batch(["c"], x),
        "",
        [[-1], [1.5], [True], [4], [2**63 - 1], [], [1, 1], 1, None],
    ),
    (lambda m, x: m.append("c", x), "token_ids", [-1, 2**31, 0.5, 1.0, True, None, "1", HUGE]),
    (lambda m, x: m.append_batch(["c"], x), "", [*NOT_TOKENS, [1, 2], []]),
    (lambda m, x: m.append_batch(["c"], [1], x), "", NOT_SLOTS),
    (
        lambda m, x: m.append_batch(["c", "a"], [1, 1], x),
        "",
        [[1], [1, 1.0], [1, 2**63 - 1], [2, 0]],
    ),
    (lambda m, x: m.reserve(["c"], x), "", NOT_SLOTS),
    (lambda m, x: m.fork("a", x), "seq_id", NOT_IDS),
    (lambda m, x: m.fork(x, "new"), "seq_id", NOT_IDS),
    (
        lambda m, x: m.reorder(["a", "b"], x),
        "parents",
        [[0], [0.0, 1], [True, 0], [0, -1], [0, 2], [2**63, 0], None, "01", [[0, 1]]],
    ),
    (lambda m, x: m.truncate("a", x), "", [*NOT_COUNTS, 11, 2**63 - 1]),
    (lambda m, x: m.free(x), "seq_id", NOT_IDS),
    (
        lambda m, x: m.begin_transfer(x),
        "",
        [[0.5], [True], [-1], [0], [17], [FREE_BLOCK], [2**63], 1, None, ["1"]],
    ),
    (lambda m, x: m.complete_transfer(x), "transfer", [*NOT_COUNTS, 1, 2**63 - 1, 0.0, False]),
    (
        lambda m, x: m.evict(x),
        "",
        [[0.5], [True], [-1], [0], [17], [FREE_BLOCK], [2**63], 1, None, ["1"]],
    ),
    (
        lambda m, x: m.set_weight_version(x),
        "weight_version",
        [0.5, True, None, [1], b"1", 2**63, HUGE],
    ),
    (lambda m, x: m.note("preempt", "a", {x: 1}), "detail", ["self", "kind", "seq", "blocks"]),
    (lambda m, x: m.blocks_for(x), "num_tokens", NOT_COUNTS),
    (
        lambda m, x: m.locate(x, np.array([0])),
        "rows",
        [np.array([0.5]), np.array([True]), [0.0], None],
    ),
    (
        lambda m, x: m.locate(np.array([0]), x),
        "positions",
        [np.array([0.5]), np.array([True]), [0.0], None],
    ),
]
CASES = [
    pytest.param(call, name, value, id=f"{name or 'x'}-{i}-{j}")
    for i, (call, name, values) in enumerate(TABLE)
    for j, value in enumerate(values)
]


@pytest.mark.parametrize(("call", "name", "value"), CASES)
def test_a_bad_number_is_refused_and_changes_nothing(call, name, value):
    m = scene(clock=lambda: 1.0)
    before = digest(m)
    with pytest.raises(JaxkvError, match=name or "."):
        call(m, value)
    assert digest(m) == before
    m.check()


SIZES: dict[str, Any] = dict(num_blocks=9, block_size=4, max_seqs=2, max_blocks_per_seq=4)


@pytest.mark.parametrize("field", [*SIZES, "sliding_window", "watermark", "weight_version", "clock",
                                   "prefix_index", "eviction"])  # fmt: skip
@pytest.mark.parametrize("value", [0.5, -1, True, "7", [1], 2**63, HUGE, float("nan")])
def test_a_bad_option_is_named(field, value):
    if (field, value) in [("watermark", 0.5), ("weight_version", -1), ("weight_version", "7")]:
        return
    with pytest.raises(ConfigError, match=field):
        BlockManager(**(SIZES | {field: value}))


def numpy_twin(dtype):
    """A manager whose every number comes from NumPy."""
    n: Any = dtype
    m: Any = BlockManager(
        n(100),
        n(4),
        max_seqs=n(3),
        max_blocks_per_seq=n(20),
        sliding_window=n(50),
        watermark=cast(Any, np.float32(0.25)),
        weight_version=n(1),
    )
    m.allocate("a", np.arange(9, dtype=dtype), lookahead=n(2), priority=n(1), ttl=np.float32(9),
               media=[Media(n(1), n(2), n(3))])  # fmt: skip
    m.commit("a", n(9))
    m.append("a", n(3))
    m.append_batch(["a"], np.array([4, 5], dtype), np.array([2], dtype))
    m.reserve(["a"], n(3))
    m.reserve(["a"], np.array([4], dtype))
    m.fork("a", "b")
    m.reorder(["a", "b"], np.array([1, 0], dtype))
    m.truncate("b", n(10))
    m.pin(np.arange(8, dtype=dtype), ttl=n(5))
    m.complete_transfer(n(m.begin_transfer(np.array([1], dtype))))
    m.commit_batch(["a"], np.array([3], dtype))
    m.set_weight_version(n(2))
    assert m.blocks_for(n(127)) == 32
    return m


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_numpy_integers_are_as_good_as_those_of_python(dtype):
    m, twin = numpy_twin(dtype), numpy_twin(np.int64)
    assert type(m.num_blocks) is type(m.block_size) is type(m.max_seqs) is int
    assert m.block_table("a").tolist() == twin.block_table("a").tolist()
    assert m.stats() == twin.stats()
    assert m.to_dict() == twin.to_dict()
    assert {type(x) for x in m.to_dict().values()} <= {int, float, bool, str}
    m.check()


def test_an_integer_that_python_refuses_to_print():
    with pytest.raises(ConfigError, match="lookahead=an integer of 16610 bits"):
        scene().allocate("new", [1], lookahead=10**5000)


def test_token_ids_that_need_no_conversion_are_not_copied():
    tokens = np.arange(100, dtype=np.int32)
    assert as_tokens(tokens) is tokens
    assert as_tokens(tokens[:0]).size == 0
    assert as_tokens([2**31 - 1, 0]).tolist() == [2**31 - 1, 0]
    assert as_tokens(tokens.astype(">i4")).dtype == np.dtype("<i4")


def test_every_call_with_a_number_is_in_the_table():
    tested = {call.__code__.co_names[0] for call, _, _ in TABLE}
    without = {"end_pins", "reset_prefix_cache", "reset", "take_plan", "stats", "blocks", "check"}
    without |= {"to_dict", "table_view"}
    by_id = {"row", "length", "num_computed_tokens", "token_ids", "block_table", "select"}
    assert {name.partition(":")[0] for name in CALLS} == tested | without | by_id


@pytest.mark.parametrize(
    "call", ["row", "length", "num_computed_tokens", "token_ids", "block_table"]
)
@pytest.mark.parametrize("seq", NOT_IDS)
def test_an_id_that_is_not_hashable(call, seq):
    m = scene()
    with pytest.raises(ConfigError, match=r"seq_id=.* must be hashable"):
        getattr(m, call)(seq)
    with pytest.raises(ConfigError, match=r"seq_id=.* must be hashable"):
        m.select(["a", seq])
