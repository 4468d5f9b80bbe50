"""Output of the GPU benchmark: a line per row as it is filled, then tables and the targets."""

from __future__ import annotations

from gpu_plan import Target
from rich.console import Console
from rich.table import Table


def line(row: dict, copy: float | None) -> str:
    """Formats a row as one line; `copy` is the copy bandwidth in bytes/s."""
    head = f"{row['name']}: "
    if row["status"] in ("failed", "skipped"):
        return f"{head}{row['status']}: {row['reason']}"
    if row["kind"] == "copy":
        ways = ", ".join(f"{way} {rate / 1e12:.3f}" for way, rate in row["ways"].items())
        return f"{head}{row['bytes_per_s'] / 1e12:.3f} TB/s ({ways})"
    if row["kind"] == "check":
        return f"{head}{row['status']}, {_error(row)}"
    return f"{head}{row['us']:.1f} us, {_rate(row, copy)}, compiled in {row['compile_s']:.1f} s"


def _error(row: dict) -> str:
    error = "not finite" if row["max_error"] is None else f"{row['max_error']:.1e}"
    memory = {True: ", output poisoned", False: ", output NOT known to be poisoned", None: ""}
    return f"error {error} of {row['tolerance']:.0e}{memory[row.get('poisoned')]}"


def _rate(row: dict, copy: float | None) -> str:
    if row["kind"] == "prefill":
        return f"{row['flops_per_s'] / 1e12:.0f} TFLOP/s"
    share = f" {row['bytes_per_s'] / copy:.1%}" if copy else ""
    return f"{row['bytes_per_s'] / 1e12:.3f} TB/s{share}"


def show(
    console: Console, rows: list[dict], copy: float | None, targets: list[Target], dry: bool
) -> None:
    """Prints the tables, the checks and the targets."""
    mark = " (dry run on a CPU: no measurement)" if dry else ""
    for kind in ("decode", "prefill"):
        timed = [r for r in rows if r["kind"] == kind and r["status"] == "ok"]
        if timed:
            console.print(_times(kind + mark, timed, copy))
    checks = [r for r in rows if r["kind"] == "check"]
    right = sum(r["status"] == "ok" for r in checks)
    console.print(f"checks: {right} of {len(checks)} passed{mark}")
    for row in rows:
        bad = row["status"] != "ok" or row.get("poisoned") is False
        if bad:
            console.print(line(row, copy), markup=False, highlight=False, soft_wrap=True)
    table = Table(title="Targets" + mark, title_justify="left")
    for column in ("of the worst row", "rows", "wanted", "got", ""):
        table.add_column(column)
    for t in targets:
        got, said = ("", "not measured") if t.got is None else (f"{t.got:.2f}", "missed")
        table.add_row(
            t.what, str(t.rows), f"{t.wanted:.2f} {t.unit}", got, "met" if t.met else said
        )
    console.print(table)


def _times(title: str, rows: list[dict], copy: float | None) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("engine", "context", "batch", "block", "heads", "dtype", "", "us", "p90",
                   "rate"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("engine", "dtype") else "right")
    for r in sorted(rows, key=lambda r: (r["context"], r["batch"], r["heads"], r["kv_heads"])):
        notes = ["ragged"] * r["ragged"] + [f"{r['layers']} layers"] * (r["layers"] > 0)
        notes += [f"{r['queries']} queries"] * (r["queries"] not in (1, r["context"]))
        table.add_row(
            r["engine"], str(r["context"]), str(r["batch"]), str(r["block"] or "-"),
            f"{r['heads']}/{r['kv_heads']}", r["dtype"], ", ".join(notes), f"{r['us']:.1f}",
            f"{r['us_p90']:.1f}", _rate(r, copy),
        )  # fmt: skip
    return table
