"""One time per public call, and events that follow a complete change, whatever listeners do."""

import contextlib
import io
import itertools
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import run
from scene import CALLS, CHANGES, digest, scene

from jaxkv import BlockManager, JaxkvError, OutOfBlocksError
from jaxkv.manager import events
from jaxkv.manager.events import json_lines


class Jumping:
    """A clock that jumps at each reading."""

    def __init__(self, jumps=()):
        self.now, self.readings, self._jumps = 0.0, 0, iter(jumps)

    def __call__(self):
        self.readings += 1
        self.now += next(self._jumps, 1.0)
        return self.now


def outcome(call, m):
    """The result of a call, or its error."""
    try:
        return call(m)
    except OutOfBlocksError as error:
        return str(error)


def test_the_list_of_calls_is_complete():
    public = {name for name in vars(BlockManager) if not name.startswith("_")}
    public -= {"for_config", "clock", "weight_version", "subscribe", "unsubscribe"}
    assert public == {name.partition(":")[0] for name in CALLS}


# -- the clock -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CALLS if name != "commit: publishes"])
@pytest.mark.parametrize("listening", [False, True])
def test_a_public_call_reads_the_clock_at_most_once(name, listening):
    clock = Jumping()
    m = scene(clock=clock)
    if listening:
        m.subscribe(lambda event: None)
    before = clock.readings
    outcome(CALLS[name], m)
    assert clock.readings <= before + 1


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("readings", range(1, 8))
def test_a_pin_that_ends_while_a_prompt_is_admitted(index, readings):
    """Blocks that were counted as pinned hits must not also count as blocks to evict."""
    clock = Jumping()
    m = BlockManager(6, 4, max_seqs=2, max_blocks_per_seq=6, prefix_index=index, clock=clock)
    m.allocate("a", run(1, 8))
    m.commit("a", 8)
    m.free("a")
    m.pin(run(1, 8), ttl=readings + 0.5)
    m.allocate("other", [50])
    for _ in range(8):  # in one of these calls the pin ends
        with pytest.raises(OutOfBlocksError):
            m.allocate("b", [*run(1, 8), *run(101, 112)])
        m.check()
    m.free("other")
    assert m.allocate("b", [*run(1, 8), *run(101, 112)]).num_cached_tokens == 8
    m.check()


@given(
    jumps=st.lists(st.floats(-3, 30), min_size=1, max_size=40), data=st.data(),
    index=st.sampled_from(["hash", "radix"]), window=st.sampled_from([None, 6]),
    eviction=st.sampled_from(["lru", "decayed", "fifo"]), listening=st.booleans(),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_a_clock_that_jumps_at_every_reading(jumps, data, index, window, eviction, listening):
    """Refusals aside, no call raises, and the bookkeeping stays whole."""
    clock = Jumping(itertools.cycle(jumps))
    m = BlockManager(9, 2, max_seqs=4, max_blocks_per_seq=6, prefix_index=index,
                     sliding_window=window, eviction=eviction, clock=clock, debug=True)  # fmt: skip
    if listening:
        m.subscribe(lambda event: None)
    ttl = st.none() | st.floats(0, 20)
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=10)
    for step in range(25):
        live = list(m._table.rows)
        choice = data.draw(st.integers(0, 8))
        with contextlib.suppress(JaxkvError):
            if choice < 3 or not live:
                prompt = data.draw(tokens)
                m.can_allocate(prompt)
                m.allocate(step, prompt, priority=data.draw(st.integers(-1, 1)),
                           ttl=data.draw(ttl))  # fmt: skip
                m.commit(step, m.length(step) - m.num_computed_tokens(step))
            elif choice == 3:
                m.pin(data.draw(tokens), ttl=data.draw(ttl))
            elif choice == 4:
                m.append_batch(live, [1] * len(live))
            elif choice == 5:
                m.fork(live[0], step)
            elif choice == 6:
                m.stats()
            elif choice == 7:
                m.take_plan()
            else:
                m.free(live[0])
        m.check()
    for seq in list(m._table.rows):
        m.free(seq)
    m.take_plan()
    assert m.stats().active == 0


# -- listeners -------------------------------------------------------------------------------


def still():
    return 1.0


def kinds_of(call, index):
    m, seen = scene(index, clock=still), []
    m.subscribe(seen.append)
    outcome(call, m)
    return list(dict.fromkeys(event.kind for event in seen))


CASES = [
    (name, index, kind)
    for name, call in CHANGES.items()
    for index in ("hash", "radix")
    for kind in kinds_of(call, index)
]


