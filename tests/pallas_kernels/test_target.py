"""The device that a step is traced for."""

import jax
import jax.numpy as jnp
import pytest

from jaxkv.pallas_kernels import target


def test_the_default_is_the_default_device_of_jax():
    assert target.current() == ("cpu", None)
    with jax.default_device(jax.devices("cpu")[0]):
        assert target.current() == ("cpu", None)


def test_compile_for_sets_the_device_and_nests():
    with target.compile_for("gpu", (9, 0)):
        assert target.current() == ("gpu", (9, 0))
        with target.compile_for("gpu", (8, 0)):
            assert target.current() == ("gpu", (8, 0))
        assert target.current() == ("gpu", (9, 0))
    assert target.current() == ("cpu", None)


def test_an_error_restores_the_device():
    with pytest.raises(RuntimeError, match="no"), target.compile_for("gpu"):
        raise RuntimeError("no")
    assert target.current() == ("cpu", None)


def test_traces_are_not_shared_between_devices():
    traced = jax.jit(lambda x: x + (target.current()[1] or (0, 0))[0])
    x = jnp.zeros((), jnp.int32)
    assert traced(x) == 0
    with target.compile_for("gpu", (9, 0)):
        assert traced(x) == 9
    with target.compile_for("gpu", (8, 0)):
        assert traced(x) == 8
    assert traced(x) == 0


def test_pipelines_go_to_the_innermost_target():
    pipeline = target.Pipeline("decode", stages=3, tile_bytes=1024)
    target.declare(pipeline)
    with target.compile_for("gpu", (9, 0)) as outer:
        with target.compile_for("gpu", (9, 0)) as inner:
            target.declare(pipeline)
        assert inner == [pipeline]
        assert outer == []
