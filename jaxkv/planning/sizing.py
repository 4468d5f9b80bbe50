"""Memory of a KV cache, and a block size for given sequence lengths. Host code: no JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._util import ceil_div
from jaxkv.config import CacheConfig, ModelShape
from jaxkv.errors import ConfigError

BLOCK_SIZES = tuple(2**i for i in range(9))  # 1 to 256: candidates of `suggest_block_size`
TABLE_ENTRY_BYTES = 4  # block tables are int32
COPY_COST = 128  # bytes; see `suggest_block_size`


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model that its cache depends on, for use without a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """Memory of a cache of one element type, paged and contiguous. Build one with `cache_size`.

    The contiguous cache reserves `max_len` tokens for every sequence and has no other cost. The
    paged cache takes whole blocks, reserves one of them as the null block, and has block tables.

    Attributes:
      config: the largest paged pool inside the budget, with a table row for each sequence of
        `length` that fits (at least one row).
      memory_bytes: the budget of either cache, in bytes. Block tables are not counted in it.
      max_len: longest sequence that has to fit, in tokens.
      length: length of the sequences that fill the budget, in tokens.
    """

    config: CacheConfig
    memory_bytes: int
    max_len: int
    length: int

    @property
    def paged_bytes(self) -> int:
        """Bytes of the blocks that one sequence of `length` tokens holds."""
        return self.config.blocks_for(self.length) * self.config.block_bytes

    @property
    def contiguous_bytes(self) -> int:
        """Bytes that a contiguous cache reserves for one sequence, whatever its length."""
        return self.max_len * self.config.bytes_per_token

    @property
    def paged_concurrency(self) -> int:
        """Sequences of `length` tokens that the pool holds at once; the null block holds none."""
        return (self.config.num_blocks - 1) // self.config.blocks_for(self.length)

    @property
    def contiguous_concurrency(self) -> int:
        """Sequences that a contiguous cache in the same budget holds at once."""
        return self.memory_bytes // self.contiguous_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the block tables, a row for each sequence, beside the budget."""
        return TABLE_ENTRY_BYTES * self.config.max_seqs * self.config.max_blocks_per_seq

    def to_dict(self) -> dict[str, Any]:
        """All values as plain numbers, in bytes, blocks and sequences."""
        return {
            "bytes_per_token": self.config.bytes_per_token,
            "block_bytes": self.config.block_bytes,
            "num_blocks": self.config.num_blocks,
            "pool_bytes": self.config.pool_bytes,
            "table_bytes": self.table_bytes,
            "paged_bytes": self.paged_bytes,
            "paged_concurrency": self.paged_concurrency,
            "contiguous_bytes": self.contiguous_bytes,
            "contiguous_concurrency": self.contiguous_concurrency,
        }


def cache_size(
    model: ModelShape,
    *,
    memory_bytes: int,
    max_len: int,
    length: int | None = None,
    block_size: int = CacheConfig.block_size,
    dtype: str = CacheConfig.dtype,
) -> CacheSize:
    """Memory of a cache of `model`, and the number of sequences that a budget holds.

    Args:
      model: object with `num_layers`, `num_kv_heads` and `head_dim`, such as a `Shape`.
      memory_bytes: budget of the pool, in bytes, the null block included.
      max_len: longest sequence that has to fit, in tokens.
      length: length of the sequences that fill the budget, in tokens; `max_len` by default.
      block_size: tokens per block.
      dtype: element type of the cache, one of `jaxkv.config.DTYPES`.

    Raises:
      ConfigError: a size is not a positive integer, `length` is above `max_len`, or the budget is
        below two blocks.

    Example:
      >>> from jaxkv.planning.sizing import Shape, cache_size
      >>> llama2_7b = Shape(num_layers=32, num_kv_heads=32, head_dim=128)
      >>> size = cache_size(llama2_7b, memory_bytes=16 * 2**30, max_len=4096, length=1000,
      ...                   dtype="float16")
      >>> size.config.bytes_per_token // 2**10, size.contiguous_bytes // 2**30  # KiB, GiB
      (512, 2)
      >>> size.contiguous_concurrency, size.paged_concurrency
      (8, 32)
    """
    length = max_len if length is None else length
    _positive(memory_bytes=memory_bytes, max_len=max_len, length=length, block_size=block_size)
    if length > max_len:
        raise ConfigError(f"{length=} is above {max_len=}; raise max_len or lower length")
    config = CacheConfig.for_model(
        model, memory_bytes=memory_bytes, max_len=max_len, block_size=block_size, dtype=dtype
    )
    size = CacheSize(config, memory_bytes, max_len, length)
    config = dataclasses.replace(config, max_seqs=max(1, size.paged_concurrency))
    return dataclasses.replace(size, config=config)


@dataclasses.dataclass(frozen=True)
class BlockSizeCost:
    """Cost of one block size per sequence, in bytes, as a mean over the lengths.

    Attributes:
      block_size: tokens per block.
      empty_slots: mean number of slots of the last block that hold no token.
      copies: mean number of pieces that one decode step reads: K and V of every layer, head and
        page.
      copy_bytes: bytes of one such piece.
      waste_bytes: bytes of the empty slots.
      table_bytes: bytes of a row of the block table, padded to the longest sequence.
      kernel_bytes: bytes that could be read in the time that copies take in addition to their own
        bytes.
    """

    block_size: int
    empty_slots: float
    copies: float
    copy_bytes: int
    waste_bytes: float
    table_bytes: int
    kernel_bytes: float

    @property
    def total_bytes(self) -> float:
        """The sum that `suggest_block_size` minimises."""
        return self.waste_bytes + self.table_bytes + self.kernel_bytes


