"""Products of few rows with the matrices of a 1-billion Llama on the CPU, in its weights' types.

    uv run benchmarks/cpu_linear.py --json out.json

Each product is measured as `jaxkv.models.linear.project` computes it and as one `dot_general`, in
turn, with the bytes of the temporaries that XLA allocates: a copy of the weight shows there.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table
from turns import machine, median_ms

from jaxkv.models.linear import project

SHAPES = {"qkv": (3072, 2048), "gate, up": (16384, 2048), "down": (2048, 8192)}  # [out, in]


def one_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The product without a choice of form."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def measure(name: str, rows: int, dtype: str, rounds: int) -> dict:
    """Milliseconds, temporaries and the largest relative difference of both forms."""
    rng = np.random.default_rng(0)
    width_out, width_in = SHAPES[name]
    x = jnp.asarray(rng.normal(size=(rows, width_in)), dtype)
    weight = jnp.asarray(rng.normal(size=(width_out, width_in)), dtype)
    forms = {"project": project, "dot_general": one_dot}
    compiled = {key: jax.jit(form).lower(x, weight).compile() for key, form in forms.items()}
    calls = {key: functools.partial(call, x, weight) for key, call in compiled.items()}
    out, plain = (np.asarray(call(), np.float32) for call in calls.values())
    times = median_ms(calls, range(rounds))
    row: dict = {"product": name, "rows": rows, "dtype": dtype}
    for key, call in compiled.items():
        row[f"{key}_ms"] = times[key]
        row[f"{key}_temp_mb"] = call.memory_analysis().temp_size_in_bytes / 1e6
    return row | {"difference": float(np.abs(out - plain).max() / np.abs(plain).max())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,2,8", help="numbers of rows")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="types of the weights")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of both forms in turn")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    rows = [
        measure(name, int(count), dtype, args.rounds)
        for dtype in args.dtypes.split(",")
        for count in args.rows.split(",")
        for name in SHAPES
    ]
    table = Table(title="x @ weight^T on the CPU")
    for column in ("dtype", "rows", "product", "project ms", "dot_general ms", "temporaries MB"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["dtype"], str(row["rows"]), row["product"], f"{row['project_ms']:.2f}",
            f"{row['dot_general_ms']:.2f}",
            f"{row['project_temp_mb']:.1f} against {row['dot_general_temp_mb']:.1f}",
        )  # fmt: skip
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"meta": machine(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
