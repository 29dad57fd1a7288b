"""Random compositions of JAX's transformations over networks whose epilogues look at what moves on, against plain JAX:
`PYTHONPATH=tests python -P -m checking.fuzz.transforms --cases 500 --seed 1`.

A network of a few layers, transformations around it, and how the result is traced and run are drawn from the seed and
the number of the case alone. The same network of plain JAX, in float64, says what is right.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import numpy as np
from jax import export
from jax.core import eval_jaxpr

import jaxdnn
from checking.cases.dtypes import F32, F64
from checking.fuzz.compositions import LOOPS, MAPPED, OTHERS, TRANSFORMS, Function
from checking.fuzz.networks import (
    ACTIVATIONS,
    LAYERS,
    OURS,
    PLAIN,
    RULED,
    RULED_IN_REVERSE,
    SHAPES,
    Tracing,
    network,
)

TOLERANCE = {F32: 2e-4, F64: 1e-9}  # relative to the largest element of an array

# ------------------------------------------------------------ how it is traced and run


@contextlib.contextmanager
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def _apart(tracing: Any, lowering: Any) -> Function:
    """Traced under one setting and lowered under another."""

    def run(function: Function, arrays: Sequence[Any], traced: Tracing) -> Any:
        with tracing():
            found = jax.jit(function).trace(*arrays)
        traced.over = True
        with lowering():
            compiled = found.lower().compile()
        with tracing():
            return compiled(*arrays)

    return run


def _exported(*shape: Any) -> Function:
    """As a program of x of some rows."""

    def run(function: Function, arrays: Sequence[Any], traced: Tracing) -> Any:
        sizes = export.symbolic_shape(*shape) if shape else arrays[0].shape
        types = [jax.ShapeDtypeStruct(sizes if i == 0 else array.shape, array.dtype) for i, array in enumerate(arrays)]
        program = export.export(jax.jit(function), disabled_checks=jaxdnn.export_checks())(*types)
        traced.over = True
        return export.deserialize(program.serialize()).call(*arrays)

    return run


def _eager(function: Function, arrays: Sequence[Any], traced: Tracing) -> Any:
    del traced
    return function(*arrays)


def _evaluated(function: Function, arrays: Sequence[Any], traced: Tracing) -> Any:
    """As a jaxpr, twice."""
    jaxpr, types = jax.make_jaxpr(function, return_shape=True)(*arrays)
    traced.over = True
    again = jax.make_jaxpr(eval_jaxpr, static_argnums=0)(jaxpr.jaxpr, jaxpr.consts, *arrays)
    results = eval_jaxpr(again.jaxpr, again.consts, *jax.tree.leaves((jaxpr.consts, arrays)))
    return jax.tree.unflatten(jax.tree.structure(types), results)


def _unjitted(function: Function, arrays: Sequence[Any], traced: Tracing) -> Any:
    del traced
    with jax.disable_jit():
        return function(*arrays)


def _checking_leaks(function: Function, arrays: Sequence[Any], traced: Tracing) -> Any:
    del traced
    with jax.checking_leaks():
        return jax.jit(function)(*arrays)


_unset = contextlib.nullcontext
RUNS = {
    "jit": _apart(_unset, _unset),
    "eager": _eager,
    "jaxpr": _evaluated,
    "without jit": _unjitted,
    "checking leaks": _checking_leaks,
    "strict promotion": _apart(_strict, _unset),
    "strict promotion when lowered": _apart(_unset, _strict),
    "without 64 bits": _apart(lambda: jax.enable_x64(False), lambda: jax.enable_x64(False)),
    "64 bits when lowered": _apart(lambda: jax.enable_x64(False), lambda: jax.enable_x64(True)),
    "without 64 bits when lowered": _apart(_unset, lambda: jax.enable_x64(False)),
    "export": _exported(),
    "export of any rows": _exported("rows, 4"),
}


@dataclass(frozen=True)
class Fuzzed:
    """A network, transformations of it, innermost first, and how the result is run."""

    layers: tuple[tuple[str, str], ...]
    transforms: tuple[str, ...]
    run: str
    dtype: str = F32
    engine: str | None = None

    def __str__(self) -> str:
        return " of ".join([f"{self.run} ({self.engine}, {self.dtype})", *reversed(self.transforms), str(self.layers)])


def draw(seed: int, number: int) -> Fuzzed:
    """The random case with this number."""
    random = np.random.default_rng([seed, number])

    def one(choices: Any) -> Any:
        choices = list(choices)
        return choices[random.integers(len(choices))]

    layers = tuple((one(LAYERS), one(ACTIVATIONS)) for _ in range(random.integers(1, 4)))
    ended = {"forward"} if {name for _, name in layers} & RULED_IN_REVERSE else set[str]()
    ruled = bool({name for _, name in layers} & RULED)
    transforms, larger, order = list[str](), False, 0
    for _ in range(random.integers(1, 5)):
        name = one(MAPPED) if random.random() < 0.2 else one(OTHERS)
        transform = TRANSFORMS[name]
        modes = transform.mode.split()
        of_rules = ruled or name == "custom_vjp"
        # JAX forgets rules in second derivatives of loops: it takes those of the functions themselves.
        forgotten = of_rules and order + len(modes) > 1 and {name, *transforms} & LOOPS
        if forgotten or ended & {*modes} or (larger and transform.larger):
            continue
        transforms.append(name)
        order, ruled = order + len(modes), of_rules
        ended |= {*transform.ends.split()}
        larger |= transform.larger
    dtype = F64 if random.random() < 0.3 else F32
    runs = [name for name in RUNS if dtype == F32 or name not in ("without 64 bits", "64 bits when lowered")]
    return Fuzzed(layers, tuple(transforms), one(runs), dtype, one((None, None, "xla")))


def problem(fuzzed: Fuzzed) -> str:
    """What is wrong with a case; empty if nothing is."""
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape) / 2 for shape in SHAPES]

    def composed(ops: Any, dtype: str, traced: Tracing) -> Function:
        function = network(ops, fuzzed.layers, dtype, traced)
        for name in fuzzed.transforms:
            function = TRANSFORMS[name].apply(function)
        return function

    own = [array.astype(fuzzed.dtype) for array in arrays]
    expected = jax.jit(composed(PLAIN, F64, Tracing()))(*arrays)
    types = jax.eval_shape(composed(PLAIN, fuzzed.dtype, Tracing()), *own)
    traced = Tracing()
    with jaxdnn.options(engine=fuzzed.engine):
        results = RUNS[fuzzed.run](composed(OURS, fuzzed.dtype, traced), own, traced)
    if jax.tree.structure(results) != jax.tree.structure(expected):
        return f"it returns {jax.tree.structure(results)} instead of {jax.tree.structure(expected)}"
    named = jax.tree.leaves_with_path(results)
    for (path, got), want, type_ in zip(named, jax.tree.leaves(expected), jax.tree.leaves(types), strict=True):
        if (got.shape, got.dtype) != (type_.shape, type_.dtype):
            return f"result{jax.tree_util.keystr(path)} is {got.dtype}{got.shape} for {type_.dtype}{type_.shape}"
        largest = np.max(np.abs(want))
        error = np.max(np.abs(np.asarray(got, F64) - want))
        if not error <= TOLERANCE[fuzzed.dtype] * max(largest, 1.0):
            return f"result{jax.tree_util.keystr(path)} is off by {error:.3g}, where the largest is {largest:.3g}"
    return ""


def failures(seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Number and description of each of the cases that fails."""
    for number in numbers:
        try:
            with jax.default_matmul_precision("highest"):
                wrong = problem(draw(seed, number))
        except Exception as error:
            wrong = f"raised {type(error).__name__}: {error}"
        if wrong:
            again = f"PYTHONPATH=tests python -P -m checking.fuzz.transforms --seed {seed} --only {number}"
            yield number, f"{draw(seed, number)}: {wrong}\n  reproduce with: {again}"
        if number % 50 == 49:  # every case compiles programs that are never used again
            jax.clear_caches()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns how many cases fail, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all of them")
    parser.add_argument("--only", type=int, help="run the case of this number alone")
    given = parser.parse_args(arguments)
    numbers = range(given.cases) if given.only is None else [given.only]
    if given.only is not None:
        print(draw(given.seed, given.only))
    started, failed = time.perf_counter(), 0
    for _, wrong in failures(given.seed, numbers):
        failed += 1
        print(wrong, flush=True)
    print(f"{len(numbers)} cases, {failed} wrong, in {time.perf_counter() - started:.0f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
