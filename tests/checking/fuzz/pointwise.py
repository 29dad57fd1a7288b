"""Random pointwise functions against JAX's own arithmetic:
`PYTHONPATH=tests python -P -m checking.fuzz.pointwise --cases 2000 --seed 1`.

A function is drawn as Python source from the seed and the number of the case alone, and is run by the interpreter of
the host and, with a C++ compiler at hand, as emitted source. A failure prints the line that runs that case by itself.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checking.pointwise.runs import Call, Emitted, run_host, values
from checking.pointwise.tolerance import exact_and_tolerance, wrong_elements
from jaxdnn.pointwise.operations import kind

# Few shapes, so that JAX compiles each of its operations for few of them.
SHAPES = ((5, 67), (3, 4, 17), (2, 3, 2, 8), (130,), (1, 9))
SUMS = ("float32",) * 6 + ("float64", "int32")
OPERANDS = ("float32", "float32", "bfloat16", "float16", "float64", "int32", "int8", "uint8", "bool", "float8_e4m3fn")
PORTION = 25
# A discontinuous function may take another value where rounding crosses an edge that the tolerance did not show.
EDGES = 0.02

FLOAT_UNARY = (
    *("jnp.exp(-jnp.abs({0}))", "jnp.tanh({0})", "jnp.log1p(jnp.abs({0}))", "jnp.sqrt(jnp.abs({0}) + 0.5)", "-{0}"),
    *("jnp.abs({0})", "jnp.square({0})", "jax.nn.gelu({0})", "jax.nn.silu({0})", "jax.nn.relu({0})", "jnp.sin({0})"),
    *("jax.nn.softplus({0})", "lax.erf({0})", "lax.logistic({0})", "jnp.cos({0})", "lax.rsqrt(jnp.abs({0}) + 1)"),
    *("jnp.expm1(jnp.minimum({0}, 2))", "jnp.clip({0}, -1, 2)", "jax.nn.elu({0})", "jax.nn.mish({0})", "{0} * 0.3"),
    *("jax.nn.gelu({0}, approximate=False)", "jnp.cbrt({0})", "{0} / 3", "1 / (jnp.abs({0}) + 0.25)", "{0} - 1.5"),
    *(
        "jnp.floor({0})",
        "jnp.ceil({0})",
        "jnp.round({0})",
        "jnp.sign({0})",
        "jnp.trunc({0})",
        "{0} ** 3",
        "jnp.arctan({0})",
    ),
)
INTEGER_UNARY = (
    "-{0}",
    "jnp.abs({0})",
    "jnp.sign({0})",
    "~{0}",
    "lax.population_count({0})",
    "lax.clz({0})",
    "{0} ** 2",
)
BOOL_UNARY = ("~{0}", "jnp.where({0}, 2.0, -1.0)", "{0}.astype('float32')", "{0}.astype('int32')")
FLOAT_BINARY = (
    *("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / (jnp.abs({1}) + 0.5)", "jnp.maximum({0}, {1})"),
    *("jnp.minimum({0}, {1})", "{0} < {1}", "{0} >= {1}", "jnp.logaddexp({0}, {1})", "jnp.hypot({0}, {1})"),
    *(
        "jnp.where({0} > {1}, {0}, {1} * 2)",
        "jnp.arctan2({0}, {1})",
        "lax.pow(jnp.abs({0}) + 0.5, jnp.clip({1}, -3, 3))",
    ),
)
INTEGER_BINARY = (
    *(
        "{0} + {1}",
        "{0} - {1}",
        "{0} * {1}",
        "{0} & {1}",
        "{0} | {1}",
        "{0} ^ {1}",
        "jnp.maximum({0}, {1})",
        "{0} == {1}",
    ),
    *("lax.div({0}, {1})", "lax.rem({0}, {1})", "{0} % {1}", "{0} // {1}", "{0} != {1}", "{0} << ({1} & 7)"),
    *("lax.shift_right_logical({0}, {1})", "lax.shift_right_arithmetic({0}, {1})"),
)
BOOL_BINARY = ("{0} & {1}", "{0} | {1}", "{0} ^ {1}")
FLOAT_CASTS = ("float32", "float32", "bfloat16", "float16", "int32", "int8", "float8_e4m3fn")
INTEGER_CASTS = ("float32", "float32", "int32", "int8", "uint8", "bool", "bfloat16")
TABLES = ("float32", "bfloat16", "float64", "int32", "int8")
LOOK_UPS = (
    "jnp.take({0}, {1}, axis=0, mode='clip')",
    "{0}.at[{1}].get(mode='fill', fill_value=2)",
    "{0}.at[{1} & 7].get(mode='promise_in_bounds')",
)
DISCONTINUOUS = (
    "floor",
    "ceil",
    "round",
    "sign",
    "trunc",
    "astype",
    "%",
    "//",
    "<",
    ">",
    "lax.rem",
    "==",
    "!=",
    "where",
)


@dataclass(frozen=True)
class Fuzzed:
    """A drawn call, and the source of its function."""

    call: Call
    source: str

    @property
    def discontinuous(self) -> bool:
        return any(name in self.source for name in DISCONTINUOUS) or "float16" in str(self.call.operands)


def draw(seed: int, number: int) -> Fuzzed:
    """The random call with this number."""
    random = np.random.default_rng([seed, number])

    def one(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    def broadcast(shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an operand, which has any of the output's dimensions."""
        kept = tuple(size if random.random() < 0.6 else 1 for size in shape)
        return kept[random.integers(len(shape) + 1) :]

    shape = one(SHAPES)
    acc = [values(one(SUMS), shape, f"{number} sum {i}") for i in range(one((1, 1, 1, 2)))]
    operands = [values(one(OPERANDS), broadcast(shape), f"{number} operand {i}") for i in range(random.integers(4))]
    tables = [values(one(TABLES), (9,), f"{number} table {i}") for i in range(random.integers(2))]
    arguments = [f"s{i}" for i in range(len(acc))] + [f"o{i}" for i in range(len(operands))]
    known = dict(zip(arguments, [array.dtype.name for array in (*acc, *operands)], strict=True))
    operands += tables
    arguments += [f"t{i}" for i in range(len(tables))]
    lines: list[str] = []

    def named(dtypes: str) -> list[str]:
        return [name for name, dtype in known.items() if kind(dtype) in dtypes and "float8" not in dtype]

    def step() -> str:
        if random.random() < 0.05:
            axis = random.integers(len(shape))
            return f"lax.broadcasted_iota('{one(('int32', 'float32', 'int8'))}', {shape}, {axis})"
        if tables and named("iu") and random.random() < 0.3:
            return one(LOOK_UPS).format("t0", one(named("iu")))
        x = one(list(known))
        x_kind = kind(known[x])
        if random.random() < 0.15 or "float8" in known[x]:
            return f"{x}.astype('{one(FLOAT_CASTS if x_kind == 'f' else INTEGER_CASTS)}')"
        y = one(named("iu" if x_kind in "iu" else x_kind) or [x])
        if random.random() < 0.5:
            pairs = {"f": FLOAT_BINARY, "b": BOOL_BINARY}.get(x_kind, INTEGER_BINARY)
            return one(pairs).format(x, y if known[x] == known[y] or x_kind not in "iu" else f"{y}.astype({x}.dtype)")
        if named("b") and random.random() < 0.2:
            return f"jnp.where({one(named('b'))}, {x}, {y})"
        return one({"f": FLOAT_UNARY, "b": BOOL_UNARY}.get(x_kind, INTEGER_UNARY)).format(x)

    def dtype_of(expression: str, name: str) -> str:
        function = _function([*lines, f"{name} = {expression}"], arguments, name)
        return jax.eval_shape(function, *acc, *operands).dtype.name

    for position in range(random.integers(2, 14)):
        name, expression = f"v{position}", step()
        try:
            known[name] = dtype_of(expression, name)
        except (TypeError, ValueError):  # JAX does not have it for these dtypes
            continue
        lines.append(f"{name} = {expression}")

    def result() -> str:
        name = list(known)[-1] if random.random() < 0.7 else one(list(known))
        whole = f"jnp.broadcast_to({name}, {shape})"
        if random.random() < 0.15 and len(shape) <= 2 and "float8" not in known[name]:
            return f"jnp.{one(('max', 'min', 'sum'))}({whole}, axis={one((None, 0))})"
        return f"{whole}.astype('bfloat16')" if random.random() < 0.15 and kind(known[name]) == "f" else whole

    returned = ", ".join(result() for _ in range(one((1, 1, 2, 3))))
    function = _function(lines, arguments, f"({returned},)")
    given = [
        f"{name}: {array.dtype.name}{list(array.shape)}"
        for name, array in zip(arguments, (*acc, *operands), strict=True)
    ]
    source = "\n".join([f"def f({', '.join(given)}):", *(f"    {line}" for line in lines), f"    return ({returned},)"])
    # Dimensions are joined in any way, but for those that are reduced.
    cuts = sorted(random.integers(len(shape) + 1, size=2).tolist())
    groups = None if "axis=" in returned else (cuts[0], cuts[1] - cuts[0], len(shape) - cuts[1])
    return Fuzzed(Call(function, shape, tuple(acc), tuple(operands), groups), source)