@dataclasses.dataclass(frozen=True)
class BlockSizeSuggestion:
    """A block size and the costs that it was chosen by.

    Attributes:
      block_size: candidate with the lowest `total_bytes`; the smaller one on a tie.
      costs: costs of all candidates, in ascending order of block size.
      rule_of_thumb: result of the older rule sqrt(mean_length * concurrency) / 6, in tokens, for
        comparison. It depends on the number of live sequences, which changes no cost here, and not
        on the model, which does.
      mean_length: mean length of the sequences, in tokens.
      max_len: longest sequence that has to fit, in tokens.
      concurrency: number of live sequences in the rule of thumb.
      dtype: element type of the cache.
      copy_cost: bytes charged for each copy.
    """

    block_size: int
    costs: tuple[BlockSizeCost, ...]
    rule_of_thumb: float
    mean_length: float
    max_len: int
    concurrency: int
    dtype: str
    copy_cost: float

    def to_dict(self) -> dict[str, Any]:
        """All values as plain numbers; each candidate with its `total_bytes`."""
        costs = [dataclasses.asdict(c) | {"total_bytes": c.total_bytes} for c in self.costs]
        return dataclasses.asdict(self) | {"costs": costs}


def suggest_block_size(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_kv_heads: int,
    num_layers: int,
    head_dim: int,
    dtype: str,
    max_len: int | None = None,
    concurrency: int = CacheConfig.max_seqs,
    copy_cost: float = COPY_COST,
) -> BlockSizeSuggestion:
    """The block size with the lowest cost for sequences of these lengths.

    Long blocks leave empty slots at the end of each sequence. Short ones make long tables and many
    small copies, of `block_size * head_dim` elements. In addition to its bytes, a copy costs a
    fixed time (page id, issue, DRAM row): `copy_cost`, in bytes that would stream in that time.

    The sum adds bytes that a sequence holds and bytes that it reads at equal weight, which is right
    where the weights are as large as the pool: a share of memory lost means fewer sequences per
    read of the weights, a share of time lost a longer read of the pool. Where the weights are k
    times the pool, empty slots matter k times as much: divide `copy_cost` by k.

    Args:
      lengths: final lengths of sequences, in tokens, a sample of the expected load.
      num_kv_heads, num_layers, head_dim, dtype: shape and element type of the cache, as in
        `CacheConfig`.
      max_len: longest sequence that has to fit, in tokens, which sets the width of the tables.
        Default: the longest of `lengths`.
      concurrency: number of live sequences, for the rule of thumb alone.
      copy_cost: bytes charged per copy: a * bandwidth, where copies of scattered pieces take
        a + size / bandwidth. The default is such a fit of NumPy's gather on one core of an Intel
        Xeon (14 to 20 ns at 8 GB/s: 125 to 160 bytes), not a measurement of a GPU.

    Raises:
      ConfigError: no lengths, a size that is not a positive integer, or a length above `max_len`.

    Example:
      >>> from jaxkv.planning.sizing import suggest_block_size
      >>> found = suggest_block_size(range(100, 2500), num_layers=32, num_kv_heads=8,
      ...                            head_dim=128, dtype="bfloat16")
      >>> found.block_size, round(found.rule_of_thumb)
      (32, 17)
      >>> [round(cost.total_bytes / 2**20, 1) for cost in found.costs]  # MiB per sequence
      [81.2, 40.7, 20.5, 10.6, 6.0, 4.5, 5.2, 8.6, 16.2]
    """
    tokens = _tokens(lengths)
    max_len = int(tokens.max()) if max_len is None else max_len
    _positive(max_len=max_len, concurrency=concurrency)
    if tokens.max() > max_len:
        raise ConfigError(f"a length of {tokens.max()} is above {max_len=}; raise max_len")
    if not 0 <= copy_cost < math.inf:
        raise ConfigError(f"{copy_cost=} must be a number of bytes, 0 or more")
    model = Shape(num_layers, num_kv_heads, head_dim)
    copies_per_page = 2 * num_layers * num_kv_heads  # K and V
    costs = []
    for block_size in BLOCK_SIZES:
        config = CacheConfig.for_model(
            model, num_blocks=2, max_len=max_len, block_size=block_size, dtype=dtype
        )
        pages = ceil_div(tokens, block_size)
        empty_slots = float((pages * block_size - tokens).mean())
        copies = float(pages.mean()) * copies_per_page
        costs.append(
            BlockSizeCost(
                block_size=block_size,
                empty_slots=empty_slots,
                copies=copies,
                copy_bytes=config.block_bytes // copies_per_page,
                waste_bytes=empty_slots * config.bytes_per_token,
                table_bytes=TABLE_ENTRY_BYTES * config.max_blocks_per_seq,
                kernel_bytes=copies * copy_cost,
            )
        )
    mean_length = float(tokens.mean())
    return BlockSizeSuggestion(
        block_size=min(costs, key=lambda cost: cost.total_bytes).block_size,
        costs=tuple(costs),
        rule_of_thumb=math.sqrt(mean_length * concurrency) / 6,
        mean_length=mean_length,
        max_len=max_len,
        concurrency=concurrency,
        dtype=dtype,
        copy_cost=copy_cost,
    )


def _tokens(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """i64[N] lengths, after validation."""
    tokens = np.asarray(lengths)
    if tokens.size == 0:
        raise ConfigError("no lengths: 0 sequences were given; give the length of at least one")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        kind = f"shape {tokens.shape} and type {tokens.dtype}"
        raise ConfigError(f"lengths must be a list of integers, one per sequence, got {kind}")
    if (short := tokens < 1).any():
        first = f"lengths[{short.argmax()}]={tokens[short.argmax()]}"
        raise ConfigError(f"{first}: {short.sum()} of {len(tokens)} are below 1; leave them out")
    return tokens.astype(np.int64)


def _positive(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a positive integer")
