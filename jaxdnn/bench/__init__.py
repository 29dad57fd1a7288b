"""The benchmark: every case of a family, against plain JAX and against the machine's limit, in one run.

    python -m jaxdnn bench [family] [--only PATTERN] [--save] [--readme]

One line a case, then geometric means. `--save` writes a CSV for this device, `--readme` makes the README's tables from
all of them.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

from jaxdnn.bench import matmul, norm, report, timing
from jaxdnn.config import Options
from jaxdnn.device import find_target

FAMILIES: dict[str, Callable[[], Iterable[timing.Case]]] = {
    "norm": norm.cases,
    "matmul": matmul.cases,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("family", nargs="?", choices=list(FAMILIES), help="the cases to run; all families by default")
    parser.add_argument("--only", metavar="PATTERN", default="", help='regular expression: "rms.*backward.*float32"')
    parser.add_argument("--save", action="store_true", help="write a CSV for this device into the results folder")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="the folder of the CSVs")
    parser.add_argument("--readme", action="store_true", help="measure nothing: write the CSVs' tables into README.md")


def main(arguments: argparse.Namespace) -> int:
    """Measures and prints, or rewrites the README; returns the exit status."""
    if arguments.readme:
        report.update_readme(Path("README.md"), arguments.results)
        return 0
    families = [arguments.family] if arguments.family else list(FAMILIES)
    device = device_name()
    limit = timing.copy_bandwidth()
    print(f"{device}, JAX {jax.__version__}: a copy moves {limit / 1e9:,.1f} GB/s", flush=True)
    for family in families:
        rows = []
        for case in FAMILIES[family]():
            if not re.search(arguments.only, str(case)):
                continue
            rows.append(_row(case, device, limit))
            print(rows[-1], flush=True)
        if not rows:
            continue
        print(*report.means(rows), sep="\n")
        if arguments.save:
            path = report.device_file(arguments.results, device, family)
            report.save(rows, path)
            print(f"written to {path}")
    return 0


def device_name() -> str:
    """The device that JAX computes on, for people: "NVIDIA H200", "CPU with avx512, 2 threads"."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    target = find_target("cpu", Options())
    assert not isinstance(target, str)
    return f"CPU with {target.arch}, {target.sm_count} threads"


def _row(case: timing.Case, device: str, limit: float) -> report.Row:
    measured = timing.measure(case)
    bandwidth = case.bytes / measured.jaxdnn
    bounded_by_memory = not case.flops
    return report.Row(
        device=device,
        jax=jax.__version__,
        call=case.call,
        shape=case.shape,
        dtype=case.dtype,
        engine=measured.engines,
        microseconds=measured.jaxdnn * 1e6,
        rate=(bandwidth if bounded_by_memory else case.flops / measured.jaxdnn) / 1e9,
        unit="GB/s" if bounded_by_memory else "GFLOP/s",
        fraction_of_limit=bandwidth / limit if bounded_by_memory else math.nan,
        xla_microseconds=measured.xla * 1e6,
        speedup=measured.xla / measured.jaxdnn,
        limit_gb_per_second=limit / 1e9,
    )
