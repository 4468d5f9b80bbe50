"""`jaxkv compile-check`: parsing of the compiler's output and, where installed, the command."""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from rich.console import Console

from jaxkv.cli import main
from jaxkv.compile_check import targets
from jaxkv.compile_check.launches import Launches
from jaxkv.compile_check.programs import programs
from jaxkv.compile_check.report import (
    Resources,
    Row,
    count_atomic_scatters,
    count_kernels,
    count_pool_copies,
    count_rematerialised,
    ptxas_remarks,
    table,
)
from jaxkv.compile_check.targets import Target
from jaxkv.errors import ConfigError

# Output of Mosaic GPU and ptxas about two kernels.
OUTPUT = """\
Resources(smem_scratch_bytes=105472, tmem_scratch_cols=0, tmem_collective_scratch_cols=0, \
barrier_counts=Counter({Barrier(arrival_count=4, num_barriers=3, orders_tensor_core=False): 2, \
Barrier(arrival_count=1, num_barriers=3, orders_tensor_core=False): 2, \
Barrier(arrival_count=1, num_barriers=1, orders_tensor_core=False): 1}), scoped_gmem_semaphores={})
Resources(smem_scratch_bytes=1024, tmem_scratch_cols=0, tmem_collective_scratch_cols=0, \
barrier_counts=Counter(), scoped_gmem_semaphores={})
.visible .entry kernel_mosaic_gpu_kernel(
.maxntid 256, 1, 1
.minnctapersm 1
ptxas info    : Compiling entry function 'kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for kernel_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 16 barriers, 1 bytes smem
.maxntid 384
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
FITS = Resources(registers=48, spill_bytes=0, stack_bytes=0, shared_bytes=105576, threads=256)
ONE_GRAPH = Launches(kernels=14, graphs=1, ungraphed=0, loops=0, unaligned=0)
GOOD = Row(
    target="h200", program="step", num_devices=1, pool_bytes=2048, attention="mosaic_gpu",
    kernels=1, resources=FITS, launches=ONE_GRAPH, max_launches=14, rematerialised=0,
    blocks_per_sm=2, bytes_in_flight=196608, alias_bytes=2100,
    pool_copies=0, atomic_scatters=0, temp_bytes=64, seconds=1.5,
)  # fmt: skip


# -- the output of the compiler --------------------------------------------------------------


def test_resources_are_the_maximum_over_kernels_and_spills_their_sum():
    assert Resources.parse(OUTPUT) == Resources(
        registers=168,
        spill_bytes=36,
        stack_bytes=24,
        shared_bytes=105472 + 8 * (2 * 3 + 2 * 3 + 1),
        threads=384,
    )


def test_without_a_kernel_there_are_no_resources():
    assert Resources.parse("a warning\n") is None


@pytest.mark.parametrize(
    ("gpu", "change", "blocks", "why"),
    [
        ("h200", {}, 2, "shared memory: 228 KiB // (103.1 + 1)"),
        ("a100", {}, 1, "shared memory: 164 KiB // (103.1 + 1)"),
        ("h200", {"shared_bytes": 115712}, 2, "twice 113 KiB and the reserved 1 KiB are 228"),
        ("h200", {"shared_bytes": 115713}, 1, "a byte more"),
        ("h200", {"shared_bytes": 232448}, 1, "the most a thread block can have"),
        ("h200", {"shared_bytes": 232449}, 0, "a byte more"),
        ("h200", {"shared_bytes": 0}, 5, "registers: 65536 // (48 * 256)"),
        ("h200", {"shared_bytes": 0, "registers": 40}, 6, "registers: 65536 // (40 * 256)"),
        ("h200", {"shared_bytes": 0, "registers": 33}, 6, "warps get 256 registers at a time"),
        ("h200", {"shared_bytes": 0, "registers": 16}, 8, "threads: 2048 // 256"),
        ("h200", {"shared_bytes": 0, "registers": 16, "threads": 20}, 32, "never more than 32"),
        ("h200", {"registers": 255, "threads": 512}, 0, "512 threads have 128 registers each"),
    ],
)
def test_thread_blocks_per_sm(gpu, change, blocks, why):
    assert dataclasses.replace(FITS, **change).blocks_per_sm(Target.load(gpu)) == blocks, why


def test_only_copies_of_the_pool_are_counted():
    hlo = """
    %copy.1 = bf16[8,2,2,1,16,64]{5,4,3,2,1,0} copy(%param_0)
    %copy-start = (bf16[32,1,16,64]{3,2,1,0}, bf16[32,1,16,64]{3,2,1,0}, u32[]) copy-start(%p)
    %transpose.3 = bf16[64,16,1,2,2,8]{5,4,3,2,1,0} transpose(%param_0), dimensions={5,4,3,2,1,0}
    %copy.2 = f32[64,3,3,1]{3,2,1,0} copy(%get-tuple-element.994), metadata={op_name="copy(x)"}
    %copy.3 = s32[] copy(%constant)
    %fusion = bf16[8,2,2,1,16,64]{5,4,3,2,1,0} fusion(%copy.1), kind=kLoop, calls=%copy_fusion
    """
    assert count_pool_copies(hlo, {8 * 2 * 2 * 16 * 64, 5}) == 3
    assert count_pool_copies(hlo, {7}) == 0


def test_scatters_whose_indices_may_repeat_are_counted():
    hlo = """
    %a = bf16[32,16,64]{2,1,0} scatter(%p, %i, %x), index_vector_dim=1, to_apply=%region
    %b = bf16[32,16,64]{2,1,0} scatter(%p, %i, %x), unique_indices=true, to_apply=%region
    ROOT %c = s32[64]{0} scatter(%lens, %i, %x), to_apply=%region, metadata={op_name="scatter"}
    """
    assert count_atomic_scatters(hlo, {32 * 16 * 64}) == 1


def test_kernels_are_counted_by_their_custom_calls():
    call = '%c = bf16[1] custom-call(%a), custom_call_target="mosaic_gpu_v2", x={}\n'
    assert count_kernels(2 * call + 'custom_call_target="__cublas$gemm"') == 2


# Steps of a program ("thunks") as XLA writes them, and its buffers.
THUNKS = """\
000: kCommandBuffer [source       | next=007 (1)]
    001: kCustomKernel [source       | sink        ] wrapped_iota grid: [1, 1, 1]
    002: kCustomCall   [prev=001 (1) | sink        ] kCustomCall
