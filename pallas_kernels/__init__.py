"""Pallas GPU kernels for the paged KV cache, each beside its XLA path and its reference."""

if __name__ != "jaxkv.pallas_kernels":  # a second copy would have types and registries of its own
    raise ImportError(f"the folder pallas_kernels is the package jaxkv.pallas_kernels; import "
                      f"jaxkv.pallas_kernels, not {__name__}")  # fmt: skip