def test_the_cases_have_every_kind_of_event():
    kinds = {events.STORED, events.REMOVED, events.CLEARED, events.ALLOCATE, events.FREE,
             events.COPY, events.EVICT, events.HIT, events.PREEMPT, events.OPERATION}  # fmt: skip
    assert {kind for _, _, kind in CASES} == kinds


@pytest.mark.parametrize(("name", "index", "kind"), CASES)
def test_a_listener_that_raises_harms_nobody(name, index, kind):
    """At each kind of event of each call: same result, same state, same events for the others."""
    undisturbed, expected = scene(index, clock=still), []
    undisturbed.subscribe(expected.append)
    result = outcome(CHANGES[name], undisturbed)

    m, seen, raised = scene(index, clock=still), [], []

    def broken(event):
        if event.kind == kind:
            raised.append(event)
            raise RuntimeError("no space left")

    m.subscribe(broken)
    m.subscribe(seen.append)
    with pytest.warns(RuntimeWarning, match=f"broken raised .*no space left .*{kind!r}") as caught:
        assert outcome(CHANGES[name], m) == result
    assert len(caught) == len(raised) == 1
    assert "test_journal.py" in str(caught[0].message)
    assert seen == expected
    assert digest(m) == digest(undisturbed)
    m.check()
    m.unsubscribe(broken)  # no error: the subscription has ended already


@pytest.mark.parametrize("name", CHANGES)
def test_listeners_see_a_complete_change(name):
    m = scene(clock=still)

    def listener(event):
        m.check()
        m.stats()
        assert m.journal.now() == event.time

    m.subscribe(listener)
    outcome(CHANGES[name], m)  # a listener that raised would warn


def test_a_listener_may_call_the_manager():
    """Its call is an operation of its own, whose events follow those of the call that caused it."""
    m, seen = scene(clock=still), []

    def listener(event):
        if event.kind == events.FREE and event.seq == "a":
            m.free("b")

    m.subscribe(listener)
    m.subscribe(lambda e: seen.append((e.kind, e.seq or e.detail.get("arguments"))))
    m.free("a")
    assert seen == [("free", "a"), ("operation", {"seq_id": "a"}),
                    ("free", "b"), ("operation", {"seq_id": "b"})]  # fmt: skip
    m.check()


def test_an_interrupted_listener_loses_no_events_of_others():
    m, seen = scene(clock=still), []

    def interrupted(event):
        if event.kind == events.FREE:
            raise KeyboardInterrupt

    m.subscribe(interrupted)
    m.subscribe(lambda e: seen.append(e.kind))
    with pytest.raises(KeyboardInterrupt):
        m.free("a")
    m.check()
    m.unsubscribe(interrupted)
    m.free("b")  # sends what was left first
    assert seen == ["free", "operation"] * 2


def test_warnings_as_errors_leave_the_manager_and_the_other_listeners_unharmed():
    m, seen = scene(clock=still), []
    m.subscribe(lambda event: 1 / 0)  # pyright: ignore[reportArgumentType]
    m.subscribe(lambda e: seen.append(e.kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="ZeroDivisionError"):
            m.free("a")
    assert seen == ["free", "operation"]
    m.check()
    m.free("b")


@pytest.mark.parametrize(
    "namespace",
    [b"salt", ("a", 1), {1: "x", False: 2}, {b"k": b"v"}, {("a", b"b"): None}, {None: [(2, b"")]},
     "\ud800", {"\ud800": 1}, "\0", -(2**100), True],
)  # fmt: skip
def test_every_legal_namespace_can_be_logged(namespace):
    m, log = BlockManager(9, 2, max_seqs=2, max_blocks_per_seq=4), io.StringIO()
    m.subscribe(json_lines(log))
    m.allocate("a", [1, 2, 3], namespace=namespace)
    m.commit("a", 3)
    m.allocate("b", [1, 2, 4], namespace=namespace)
    m.free("b")
    assert m.num_computed_tokens("a") == 3
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["kind"] for line in lines if line["kind"] != "operation"] == [
        "allocate", "BlockStored", "hit", "allocate", "free",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "seq", [("a", 1), 1.5, b"x", frozenset({1, "b", b"c", None}), frozenset(), 2**70, None]
)
def test_every_id_can_be_logged(seq):
    m, log = BlockManager(9, 2, max_seqs=2, max_blocks_per_seq=4), io.StringIO()
    m.subscribe(json_lines(log))
    m.allocate(seq, [1, 2, 3])
    m.free(seq)
    assert len([json.loads(line) for line in log.getvalue().splitlines()]) == 4