003: kAllReduce    [prev=000 (1) | next=004 (1)]
004: kWhile         [prev=003 (1) | next=000 (1)]
condition:
    005: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    006: kCopy         [prev=005 (1) | sink        ] kCopy
000: kCommandBuffer [prev=004 (1) | next=011 (1)]
    007: kCustomKernel [source       | sink        ] loop_reduce_fusion grid: [16, 1, 1]
    008: kWhile        [prev=007 (1) | sink        ]
    condition:
        009: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        010: kMemset       [source | sink] kMemset
011: kGemm          [prev=008 (1) | sink        ]
"""
BUFFERS = """\
BufferAssignment:
allocation 0: size 4096, page 0, parameter 0, shape |bf16[2048]| at ShapeIndex {}, maybe-live-out:
 value: <606 state_kv_pages.1 @0> (size=4096,offset=0): bf16[2048]{0}
allocation 1: size 2048, page 0, preallocated-temp:
 value: <107 copy.13 @0> (size=256,offset=768): u32[64]{0}
 value: <612 fusion.3 @0> (size=128,offset=1024): u32[32]{0}
 value: <613 fusion.4 @0> (size=128,offset=1152): u32[32]{0}
"""


def test_launches_and_what_ends_a_graph_are_counted():
    found = Launches.parse(THUNKS, BUFFERS)
    assert found == Launches(kernels=9, graphs=2, ungraphed=2, loops=1, unaligned=1)


def test_the_dump_is_read_with_and_without_graphs(tmp_path):
    """XLA writes a second list of steps if it puts some of them into graphs."""
    assert Launches.read(tmp_path) is None
    (tmp_path / "module.sm_9.0a_gpu_after_optimizations-buffer-assignment.txt").write_text(BUFFERS)
    assert Launches.read(tmp_path) is None
    (tmp_path / "module.thunk_sequence.txt").write_text("000: kGemm [source | sink]\n")
    alone = Launches(kernels=1, graphs=0, ungraphed=1, loops=0, unaligned=1)
    assert Launches.read(tmp_path) == alone
    (tmp_path / "module.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    assert Launches.read(tmp_path) == Launches.parse(THUNKS, BUFFERS)


def test_results_that_are_computed_again_are_counted():
    hlo = """
    %fusion.3.remat = s32[64]{0} fusion(%p), kind=kLoop, calls=%c, metadata={op_name="x.remat = "}
    %fusion.3.remat2 = s32[64]{0} fusion(%p), kind=kLoop, calls=%fused_computation.remat
    ROOT %tuple = (s32[64]{0}) tuple(%fusion.3.remat2)
    """
    assert count_rematerialised(hlo) == 2


def test_remarks_of_ptxas_are_kept_once_each():
    slow = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    output = f"{OUTPUT}ptxas info    : {slow} due to x\nptxas info    : {slow} due to x\n"
    assert ptxas_remarks(output) == (f"{slow} due to x",)
    assert ptxas_remarks(OUTPUT) == ()


# -- limits ----------------------------------------------------------------------------------


def test_a_good_row_violates_no_limit():
    assert GOOD.broken == []
    assert dataclasses.replace(GOOD, fallback="no kernel", kernels=0, resources=None).broken == []
    assert dataclasses.replace(GOOD, attention=None, kernels=0, resources=None).broken == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": "ValueError: 7 is odd\nmore"}, "does not compile: ValueError: 7 is odd"),
        ({"resources": dataclasses.replace(FITS, spill_bytes=36)}, "registers spill 36 bytes"),
        (
            {"resources": dataclasses.replace(FITS, stack_bytes=8)},
            "8 bytes of arrays in local memory",
        ),
        ({"launches": None}, "the compiler did not report its launches"),
        (
            {"launches": dataclasses.replace(ONE_GRAPH, ungraphed=2, loops=2)},
            "2 loops end a CUDA graph and wait for the host",
        ),
        (
            {"launches": dataclasses.replace(ONE_GRAPH, ungraphed=3)},
            "3 launches are in no CUDA graph",
        ),
        ({"launches": dataclasses.replace(ONE_GRAPH, graphs=2)}, "2 CUDA graphs instead of one"),
        ({"launches": dataclasses.replace(ONE_GRAPH, kernels=15)}, "15 launches, more than 14"),
        (
            {"launches": dataclasses.replace(ONE_GRAPH, unaligned=1)},
            "1 buffers do not begin at a multiple of 256 bytes",
        ),
        ({"rematerialised": 90}, "90 results are computed again to save memory"),
        ({"remarks": ("(C7510) wgmma is serialized",)}, "ptxas: (C7510) wgmma is serialized"),
        ({"blocks_per_sm": 0}, "its thread block does not fit an SM"),
        ({"alias_bytes": 100}, "only 100 of the pool's 2048 bytes are aliased"),
        ({"pool_copies": 2}, "2 copies of the pool"),
        ({"atomic_scatters": 3}, "3 scatters compare and swap each element"),
        ({"temp_bytes": 2048}, "2048 temporary bytes, not less than the pool"),
        ({"kernels": 0}, "a kernel supports this call, but the step calls none"),
        ({"resources": None}, "the compiler did not report the resources of its kernels"),
    ],
)
def test_a_violated_limit_is_reported_with_numbers(change, message):
    assert dataclasses.replace(GOOD, **change).broken == [message]


def test_the_table_shows_the_numbers_and_the_fallback_reasons():
    rows = [GOOD, dataclasses.replace(GOOD, program="other", kernels=0, attention="xla",
                                      resources=None, launches=None, blocks_per_sm=None,
                                      bytes_in_flight=None,
                                      fallback="group 9 is too large")]  # fmt: skip
    console = Console(width=180)
    with console.capture() as capture:
        console.print(table(Target.load("h200"), rows))
    lines = capture.get().splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [
        ["step", "1", "yes", "mosaic_gpu x1", "14", "48", "0", "103.1", "2", "192", "0", "0", "0",
         "0", "1.5"],
        ["other", "1", "yes", "xla", *6 * "-", "0", "0", "0", "0", "1.5"],
    ]  # fmt: skip
    assert "xla: group 9 is too large" in capture.get()


# -- targets and programs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "shared_kib"),
    [("a100", (8, 0), 164), ("h100", (9, 0), 228), ("h200", (9, 0), 228), ("b200", (10, 0), 228)],
)
def test_targets(name, capability, shared_kib):
    target = Target.load(name)
    assert target.compute_capability == capability
    assert target.shared_bytes == shared_kib * 1024
    assert target.shared_bytes_per_block == target.shared_bytes - 1024
    assert (target.registers, target.threads) == (65536, 2048)


def test_the_list_of_targets():
    assert targets.NAMES == ("a100", "b200", "h100", "h200")


def test_an_unknown_target_is_an_error():
    with pytest.raises(ConfigError, match="GPU must be one of a100, b200, h100, h200, got 'h300'"):
        Target.load("h300")


@pytest.mark.parametrize("name", [n for n, p in programs().items() if p.num_devices == 1])
def test_programs_trace(name):
    program = programs()[name]
    function, (first, *args) = program.build(Mesh(np.array(jax.devices()[:1]), ("heads",)))
    held = first if program.kind == "operation" else (first.kv_pages, first.kv_scales)
    held = jax.tree.leaves(held)
    assert sum(x.size * x.dtype.itemsize for x in held) == program.pool_bytes
    assert max(x.size for x in held) > 2**31
    if program.kind == "step":  # a model's trace takes seconds
        return
    results = jax.tree.leaves(jax.eval_shape(function, first, *args))
    shapes = [(x.shape, x.dtype) for x in results]
    assert all((x.shape, x.dtype) in shapes for x in held)


# -- the command -----------------------------------------------------------------------------


def test_without_the_compiler_the_error_gives_the_command(capsys, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "jax-cuda13-pjrt":
            raise importlib.metadata.PackageNotFoundError(name)
        return real("jax") if name == "jax-cuda13-plugin" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["compile-check"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"needs jax-cuda13-pjrt {real('jax')}, the version of jax, but it is not installed" in error
    )
    assert "uv run --group aot jaxkv compile-check" in error


def test_a_filter_that_leaves_nothing_is_an_error(capsys):
    assert main(["compile-check", "--only", "mamba"]) == 2
    assert "matches no program; the programs are: scatter_kv bfloat16;" in capsys.readouterr().err


def compile_check(tmp_path, *args, **environment):
    """Runs the command in a separate process; returns rows by (target, program)."""
    run = "import sys, jaxkv.cli; sys.exit(jaxkv.cli.main())"
    ran = subprocess.run(
        [sys.executable, "-c", run, "compile-check", "--json", tmp_path / "rows.json", *args],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(row["program"] in ran.stdout for row in rows)
    return {(row["target"], row["program"]): row for row in rows}


def only(*texts):
    return [arg for text in texts for arg in ("--only", text)]


@pytest.fixture(scope="module")
def on_an_h200(tmp_path_factory):
    """Rows of an H200 by name, and the PTX of the operations on the pool."""
    folder = tmp_path_factory.mktemp("h200")
    operations = "jit_(scatter|gather|copy_blocks|put_blocks|zero_blocks)"
    rows = compile_check(
        folder,
        *only("scatter_kv", "_blocks", "decode bfloat16, head 64, block 16", "head 80", "head 256"),
        *only("decode bfloat16, head 128, block 16", "prefill bfloat16, head 128, block 16"),
        *only("int8, head 128, block 64", "Llama-3-8B decode"),
        XLA_FLAGS=f"--xla_dump_to={folder} --xla_dump_emitter_re=. "
        f"--xla_dump_hlo_module_re={operations}",
    )
    ptx = [file.read_text() for file in folder.glob("*.ptx")]
    return {name: row for (_, name), row in rows.items()}, ptx


@pytest.mark.aot
def test_nothing_copies_a_pool_of_40_gib(on_an_h200):
    rows, _ = on_an_h200
    assert len(rows) == 6 + 8 + 2
    for name, row in rows.items():
        assert row["error"] is None
        assert row["broken"] == []
        assert row["pool_bytes"] > 39 * 2**30
        assert row["alias_bytes"] >= row["pool_bytes"]
        assert row["pool_copies"] == row["atomic_scatters"] == row["rematerialised"] == 0
        assert row["temp_bytes"] < row["pool_bytes"] / 100, name


@pytest.mark.aot
def test_kernels_fill_an_h200(on_an_h200):
    rows, _ = on_an_h200
    rows = {name: row for name, row in rows.items() if row["attention"] is not None}
    assert len(rows) == 10
    assert {row["num_devices"] for row in rows.values()} == {1, 8}
    for name, row in rows.items():
        assert row["attention"] == "mosaic_gpu"
        assert row["resources"]["spill_bytes"] == row["resources"]["stack_bytes"] == 0
        assert row["remarks"] == []
        assert row["blocks_per_sm"] >= 1
        assert row["bytes_in_flight"] >= 64 * 1024
        if "decode" in name and "head 256" not in name:
            assert row["blocks_per_sm"] >= 2
            assert row["resources"]["registers"] <= (104 if "int8" in name else 64), name


@pytest.mark.aot
def test_operations_on_the_pool_write_wide_and_without_atomics(on_an_h200):
    rows, ptx = on_an_h200
    for name in ("scatter_kv bfloat16", "gather_blocks", "put_blocks", "zero_blocks"):
        assert rows[name]["temp_bytes"] < 4096
    assert rows["scatter_kv int8"]["temp_bytes"] < 2**16  # one scale per row
    assert rows["copy_blocks"]["temp_bytes"] < 2**16 + 32 * 2 * 2**20  # the blocks copied
    moving = [text for text in ptx if re.search(r"\.entry \w*(scatter|gather|select)", text)]
    assert len(moving) == 7 + 1  # the copy has two, and scatter_kv of int8 one more for the scales
    for text in moving:
        assert not re.search(r"\b(atom|red)\.", text)
        widths = [
            int(count or 1) * int(bits)
            for count, bits in re.findall(r"\bst\.global\.(?:v(\d)\.)?b(\d+)", text)
        ]
        assert widths
        assert min(widths) >= 32


@pytest.mark.aot
def test_other_gpus(tmp_path):
    """Every generation has kernels; unsupported calls run through XLA, with a reason."""
    gpus = [arg for gpu in ("a100", "b200", "h100") for arg in ("--gpu", gpu)]
    both = "cascade bfloat16, head 64, block 16"  # a decode and a prefill kernel
    rows = compile_check(tmp_path, *gpus, *only(both, "decode bfloat16, head 80"))
    assert len(rows) == 3 * 2
    for (gpu, program), row in rows.items():
        assert row["broken"] == []
        if gpu == "a100" and "head 80" in program:
            assert row["attention"] == "xla"
            assert row["fallback"].startswith("head_dim=80 is not supported on Ampere")
        else:
            assert row["attention"] == "mosaic_gpu"
            assert row["kernels"] == (2 if program == both else 1)
            assert row["fallback"] is None
            assert row["resources"]["spill_bytes"] == 0


BAD_STEPS = """
import dataclasses, os
import jax.numpy as jnp
from jaxkv.compile_check.compiler import _Job
from jaxkv.compile_check.programs import programs
from jaxkv.compile_check.targets import Target