def _function(lines: Sequence[str], arguments: Sequence[str], returned: str) -> Any:
    body = "".join(f"    {line}\n" for line in lines)
    namespace: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": jax.lax}
    exec(f"def f({', '.join(arguments)}):\n{body}    return {returned}\n", namespace)
    return namespace["f"]


def problem(fuzzed: Fuzzed, runs: dict[str, Sequence[np.ndarray]], expected: Any) -> str:
    """What is wrong with the results of a run, if anything is."""
    for run, results in runs.items():
        for position, (got, (exact, tolerance)) in enumerate(zip(results, expected, strict=True)):
            if got.shape != exact.shape:
                return f"{run}, result {position}: its shape is {got.shape} for {exact.shape}"
            wrong = wrong_elements(got, exact, tolerance)
            allowed = max(1, EDGES * wrong.size) if fuzzed.discontinuous else 0
            if wrong.sum() > allowed:
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                return (
                    f"{run}, result {position}: {wrong.sum()} of {wrong.size} are wrong; at {at} "
                    f"{got[at]!r} for {exact[at]!r} +- {tolerance[at]:.3g}"
                )
    return ""


def failures(seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Number and description of each of the cases that fails."""
    for start in range(0, len(numbers), PORTION):
        portion = numbers[start : start + PORTION]
        drawn = [draw(seed, number) for number in portion]
        with tempfile.TemporaryDirectory() as folder:
            emitted = Emitted([one.call for one in drawn], Path(folder) / "unit") if shutil.which("g++") else None
            for k, (number, fuzzed) in enumerate(zip(portion, drawn, strict=True)):
                try:
                    runs = {"host": run_host(fuzzed.call)}
                    if emitted:
                        runs["emitted"] = emitted.run(k)
                    expected = exact_and_tolerance(
                        fuzzed.call.function, (*fuzzed.call.accumulators, *fuzzed.call.operands)
                    )
                    wrong = problem(fuzzed, runs, expected)
                except Exception as error:
                    wrong = f"raised {type(error).__name__}: {error}"
                if wrong:
                    again = f"PYTHONPATH=tests python -P -m checking.fuzz.pointwise --seed {seed} --only {number}"
                    yield number, f"{fuzzed.source}\n{wrong}\n  reproduce with: {again}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns how many cases fail, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all of them")
    parser.add_argument("--only", type=int, help="run the case of this number alone")
    given = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    numbers = range(given.cases) if given.only is None else [given.only]
    if given.only is not None:
        print(draw(given.seed, given.only).source)
    started, failed = time.perf_counter(), 0
    for _, wrong in failures(given.seed, numbers):
        failed += 1
        print(wrong, flush=True)
    print(f"{len(numbers)} cases, {failed} wrong, in {time.perf_counter() - started:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
