"""Random calls against the float64 formulas of analytic.py: `python tests/fuzz.py --cases 2000 --seed 1`.

Shape, axes, dtypes, operands, values, mapped axes, direction, engine and options are drawn from the seed and the number
of the case alone. A failure prints the line that runs that case by itself.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
from analytic import evaluate
from cases import BF16, F16, F32, F64, NormCase
from checking import as_tuple, difference, engines, platform

import jaxdnn

CHECKS = ("forward", "jvp", "vjp")
DTYPES = (F32, BF16, F16, F64)


@dataclass(frozen=True)
class Fuzzed:
    """A case, which derivative of it is checked, the size of a mapped axis with the operands that carry it, options."""

    case: NormCase
    check: str
    mapped: int = 0
    carriers: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        batch = f" under vmap over {self.mapped} of {', '.join(self.carriers)}" if self.mapped else ""
        return f"{self.check} of {self.case!r}{batch} with {dict(self.options)}"


def draw(seed: int, number: int) -> Fuzzed:
    """The random call with this number."""
    random = np.random.default_rng([seed, number])

    def chance(probability: float) -> bool:
        return bool(random.random() < probability)

    def one(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    kind = one(("layer_norm", "rms_norm"))
    shape, axis = _shape(random)
    x = random.choice(DTYPES, p=(0.4, 0.35, 0.15, 0.1)).item()

    def dtype(present: float) -> str | None:
        if not chance(present):
            return None
        return x if chance(0.5) else one(DTYPES)

    case = NormCase(
        kind,
        shape,
        axis=axis,
        x=x,
        residual=dtype(0.35),
        scale=dtype(0.75),
        bias=dtype(0.6) if kind == "layer_norm" else None,
        epsilon=one((1e-6, 1e-6, 1e-5, 1e-3, 0.5)),
        statistics=chance(0.3),
        seed=int(random.integers(2**31)),
    )
    if case.scale and chance(0.25):
        case = case.replace(scale_offset=one((1.0, 0.5, -0.25)))
    if chance(0.2):
        case = case.replace(data="large_mean")
    elif chance(0.2) and F16 not in case.dtypes.values() and case.columns >= 16:
        case = case.replace(data=one(("huge", "tiny")), epsilon=one((0.0, 1e-6)))
    carriers = tuple(name for name in case.operands if chance(0.6))
    mapped = int(random.integers(1, 4)) if carriers and chance(0.3) else 0
    return Fuzzed(case, one(CHECKS), mapped, carriers if mapped else (), _options(random))


def _shape(random: np.random.Generator) -> tuple[tuple[int, ...], int | tuple[int, ...]]:
    power = 2 ** int(random.integers(13))
    columns = int(
        random.choice(
            [random.integers(1, 9), random.integers(1, 200), power, power + 1, power - 1, random.integers(6000)]
        )
    )
    rows = int(random.choice([1, random.integers(1, 8), random.integers(1, 300), random.integers(1, 3000)]))
    columns = max(columns, 1)
    rows = max(1, min(rows, 200_000 // columns))
    kind = random.random()
    if kind < 0.6:
        return (rows, columns), -1
    if kind < 0.7:
        return (columns,), 0
    if kind < 0.8:
        return (columns, rows), 0
    sizes = tuple(int(size) for size in random.integers(1, 9, random.integers(3, 5)))
    count = int(random.integers(1, len(sizes)))
    axes = random.choice(len(sizes), count, replace=False)
    return sizes, tuple(int(axis) - (len(sizes) if random.random() < 0.5 else 0) for axis in axes)


def _options(random: np.random.Generator) -> tuple[tuple[str, Any], ...]:
    options = [()] * 6
    options += [(("engine", engine),) for engine in engines()]
    options += [(("workspace_limit", 0),), (("workspace_limit", 4096),)]
    if platform() == "cuda":
        options += [(("sm_count", 3),), (("sm_count", 77),)]
    return options[random.integers(len(options))]


def problem(fuzzed: Fuzzed) -> str:
    """What is wrong with a call; empty if nothing is."""
    case, check, mapped = fuzzed.case, fuzzed.check, fuzzed.mapped
    # One case for each element of the mapped axis, which differ in the operands that carry it.
    several = [case.replace(seed=case.seed + i) for i in range(max(1, mapped))]

    def stacked(arrays: Sequence[Any], names: Sequence[str]) -> tuple[Any, ...]:
        pairs = zip(names, zip(*arrays, strict=True), strict=True)
        return tuple(np.stack(one) if name in carried else one[0] for name, one in pairs)

    carried = (*fuzzed.carriers, *case.outputs) if mapped else ()
    primals = stacked([one.primals() for one in several], case.operands)
    names = {"forward": (), "jvp": case.operands, "vjp": tuple(case.outputs)}[check]
    of_check = {"forward": lambda _: (), "jvp": NormCase.tangents, "vjp": NormCase.cotangents}[check]
    directions = stacked([of_check(one) for one in several], names) if names else ()

    function = _transformed(as_tuple(case.call), check)
    if mapped:
        in_axes = tuple(tuple(0 if name in carried else None for name in group) for group in (case.operands, names))
        function = jax.vmap(function, in_axes)
    with jaxdnn.options(**dict(fuzzed.options)):
        results = jax.tree.leaves(jax.jit(function)(primals, directions))

    def element(i: int) -> list[Any]:
        def pick(arrays: Any, of: Any) -> list[Any]:
            return [array[i] if name in carried else array for name, array in zip(of, arrays, strict=True)]

        return evaluate(case, check, pick(primals, case.operands), pick(directions, names))

    expected = [element(i) for i in range(len(several))]
    for position, got in enumerate(results):
        want, error = ([one[position][part] for one in expected] for part in (0, 1))
        pair = (np.stack(want), np.stack(error)) if mapped else (want[0], error[0])
        if wrong := difference(np.asarray(got), *pair):
            return f"result {position} {wrong}"
    return ""


def _transformed(function: Any, check: str) -> Any:
    def transformed(primals: Any, directions: Any) -> Any:
        if check == "forward":
            return function(*primals)
        if check == "jvp":
            return jax.jvp(function, primals, directions)
        outputs, pull_back = jax.vjp(function, *primals)
        return outputs, pull_back(directions)

    return transformed


def failures(seed: int, numbers: Sequence[int], workers: int) -> Iterator[tuple[int, str]]:
    """Number and description of each of the cases that fails."""

    def run(number: int) -> tuple[int, str]:
        fuzzed = draw(seed, number)
        try:
            wrong = problem(fuzzed)
        except Exception as error:
            wrong = f"raised {type(error).__name__}: {error}"
        return number, f"{fuzzed}: {wrong}" if wrong else ""

    with ThreadPoolExecutor(workers) as pool:
        # In portions, since every case compiles programs that are never used again.
        for start in range(0, len(numbers), 200):
            for number, wrong in pool.map(run, numbers[start : start + 200]):
                if wrong:
                    yield number, f"{wrong}\n  reproduce with: python tests/fuzz.py --seed {seed} --only {number}"
            jax.clear_caches()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns how many cases fail, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all of them")
    parser.add_argument("--only", type=int, help="run the case of this number alone")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="threads")
    parser.add_argument("--case", help='run this one: "NormCase(...)", as a failure prints it')
    parser.add_argument("--check", choices=CHECKS, default="vjp", help="what of --case to check")
    parser.add_argument("--engine", help="the engine for --case")
    given = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    if given.case:
        fuzzed = Fuzzed(eval(given.case), given.check, options=(("engine", given.engine),))
        wrong = problem(fuzzed)
        print(f"{fuzzed}: {wrong or 'right'}")
        return bool(wrong)
    numbers = range(given.cases) if given.only is None else [given.only]
    if given.only is not None:
        print(draw(given.seed, given.only))
    started, failed = time.perf_counter(), 0
    for _, wrong in failures(given.seed, numbers, given.workers):
        failed += 1
        print(wrong, flush=True)
    checks = Counter(draw(given.seed, number).check for number in numbers)
    print(f"{len(numbers)} cases {dict(checks)}, {failed} wrong, in {time.perf_counter() - started:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
