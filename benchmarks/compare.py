"""Compare two result files of one benchmark and list the figures that changed.

    uv run benchmarks/compare.py benchmarks/results/manager.json new.json --noise 0.1

A figure is worse if it moved in its bad direction by more than its noise, a share of the old value:
the spread of the figure's repeats, the larger one of the two files, or --noise if neither has any.
Figures that do not depend on timing have no noise. Figures of unknown direction, of peers and of
baselines are listed as changed and not judged. Versions may differ and are printed.

Exit status: 1 if a figure is worse, 2 if the files cannot be compared.
"""

import argparse
import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Form of a benchmark's result files. Patterns match dotted paths such as host.256.host_ms.

    Attributes:
      marks: keys that identify the form; "rows.x" is a key of the first row.
      row_id: fields that name a row. Rows with the same name are repeats.
      configuration: numbers that must agree. Text must agree unless it is a version.
      higher, lower: figures for which higher, or lower, is better; `higher` takes precedence.
      unjudged: figures of peers and baselines, and time spent waiting, whatever else they match.
      exact: figures without noise.
      repeats: lists of one figure's repeats. The items of other lists are separate figures.
      labels: names of a list's items, or the key of the list that holds them.
    """

    marks: tuple[str, ...]
    row_id: tuple[str, ...] = ()
    configuration: tuple[str, ...] = ()
    higher: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()
    labels: tuple[tuple[str, tuple[str, ...] | str], ...] = ()


BENCHMARKS = {
    "manager": Benchmark(
        marks=("ns", "bytes_per_block"), lower=("ns.*", "bytes_per_*"), exact=("bytes_per_*",)
    ),
    "engine": Benchmark(
        marks=("host", "no hits"), row_id=("seqs",), higher=("shared.ratio",),
        configuration=("host.*.steps", "shared.requests", "shared.prefix"),
        lower=("host.*ms*", "*.seconds.*", "*.ratio"), unjudged=("*.wait",),
        repeats=("*.seconds.*",),
    ),
    "serving": Benchmark(
        marks=("rows.name", "rows.same_as_first"), row_id=("name",),
        configuration=("*.generated_tokens", "*.prompt_tokens", "*.requests", "*.settings.[!s]*"),
        higher=("*.tokens_per_s", "*.same_as_first"),
        lower=("*.seconds", "*token_s.*", "*.host_ms.*"),
        unjudged=("rows.llama*", "rows.transformers*", "*.wait"),
        labels=(("*token_s", ("p50", "p95")),),
    ),
    "cpu_attention": Benchmark(
        marks=("rows.dense_ms", "rows.paged_ms"), configuration=("meta.heads.*",),
        row_id=("kind", "sequences", "queries", "length", "block_size"),
        lower=("*.paged_ms", "*.ratio"),
    ),
    "cpu_decode": Benchmark(
        marks=("rows.engine", "rows.streams"), configuration=("*.steps",),
        row_id=("engine", "streams", "kv_type", "block_size", "flash_attn", "kv_unified"),
        higher=("*tokens_per_s", "ratios.*"), lower=("*.ms_*",), unjudged=("rows.llama.cpp/*",),
    ),
    "hit_rates": Benchmark(
        marks=("hit_rate", "seconds_per_replay"), configuration=("block_size",),
        higher=("hit_rate.*",), lower=("seconds_per_replay.*",), unjudged=("hit_rate.Belady.*",),
        exact=("hit_rate.*",), labels=(("hit_rate.*", "blocks"),),
    ),
    "pool_size": Benchmark(
        marks=("rows.pool_mib",), row_id=("pool_mib",), higher=("meta.in_place",),
        lower=("*.ms_per_step_median", "meta.ratio"), exact=("meta.in_place",),
    ),
    "manager_growth": Benchmark(
        marks=("growth",), configuration=("meta.calls",), lower=("growth.*",),
    ),
}  # fmt: skip
MACHINE = ("meta.cpus", "meta.device*", "meta.machine*", "*.system_info", "*.cpu_capability")
NOTES = ("*.python", "*.numpy", "*.jax", "*.torch", "*load_1m", "*cpu_share")  # may differ


class Incomparable(Exception):
    """The files cannot be compared; the message says why."""


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def leaves(value: Any, form: Benchmark, document: dict, path: str = "", is_round: bool = False
           ) -> Iterator[tuple[str, Any, bool]]:  # fmt: skip
    """(path, leaf, whether the leaf is one round of a figure whose value stands elsewhere)."""
    under = f"{path}." if path else ""
    if isinstance(value, dict):
        rounds = {"rounds": path, "rounds_ms": under + "host_ms"}  # "rounds" mirrors its siblings
        for key, item in value.items():
            where = rounds[key] if key in rounds else under + key
            yield from leaves(item, form, document, where, is_round or key in rounds)
    elif not isinstance(value, list):
        yield path, value, is_round
    elif is_round or matches(path, form.repeats):
        yield from ((path, item, is_round) for item in value)
    elif value and isinstance(value[0], dict):
        for row in value:
            name = "/".join(str(row[key]) for key in form.row_id if key in row)
            rest = {key: item for key, item in row.items() if key not in form.row_id}
            yield from leaves(rest, form, document, under + name)
    elif path not in (names for _, names in form.labels):
        found = [names for pattern, names in form.labels if fnmatchcase(path, pattern)]
        names = found[0] if found else range(len(value))
        names = document[names] if isinstance(names, str) else names
        for name, item in zip(names, value, strict=True):
            yield from leaves(item, form, document, f"{under}{name}")


@dataclasses.dataclass
class Results:
    """Contents of a result file: figures, measured spreads of some, and all other fields."""

    benchmark: str
    figures: dict[str, float]
    spreads: dict[str, float]
    fields: dict[str, Any]


def read(file: Path) -> Results:
    """Read a result file; raises Incomparable if it is not one."""
    try:
        document = json.loads(file.read_text())
        keys = {*document, *(f"rows.{key}" for row in document.get("rows", [])[:1] for key in row)}
        name = next(name for name, form in BENCHMARKS.items() if keys.issuperset(form.marks))
    except OSError as error:
        raise Incomparable(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise Incomparable(f"{file} is not valid JSON: {error}") from None
    except (AttributeError, KeyError, TypeError, StopIteration):
        raise Incomparable(f"{file} is not a result of {', '.join(BENCHMARKS)}") from None
    form, fields = BENCHMARKS[name], {}
    values, rounds = defaultdict[str, list](list), defaultdict[str, list](list)
    try:
        for path, leaf, is_round in leaves(document, form, document):
            is_field = matches(path, (*form.configuration, *MACHINE, *NOTES))
            is_flag = isinstance(leaf, bool) and not matches(path, form.higher)
            if is_field or is_flag or not isinstance(leaf, int | float):
                fields[path] = leaf
            elif not math.isfinite(leaf):
                raise Incomparable(f"{file}: {path} is {leaf}, not a finite number")
            else:
                (rounds if is_round else values)[path].append(leaf)
        repeats = {path: found for path, found in (values | rounds).items() if len(found) > 1}
        figures = {path: float(statistics.median(found)) for path, found in values.items()}
        return Results(name, figures, {p: spread(x) for p, x in repeats.items()}, fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Incomparable(f"{file} is not in the form that {name}.py writes: {error!r}") from None


def spread(repeats: list[float]) -> float:
    """Range of the repeats over their median; from 8 repeats on, the interquartile range."""
    low, middle, high = min(repeats), statistics.median(repeats), max(repeats)
    if len(repeats) >= 8:  # the range would grow with their number
        low, _, high = statistics.quantiles(repeats, n=4, method="inclusive")
    return (high - low) / abs(middle) if middle else 0.0


def differing(old: Results, new: Results, other_machine: bool) -> str:
    """Permitted differences as text; raises Incomparable on others."""
    if old.benchmark != new.benchmark:
        raise Incomparable(f"the benchmarks differ: {old.benchmark} and {new.benchmark}")
    pairs = {path: (was, new.fields.get(path, was)) for path, was in old.fields.items()}
    texts = {path: f"{path} {was} -> {now}" for path, (was, now) in pairs.items() if was != now}
    machine = [text for path, text in texts.items() if matches(path, MACHINE)]
    wrong = [text for path, text in texts.items() if not matches(path, (*MACHINE, *NOTES))]
    if wrong:
        raise Incomparable(f"the configurations differ: {'; '.join(wrong)}")
    if machine and not other_machine:
        raise Incomparable(f"the machines differ: {'; '.join(machine)} (see --other-machine)")
    if not old.figures.keys() & new.figures.keys():
        raise Incomparable("the files have no figure in common")
    return "; ".join(texts.values())


def compare(old: Results, new: Results, noise: float) -> list[tuple[str, str, float, float]]:
    """(verdict, path, change, noise) of the figures that changed, the worst first."""
    form, found = BENCHMARKS[old.benchmark], []
    for path in old.figures.keys() & new.figures.keys():
        was, now = old.figures[path], new.figures[path]
        spreads = [r.spreads[path] for r in (old, new) if path in r.spreads]
        share = 0.0 if matches(path, form.exact) else max(spreads, default=noise)
        change = (now - was) / abs(was) if was else math.copysign(math.inf, now) if now else 0.0
        if abs(change) <= share:
            continue
        verdict = "changed"
        if not matches(path, form.unjudged) and matches(path, (*form.higher, *form.lower)):
            verdict = "better" if (change > 0) == matches(path, form.higher) else "worse"
        found.append((verdict, path, change, share))
    order = ("worse", "better", "changed")
    return sorted(found, key=lambda row: (order.index(row[0]), -abs(row[2]), row[1]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare two result files of one benchmark.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--noise", type=float, default=0.1, help="noise of figures without repeats")
    parser.add_argument("--other-machine", action="store_true", help="compare across machines")
    args = parser.parse_args(argv)
    if not args.noise >= 0:
        parser.error(f"--noise must be 0 or more, got {args.noise}")
    try:
        old, new = read(args.old), read(args.new)
        notes = differing(old, new, args.other_machine)
    except Incomparable as error:
        parser.error(str(error))
    rows = compare(old, new, args.noise)
    table = Table(title=f"{old.benchmark}: {len(rows)} of {len(old.figures)} figures changed")
    for column in ("", "figure", "old", "new", "change", "noise"):
        table.add_column(column, justify="left" if column in ("", "figure") else "right")
    for verdict, path, change, share in rows:
        table.add_row(
            verdict, path, f"{old.figures[path]:,.4g}", f"{new.figures[path]:,.4g}",
            f"{change:+.1%}", f"{share:.1%}",
            style={"worse": "red", "better": "green"}.get(verdict),
        )  # fmt: skip
    out = Console(markup=False, highlight=False)
    out.width = out.width if out.is_terminal else 120
    out.print(table)
    if missing := sorted(old.figures.keys() ^ new.figures.keys()):
        out.print(f"only in one of the files: {', '.join(missing)}")
    if notes:
        out.print(f"differs: {notes}")
    return int(any(verdict == "worse" for verdict, *_ in rows))


if __name__ == "__main__":
    raise SystemExit(main())
