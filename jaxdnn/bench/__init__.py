"""The benchmark: every case of a family, against plain JAX and against the machine's limit, in one run.

    python -m jaxdnn bench [family] [--only PATTERN] [--shapes 512x4096 ...] [--dtypes float32 ...] [--save] [--readme]
    python -m jaxdnn bench [family] --untuned SEED
    python -m jaxdnn bench [family] ... --configurations

One line a case, then geometric means. `--save` writes them into a CSV for this device, `--readme` makes the tables of
benchmarks/README.md from all of them. `--configurations` times what else could have run instead.
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdnn.bench import attention, choices, convolution, matmul, norm, report, timing, training, untuned
from jaxdnn.config import Options
from jaxdnn.device import find_target


@dataclass(frozen=True)
class Family:
    """Cases of one kind.

    Attributes:
      cases: of shapes and dtypes; where these are empty, of the ones that are published.
      sizes: what a shape consists of.
      dtypes: the ones that may be asked for.
      classes: of shapes, which draw cases.
    """

    cases: Callable[..., Iterable[timing.Case]]
    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]
    classes: Sequence[untuned.Class]


_FLOATS = ("float32", "bfloat16", "float16")
FAMILIES = {
    "norm": Family(norm.cases, ("rows", "columns"), _FLOATS, norm.CLASSES),
    "matmul": Family(matmul.cases, ("m", "n", "k"), (*_FLOATS, "float8_e4m3fn"), matmul.CLASSES),
    "attention": Family(attention.cases, ("batch", "length", "heads", "head_size"), _FLOATS, attention.CLASSES),
    "convolution": Family(
        convolution.cases, ("batch", "size", "channels", "window", "features"), _FLOATS, convolution.CLASSES
    ),
    "training": Family(training.cases, ("batch", "length", "layers", "width"), _FLOATS, training.CLASSES),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("family", nargs="?", choices=list(FAMILIES), help="the cases to run; all families by default")
    example = 'regular expression: "rms.*backward.*float32"'
    parser.add_argument("--only", metavar="PATTERN", type=_pattern, default="", help=example)
    sizes = ", ".join(f"{name} {'x'.join(family.sizes)}" for name, family in FAMILIES.items())
    parser.add_argument(
        "--shapes", metavar="SIZES", nargs="+", type=_shape, default=(), help=f"instead of ours: {sizes}"
    )
    dtypes = list(dict.fromkeys(dtype for family in FAMILIES.values() for dtype in family.dtypes))
    parser.add_argument(
        "--dtypes", metavar="DTYPE", nargs="+", choices=dtypes, default=(), help=f"of {', '.join(dtypes)}"
    )
    parser.add_argument("--untuned", metavar="SEED", type=_seed, help="instead of ours: shapes drawn from this number")
    parser.add_argument("--configurations", action="store_true", help="instead of plain JAX: all that engines offer")
    parser.add_argument("--save", action="store_true", help="write this device's CSV, or into it")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="the folder of the CSVs")
    parser.add_argument("--readme", action="store_true", help="measure nothing: write the CSVs' tables into their page")


def main(arguments: argparse.Namespace) -> int:
    """Measures and prints, or rewrites the page of results; returns the exit status."""
    if arguments.readme:
        try:
            report.update_readme(arguments.results.parent / "README.md", arguments.results)
        except (OSError, ValueError) as error:
            print(f"bench: --readme: {error}", file=sys.stderr)
            return 2
        return 0
    if arguments.untuned is not None and (arguments.shapes or arguments.dtypes or arguments.save):
        print("bench: --untuned draws shapes and dtypes, and saves nothing: leave out the others", file=sys.stderr)
        return 2
    chosen = {
        name: [case for case in cases if arguments.only.search(str(case))] for name, cases in _cases(arguments).items()
    }
    if not any(chosen.values()):
        print("bench: no case is of that family, shape and dtype, and fits --only; there are", file=sys.stderr)
        for name, family in FAMILIES.items():
            cases = list(family.cases())
            calls, shapes, dtypes = (
                ", ".join(dict.fromkeys(getattr(case, field) for case in cases)) for field in ("call", "shape", "dtype")
            )
            print(f"  {name}: {calls}\n    of {shapes}\n    in {dtypes}", file=sys.stderr)
        return 2
    if arguments.configurations and arguments.save:
        print("bench: --configurations only prints: leave out --save", file=sys.stderr)
        return 2
    if arguments.save:  # where it can't be, nothing is measured in vain
        try:
            arguments.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"bench: --save: {error}", file=sys.stderr)
            return 2
    if arguments.configurations:
        for text in choices.measure(case for cases in chosen.values() for case in cases):
            print(text, flush=True)
        return 0
    device = device_name()
    limit = timing.copy_bandwidth()
    print(f"{device}, JAX {jax.__version__}: a copy moves {limit / 1e9:,.1f} GB/s", flush=True)
    print(report.HEADER, flush=True)
    for family, cases in chosen.items():
        rows, path = [], report.device_file(arguments.results, device, family)
        for compiled in _compiled(cases):
            rows.append(_row(compiled, device, limit))
            print(rows[-1], flush=True)
            if arguments.save:  # of each, so that a run that is cut off has saved what it measured
                report.save(rows, path)
        if not rows:
            continue
        print(*report.means(rows), sep="\n")
        if arguments.save:
            print(f"written to {path}")
    return 0


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a seed is a number from 0; got {text!r}")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"sizes are joined by x, as in 512x4096; got {text!r}")
    return tuple(map(int, text.split("x")))


def _cases(arguments: argparse.Namespace) -> dict[str, list[timing.Case]]:
    """The cases of each family that was named, or of all, of those shapes and dtypes asked for that it has."""

    def cases(family: Family) -> list[timing.Case]:
        if arguments.untuned is not None:
            return list(untuned.draw(family.classes, arguments.untuned))
        shapes = [shape for shape in arguments.shapes if len(shape) == len(family.sizes)]
        dtypes = [dtype for dtype in arguments.dtypes if dtype in family.dtypes]
        if (arguments.shapes and not shapes) or (arguments.dtypes and not dtypes):
            return []
        return list(family.cases(shapes, dtypes))

    named = [arguments.family] if arguments.family else list(FAMILIES)
    return {name: cases(FAMILIES[name]) for name in named}


def device_name() -> str:
    """The device that JAX computes on, for people: "NVIDIA H200", "CPU with avx512, 2 threads"."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    target = find_target("cpu", Options())
    assert not isinstance(target, str)
    return f"CPU with {target.arch}, {target.sm_count} threads"


def _compiled(cases: Sequence[timing.Case]) -> Iterator[timing.Compiled]:
    """The cases' programs: of as many cases at a time as there are processors, and none while one is timed."""
    at_a_time = os.cpu_count() or 1
    with ThreadPoolExecutor(at_a_time) as threads:
        for first in range(0, len(cases), at_a_time):
            yield from list(threads.map(timing.compiled, cases[first : first + at_a_time]))


def _row(compiled: timing.Compiled, device: str, limit: float) -> report.Row:
    case, measured = compiled.case, compiled.measure()
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
        error=measured.error,
        xla_error=measured.xla_error,
        temporary_mib=measured.temporary / 2**20,
        xla_temporary_mib=measured.xla_temporary / 2**20,
    )