def copies(state, *args):
    return dataclasses.replace(state, kv_pages=state.kv_pages.at[0].set(0)), state.kv_pages

def may_repeat(state, *args):
    pages = state.kv_pages
    return dataclasses.replace(state, kv_pages=pages.at[state.seq_lens].set(0))

def moves(state, *args):
    pages = state.kv_pages
    return dataclasses.replace(state, kv_pages=pages.swapaxes(3, 4).reshape(pages.shape))

def converts(state, *args):
    return dataclasses.replace(state, kv_pages=state.kv_pages.astype("float32"))

def searches(state, *args):
    found = jnp.searchsorted(state.seq_lens, state.block_tables[:, 0])
    return dataclasses.replace(state, seq_lens=found.astype("int32"))

def fails(state, *args):
    raise ValueError("7 is odd")

def dies(state, *args):
    os.write(2, b"LLVM ERROR: cannot select\\n")
    os.abort()

program = programs()["decode bfloat16, head 64, block 16"]
for bad in (copies, may_repeat, moves, converts, searches, fails, dies):
    build = lambda mesh: (bad, program.build(mesh)[1])
    job = _Job(Target.load("h200"), dataclasses.replace(program, build=build))
    print(*job.row().broken, sep="; ")
"""


@pytest.mark.aot
def test_bad_steps_are_caught():
    from jaxkv.compile_check.compiler import ENVIRONMENT

    ran = subprocess.run(
        [sys.executable, "-c", BAD_STEPS], env=os.environ | ENVIRONMENT, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    copied, repeated, moved, converted, searched, failed, died = ran.stdout.splitlines()
    pool = programs()["decode bfloat16, head 64, block 16"].pool_bytes
    assert "copies of the pool" in copied
    assert "1 scatters compare and swap each element" in repeated
    assert f"{pool} temporary bytes, not less than the pool" in moved
    assert f"of the pool's {pool} bytes are aliased" in converted
    assert "1 loops end a CUDA graph and wait for the host" in searched
    assert failed == "does not compile: ValueError: 7 is odd"
    assert died == "does not compile: the compiler exited with -6: LLVM ERROR: cannot select"
