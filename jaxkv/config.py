"""The shape of a paged cache, and its cost in bytes.

Host code: imports no JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self

from jaxkv._util import as_int, ceil_div, require_positive
from jaxkv.errors import ConfigError
from jaxkv.pallas_kernels.formats import FORMATS

# Element types of weights and of unquantised pages.
DTYPES = {name: f.dtype for name, f in FORMATS.items() if not f.quantised}

# Pages of a pool (one layer, K or V, one head each): kernels count them in an int32.
_MAX_PAGES = 2**31 - 1


class ModelShape(Protocol):
    """Sizes of a model that a cache depends on."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Sizes of one paged KV cache.

    Attributes:
      num_layers: transformer layers; a block holds all of them.
      num_kv_heads: key/value heads of a layer (not query heads).
      head_dim: elements of one head, as declared by the model (not hidden size / heads).
      num_blocks: blocks in the pool, the null block (block 0, never allocated) included.
      block_size: tokens per block.
      max_seqs: rows of the block table: most live sequences.
      max_blocks_per_seq: columns of the block table: longest sequence, in blocks.
      dtype: element type of the pages: "float32", "bfloat16", "float16", or "int8" with a scale per
        token and KV head beside them.
      scale_dtype: element type of the scales of quantised pages: "float32" or "bfloat16".

    Raises:
      ConfigError: a size that is not positive, an unknown dtype, or a pool with more pages (one
        for each block, layer, K or V, and head) than an int32 can count. The number of elements
        may exceed that.

    Example:
      >>> from jaxkv import CacheConfig
      >>> c = CacheConfig(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=257,
      ...                 block_size=16, max_seqs=4, max_blocks_per_seq=64, dtype="bfloat16")
      >>> c.bytes_per_token, c.block_bytes, c.max_len
      (131072, 2097152, 1024)
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int = 16
    max_seqs: int = 8
    max_blocks_per_seq: int = 128
    dtype: str = "float32"
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        fields = dataclasses.asdict(self)
        dtype, scale_dtype = fields.pop("dtype"), fields.pop("scale_dtype")
        if dtype not in FORMATS:
            raise ConfigError(f"dtype must be one of {', '.join(FORMATS)}, got {dtype!r}")
        scale_dtypes = FORMATS["int8"].scale_dtypes
        if scale_dtype not in scale_dtypes:
            raise ConfigError(
                f"scale_dtype must be one of {', '.join(scale_dtypes)}, got {scale_dtype!r}"
            )
        require_positive(**fields)
        for name, value in fields.items():  # Python integers: products of NumPy's wrap
            object.__setattr__(self, name, int(value))
        if self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks={self.num_blocks} leaves no usable block: block 0 is the null block; "
                "give at least 2"
            )
        pages_of_block = 2 * self.num_layers * self.num_kv_heads
        most = _MAX_PAGES // pages_of_block - 1  # padding points one block past the end
        if self.num_blocks > most:
            raise ConfigError(
                f"num_blocks={self.num_blocks} of {pages_of_block} pages each (num_layers="
                f"{self.num_layers} x 2 x num_kv_heads={self.num_kv_heads}) are more pages than an "
                f"int32 numbers, {_MAX_PAGES}: give at most {most}, or raise block_size="
                f"{self.block_size}"
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers, scales included."""
        row = FORMATS[self.dtype].row_bytes(self.head_dim, self.scale_dtype)
        return 2 * self.num_layers * self.num_kv_heads * row

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: `block_size` tokens, all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool, the null block included."""
        return self.block_bytes * self.num_blocks

    @property
    def max_len(self) -> int:
        """Longest sequence that a table row can hold, in tokens."""
        return self.max_blocks_per_seq * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return ceil_div(as_int("num_tokens", num_tokens), self.block_size)

    @classmethod
    def for_model(
        cls,
        model: ModelShape,
        *,
        memory_bytes: int | None = None,
        num_blocks: int | None = None,
        max_len: int = 2048,
        block_size: int = 16,
        max_seqs: int = 8,
        dtype: str = "float32",
    ) -> Self:
        """Makes the configuration for a model, by memory budget or number of blocks.

        Args:
          model: any object with `num_layers`, `num_kv_heads` and `head_dim`.
          memory_bytes: budget of the pool, in bytes; the largest pool within it is chosen.
          num_blocks: blocks of the pool, the null block included. With neither, the pool holds
            `max_seqs` sequences of `max_len`.
          max_len: longest sequence, in tokens.
          block_size: tokens per block.
          max_seqs: most live sequences.
          dtype: element type of the pages.

        Raises:
          ConfigError: a budget below one usable block, or both limits.
        """
        if memory_bytes is not None and num_blocks is not None:
            raise ConfigError(f"give {memory_bytes=} or {num_blocks=}, not both")
        if memory_bytes is not None:
            memory_bytes = as_int("memory_bytes", memory_bytes)
        max_seqs, block_size = as_int("max_seqs", max_seqs, 1), as_int("block_size", block_size, 1)
        blocks_per_seq = ceil_div(as_int("max_len", max_len, 1), block_size)
        config = cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_blocks=1 + max_seqs * blocks_per_seq if num_blocks is None else num_blocks,
            block_size=block_size,
            max_seqs=max_seqs,
            max_blocks_per_seq=blocks_per_seq,
            dtype=dtype,
        )
        if memory_bytes is None:
            return config
        if memory_bytes < 2 * config.block_bytes:
            raise ConfigError(
                f"{memory_bytes=} is less than two blocks of {config.block_bytes} bytes (the null "
                "block and one usable); raise the budget or lower block_size"
            )
        return dataclasses.replace(config, num_blocks=memory_bytes // config.block_bytes)
