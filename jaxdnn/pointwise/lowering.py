"""What each JAX primitive means for one element: where its arguments' elements lie, and what is computed from them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax.core import Tracer

from jaxdnn.pointwise.builder import Builder
from jaxdnn.pointwise.graph import CALLS, DRAWN, IDENTITIES, RANDOM, Node, ancestors
from jaxdnn.pointwise.operations import DTYPES, TABLE, kind
from jaxdnn.pointwise.program import Index, Instruction, Load


@dataclass(frozen=True)
class At:
    """One place along a dimension, the same for all elements of the output."""

    place: int


@dataclass(frozen=True)
class By:
    """The place along a dimension that an array of integers says, itself demanded along `dimensions`."""

    node: Node
    dimensions: "Dimensions"


# For each dimension of an array the output's dimension that it runs along, or which place of it is meant; None where
# its size is one.
Dimensions = tuple[int | At | By | None, ...]

REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


def identity(shape: Sequence[int]) -> tuple[int | None, ...]:
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


# ---- Primitives that say which one of an argument's elements it is ---------------------------------------------------

Demand = tuple[Node, Dimensions]


def _gather(node: Node, dimensions: Dimensions) -> Iterator[Demand]:
    """The table's element, then the indices that say which one."""
    (table, indices), numbers, sizes = node.inputs, node.params["dimension_numbers"], node.params["slice_sizes"]
    if "ONE_HOT" in str(node.params["mode"]):
        raise node.unsupported(f"its mode is {node.params['mode']}; a kernel has clip, fill and promise_in_bounds")
    batch = [d for place, d in enumerate(dimensions) if place not in numbers.offset_dims]
    # The places of indices, of which the last dimension says which one of the table's dimensions they are along.
    components = [At(k) if len(numbers.start_index_map) > 1 else None for k in range(len(numbers.start_index_map))]
    along: list[Dimensions] = [
        tuple(None if size == 1 else d for size, d in zip(indices.shape, (*batch, component), strict=True))
        for component in components
    ]
    inner = iter(dimensions[place] for place in numbers.offset_dims)
    found: list[int | At | By | None] = []
    for d, (size, taken) in enumerate(zip(table.shape, sizes, strict=True)):
        if d in numbers.operand_batching_dims:
            place = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(d)]
            found.append(None if size == 1 else batch[place])
            continue
        outer = None if d in numbers.collapsed_slice_dims else next(inner)
        if taken == size:  # all, wherever an index may say that they begin
            found.append(None if size == 1 else outer)
        elif taken == 1:
            found.append(By(indices, along[numbers.start_index_map.index(d)]))
        else:
            raise node.unsupported(f"it takes {taken} of {size} elements along dimension {d} of the table; {_SLICES}")
    return iter([(table, tuple(found)), *((indices, one) for one in along)])


_SLICES = "a kernel takes one, which an index says, or all"


def _dynamic_slice(node: Node, dimensions: Dimensions) -> Iterator[Demand]:
    table, *starts = node.inputs
    found: list[int | At | By | None] = []
    for d, (size, taken) in enumerate(zip(table.shape, node.params["slice_sizes"], strict=True)):
        if taken not in (1, size):
            raise node.unsupported(f"it takes {taken} of {size} elements along dimension {d}; {_SLICES}")
        found.append(None if size == 1 else By(starts[d], ()) if taken == 1 else dimensions[d])
    return iter([(table, tuple(found)), *((start, ()) for start in starts)])


def _concatenate(node: Node, dimensions: Dimensions) -> Iterator[Demand]:
    """The array that the place is in. Only indices of several dimensions are joined so."""
    place = dimensions[joined := node.params["dimension"]]
    if not isinstance(place, At):
        raise node.unsupported("it joins arrays; a kernel has what each element is computed from alone")
    before = 0
    for source in node.inputs:
        if place.place < before + source.shape[joined]:
            own = None if source.shape[joined] == 1 else At(place.place - before)
            yield source, tuple(own if d == joined else one for d, one in enumerate(dimensions))
            return
        before += source.shape[joined]


TAKES: dict[str, Callable[[Node, Dimensions], Iterator[Demand]]] = {
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
}


