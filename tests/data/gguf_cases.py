"""Writes small GGUF files, right and wrong ones."""

import warnings

import gguf
import numpy as np

from jaxkv.models import Tokenizer

BYTES = [t for t, _ in sorted(Tokenizer.bytes().backend.get_vocab().items(), key=lambda x: x[1])]
NAMES = ["attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
         "ffn_down"]  # fmt: skip


def write(path, tokens=(), *, types=None, pre: str | None = "gpt-2", merges=("a b",), drop=(),
          add=None, tensors=None, layers=1, **fields):  # fmt: skip
    """A Llama of one layer whose vocabulary is the bytes, "ab" and `tokens`.

    `fields` are added under their full keys, `__` for a dot; `drop` names keys and tensors to leave
    out.
    """
    tokens = [*BYTES, "ab", *tokens]
    given = {
        "llama.context_length": 64, "llama.embedding_length": 16, "llama.block_count": layers,
        "llama.feed_forward_length": 32, "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.token_type": [1] * 257 + list(types or [1] * (len(tokens) - 257)),
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in fields.items()} | (add or {})
    writer = gguf.GGUFWriter(path, "llama")
    kinds = {bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32,
             str: writer.add_string, list: writer.add_array}  # fmt: skip
    for key, value in given.items():
        if key not in drop and value is not None:
            kinds[type(value)](key, value)
    shapes = {"token_embd.weight": (len(tokens), 16), "output_norm.weight": (16,)}
    for i in range(layers):
        sizes = [(16,), (16,), (16, 16), (8, 16), (8, 16), (16, 16), (32, 16), (32, 16), (16, 32)]
        for name, shape in zip(NAMES, sizes, strict=True):
            shapes[f"blk.{i}.{name}.weight"] = shape
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in (values | (tensors or {})).items():
        if name not in drop:
            writer.add_tensor(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    return path
