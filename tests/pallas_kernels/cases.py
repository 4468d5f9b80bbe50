"""Random ragged batches over a shuffled pool, shared by the kernel tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class Case:
    q: jax.Array  # [T, Hq, D]
    pages: jax.Array  # [N, L, 2, H, B, D]
    tables: jax.Array  # i32[S, M]
    lens: jax.Array  # i32[S]
    query_start: jax.Array  # i32[S + 1]
    max_query_len: int
    layer: int
    dense: list[tuple[np.ndarray, np.ndarray]]  # K and V f32[len, H, D] of each sequence

    def kwargs(self):
        return dict(layer=self.layer, max_query_len=self.max_query_len)

    def args(self):
        return self.q, self.pages, self.tables, self.lens, self.query_start


def make(
    lens, counts, *, block=4, heads=4, kv_heads=2, dim=8, layers=2, layer=1, seed=0,
    dtype=jnp.float32, fill=0.0, spare_columns=2, padding_tokens=0, max_query_len=None,
):  # fmt: skip
    """Sequences of `lens` cached tokens whose last `counts` are this step's queries.

    Every slot that holds no token is `fill`, and unused table entries point anywhere.
    """
    rng = np.random.default_rng(seed)
    need = [-(-n // block) for n in lens]
    width = max([*need, 1]) + spare_columns
    num_blocks = sum(need) + 5
    order = rng.permutation(np.arange(1, num_blocks))
    pages = np.full((num_blocks, layers, 2, kv_heads, block, dim), fill, np.float32)
    tables = rng.integers(0, num_blocks, (len(lens), width))
    dense, at = [], 0
    for s, n in enumerate(lens):
        tables[s, : need[s]] = order[at : at + need[s]]
        at += need[s]
        kv = rng.normal(0, 1, (2, n, kv_heads, dim)).astype(np.float32)
        for t in range(n):
            pages[tables[s, t // block], layer, :, :, t % block] = kv[:, t]
        dense.append((kv[0], kv[1]))
    total = int(sum(counts))
    q = rng.normal(0, 1, (total + padding_tokens, heads, dim))
    return Case(
        jnp.asarray(q, dtype),
        jnp.asarray(pages, dtype),
        jnp.asarray(tables, jnp.int32),
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32),
        max_query_len or max([*counts, 2]),
        layer,
        dense,
    )


def oracle(case: Case) -> np.ndarray:
    """Dense attention in float64, one query at a time."""
    q = np.asarray(case.q, np.float64)
    out = np.zeros_like(q)
    start = np.asarray(case.query_start)
    for s, (k, v) in enumerate(case.dense):
        count = start[s + 1] - start[s]
        group = q.shape[1] // max(k.shape[1], 1)
        for i in range(count):
            seen = len(k) - count + i + 1
            for h in range(q.shape[1]):
                kh, vh = k[:seen, h // group], v[:seen, h // group]
                logits = kh @ q[start[s] + i, h] / np.sqrt(q.shape[2])
                weights = np.exp(logits - logits.max())
                out[start[s] + i, h] = weights @ vh / weights.sum()
    return out