def demands(node: Node, dimensions: Dimensions) -> list[Demand]:
    """The elements of its arguments that `node`, itself demanded along `dimensions`, is computed from."""
    _check(node)
    if rule := LAYOUT.get(node.primitive):
        return [(node.inputs[0], rule(node, dimensions))]
    if rule := TAKES.get(node.primitive):
        return list(rule(node, dimensions))
    # Arguments have the result's shape, but for dimensions of size one; or they are scalars.
    return [
        (source, tuple(None if size == 1 else along for size, along in zip(source.shape, dimensions, strict=False)))
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
    {*TABLE, *REWRITTEN, *LAYOUT, *TAKES, *REDUCTIONS, *CALLS, *IDENTITIES, "iota"}
    - {"select", "convert", "round_half_even", "round_half_away"}
)


def lower(build: Builder, node: Node, dimensions: Dimensions, values: Sequence[int], rank: int) -> int:
    """The instructions for the element of `node` along `dimensions` of `rank`, from those of its arguments.

    The arguments of an operand are the indices that it is demanded by.
    """
    match node.primitive:
        case "accumulator":
            return build.add(Instruction("accumulator", node.dtype, immediate=node.params["number"]))
        case "operand":
            if any(isinstance(d, At) for d in dimensions):
                raise node.unsupported("indices of several dimensions are one operand; pass an operand for each")
            along = tuple(dimensions.index(d) if d in dimensions else None for d in range(rank))
            gathered = tuple(place for place, d in enumerate(dimensions) if isinstance(d, By))
            return build.add(
                Instruction("operand", node.dtype, tuple(values), Load(node.params["number"], along, gathered))
            )
        case "constant":
            return build.literal(_constant(node.params["value"]), node.dtype)
        case "iota":
            along = dimensions[node.params["dimension"]]
            if along is None:
                return build.literal(0, node.dtype)
            if isinstance(along, At):
                return build.literal(along.place, node.dtype)
            if isinstance(along, By):
                raise node.unsupported("it is indexed as a table; a kernel's tables are operands")
            return build.add(Instruction("index", node.dtype, immediate=Index(along)))
        case "gather":
            return _filled(build, node, *values)
    if node.primitive in LAYOUT or node.primitive in TAKES:
        return values[0]
    if rule := REWRITTEN.get(node.primitive):
        return rule(build, node, *values)
    return build.operation(node.primitive, *values)


def _filled(build: Builder, node: Node, value: int, *indices: int) -> int:
    """What was gathered, or where an index is out of bounds what the mode says; there the kernel reads the nearest."""
    if "FILL" not in str(node.params["mode"]):
        return value
    fill, numbers = node.params["fill_value"], node.params["dimension_numbers"]
    if fill is None:
        dtype = node.dtype
        fill = np.nan if kind(dtype) == "f" else False if dtype == "bool" else _bounds(dtype)[kind(dtype) == "u"]
    for index, d in zip(indices, numbers.start_index_map, strict=True):
        dtype = build.dtype(index)
        inside = []
        if kind(dtype) == "i":
            inside.append(build.operation("ge", index, build.literal(0, dtype)))
        if (last := node.inputs[0].shape[d] - node.params["slice_sizes"][d]) < _bounds(dtype)[1]:
            inside.append(build.operation("le", index, build.literal(last, dtype)))
        for one in inside:
            value = build.operation("select", one, value, build.literal(fill, node.dtype))
    return value


def _bounds(dtype: str) -> tuple[int, int]:
    about = np.iinfo(dtype)
    return int(about.min), int(about.max)


def _check(node: Node) -> None:
    """Raises if a program can't compute `node`."""
    name = node.primitive
    if name in REDUCTIONS:
        raise node.unsupported(
            "a reduction can only be the last step of what is returned, over the whole output's shape"
        )
    leaf = name in ("accumulator", "operand", "constant", "iota")
    if not leaf and not (name in LAYOUT or name in TAKES or name in REWRITTEN):
        if name not in TABLE:
            if drawn := next((one for one in (node, *ancestors(node)) if one.primitive in RANDOM), None):
                raise drawn.unsupported(DRAWN)
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
