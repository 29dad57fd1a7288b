"""What each JAX primitive means for one element: where its arguments' elements lie, and what is computed from them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.core import Tracer

from jaxdnn.pointwise.builder import Builder
from jaxdnn.pointwise.graph import CALLS, IDENTITIES, Node
from jaxdnn.pointwise.operations import DTYPES, TABLE, kind
from jaxdnn.pointwise.program import Index, Instruction, Load

# For each dimension of an array the output's dimension that it runs along; None where its size is one.
Dimensions = tuple[int | None, ...]

REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


def identity(shape: Sequence[int]) -> Dimensions:
    """The dimensions of an array that has the output's shape."""
    return tuple(None if size == 1 else d for d, size in enumerate(shape))


# ---- Primitives that only say where elements lie: their argument's dimensions, from their own -----------------------


def _broadcast_in_dim(node: Node, dimensions: Dimensions) -> Dimensions:
    source, places = node.inputs[0], node.params["broadcast_dimensions"]
    return tuple(None if size == 1 else dimensions[d] for size, d in zip(source.shape, places, strict=True))


def _reshape(node: Node, dimensions: Dimensions) -> Dimensions:
    source = node.inputs[0]
    if [size for size in node.shape if size != 1] != [size for size in source.shape if size != 1]:
        raise node.unsupported(
            f"it reshapes {source.shape} to {node.shape}; only dimensions of size one may come and go"
        )
    long = iter(dimension for dimension, size in zip(dimensions, node.shape, strict=True) if size != 1)
    return tuple(None if size == 1 else next(long) for size in source.shape)


def _transpose(node: Node, dimensions: Dimensions) -> Dimensions:
    return tuple(dimensions[place] for place in np.argsort(node.params["permutation"]))


LAYOUT: dict[str, Callable[[Node, Dimensions], Dimensions]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
}


def demands(node: Node, dimensions: Dimensions) -> list[Dimensions]:
    """The elements of its arguments that `node`, itself demanded along `dimensions`, is computed from."""
    _check(node)
    if rule := LAYOUT.get(node.primitive):
        return [rule(node, dimensions)]
    # Arguments have the result's shape, but for dimensions of size one; or they are scalars.
    return [
        tuple(None if size == 1 else dimension for size, dimension in zip(source.shape, dimensions, strict=False))
        for source in node.inputs
    ]


# ---- Primitives that are not simply a row of the table --------------------------------------------------------------


def _clamp(build: Builder, _: Node, low: int, x: int, high: int) -> int:
    return build.operation("min", build.operation("max", x, low), high)


def _integer_pow(build: Builder, node: Node, x: int) -> int:
    return build.power(x, node.params["y"])


def _pow(build: Builder, _: Node, x: int, y: int) -> int:
    return build.operation("pow", x, build.convert(y, build.dtype(x)))


def _round(build: Builder, node: Node, x: int) -> int:
    to_even = node.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return build.operation("round_half_even" if to_even else "round_half_away", x)


def _select_n(build: Builder, _: Node, which: int, *cases: int) -> int:
    if build.dtype(which) == "bool":
        return build.operation("select", which, cases[-1], cases[0])
    result = cases[-1]
    for number, case in reversed(list(enumerate(cases[:-1]))):
        chosen = build.operation("eq", which, build.literal(number, build.dtype(which)))
        result = build.operation("select", chosen, case, result)
    return result


def _square(build: Builder, _: Node, x: int) -> int:
    return build.operation("mul", x, x)


def _one_minus_square(build: Builder, _: Node, x: int) -> int:
    # JAX 0.11's factor of tanh's derivative; as a product it keeps its digits where x is close to 1.
    one = build.literal(1, build.dtype(x))
    return build.operation("mul", build.operation("sub", one, x), build.operation("add", one, x))


def _convert(build: Builder, node: Node, x: int) -> int:
    return build.convert(x, node.dtype)


REWRITTEN: dict[str, Callable[..., int]] = {
    "add_any": lambda build, _, x, y: build.operation("add", x, y),
    "clamp": _clamp,
    "convert_element_type": _convert,
    "integer_pow": _integer_pow,
    "one_minus_square": _one_minus_square,
    "pow": _pow,
    "round": _round,
    "select_n": _select_n,
    "square": _square,
}

SUPPORTED = sorted(
    {*TABLE, *REWRITTEN, *LAYOUT, *REDUCTIONS, *CALLS, *IDENTITIES, "iota"}
    - {"select", "convert", "round_half_even", "round_half_away"}
)


def lower(build: Builder, node: Node, dimensions: Dimensions, values: Sequence[int], rank: int) -> int:
    """The instructions for the element of `node` along `dimensions` of `rank`, from those of its arguments."""
    match node.primitive:
        case "accumulator":
            return build.add(Instruction("accumulator", node.dtype, immediate=node.params["number"]))
        case "operand":
            along = tuple(dimensions.index(d) if d in dimensions else None for d in range(rank))
            return build.add(Instruction("operand", node.dtype, immediate=Load(node.params["number"], along)))
        case "constant":
            return build.literal(_constant(node.params["value"]), node.dtype)
        case "iota":
            along = dimensions[node.params["dimension"]]
            if along is None:
                return build.literal(0, node.dtype)
            return build.add(Instruction("index", node.dtype, immediate=Index(along)))
    if node.primitive in LAYOUT:
        return values[0]
    if rule := REWRITTEN.get(node.primitive):
        return rule(build, node, *values)
    return build.operation(node.primitive, *values)


def _check(node: Node) -> None:
    """Raises if a program can't compute `node`."""
    name = node.primitive
    if name in REDUCTIONS:
        raise node.unsupported(
            "a reduction can only be the last step of what is returned, over the whole output's shape"
        )
    if name not in ("accumulator", "operand", "constant", "iota") and not (name in LAYOUT or name in REWRITTEN):
        if name not in TABLE:
            raise node.unsupported(f"it can't be part of a kernel. These can: {', '.join(SUPPORTED)}")
        if kind(node.inputs[0].dtype) not in TABLE[name].kinds:
            raise node.unsupported(f"it is not supported for {node.inputs[0].dtype}")
    if node.dtype not in DTYPES:
        raise node.unsupported(f"its dtype is {node.dtype}; a kernel's values can be {', '.join(DTYPES)}")


def _constant(value: Any) -> Any:
    if isinstance(value, Tracer):
        raise TypeError(
            f"the function closes over a traced array, {value.aval.str_short()}; "
            "pass it as an operand, as in `matmul(x, w, b, epilogue=lambda acc, b: acc + b)`"
        )
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(
            f"the function holds an array, {array.dtype.name}{list(array.shape)}; only scalars become part of a "
            "kernel: pass it as an operand, as in `matmul(x, w, b, epilogue=lambda acc, b: acc + b)`"
        )
    return array.reshape(())
