"""Names of the kernels' axes and of a user's mesh, which share one namespace in Pallas.

The interpreter looks names up in the kernel's grid first and the compiler in the mesh first, so
programs are lowered for GPUs here.
"""

import contextlib
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make, oracle_with_lse
from jax._src.mesh import AbstractDevice
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from races import detector

from jaxkv.pallas_kernels.layout import split_by_heads
from jaxkv.pallas_kernels.paged_attention import paged_attention
from jaxkv.pallas_kernels.paged_attention.launch_gpu import AXIS_NAMES
from jaxkv.pallas_kernels.target import compile_for

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
# Names that people give to mesh axes, among them all names that axes of the kernels ever had.
MESH_AXES = ("h", "s", "split", "tile", "head", "role", "sequence", "warpgroup", "block", "x")
KERNELS = [("decode", (9, 0)), ("prefill", (9, 0)), ("decode", (8, 0)), ("prefill", (8, 0))]
SEQS, HEADS, KV_HEADS, DIM, BLOCK, COLUMNS = 3, 4, 2, 64, 64, 5


@contextlib.contextmanager
def traced(form, generation, axes):
    """The trace of a step under `shard_map` over these axes, two devices along the first."""
    count = 1 if form == "decode" else 5
    sizes = (2, *[1] * (len(axes) - 1))
    mesh = AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes), abstract_device=H100)
    shapes = [
        ((SEQS * count, HEADS, DIM), jnp.bfloat16),
        ((9, 1, 2, KV_HEADS, BLOCK, DIM), jnp.bfloat16),
        *((shape, jnp.int32) for shape in ((SEQS, COLUMNS), (SEQS,), (SEQS + 1,))),
    ]

    def step(*args):
        return paged_attention(*args, layer=0, max_query_len=count, implementation="mosaic_gpu")

    by_heads = P(None, axes[0])
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(by_heads, split_by_heads(axes[0]), P(), P(), P()),
        out_specs=by_heads, check_vma=False,
    )  # fmt: skip
    with compile_for("gpu", generation), jax.sharding.use_abstract_mesh(mesh):
        yield jax.jit(sharded).trace(*(jax.ShapeDtypeStruct(*x) for x in shapes))


def lowered(form, generation, axes) -> str:
    """The program for GPUs, kernel included, with the names of the mesh's axes replaced."""
    with traced(form, generation, axes) as step:
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    for i, axis in enumerate(axes):
        text = text.replace(f'"{axis}"', f'"axis {i}"')
    return text


@pytest.mark.parametrize(("form", "generation"), KERNELS)
def test_names_of_mesh_axes_do_not_change_the_kernel(form, generation):
    other = tuple(f"nobody's {letter}" for letter in string.ascii_lowercase[: len(MESH_AXES)])
    want = lowered(form, generation, other)
    assert "mosaic_gpu" in want
    assert lowered(form, generation, MESH_AXES) == want


@pytest.mark.parametrize(("form", "generation"), KERNELS)
def test_a_mesh_with_an_axis_of_the_kernel_is_refused(form, generation, monkeypatch):
    names, real = set(), plgpu.kernel

    def kernel(*args, grid_names, thread_name=None, **options):
        names.update(grid_names, {thread_name} - {None})
        return real(*args, grid_names=grid_names, thread_name=thread_name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(plgpu, "kernel", kernel)
        with traced(form, generation, ("x",)):
            pass
    assert len(names) >= 3
    assert names <= set(AXIS_NAMES.values())
    assert not names & set(MESH_AXES)
    for name in names:
        message = f"mesh axes must not be called jaxkv_split, .* got {name}: rename them"
        with pytest.raises(ValueError, match=message), traced(form, generation, ("x", name)):
            pass


def test_a_sharded_step_runs_with_any_names_of_axes():
    """On one device, since the interpreter confuses the barriers of two in one process."""
    case = make(
        [70, 3], [1, 1], block=BLOCK, heads=4, kv_heads=2, dim=DIM, dtype=jnp.bfloat16,
        max_query_len=1, fill=np.nan,
    )  # fmt: skip
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("h", "s"))
    specs = (P(None, "h"), split_by_heads("h"), P(), P())

    def step(*args):
        return paged_attention(*args, layer=1, implementation="mosaic_gpu",
                               interpret=detector())  # fmt: skip

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=P(None, "h"), check_vma=False
    )
    args = case.q, case.pages, case.tables, case.lens
    args = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]
    out = np.asarray(jax.jit(sharded)(*args), np.float32)
    np.testing.assert_allclose(out, oracle_with_lse(case)[0], atol=2e-2, rtol=2e-2)
