"""Race detection for interpreted kernels, with two things that JAX's interpreter lacks.

- It computes a `wgmma` without recording that shared memory is read. Here the reads are recorded in
  the async proxy, which sees stores of the warpgroup only after a fence (`commit_smem`), and later
  writes of the operands must be ordered after them. The product counts as finished when it is
  issued: a barrier arrival between a product and the wait for it would go unnoticed.
- A warpgroup that waits for an arrival that never comes waits for ever. Here it raises an error.

Swizzles, the boxes of TMA copies and the descriptors of `wgmma` are not modelled by anything: the
interpreter keeps buffers in their logical shape.
"""

import functools
import threading
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

PATIENCE = 60.0  # seconds that a warpgroup waits at a barrier; milliseconds are usual


@functools.cache
def detector() -> plgpu.InterpretGPUParams:
    """Parameters of interpret mode; the first call patches the interpreter for the process."""
    _record_reads_of_wgmma()
    _limit_waits()
    return plgpu.InterpretGPUParams(detect_races=True)


def _record_reads_of_wgmma() -> None:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import HostAllocationKey

    multiply: Any = gpu_callbacks.wgmma

    @gpu_callbacks.fail_on_exception
    def wgmma(**call: Any):
        memory, warpgroup = gpu_callbacks._get_shared_memory(), call["thread"]
        if memory.detect_races:
            # Clocks have an entry for each warp. Code for single warps uses it, which these kernels
            # do not have, so it can count the products of the warpgroup.
            products = memory.thread_to_vc_position(warpgroup.warp(0))
            with memory.lock:
                memory.clocks[warpgroup].inc(products)
                clock = memory.clocks[warpgroup].async_smem_clock.copy()
            for operand in "ab":
                key = HostAllocationKey.from_array(call[f"{operand}_allocation_key_as_array"])
                transforms = gpu_callbacks._remove_noop_transforms(call[f"{operand}_transforms"])
                access = memory.access(key, jax.tree.map(int, transforms))
                gpu_callbacks.get_races().check_read(
                    warpgroup, clock, key, access, source_info=call["source_info"]
                )
        return multiply(**call)

    gpu_callbacks.wgmma = wgmma


class _Condition(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        arrived = super().wait(PATIENCE if timeout is None else timeout)
        if not arrived and timeout is None:
            raise TimeoutError(f"waited {PATIENCE} s at a barrier: an arrival is missing")
        return arrived


def _limit_waits() -> None:
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import Barrier

    make = Barrier.__init__

    def init(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.cv = _Condition()

    Barrier.__init__ = init
