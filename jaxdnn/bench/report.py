"""What a benchmark prints, the CSV it writes, and the page of all results, which is made from the CSVs."""

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxdnn.bench.timing import geometric_mean

BEGIN, END = "<!-- benchmarks: python -m jaxdnn bench --readme -->", "<!-- end of benchmarks -->"


@dataclass(frozen=True)
class Row:
    """One measured case.

    Where memory alone is the bound, the rate is of the bytes that must move, and the limit that of a copy in the same
    run. Else it is of the operations that must be done, and the fraction of the limit is not a number. Nor are errors,
    relative to float64, of what is not compared with it, and temporary arrays of what is not a whole program.
    """

    device: str
    jax: str
    call: str
    shape: str
    dtype: str
    engine: str
    microseconds: float
    rate: float
    unit: str
    fraction_of_limit: float
    xla_microseconds: float
    speedup: float
    limit_gb_per_second: float
    error: float
    xla_error: float
    temporary_mib: float
    xla_temporary_mib: float

    def __str__(self) -> str:
        rate = _rate(self.rate, self.unit, self.fraction_of_limit)
        times = [f"{time:,.1f} us" for time in (self.microseconds, self.xla_microseconds)]
        errors = ["" if math.isnan(error) else f"{error:.1e}" for error in (self.error, self.xla_error)]
        memory = [_memory(mib) for mib in (self.temporary_mib, self.xla_temporary_mib)]
        speedup = _times(self.speedup)
        return _LINE.format(
            self.call, self.shape, self.dtype, times[0], rate, times[1], speedup, *errors, *memory, self.engine
        ).rstrip()


_LINE = "{:<38} {:>24} {:<13} {:>12}  {:<25} {:>12} {:>8} {:>8} {:>8} {:>10} {:>10}  {}"
HEADER = _LINE.format(
    "call", "shape", "dtype", "jaxdnn", "rate", "XLA", "speedup", "error", "XLA's", "memory", "XLA's", "engine"
)


def _times(speedup: float) -> str:
    return f"{speedup:.2f} x"


def _memory(mib: float) -> str:
    """Of temporary arrays, where it is known."""
    return "" if math.isnan(mib) else f"{mib:,.0f} MiB"


def _copies(rows: Sequence[Row]) -> str:
    """The speed of a copy in the runs of these rows."""
    limits = [row.limit_gb_per_second for row in rows]
    ends = dict.fromkeys(f"{limit:,.0f}" for limit in (min(limits), max(limits)))
    return " to ".join(ends)


def _rate(rate: float, unit: str, fraction: float) -> str:
    """For people: "3,751 GB/s, 91% of limit"; "702 TFLOP/s"."""
    if rate >= 10_000 and unit == "GFLOP/s":
        rate, unit = rate / 1000, "TFLOP/s"
    return f"{rate:,.{0 if rate >= 100 else 1}f} {unit}" + (
        "" if math.isnan(fraction) else f", {fraction:.0%} of limit"
    )


def means(rows: Sequence[Row]) -> list[str]:
    """A line of geometric means for each call and dtype, and one for all."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.call, row.dtype), []).append(row)
    groups["all", ""] = list(rows)

    def mean(call: str, dtype: str, group: Sequence[Row]) -> str:
        rate, fraction, speedup = (
            geometric_mean([getattr(row, column) for row in group])
            for column in ("rate", "fraction_of_limit", "speedup")
        )
        (unit, *others) = {row.unit for row in group}
        rate = "" if others else _rate(rate, unit, fraction)
        return _LINE.format(call, "geometric mean", dtype, "", rate, "", _times(speedup), *[""] * 5).rstrip()

    return [mean(*name, group) for name, group in groups.items()]


def save(rows: Sequence[Row], path: Path) -> None:
    """Writes the CSV, and its folder if there is none. Rows of other cases that it has stay where they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = {(row.call, row.shape, row.dtype): row for row in [*(load(path) if path.exists() else ()), *rows]}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Row)])
        for row in cases.values():
            values = (getattr(row, field.name) for field in fields(Row))
            writer.writerow([f"{value:.4g}" if isinstance(value, float) else value for value in values])


def load(path: Path) -> list[Row]:
    """Reads what `save` wrote."""

    def value(text: str, dtype: object) -> Any:
        return float(text) if dtype is float else text

    with path.open(newline="") as file:
        return [Row(**{f.name: value(record[f.name], f.type) for f in fields(Row)}) for record in csv.DictReader(file)]


def device_file(results: Path, device: str, family: str) -> Path:
    """Where the results of one family on one device go."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return results / f"{slug}-{family}.csv"


def update_readme(readme: Path, results: Path) -> bool:
    """Writes the tables of every CSV in `results` between the README's markers; returns whether anything changed."""
    text = readme.read_text()
    before, marker, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise ValueError(f"{readme} lacks the markers {BEGIN} and {END}")
    gpus_first = sorted(results.glob("*.csv"), key=lambda path: (path.name.startswith("cpu"), path.name))
    tables = "\n\n".join(_markdown(rows) for rows in map(load, gpus_first) if rows)
    if not tables:
        raise ValueError(f"{results} holds no results of `bench --save`, and {readme} stays as it is")
    updated = f"{before}{BEGIN}\n{tables}\n{END}{after}"
    readme.write_text(updated)
    return updated != text


def _markdown(rows: Sequence[Row]) -> str:
    """A line for each call and shape, a column for each dtype."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    by_case = {(row.call, row.shape, row.dtype): row for row in rows}
    calls = dict.fromkeys(row.call for row in rows)
    shapes = dict.fromkeys(row.shape for row in rows)

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        share = row.temporary_mib / row.xla_temporary_mib
        memory = "" if math.isnan(share) else f", {share:.2f} of the memory"
        return f"{_rate(row.rate, row.unit, row.fraction_of_limit)}, {row.speedup:.2f} x{memory}"

    def mean(call: str, dtype: str) -> str:
        speedups = [row.speedup for row in rows if (row.call, row.dtype) == (call, dtype)]
        return f"**{geometric_mean(speedups):.2f} x**" if speedups else ""

    lines = [
        f"**{rows[0].device}**, JAX {rows[0].jax}. Bytes that must move per second and their share of the speed of a "
        f"copy ({_copies(rows)} GB/s in the same run), or operations per second; how many times the "
        "speed of XLA; and of whole programs, the share of the memory that XLA's takes for temporary arrays.",
        "",
        line(["call", "shape", *dtypes]),
        line(["---"] * (2 + len(dtypes))),
    ]
    for call in calls:
        lines += [
            line([call, shape, *(cell(by_case.get((call, shape, dtype))) for dtype in dtypes)])
            for shape in shapes
            if any((call, shape, dtype) in by_case for dtype in dtypes)
        ]
        lines.append(line([call, "geometric mean", *(mean(call, dtype) for dtype in dtypes)]))
    return "\n".join(lines)
