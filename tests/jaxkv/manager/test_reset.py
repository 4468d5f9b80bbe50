"""`reset`: a manager that works from any state, also from the middle of an interrupted call."""

import random
import sys

import pytest
from oracle import run
from scene import CHANGES, scene

from jaxkv import BlockManager, JaxkvError
from jaxkv.manager import events


class Interrupted(BaseException):
    """What a signal handler raises."""


def interrupted_at(line, call, manager):
    """Runs a call, up to a number of lines of the manager's modules; whether it got that far."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "jaxkv/manager/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == line:
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        call(manager)
    except Interrupted:
        return True
    except JaxkvError:  # the call refuses
        pass
    finally:
        sys.settrace(None)
    return False


def require_like_new(manager):
    stats = manager.stats()
    assert (stats.active, stats.cached, stats.num_seqs) == (0, 0, 0)
    assert stats.free == manager.num_blocks - 1
    plan = manager.take_plan()
    assert not len(plan.cells)
    assert not len(plan.copies)
    manager.check()
    assert manager.allocate("a", run(1, 10)).num_cached_tokens == 0
    manager.commit("a", 10)
    manager.free("a")
    assert manager.allocate("b", run(1, 10)).num_cached_tokens == 8
    manager.check()


@pytest.mark.parametrize("index", ["hash", "radix", None])
def test_a_manager_is_like_new_after_a_reset(index):
    manager = scene(index) if index else BlockManager(9, 4, max_seqs=2, max_blocks_per_seq=4)
    manager.reset()
    if index:
        require_like_new(manager)
    assert manager.stats().num_seqs == bool(index)


@pytest.mark.parametrize("name", CHANGES)
def test_a_reset_follows_an_interrupt_anywhere_in_a_call(name):
    rng = random.Random(name)
    lines = 1
    while interrupted_at(lines, CHANGES[name], scene()):
        lines += 1 + rng.randrange(lines)  # further and further apart
    for line in {1, *(rng.randrange(1, lines + 1) for _ in range(12))}:
        manager, seen = scene(), []
        manager.subscribe(lambda event, seen=seen: seen.append(event.kind))
        interrupted_at(line, CHANGES[name], manager)
        seen.clear()
        manager.reset()
        assert seen == [events.CLEARED, events.OPERATION]
        require_like_new(manager)
        assert seen[-1] == events.OPERATION  # later calls are told as well


def test_listeners_options_and_clock_outlast_a_reset():
    times = iter(range(1000))
    manager = BlockManager(
        9, 4, max_seqs=2, max_blocks_per_seq=4, eviction="slru", watermark=0.25,
        clock=lambda: float(next(times)),
    )  # fmt: skip
    options, clock, seen = manager.to_dict(), manager.clock, []
    manager.subscribe(seen.append)
    manager.set_weight_version("b")
    manager.reset()
    assert manager.to_dict() == options | {"weight_version": "b"}
    assert manager.clock is clock
    assert [event.kind for event in seen] == [events.OPERATION, events.CLEARED, events.OPERATION]
