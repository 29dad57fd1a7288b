"""Compares a transformed jaxdnn function with the same transformation of the float64 reference."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import FAMILIES
from checking.tolerance import around, exact_and_tolerance, tolerated, within
from jaxdnn.engines.table import ENGINES


def platform() -> str:
    """The platform that the tests run on: "cpu" or "cuda"."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def engines(op: str, on: str | None = None) -> list[str]:
    """Names of the engines of the table that serve `op` on this machine (or the platform `on`)."""
    here = ("any", on or platform())
    families = (*FAMILIES[op], "any")
    return [engine.name for engine in ENGINES if engine.platform in here and engine.family in families]


needs_native = pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")


def served(cases: Iterable[Any], on: str | None = None) -> list[Any]:
    """The cases of whose op a kernel of ours serves some, here or on the platform `on`."""
    return [case for case in cases if engines(case.op, on) != ["xla"]]


def runs(rows: Iterable[Any], on: str | None = None) -> list[Any]:
    """Every case with every engine that serves its op here, as parameters of a test; a row may say more of its case.

    An engine of another platform is one test, which is skipped: the report says what was not tested.
    """
    tuples = [row if isinstance(row, tuple) else (row,) for row in rows]
    every = [(*row, engine) for row in tuples for engine in engines(row[0].op, on)]
    found = [pytest.param(*values, id="-".join(map(str, values))) for values in every]
    return found if on else [*found, *absent(tuples)]


def absent(rows: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """The first case of each engine that would serve one on another platform, as a test that is skipped."""
    for engine in ENGINES:
        row = next((row for row in rows if engine.family in FAMILIES[row[0].op]), None)
        if row is not None and engine.platform not in ("any", platform()):
            mark = pytest.mark.skip(reason=f"the engine {engine.name} needs {engine.platform}")
            yield pytest.param(*row, engine.name, id=f"every case-{engine.family}-{engine.name}", marks=mark)


def as_tuple(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The function, with its one output in a tuple too."""

    @functools.wraps(function)
    def wrapped(*arrays: Any) -> tuple[Any, ...]:
        outputs = function(*arrays)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return wrapped


@functools.lru_cache(maxsize=8)
def _expected(transform: Callable[..., Any], case: Any, arguments: Callable[[Any], Any]) -> tuple[Any, Any]:
    return exact_and_tolerance(transform, case, arguments(case))


def check(
    transform: Callable[..., Any],
    case: Any,
    arguments: Callable[[Any], Any],
    engine: str | None = None,
    *,
    surroundings: bool = False,
) -> str:
    """Asserts that `transform(case.call, *arguments(case))`, jitted, is the reference's within tolerance.

    Args:
      transform: gets a function that returns a tuple, and the arguments.
      case: of the table.
      arguments: makes the arguments of a case.
      engine: as in `options`.
      surroundings: whether `transform` computes more around the op (a loss, say), which rounds as well.

    Returns:
      The text of the compiled program.
    """
    given = arguments(case)
    with jaxdnn.options(engine=engine):
        compiled = jax.jit(functools.partial(transform, as_tuple(case.call))).lower(*given).compile()
    actual = compiled(*given)
    assert_close(actual, transform, case, arguments, surroundings=surroundings)
    return compiled.as_text()


def assert_close(
    actual: Any,
    transform: Callable[..., Any],
    case: Any,
    arguments: Callable[[Any], Any],
    *,
    surroundings: bool = False,
) -> None:
    """Asserts that `actual` is what `transform` makes of the reference, within tolerance."""
    exact, deviation = _expected(transform, case, arguments)
    if surroundings:
        deviation = jax.tree.map(functools.partial(around, case.unit), exact, deviation)
    compare(actual, exact, deviation, case)


def compare(actual: Any, exact: Any, deviation: Any, case: Any, reproduction: str = "") -> None:
    """Asserts that arrays are within tolerance of the exact ones; the message holds a line that reproduces it."""
    named, structure = jax.tree.flatten_with_path(actual)
    assert structure == jax.tree.structure(exact), f"{structure} is not the reference's {jax.tree.structure(exact)}"
    for (path, got), want, spread in zip(named, jax.tree.leaves(exact), jax.tree.leaves(deviation), strict=True):
        problem = difference(np.asarray(got), want, spread)
        if problem:
            raise AssertionError(f"{case!r}: result{jax.tree_util.keystr(path)} {problem}\n{_line(case, reproduction)}")


def difference(got: np.ndarray, want: np.ndarray, spread: np.ndarray) -> str:
    """What is wrong with an array; empty if nothing is."""
    if got.shape != want.shape:
        return f"has shape {got.shape} instead of {want.shape}"
    wide = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(wide - want)
        allowed = tolerated(want, spread, got.dtype)
        right = within(got, want, allowed)
    if right.all():
        return ""
    with np.errstate(all="ignore"):
        ratio = np.where(right, 0, np.where(np.isfinite(error / allowed), error / allowed, np.inf))
    worst = np.unravel_index(np.argmax(ratio), ratio.shape)
    return (
        f"({got.dtype}{list(got.shape)}) is wrong in {np.sum(~right)} of {right.size} elements; the worst is "
        f"{list(map(int, worst))}: {wide[worst]:.9g} instead of {want[worst]:.9g}, off by {error[worst]:.3g} where "
        f"{allowed[worst]:.3g} is allowed"
    )


def _line(case: Any, reproduction: str) -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    return "reproduce with: " + (reproduction or (f"pytest '{test}'" if test else case.reproduction()))


def dtypes_of(arrays: Any) -> list[str]:
    return [jnp.dtype(array.dtype).name for array in jax.tree.leaves(arrays)]
