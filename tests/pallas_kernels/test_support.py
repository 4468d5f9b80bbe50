import warnings

import jax
import pytest
from cases import make, run

from pallas_kernels.paged_attention import PagedAttentionFallbackWarning, support, supports


@pytest.mark.parametrize(("device", "reason"), [
    (dict(platform="cpu"), "needs an NVIDIA GPU and the platform is 'cpu'"),
    (dict(platform="gpu", compute_capability="8.9"), "9.x (Hopper), the device has '8.9'"),
    (dict(platform="cuda", compute_capability="10.0"), "the device has '10.0'"),
    (dict(platform="gpu", compute_capability="gfx90a"), "the device has 'gfx90a'"),
])  # fmt: skip
def test_the_gpu_kernel_says_why_not(device, reason):
    runs, why = supports("mosaic_gpu", **device)
    assert not runs
    assert reason in why
    for name in ("xla", "reference"):
        assert supports(name, **device) == (True, "")


def test_an_unknown_name():
    assert "'nonsense'" in supports("nonsense")[1]


@pytest.fixture
def device(monkeypatch):
    """Makes JAX name another backend, with a first device of some compute capability."""

    def pretend(backend, compute_capability):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(support, "_compute_capability", lambda _: compute_capability)
        support._warn_once.cache_clear()

    yield pretend
    support._warn_once.cache_clear()


def test_another_gpu_falls_back_and_says_so_once(device):
    device("gpu", "8.0")
    with pytest.warns(PagedAttentionFallbackWarning, match=r"the device has '8\.0'\. It runs"):
        assert support.choose(None) == "xla"
    assert support.choose(None) == "xla"  # a second warning would be an error
    assert support.choose("xla") == "xla"


@pytest.mark.parametrize(("backend", "capability"), [("cpu", None), ("gpu", "gfx90a")])
def test_nobody_is_told_where_there_is_no_cuda_device(device, backend, capability):
    device(backend, capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert support.choose(None) == "xla"


def test_the_default_runs():
    run(make([9], [1], max_query_len=1), None)
