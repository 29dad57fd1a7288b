"""Random calls against float64 formulas, of each op, or of `--op matmul`:
`PYTHONPATH=tests python -P -m checking.fuzz.calls --cases 2000 --seed 1`.

Shapes, dtypes, values, mapped axes, direction, engine and options are drawn from the seed and the number of the case
alone. A failure prints the line that runs that case by itself. An op is a module with two functions: `draw(random)`
returns a case, as of the table in `cases`, which also says whether it is `differentiable`; `evaluate(case, check,
primals, directions)` what it should return.
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
    os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking.cases import AttentionCase as AttentionCase
from checking.cases import ConvolutionCase as ConvolutionCase
from checking.cases import MatmulCase as MatmulCase
from checking.cases import NormCase as NormCase
from checking.compare import as_tuple, compare, difference, engines, platform
from checking.fuzz import attention, convolution, matmul, norm
from checking.tolerance import exact_and_tolerance

OPS = {"norm": norm, "matmul": matmul, "attention": attention, "convolution": convolution}
CHECKS = ("forward", "jvp", "vjp")


@dataclass(frozen=True)
class Fuzzed:
    """A case, which derivative of it is checked, the size of a mapped axis with the operands that carry it, options."""

    case: Any
    check: str
    mapped: int = 0
    carriers: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        batch = f" under vmap over {self.mapped} of {', '.join(self.carriers)}" if self.mapped else ""
        return f"{self.check} of {self.case!r}{batch} with {dict(self.options)}"


def draw(op: str, seed: int, number: int) -> Fuzzed:
    """The random call of an op with this number."""
    random = np.random.default_rng([seed, number])
    case = OPS[op].draw(random)
    carriers = tuple(name for name in case.operands if random.random() < 0.6)
    mapped = int(random.integers(1, 4)) if carriers and random.random() < 0.3 else 0
    check = CHECKS[random.integers(len(CHECKS))] if case.differentiable else "forward"
    return Fuzzed(case, check, mapped, carriers if mapped else (), _options(op, random))


def _options(op: str, random: np.random.Generator) -> tuple[tuple[str, Any], ...]:
    options = [()] * 6
    options += [(("engine", engine),) for engine in engines(op)]
    options += [(("workspace_limit", 0),), (("workspace_limit", 4096),)]
    if platform() == "cuda":
        options += [(("sm_count", 3),), (("sm_count", 77),)]
    return options[random.integers(len(options))]


def problem(fuzzed: Fuzzed) -> str:
    """What is wrong with a call; empty if nothing is."""
    case, check, mapped = fuzzed.case, fuzzed.check, fuzzed.mapped
    # One case for each element of the mapped axis, which differ in the operands that carry it.
    several = [case.replace(seed=case.seed + i) for i in range(max(1, mapped))]
    active = tuple(name for name in case.operands if jnp.issubdtype(case.dtypes[name], jnp.floating))

    def stacked(arrays: Sequence[Any], names: Sequence[str]) -> tuple[Any, ...]:
        pairs = zip(names, zip(*arrays, strict=True), strict=True)
        return tuple(np.stack(one) if name in carried else one[0] for name, one in pairs)

    def direction(one: Any) -> Sequence[Any]:
        if check == "vjp":
            return one.cotangents()
        pairs = zip(case.operands, one.tangents(), strict=True)
        return [tangent for name, tangent in pairs if name in active]

    carried = (*fuzzed.carriers, *case.outputs) if mapped else ()
    primals = stacked([one.primals() for one in several], case.operands)
    names = {"forward": (), "jvp": active, "vjp": tuple(case.outputs)}[check]
    directions = stacked([direction(one) for one in several], names) if names else ()

    function = transformed(as_tuple(case.call), check, [case.operands.index(name) for name in active])
    if mapped:
        in_axes = tuple(tuple(0 if name in carried else None for name in group) for group in (case.operands, names))
        function = jax.vmap(function, in_axes)
    with jaxdnn.options(**dict(fuzzed.options)):
        results = jax.tree.leaves(jax.jit(function)(primals, directions))

    def element(i: int) -> list[Any]:
        def pick(arrays: Any, of: Any) -> list[Any]:
            return [array[i] if name in carried else array for name, array in zip(of, arrays, strict=True)]

        return OPS[case.op].evaluate(case, check, pick(primals, case.operands), pick(directions, names))

    expected = [element(i) for i in range(len(several))]
    for position, got in enumerate(results):
        want, error = ([one[position][part] for one in expected] for part in (0, 1))
        pair = (np.stack(want), np.stack(error)) if mapped else (want[0], error[0])
        if wrong := difference_of(np.asarray(got), *pair):
            return f"result {position} {wrong}"
    if len(results) != len(expected[0]):
        return f"it has {len(results)} results instead of {len(expected[0])}"
    return ""


def difference_of(got: np.ndarray, want: np.ndarray, error: np.ndarray) -> str:
    if got.shape == want.shape and jnp.issubdtype(got.dtype, jnp.floating):
        # Past a dtype's range, anything may come of it.
        unknown = np.isinf(error) | (np.abs(want) + error >= float(jnp.finfo(got.dtype).max))
        want = np.where(unknown, got.astype(np.float64), want)
        # What is off by the error is rounded, too.
        error = np.where(unknown, 0, error * (1 + float(jnp.finfo(got.dtype).eps)))
    return difference(got, want, error)


def transformed(function: Any, check: str, active: Sequence[int]) -> Any:
    """The function, or its derivative in the active arguments, of primals and directions."""

    def applied(primals: Any, directions: Any) -> Any:
        def along(*arrays: Any) -> Any:
            merged = list(primals)
            for position, array in zip(active, arrays, strict=True):
                merged[position] = array
            return function(*merged)

        if check == "forward":
            return function(*primals)
        if check == "jvp":
            return jax.jvp(along, tuple(primals[i] for i in active), tuple(directions))
        outputs, pull_back = jax.vjp(along, *(primals[i] for i in active))
        return outputs, pull_back(tuple(directions))

    return applied


def failures(op: str, seed: int, numbers: Sequence[int], workers: int) -> Iterator[tuple[int, str]]:
    """Number and description of each of the cases that fails."""

    def run(number: int) -> tuple[int, str]:
        fuzzed = None
        try:
            fuzzed = draw(op, seed, number)
            wrong = problem(fuzzed)
        except Exception as error:
            wrong = f"raised {type(error).__name__}: {error}"
        return number, f"{fuzzed}: {wrong}" if wrong else ""

    with ThreadPoolExecutor(workers) as pool:
        # In portions, since every case compiles programs that are never used again.
        for start in range(0, len(numbers), 200):
            for number, wrong in pool.map(run, numbers[start : start + 200]):
                if wrong:
                    again = f"PYTHONPATH=tests python -P -m checking.fuzz.calls --op {op} --seed {seed} --only {number}"
                    yield number, f"{wrong}\n  reproduce with: {again}"
            jax.clear_caches()


def _named(text: str, check: str, engine: str | None) -> str:
    """What is wrong with a case of the table, given as its text; empty if nothing is."""
    case = eval(text)
    given = case.primals(), {"forward": tuple, "jvp": case.tangents, "vjp": case.cotangents}[check]()
    positions = range(len(case.operands))

    def transform(function: Any, primals: Any, directions: Any) -> Any:
        return transformed(function, check, positions)(primals, directions)

    with jaxdnn.options(engine=engine):
        actual = jax.jit(lambda *arrays: transform(as_tuple(case.call), *arrays))(*given)
    try:
        compare(actual, *exact_and_tolerance(transform, case, given), case, case.reproduction(check, engine))
    except AssertionError as error:
        return str(error)
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns how many cases fail, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=OPS, help="of one op alone")
    parser.add_argument("--cases", type=int, default=2000, help="how many of each op")
    parser.add_argument("--seed", type=int, default=0, help="of all of them")
    parser.add_argument("--only", type=int, help="run the case of this number alone")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="threads")
    parser.add_argument("--case", help='run this one: "NormCase(...)", as a failure prints it')
    parser.add_argument("--check", choices=CHECKS, default="vjp", help="what of --case to check")
    parser.add_argument("--engine", help="the engine for --case")
    given = parser.parse_args(arguments)
    if given.case:
        wrong = _named(given.case, given.check, given.engine)
        print(f"{given.check} of {given.case}: {wrong or 'right'}")
        return bool(wrong)
    numbers = range(given.cases) if given.only is None else [given.only]
    total = 0
    for op in [given.op] if given.op else OPS:
        if given.only is not None:
            print(draw(op, given.seed, given.only))
        started, failed = time.perf_counter(), 0
        for _, wrong in failures(op, given.seed, numbers, given.workers):
            failed += 1
            print(wrong, flush=True)
        checks = Counter(draw(op, given.seed, number).check for number in numbers)
        seconds = time.perf_counter() - started
        print(f"{op}: {len(numbers)} cases {dict(checks)}, {failed} wrong, in {seconds:.0f} s", flush=True)
        total += failed
    return min(total, 1)


if __name__ == "__main__":
    sys.exit(main())
