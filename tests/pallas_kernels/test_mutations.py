"""Each synchronisation of the GPU kernels is needed: without it, the test named here fails.

The default run checks that the table is complete; `pytest -m mutation` removes one after the other.
"""

import os
import subprocess
import sys
from pathlib import Path

import mutations
import pytest

FOLDER = Path(__file__).parent
TESTS = FOLDER / "test_gpu_kernels.py"
DECODE = "test_decode_fills_each_stage_of_its_ring_again[hopper]"
DECODE_INT8 = "test_decode_fills_each_stage_of_its_ring_again[hopper-int8]"
DECODE_MMA = "test_decode_fills_each_stage_of_its_ring_again[blackwell]"
PREFILL = "test_prefill_fills_each_stage_of_its_ring_again[hopper]"
NOTICED = {
    "decode_gpu.compute: barrier_wait(q_ready)": DECODE,
    "decode_gpu.operand: commit_smem()": DECODE_INT8,
    "decode_gpu.tile: barrier_wait(ring.k_ready.at[slot])": DECODE,
    "decode_gpu.tile: barrier_arrive(ring.k_free.at[slot])": DECODE,
    "decode_gpu.tile: barrier_wait(ring.v_ready.at[slot])": DECODE,
    "decode_gpu.tile: commit_smem()": DECODE,
    "decode_gpu.tile: barrier_arrive(ring.v_free.at[slot])": DECODE,
    "decode_gpu.compute: commit_smem()": DECODE,
    "decode_gpu.compute: wait_smem_to_gmem(0)": DECODE,
    "prefill_gpu.compute: barrier_wait(q_ready.at[rows])": PREFILL,
    "prefill_gpu.step: barrier_wait(ring.k_ready.at[slot])": PREFILL,
    "prefill_gpu.step: barrier_arrive(ring.k_free.at[slot])": PREFILL,
    "prefill_gpu.step: commit_smem()": PREFILL,
    "prefill_gpu.step: barrier_wait(ring.v_ready.at[slot])": PREFILL,
    "prefill_gpu.step: barrier_arrive(ring.v_free.at[slot])": PREFILL,
    "prefill_gpu.compute: commit_smem()": PREFILL,
    "prefill_gpu.compute: wait_smem_to_gmem(0)": PREFILL,
    "pages_gpu.refill: barrier_wait(ring.k_free.at[slot])": DECODE,
    "pages_gpu.refill: barrier_wait(ring.v_free.at[slot])": DECODE,
    "pages_gpu.run: lax.fori_loop(span.from_tile, refills, refill, None)": DECODE,
    "pages_gpu._clear: barrier_wait(ring.edge_ready.at[self._edge(tile, span)])": DECODE,
    "pages_gpu._clear: commit_smem()": PREFILL,  # decode has a fence behind it, before the product
    "pages_gpu._clear: barrier_arrive(ring.v_ready.at[slot])": DECODE,
    "products_gpu._mma: commit_smem()": DECODE_MMA,
}


def test_the_table_names_each_synchronisation():
    assert sorted(NOTICED) == sorted(mutations.points())


@pytest.mark.mutation
@pytest.mark.parametrize("point", NOTICED)
def test_without_it_a_test_fails(point):
    test = NOTICED[point]
    ran = subprocess.run(
        [sys.executable, FOLDER / "mutations.py", point, f"{TESTS}::{test}"],
        env=os.environ | {"PYTHONPATH": str(FOLDER)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert not ran.stderr.strip().endswith("was not imported"), ran.stderr
    assert ran.returncode == 1, f"{test} does not notice that {point} is missing\n{ran.stdout}"
    assert f"::{test}" in ran.stdout.split("short test summary")[-1], ran.stdout + ran.stderr
    # A slow machine must not pass for a missing arrival.
    assert ("an arrival is missing" in ran.stdout) == ("arrive(" in point or "refill, " in point)
