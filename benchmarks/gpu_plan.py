"""Rows of the GPU benchmark, the most important first, and its targets.

The full product of contexts, batches, blocks, heads, dtypes and engines has thousands of rows, each
with its own kernel to compile: some seconds, against half a second of measuring. The rows are
checks of every kernel; the cases of the targets, with all engines; the whole grid of contexts and
batches at block 16 and 32/8 heads; the other blocks where a target needs them; the other heads and
dtypes at a few points of the grid; last, the peers at more points.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from gpu_rows import AttentionCheck, Case, Copy, OperationCheck, PeerCheck, Task

ENGINES = {
    "jaxkv": "this library's kernels",
    "cudnn_paged": "jax._src.cudnn's paged_attention, private; pages of [block, H, D]",
    "cudnn_paged_bnth": "the same, pages of [H, block, D]",
    "cudnn_dense": "jax.nn.dot_product_attention(implementation='cudnn') on contiguous K and V",
    "pallas_triton": "jax.experimental.pallas.ops.gpu.paged_attention, deprecated",
    "torch_sdpa": "PyTorch's scaled_dot_product_attention on contiguous K and V",
    "torch_flex_paged": "PyTorch's FlexAttention with its experimental PagedAttention",
    "torch_flex": "PyTorch's FlexAttention on contiguous K and V, causal",
}
BLOCKS, CONTEXTS, BATCHES = (16, 32, 64, 128), (1024, 4096, 16384, 131072), (1, 8, 64, 256)
LONGEST, PREFILL = 131072, 8192

_RAGGED = (2000, 513, 1, 0, 64, 777)
_CHECKS = (
    AttentionCheck("ragged, split", _RAGGED),
    AttentionCheck("one split", tuple(range(1, 160))),
    AttentionCheck("window", _RAGGED, heads=64, dim=64, block=32, dtype="float16", window=300),
    AttentionCheck("one head a group", _RAGGED, heads=8, block=64),
    AttentionCheck("cap, sinks", _RAGGED, heads=14, kv_heads=2, dim=256, block=128, soft_cap=2.0,
                   sinks=True),
    AttentionCheck("all options", _RAGGED, heads=16, kv_heads=1, dim=80, block=8, window=100,
                   soft_cap=2.0, sinks=True),
    AttentionCheck("split", _RAGGED, dim=96, block=64),
    AttentionCheck("two halves merged", (2000, 777, 130), parts=True),
    AttentionCheck("float32 scales", _RAGGED, block=64, scale_dtype="float32"),
    AttentionCheck("bfloat16 scales, window, sinks", _RAGGED, dim=64, block=128,
                   scale_dtype="bfloat16", window=300, sinks=True),
    AttentionCheck("wide head", _RAGGED, kv_heads=4, heads=16, dim=256, block=64,
                   scale_dtype="float32"),
    AttentionCheck("ragged, behind prefixes, padding", (600, 130, 64, 9, 0), (300, 130, 3, 9, 0),
                   heads=8, kv_heads=2, padding=7),
    AttentionCheck("window", (500, 200), (400, 64), heads=8, dim=64, block=128, dtype="float16",
                   window=150),
    AttentionCheck("cap, sinks", (300, 90), (200, 90), heads=4, kv_heads=1, dim=256, block=64,
                   soft_cap=2.0, sinks=True),
    AttentionCheck("all options", (300, 90), (200, 40), heads=4, kv_heads=2, dim=80, block=32,
                   window=70, soft_cap=2.0, sinks=True),
    AttentionCheck("few queries", (300, 90), (5, 3), heads=4, kv_heads=2, dim=96, block=8),
)  # fmt: skip
_OPERATIONS = ("scatter_kv", "scatter_kv int8", "copy_blocks", "gather_blocks", "put_blocks",
               "zero_blocks", "merge_attention")  # fmt: skip


def full() -> list[Task]:
    """Rows for a GPU, in order: the least important ones are last, where the time may run out."""
    decode, prefill = _decode, _prefill
    peers = ("cudnn_paged", "cudnn_dense", "pallas_triton")
    tasks: list[Task] = [Copy(), *_CHECKS, *map(OperationCheck, _OPERATIONS)]
    # The cases of the targets.
    tasks += [decode(4096, 64, block) for block in BLOCKS]
    tasks += [decode(LONGEST, 1, 16), prefill(PREFILL)]
    tasks += [PeerCheck(decode(256, 4, 16, name)) for name in (*peers, "cudnn_paged_bnth")]
    tasks += [PeerCheck(prefill(512, batch=2, engine=name)) for name in peers[:2]]
    tasks += [decode(4096, 64, 16, name) for name in (*peers, "cudnn_paged_bnth")]
    tasks += [prefill(PREFILL, engine=name) for name in peers[:2]]
    tasks += [decode(LONGEST, 1, 16, name) for name in peers]
    tasks += [decode(4096, 256, block) for block in BLOCKS]
    tasks += [decode(LONGEST, 1, block) for block in BLOCKS[1:]]
    # The grid, the longest contexts first.
    grid = itertools.product(reversed(CONTEXTS), reversed(BATCHES))
    tasks += [decode(*sizes, 16) for sizes in grid]
    tasks += [decode(16384, 64, block) for block in BLOCKS[1:]]
    # PyTorch.
    torch = [prefill(PREFILL, engine="torch_sdpa", block=0), decode(4096, 64, 0, "torch_sdpa")]
    torch += [decode(4096, 64, 128, "torch_flex_paged"), decode(LONGEST, 1, 0, "torch_sdpa")]
    torch += [prefill(PREFILL, engine="torch_flex", block=0)]
    torch += [decode(16384, 64, 64, "torch_flex_paged"), decode(16384, 64, 0, "torch_sdpa")]
    tasks += [PeerCheck(decode(256, 4, 0, "torch_sdpa"))]
    tasks += [PeerCheck(decode(512, 4, 128, "torch_flex_paged")), *torch]
    # Other heads, dtypes, prefills.
    others: tuple[dict[str, Any], ...] = (dict(heads=32, kv_heads=32), dict(heads=64, kv_heads=8))
    for heads in others:
        tasks += [decode(4096, 64, 16, **heads), decode(LONGEST, 1, 16, **heads)]
        tasks += [prefill(PREFILL, **heads)]
        tasks += [prefill(PREFILL, engine="cudnn_dense", **heads)]
    tasks += [decode(4096, 64, block, dtype="int8") for block in BLOCKS[2:]]
    tasks += [decode(LONGEST, 1, 64, dtype="int8"), decode(4096, 64, 16, dtype="float16")]
    tasks += [decode(16384, 64, 16, ragged=True), decode(4096, 64, 16, layers=32)]
    tasks += [prefill(PREFILL, block=block) for block in BLOCKS[1:]]
    tasks += [prefill(PREFILL, dtype="float16"), prefill(16384, queries=512)]
    for sizes in ((1024, 8), (16384, 1), (LONGEST, 1)):
        tasks += [prefill(*sizes), prefill(*sizes, engine="cudnn_dense")]
    tasks += [decode(*sizes, 16, name) for sizes in ((16384, 64), (1024, 64)) for name in peers]
    tasks += [decode(4096, 64, block, name) for block in (64, 128) for name in peers[::2]]
    return list(dict.fromkeys(tasks))


def dry() -> list[Task]:
    """A few tiny rows that run the same code on a CPU."""
    small: dict[str, Any] = dict(heads=4, kv_heads=2, dim=16)
    case = Case("jaxkv", "decode", 64, 2, layers=2, **small)
    prefill = dataclasses.replace(case, form="prefill", queries=64)
    dense: dict[str, Any] = dict(engine="cudnn_dense", block=0)
    return [
        Copy(),
        AttentionCheck("all options", (70, 9, 0), window=30, soft_cap=2.0, sinks=True, **small),
        AttentionCheck("merged", (70, 20), parts=True, **small),
        AttentionCheck("scales", (70, 9), scale_dtype="float32", **small),
        AttentionCheck("chunks", (70, 9), (40, 9), padding=3, **small),
        *map(OperationCheck, _OPERATIONS),
        PeerCheck(dataclasses.replace(case, **dense)),
        PeerCheck(dataclasses.replace(case, engine="pallas_triton")),
        case,
        dataclasses.replace(case, block=32, dtype="int8", ragged=True),
        prefill,
        dataclasses.replace(case, **dense),
        dataclasses.replace(prefill, **dense),
        dataclasses.replace(case, engine="cudnn_paged"),
        dataclasses.replace(case, context=2**30),
        dataclasses.replace(case, engine="torch_sdpa", block=0),
    ]


def _decode(context: int, batch: int, block: int, engine: str = "jaxkv", **more) -> Case:
    block = 0 if engine in ("cudnn_dense", "torch_sdpa") else block
    return Case(engine, "decode", context, batch, block, **more)


def _prefill(context: int, batch: int = 1, engine: str = "jaxkv", **more) -> Case:
    if engine == "cudnn_dense":
        more["block"] = 0
    more.setdefault("queries", context)
    return Case(engine, "prefill", context, batch, **more)


@dataclasses.dataclass(frozen=True)
class Target:
    """A target value.

    Attributes:
      what: description of the rows.
      unit: unit of the value.
      wanted: minimum value.
      got: value of the worst row; None without rows.
      rows: number of rows.
    """

    what: str
    unit: str
    wanted: float
    got: float | None
    rows: int

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if no row was measured."""
        return None if self.got is None else self.got >= self.wanted


