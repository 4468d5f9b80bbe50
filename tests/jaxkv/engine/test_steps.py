"""Compiled steps of a model."""

import functools
from typing import Any

import jax

from jaxkv.engine import steps
from jaxkv.pallas_kernels import target


def test_steps_for_a_gpu_have_its_compiler_options_and_share_no_program(small_model, monkeypatch):
    """Without the options XLA recomputes small results in each layer, see `compiler_options`."""
    given, jit = [], jax.jit

    def noting(*args: Any, **options: Any):
        given.append(options.get("compiler_options"))
        return jit(*args, **options)

    monkeypatch.setattr(jax, "jit", noting)
    steps._compiled.cache_clear()
    here = steps.make_steps(small_model)
    assert given == [{}, {}]
    with target.compile_for("gpu", (9, 0)):
        there = steps.make_steps(small_model)
    assert given[2:] == [{"xla_gpu_memory_limit_slop_factor": 1000}] * 2
    for a, b in zip(here[:2], there[:2], strict=True):
        assert isinstance(a, functools.partial)
        assert isinstance(b, functools.partial)
        assert a.func is not b.func
