"""For which device a step is traced."""

import jax
import jax.numpy as jnp
import pytest

from jaxkv.pallas_kernels import target


def test_the_default_is_the_device_of_jax():
    assert target.current() == ("cpu", None)
    with jax.default_device(jax.devices("cpu")[0]):
        assert target.current() == ("cpu", None)


def test_inside_it_is_the_one_that_is_compiled_for():
    with target.compile_for("gpu", (9, 0)):
        assert target.current() == ("gpu", (9, 0))
        with target.compile_for("gpu", (8, 0)):
            assert target.current() == ("gpu", (8, 0))
        assert target.current() == ("gpu", (9, 0))
    assert target.current() == ("cpu", None)


def test_an_error_ends_it_too():
    with pytest.raises(RuntimeError, match="no"), target.compile_for("gpu"):
        raise RuntimeError("no")
    assert target.current() == ("cpu", None)


def test_a_trace_for_one_device_is_not_used_for_another():
    traced = jax.jit(lambda x: x + (target.current()[1] or (0, 0))[0])
    x = jnp.zeros((), jnp.int32)
    assert traced(x) == 0
    with target.compile_for("gpu", (9, 0)):
        assert traced(x) == 9
    with target.compile_for("gpu", (8, 0)):
        assert traced(x) == 8
    assert traced(x) == 0


def test_pipelines_are_heard_by_the_target_that_is_compiled_for():
    pipeline = target.Pipeline("decode", stages=3, tile_bytes=1024)
    target.declare(pipeline)
    with target.compile_for("gpu", (9, 0)) as outer:
        with target.compile_for("gpu", (9, 0)) as inner:
            target.declare(pipeline)
        assert inner == [pipeline]
        assert outer == []