def targets(rows: list[dict], copy: float | None) -> list[Target]:
    """Targets with the values of the rows; `copy` is the copy bandwidth in bytes/s."""
    timed = [r for r in rows if r["kind"] in ("decode", "prefill") and r["status"] == "ok"]
    own = [r for r in timed if r["engine"] == "jaxkv"]
    plain = [r for r in own if r["kind"] == "decode" and r["dtype"] != "int8" and not r["ragged"]]

    def share(what: str, wanted: float, fits: Callable[[dict], bool]) -> Target:
        shares = [r["bytes_per_s"] / copy for r in plain if fits(r)] if copy else []
        return Target(what, "of copy bandwidth", wanted, min(shares, default=None), len(shares))

    def faster(what: str, wanted: float, *engines: str, **fields) -> Target:
        """Target of the speedup over the fastest of the engines on the same case."""
        ratios = []
        for row in own:
            peers = [r["us"] for r in timed if r["engine"] in engines and _same(r, row)]
            if peers and all(row[name] == value for name, value in fields.items()):
                ratios.append(min(peers) / row["us"])
        return Target(what, "times as fast", wanted, min(ratios, default=None), len(ratios))

    listed = [
        share(
            f"decode, context from 4096, batch from 32, block {block}",
            0.92,
            lambda r, block=block: (
                r["block"] == block and r["context"] >= 4096 and r["batch"] >= 32
            ),
        )
        for block in BLOCKS
    ]
    return [
        *listed,
        share(
            "decode, context 131072, batch 1",
            0.80,
            lambda r: r["context"] == LONGEST and r["batch"] == 1,
        ),
        faster("prefill of 8192 against dense cuDNN", 1 / 1.1, "cudnn_dense", kind="prefill",
               context=PREFILL),
        faster("decode against cuDNN paged", 1.0, "cudnn_paged", "cudnn_paged_bnth", kind="decode"),
        faster("prefill against cuDNN paged", 1.0, "cudnn_paged", "cudnn_paged_bnth",
               kind="prefill"),
        faster("decode against JAX's deprecated op", 3.0, "pallas_triton", kind="decode"),
    ]  # fmt: skip


_SAME = ("kind", "context", "batch", "heads", "kv_heads", "dim", "dtype", "queries", "ragged")


def _same(row: dict, other: dict) -> bool:
    """Whether two rows compute the same case, with equal page sizes if both have pages."""
    blocks = row["block"] == other["block"] or 0 in (row["block"], other["block"])
    return blocks and all(row[name] == other[name] for name in _SAME)
