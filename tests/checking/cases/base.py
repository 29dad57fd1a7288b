"""What a case of any op is, and what a family's rows of the table are for."""

import itertools
import zlib
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from checking.cases.dtypes import F32, F64


@dataclass(frozen=True, repr=False)
class Case:
    """One call of an op, with all that the tests need to know of it.

    A family is a subclass, whose fields say what is called. It has:

      op                            the op of the engines that serve the call
      dtypes, outputs               name and dtype of each operand, in the order of `call`, and of each result
      shape_of(name)                the shape of an operand or result
      call(*arrays, **changes)      jaxdnn's function, with other keywords if asked
      reference(rounding, *arrays)  the independent definition on float64 arrays (see reference.py)
      __str__                       the id of a test

    Attributes:
      data: what the first operand holds: "normal", or what the family says.
      seed: of the random arrays, which are a function of the case alone, and exactly representable in their dtypes.
    """

    data: str = field(default="normal", kw_only=True)
    seed: int = field(default=0, kw_only=True)

    op: ClassVar[str]

    @property
    def dtypes(self) -> dict[str, str]:
        raise NotImplementedError

    @property
    def outputs(self) -> dict[str, str]:
        raise NotImplementedError

    def shape_of(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def call(self, *arrays: Any, **changes: Any) -> Any:
        raise NotImplementedError

    def reference(self, rounding: Any, *arrays: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def operand_values(self, name: str, values: np.ndarray) -> np.ndarray:
        """The values of an operand, made of normally distributed ones."""
        del name
        return values

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(self.dtypes)

    @property
    def differentiable(self) -> bool:
        """Whether every operand is floating point."""
        return not any("int" in dtype for dtype in self.dtypes.values())

    @property
    def compute_dtype(self) -> str:
        return F64 if F64 in self.dtypes.values() else F32

    @property
    def unit(self) -> float:
        """The unit roundoff of the op's arithmetic."""
        return float(np.finfo(self.compute_dtype).eps) / 2

    def primals(self) -> tuple[np.ndarray, ...]:
        return tuple(self._array("primal", name) for name in self.dtypes)

    def tangents(self) -> tuple[np.ndarray, ...]:
        return tuple(self._array("tangent", name) for name in self.dtypes)

    def cotangents(self) -> Any:
        """A tuple of what has the structure of the results."""
        return tuple(self._array("cotangent", name) for name in self.outputs)

    def _array(self, role: str, name: str) -> np.ndarray:
        random = np.random.default_rng([self.seed, zlib.crc32(f"{role} {name}".encode())])
        dtype = jnp.dtype(self.dtypes.get(name) or self.outputs[name])
        if jnp.issubdtype(dtype, jnp.integer):
            return random.integers(-127, 128, self.shape_of(name)).astype(dtype)
        values = random.standard_normal(self.shape_of(name))
        return (self.operand_values(name, values) if role == "primal" else values).astype(dtype)

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def reproduction(self, check: str, engine: str | None = None) -> str:
        """The command that runs one check of this case: "forward", "jvp" or "vjp"."""
        named = f" --engine {engine}" if engine else ""
        return f'PYTHONPATH=tests python -P -m checking.fuzz.calls --check {check}{named} --case "{self!r}"'


Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Split:
    """How a case lies on a mesh of 2 x 2 devices, "a" and "b".

    Attributes:
      operands: a spec for each.
      outputs: a spec for each result, and so for each cotangent; of none, cotangents lie where the partitioner likes.
      sends, gradient_sends: the collectives of the program, and of the one with its gradient; None where any will do.
      calls: how many custom calls the two have, where their collectives are known.
      explicit: whether axes of the mesh may be explicit, which allow no operands that ask for one axis.
    """

    case: Case
    operands: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...] = ()
    sends: set[str] | None = None
    gradient_sends: set[str] | None = None
    calls: tuple[int, int] = (1, 2)
    explicit: bool = True

    def __str__(self) -> str:
        specs = (",".join(str(tuple(spec)) for spec in group) for group in (self.operands, self.outputs))
        return f"{self.case}-{'->'.join(specs)}".replace(" ", "").replace("'", "")


@dataclass(frozen=True)
class Rows:
    """What a family puts in the table: a list for each purpose, since what is compiled many times is to be small.

    Attributes:
      every: all that can be asked of the op; first derivatives are taken of them, and every engine plans them.
      empty: calls without elements: the answer is the reference's, and nothing may be launched.
      not_finite: one element is not finite, and what does not depend on it must not notice.
      plain: a call as models make it.
      small: for second derivatives and jacobians: what an op's rules have to tell apart.
      deep: of those, the ones for third derivatives.
      tiny: of two operands.
      repeated: large enough to be computed in several pieces, whose order must not matter.
      mapped: with in_axes.
      narrow: the same of 16 bits, without derivatives: gradients of what is not mapped are JAX's sums in 16 bits.
      nested: with in_axes of an inner and of an outer vmap.
      looped: layers, whose results take the place of their first operands.
      donated: with the positions of the operands that are donated.
      unsized: cases of one call in several sizes, with the operands' shapes where those are not known.
      split: calls over several devices.
      manual: calls in a `shard_map`, with the operands' specs and those of all results, over the axis "rows".
    """

    every: list[Any]
    empty: list[Any]
    not_finite: list[Any]
    plain: list[Any]
    small: list[Any]
    deep: list[Any]
    tiny: list[Any]
    repeated: list[Any]
    mapped: list[tuple[Any, Axes]]
    narrow: list[tuple[Any, Axes]]
    nested: list[tuple[Any, Axes, Axes]]
    looped: list[Any]
    donated: list[tuple[Any, tuple[int, ...]]]
    unsized: list[tuple[list[Any], tuple[str, ...]]]
    split: list[Split]
    manual: list[tuple[Any, tuple[PartitionSpec, ...], PartitionSpec]]

    @property
    def differentiable(self) -> list[Any]:
        return [case for case in self.every if case.differentiable]


def joined(*families: Rows) -> Rows:
    """The rows of all families."""
    names = [f.name for f in fields(Rows)]
    return Rows(**{name: [row for family in families for row in getattr(family, name)] for name in names})


def subsets(case: Case) -> list[tuple[Case, Axes]]:
    """The case with all in_axes that map the first dimensions of some operands."""
    every = itertools.product((0, None), repeat=len(case.operands))
    return [(case, axes) for axes in every if any(axis is not None for axis in axes)]
