"""Setup of both llama.cpp scripts: a silent log, the model, and the cache types."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import llama_cpp

KV_TYPES = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16}


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: Any) -> None:
    """Drops the log, which fills pages. Global, because llama.cpp may call it at any time."""


def load_model(gguf: str | Path) -> Any:
    """Loads the model of a GGUF file."""
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        os.fsencode(gguf), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp could not load {gguf}")
    return model


def flash_attention(on: bool) -> int:
    """llama.cpp's constant for flash attention on or off."""
    if on:
        return llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    return llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
