"""Random epilogues: short straight-line programs, written in functions that `jax.numpy` and `bounded` both have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checking.cases.dtypes import BF16, E4M3, F16, F32, F64, I32
from checking.fuzz import bounded_functions
from checking.fuzz.bounded import Bounded

_NAMES = """
arctan broadcast_to ceil clip cos exp expand_dims expm1 floor log1p maximum minimum sign sin sqrt square swapaxes tanh
where
"""
_ACTIVATIONS = "elu gelu hard_swish leaky_relu mish relu sigmoid silu softplus"
JAX = SimpleNamespace(
    **{name: getattr(jnp, name) for name in _NAMES.split()},
    **{name: getattr(jax.nn, name) for name in _ACTIVATIONS.split()},
    abs=jnp.abs,
    sum=jnp.sum,
    max=jnp.max,
    min=jnp.min,
    round=jnp.round,
    erf=jax.lax.erf,
    iota=lambda like, axis: jax.lax.broadcasted_iota(jnp.float32, like.shape, axis),
)
BOUNDED = SimpleNamespace(
    **{name: getattr(bounded_functions, name) for name in (_NAMES + _ACTIVATIONS).split()},
    abs=bounded_functions.absolute,
    sum=bounded_functions.total,
    max=bounded_functions.largest,
    min=bounded_functions.least,
    round=bounded_functions.nearest,
    erf=bounded_functions.erf,
    iota=bounded_functions.iota,
)

# Arguments are clipped where a few steps could otherwise leave the range of float32.
_UNARY = (
    *("-{0}", "{0} * 0.3", "{0} - 1.5", "{0} / 3.0", "xp.abs({0})", "xp.tanh({0})", "xp.sin({0})", "xp.cos({0})"),
    *("xp.square(xp.clip({0}, -9.0, 9.0))", "xp.exp(xp.minimum({0}, 3.0))", "xp.expm1(xp.minimum({0}, 3.0))"),
    *(
        "xp.log1p(xp.abs({0}))",
        "xp.sqrt(xp.abs({0}) + 0.5)",
        "xp.erf({0})",
        "xp.arctan({0})",
        "xp.clip({0}, -1.0, 2.0)",
    ),
    *("xp.silu({0})", "xp.gelu({0})", "xp.gelu({0}, approximate=False)", "xp.relu({0})", "xp.sigmoid({0})"),
    *("xp.softplus({0})", "xp.elu({0})", "xp.mish({0})", "xp.hard_swish({0})", "xp.leaky_relu({0})"),
    *("xp.floor({0})", "xp.ceil({0})", "xp.round({0})", "xp.sign({0})"),
)
_BINARY = (
    *("{0} + {1}", "{0} - {1}", "xp.clip({0}, -50.0, 50.0) * {1}", "{0} / (xp.abs({1}) + 0.5)"),
    *("xp.maximum({0}, {1})", "xp.minimum({0}, {1})", "xp.where({0} < {1}, {0}, {1} * 2.0)", "{0} >= {1}"),
)
_OF_INTEGERS = ("-{0}", "xp.abs({0})", "{0} + {1}", "{0} - {1}", "xp.maximum({0}, {1})", "xp.minimum({0}, {1})")
_CASTS = (F32, F32, BF16, BF16, F16, F64)


@dataclass(frozen=True)
class Program:
    """An epilogue.

    Attributes:
      arguments: names of the sums, then of the operands.
      lines: assignments.
      returned: an expression for each result, and whether it is a reduction.
    """

    arguments: tuple[str, ...]
    lines: tuple[str, ...]
    returned: tuple[tuple[str, bool], ...]

    @property
    def source(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        results = ", ".join(expression for expression, _ in self.returned)
        results = results if len(self.returned) == 1 else f"({results})"
        return f"def epilogue({', '.join(self.arguments)}):\n{body}    return {results}\n"

    def function(self, namespace: SimpleNamespace) -> Callable[..., Any]:
        """The program as a function of arrays of a namespace."""
        scope: dict[str, Any] = {"xp": namespace}
        exec(self.source, scope)
        return scope["epilogue"]

    def __repr__(self) -> str:
        return " ".join("; ".join(self.source.splitlines()).split())


def draw(
    random: np.random.Generator, shape: tuple[int, ...], acc: Sequence[str]
) -> tuple[Program, tuple[tuple[tuple[int, ...], str], ...]]:
    """A random program for sums of a shape and of these dtypes, and its operands' shapes and dtypes."""

    def one(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    def chance(probability: float) -> bool:
        return bool(random.random() < probability)

    names = [f"s{i}" for i in range(len(acc))]
    known = dict(zip(names, acc, strict=True))
    lines, extras = [], []

    def kind(name: str) -> str:
        return "f" if jnp.issubdtype(known[name], jnp.floating) else "b" if known[name] == "bool" else "i"

    def define(expression: str) -> str:
        name = f"v{len(lines)}"
        scope: dict[str, Any] = {"xp": BOUNDED}
        scope |= {known_name: _sample(dtype) for known_name, dtype in known.items()}
        known[name] = eval(expression, scope).dtype
        lines.append(f"{name} = {expression}")
        return name

    for i in range(int(random.integers(4))):
        dtype = one((F32, F32, F32, BF16, BF16, F16, F64, I32, "bool"))
        stored, loaded = _operand(random, shape, f"o{i}")
        extras.append((stored, dtype))
        if loaded != f"o{i}":
            lines.append(f"v{len(lines)} = {loaded}")
        known[f"o{i}" if loaded == f"o{i}" else f"v{len(lines) - 1}"] = dtype

    for _ in range(int(random.integers(1, 9))):
        # What was last defined and what is of the sums are what matters.
        x = list(known)[-1] if chance(0.5) else one(list(known))
        of_kind = [name for name in known if kind(name) == kind(x)]
        y = one(of_kind)
        if kind(x) == "b":
            values = [name for name in known if kind(name) == "f"] or [f"{names[0]}.astype('float32')"]
            define(one((f"xp.where({x}, {one(values)}, {one(values)})", f"~{x}", f"{x} & {y}")))
        elif kind(x) == "i":
            define(f"{x}.astype('{F32}') * 0.01" if chance(0.4) else one(_OF_INTEGERS).format(x, y))
        elif chance(0.1):
            define(f"{x}.astype('{one(_CASTS)}')")
        elif chance(0.06) and shape:
            define(f"xp.iota({names[0]}, {random.integers(len(shape))}) * 0.1")
        elif chance(0.03) and shape and 0 not in shape and kind(names[0]) == "f":
            define(f"{x} - xp.{one(('max', 'sum'))}({names[0]}, axis=-1, keepdims=True).astype('{F32}') * 0.1")
        else:
            define(one(_UNARY if chance(0.5) else _BINARY).format(x, y))

    returned = []
    for i in range(one((1, 1, 1, 2, 2, 3))):
        candidates = [name for name in known if kind(name) != "b"]
        name = candidates[-1] if i == 0 else one(candidates)
        whole = f"xp.broadcast_to({name}, {shape})"
        if i == 0:  # everything depends on the sums
            whole = f"({whole} + {names[0]})" if chance(0.5) else f"xp.maximum({whole}, {names[0]})"
        if shape and kind(name) == "f" and chance(0.25):
            returned.append((_reduction(random, shape, whole), True))
        elif kind(name) == "f" and chance(0.2):
            cast = one((BF16, F16, F32, E4M3))
            returned.append((f"xp.clip({whole}, -200.0, 200.0).astype('{cast}')", False))
        else:
            returned.append((whole, False))
    arguments = (*names, *(f"o{i}" for i in range(len(extras))))
    return Program(arguments, tuple(lines), tuple(returned)), tuple(extras)


def _sample(dtype: str) -> Bounded:
    return Bounded(np.ones((1,) * 8, bool if dtype == "bool" else float), np.zeros((1,) * 8), dtype)


def _operand(random: np.random.Generator, shape: tuple[int, ...], name: str) -> tuple[tuple[int, ...], str]:
    """The shape of an operand that broadcasts to `shape`, and the expression that makes it do so."""
    along = random.random(len(shape)) < random.choice((0.0, 0.4, 0.7, 1.0))
    kept = tuple(size if varies else 1 for size, varies in zip(shape, along, strict=True))
    if len(shape) >= 2 and random.random() < 0.15:
        return (*kept[:-2], kept[-1], kept[-2]), f"xp.swapaxes({name}, -1, -2)"
    if len(shape) >= 2 and kept[-1] == 1 and random.random() < 0.5:
        return kept[:-1], f"xp.expand_dims({name}, -1)"
    ones = next((i for i, size in enumerate(kept) if size != 1), len(kept))
    return kept[random.integers(ones + 1) :], name


def _reduction(random: np.random.Generator, shape: tuple[int, ...], whole: str) -> str:
    function = "sum" if 0 in shape else random.choice(("sum", "max", "min"))
    axes: Any = None
    if random.random() < 0.7:
        count = int(random.integers(1, len(shape) + 1))
        axes = tuple(int(axis) for axis in random.choice(len(shape), count, replace=False))
        axes = axes[0] if len(axes) == 1 else axes
    of = f"xp.abs({whole})" if function == "max" and random.random() < 0.5 else whole
    return f"xp.{function}({of}, axis={axes}{', keepdims=True' if random.random() < 0.3 else ''})"
