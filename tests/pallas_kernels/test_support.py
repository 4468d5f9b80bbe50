import itertools
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from cases import make, run

from jaxkv.pallas_kernels import target
from jaxkv.pallas_kernels.paged_attention import PagedAttentionFallbackWarning, support, supports

AMPERE, HOPPER, BLACKWELL = (
    dict(platform="gpu", compute_capability=(major, 0)) for major in (8, 9, 10)
)


@pytest.mark.parametrize(("call", "reason"), [
    (dict(platform="cpu"), "needs an NVIDIA GPU, got platform 'cpu'"),
    (dict(platform="gpu", compute_capability=(7, 5)), "10.x (Blackwell), got (7, 5)"),
    (dict(platform="cuda", compute_capability=(12, 0)), "got (12, 0)"),
    (AMPERE | dict(head_dim=80), "head_dim=80 is not supported on Ampere (one of 64, 128, 256)"),
    (AMPERE | dict(head_dim=256, form="prefill"), "head_dim=256 is not supported in prefill on"),
    (AMPERE | dict(head_dim=128, form="prefill", causal=False), "in non-causal prefill on Ampere"),
    (HOPPER | dict(head_dim=72), "head_dim=72 is not supported (one of 64, 80, 96, 128, 256)"),
    (HOPPER | dict(block_size=24), "block_size=24 is not supported (one of 8, 16, 32, 64, 128)"),
    (HOPPER | dict(group=17), "17 query heads per KV head are not supported (at most 16)"),
    (HOPPER | dict(dtype=jnp.float32), "pages of float32 are not supported (one of bfloat16"),
    (HOPPER | dict(dtype=jnp.bfloat16, query_dtype=jnp.float32), "queries of float32 are not"),
    (HOPPER | dict(dtype=jnp.int8, query_dtype=jnp.float32), "queries of float32 are not"),
    (HOPPER | dict(dtype=jnp.int8, form="prefill"), "int8 pages are not supported in prefill"),
    (HOPPER | dict(dtype=jnp.int8, head_dim=96), "head_dim=96 is not supported with int8 pages"),
    (HOPPER | dict(dtype=jnp.int8, block_size=16), "block_size=16 is not supported with int8"),
])  # fmt: skip
def test_unsupported_calls_of_the_gpu_kernel_have_a_reason(call, reason):
    runs, why = supports("mosaic_gpu", **call)
    assert not runs
    assert reason in why
    for name in ("xla", "reference"):
        assert supports(name, **call) == (True, "")


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL])
def test_the_gpu_kernel_supports_hopper_and_blackwell(gpu):
    float_pages: dict[str, Any] = dict(dtype=jnp.bfloat16, query_dtype=jnp.bfloat16)
    for head_dim, block_size in itertools.product(support.HEAD_DIMS, support.BLOCK_SIZES):
        call: dict[str, Any] = dict(
            head_dim=head_dim, block_size=block_size, group=16, **gpu, **float_pages
        )
        assert supports("mosaic_gpu", **call) == (True, "")
    int8_pages: dict[str, Any] = dict(dtype=jnp.int8, query_dtype=jnp.bfloat16, form="decode")
    call: dict[str, Any] = dict(head_dim=128, block_size=64, **gpu, **int8_pages)
    assert supports("mosaic_gpu", **call) == (True, "")


def test_the_gpu_kernel_supports_ampere():
    kinds: tuple[dict[str, Any], ...] = (
        dict(head_dim=256, form="decode"),
        dict(head_dim=128, form="prefill", causal=True),
        dict(head_dim=64, form="prefill", causal=False),
        dict(head_dim=128, form="decode", dtype=jnp.int8, block_size=64),
    )
    for kind in kinds:
        assert supports("mosaic_gpu", group=16, **(AMPERE | kind)) == (True, "")  # pyright: ignore[reportArgumentType]


def test_an_unknown_implementation_has_a_reason():
    assert "'nonsense'" in supports("nonsense")[1]


@pytest.fixture
def device():
    """Traces for a device of a given platform and compute capability."""
    support._warn_once.cache_clear()
    yield target.compile_for
    support._warn_once.cache_clear()


def test_fallback_on_another_gpu_warns_once(device):
    with device("gpu", (7, 5)):
        with pytest.warns(
            PagedAttentionFallbackWarning, match=r"falls back to XLA.* got \(7, 5\)\. Pass"
        ):
            assert support.choose(None, interpret=False) == "xla"
        assert support.choose(None, interpret=False) == "xla"  # a second warning would be an error
        assert support.choose("xla", interpret=False) == "xla"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])  # an AMD GPU has no compute capability here
def test_fallback_without_a_cuda_device_does_not_warn(device, platform):
    with device(platform), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert support.choose(None, interpret=False) == "xla"


@pytest.mark.parametrize("compute_capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3)])
def test_supported_gpus_select_the_kernel(device, compute_capability):
    with device("gpu", compute_capability):
        assert support.choose(None, interpret=False, head_dim=128, block_size=16) == "mosaic_gpu"


def test_the_default_implementation_runs():
    run(make([9], [1], max_query_len=1), None)  # pyright: ignore[reportArgumentType]


def test_the_documentation_has_the_table():
    page = Path(__file__).parents[2] / "docs" / "gpu.md"
    assert support.support_table() in page.read_text()
