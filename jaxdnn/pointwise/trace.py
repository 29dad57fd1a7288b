"""A JAX function to a `Program`: `trace`.

1. The function is traced on the whole output's shape, and its jaxpr becomes a graph of arrays (graph.py).
2. Demand flows back from what is returned: which element of each array does one element of the output need? So a
   broadcast or a transpose is never computed: it only changes which element of an operand is loaded.
3. Every array, in every place where it is demanded, becomes an instruction (lowering.py, builder.py).
"""

import inspect
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxdnn.pointwise.builder import Builder
from jaxdnn.pointwise.graph import DRAWN, UNKNOWN, Graph, Node, UnsupportedOperation, ancestors
from jaxdnn.pointwise.lowering import LAYOUT, REDUCTIONS, By, Demand, Dimensions, demands, identity, lower
from jaxdnn.pointwise.meaning import Meaning
from jaxdnn.pointwise.operations import DTYPES, NARROW_FLOATS, kind
from jaxdnn.pointwise.program import Argument, Output, Program

# Sums of these leave their range long before that of a kernel's registers.
_SHORT_RANGE = ("int8", "int16", "uint8", "uint16", "float16", "float8_e4m3fn", "float8_e5m2")

_COLLECTIVE = (
    "a kernel has no axis of devices or of vmap by name, and no collectives, as jax.lax.psum, axis_index and pcast; "
    "apply them to what the kernel returns"
)


@dataclass(frozen=True)
class Captured:
    """A function as it was when it was called, once, with tracers; of what it returns, the leaves.

    Attributes:
      jaxpr: what it computes.
      meaning: by which one is told from others.
      accumulators: how many of its arguments the kernel computes; the others are operands.
      names: of its arguments.
      tree: how the leaves are arranged in what it returns.
      title: the function in a few words, for people.
      where: the place in the user's source that made the call.
    """

    jaxpr: ClosedJaxpr = field(compare=False)
    meaning: Meaning
    accumulators: int
    names: tuple[str, ...]
    tree: Any
    title: str
    where: str = UNKNOWN

    def program(self, shape: Sequence[int]) -> Program:
        """The captured function as a program over the output's shape. What that was before, it is again."""
        # What is equal to itself alone would fill the memory, and never be found again.
        program = _program(self, tuple(shape)) if self.meaning.held else _known_program(self, tuple(shape))
        if isinstance(program, UnsupportedOperation):
            raise UnsupportedOperation(program.primitive, program.where, program.reason)
        return program


def _program(captured: Captured, shape: tuple[int, ...]) -> Program | UnsupportedOperation:
    try:
        return _traced(captured, shape)
    except UnsupportedOperation as error:
        return error.with_traceback(None)


_known_program = lru_cache(maxsize=1024)(_program)


def _traced(captured: Captured, shape: tuple[int, ...]) -> Program:
    count, types, title = captured.accumulators, captured.jaxpr.in_avals, captured.title
    for name, type_ in zip(captured.names, types, strict=True):
        if jnp.issubdtype(type_.dtype, jax.dtypes.prng_key):
            raise UnsupportedOperation(name, title, DRAWN)
        if type_.dtype.name not in DTYPES:
            reason = f"it is {type_.dtype.name}; kernels take {', '.join(DTYPES)}"
            raise UnsupportedOperation(name, title, reason)
    graph = Graph()
    inputs = [
        graph.add("accumulator", type_.shape, type_.dtype.name, params={"number": i})
        if i < count
        else graph.add("operand", type_.shape, type_.dtype.name, params={"number": i - count})
        for i, type_ in enumerate(types)
    ]
    returned = graph.inline(captured.jaxpr.jaxpr, captured.jaxpr.consts, inputs, captured.where)
    roots = [_root(node, shape, title) for node in returned]
    try:
        instructions, outputs = _lower(graph, roots, shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{title}: {error}") from None
    arguments = tuple(Argument(name, type_.dtype.name) for name, type_ in zip(captured.names, types, strict=True))
    return Program(arguments[:count], arguments[count:], instructions, outputs, len(shape), captured.tree, title)


def capture(
    function: Callable[..., Any],
    shape: Sequence[int],
    accumulators: Sequence[jax.typing.DTypeLike],
    operands: Sequence[jax.Array | jax.ShapeDtypeStruct] = (),
) -> Captured:
    """Calls `function(*accumulators, *operands)` with tracers.

    Args:
      function: returns an array, or a pytree of arrays.
      shape: of each accumulator.
      accumulators: the dtypes of the arrays that the kernel computes.
      operands: the other arrays, or anything with a shape and a dtype.

    Raises:
      TypeError, ValueError: the function raised one, returns no array, or has side effects.
    """
    title = _title(function)
    avals = [jax.ShapeDtypeStruct(tuple(shape), dtype) for dtype in accumulators]
    avals += [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    names = _names(function, len(avals))

    @wraps(function, assigned=(), updated=())  # JAX's messages then name the user's
    def called(*arrays: Any) -> Any:  # a new one each time: of one that it knows, JAX returns what it once traced
        return function(*arrays)

    try:
        # What is computed of one element has no mesh; with one, JAX puts changes of sharding into derivatives.
        with use_abstract_mesh(AbstractMesh((), ())):
            jaxpr, returned = jax.make_jaxpr(called, return_shape=True)(*avals)
    except AssertionError as error:
        # JAX's own, of a function in `shard_map` that says what varies over devices, of which there are none here.
        if not any(type(what).__name__ == "ManualAxisType" for what in error.args):
            raise
        raise ValueError(f"{title}: {_COLLECTIVE}") from error
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{n}: {a.dtype.name}{list(a.shape)}" for n, a in zip(names, avals, strict=True))
        raise (TypeError if isinstance(error, TypeError) else ValueError)(
            f"{title}: tracing it on {given} failed: {error}"
        ) from error
    leaves, tree = jax.tree.flatten(returned)
    if not leaves:
        raise TypeError(f"{title}: expected it to return one array or more; it returns {returned!r}")
    if any(type(effect).__name__ == "NamedAxisEffect" for effect in jaxpr.effects):
        raise ValueError(f"{title}: {_COLLECTIVE}")
    if jaxpr.effects:
        effects = ", ".join(sorted(str(effect) for effect in jaxpr.effects))
        raise ValueError(f"{title}: it has side effects ({effects}), which a kernel can't have; take them out of it")
    # Equations know their places in the function, which may be all JAX's, as that of `jax.nn.softmax` is.
    where = source_info_util.summarize(source_info_util.current()) or UNKNOWN
    return Captured(jaxpr, Meaning(jaxpr), len(accumulators), tuple(names), tree, title, where)


def trace(
    function: Callable[..., Any],
    shape: Sequence[int],
    accumulators: Sequence[jax.typing.DTypeLike],
    operands: Sequence[jax.Array | jax.ShapeDtypeStruct] = (),
) -> Program:
    """Traces `function(*accumulators, *operands)` to a program.

    The function may be any composition of JAX's elementwise operations and broadcasts. It returns an array, or a pytree
    of arrays. Each has the output's shape, or is a sum, maximum or minimum of such an array over some of its axes.
    Arguments are those of `capture`.

    Raises:
      UnsupportedOperation: an operation, a dtype, or the way in which it is used, has no pointwise meaning.
      TypeError, ValueError: the function closes over an array, has side effects, or returns something else.
    """
    return capture(function, shape, accumulators, operands).program(shape)


# An output whose value is still missing, the node that it is the value of, and the output's dimensions that this one's
# run along.
_Root = tuple[Node, Output, Dimensions]


def _lower(graph: Graph, roots: Sequence[_Root], shape: tuple[int, ...]) -> Any:
    """The instructions that compute the roots, and the outputs with their values."""
    whole = identity(shape)
    demanded: dict[Node, dict[Dimensions, None]] = {}
    for node, _, place in roots:
        demanded.setdefault(node, {})[place] = None
    for node in reversed(graph.nodes):
        for dimensions in demanded.get(node, ()):
            for source, place in demands(node, dimensions):
                if source.primitive == "accumulator" and place != whole:
                    raise node.unsupported("it needs elements of the accumulator from other places of the output")
                demanded.setdefault(source, {})[place] = None

    build = Builder()
    values: dict[Demand, int] = {}

    def value(node: Node, dimensions: Dimensions) -> int:
        if (node, dimensions) not in values:
            # A table's element is loaded after the indices that say which one, later in the graph as they may be.
            indices = [(one.node, one.dimensions) for one in dimensions if isinstance(one, By)]
            sources = indices if node.primitive == "operand" else demands(node, dimensions)
            arguments = [value(*source) for source in sources]
            values[node, dimensions] = lower(build, node, dimensions, arguments, len(shape))
        return values[node, dimensions]

    for node in graph.nodes:
        for dimensions in demanded.get(node, ()):
            value(node, dimensions)
    outputs = [
        Output(values[node, place], output.dtype, output.dimensions, output.reduction, output.axes)
        for node, output, place in roots
    ]
    return build.finish(tuple(outputs))


def _root(node: Node, shape: tuple[int, ...], title: str) -> _Root:
    """What one leaf of the function's result is made of."""
    dtype = node.dtype
    if reduction := _reduction(node):
        source = reduction.inputs[0]
        order = _order(source, shape)
        if order is not None:
            reduced = tuple(reduction.params["axes"])
            kept = tuple(order[d] for d in range(len(shape)) if d not in reduced)
            dimensions = _carried(node, reduction, tuple(None if shape[d] == 1 else d for d in kept))
            axes = tuple(sorted(order[d] for d in reduced))
            output = Output(0, dtype, dimensions, REDUCTIONS[reduction.primitive], axes)  # type: ignore[arg-type]
            whole = identity(shape)
            return source, output, tuple(whole[d] for d in order)
    if node.shape != shape:
        if reduced := _reduces(node):
            raise node.unsupported(f"it follows `{reduced}`; a reduction can only be the last step of what is returned")
        raise ValueError(
            f"{title}: it returns {dtype}{list(node.shape)}; expected the output's shape {list(shape)}, or as the last "
            "step a sum, maximum or minimum of an array of that shape"
        )
    if node.primitive == "convert_element_type" and dtype in NARROW_FLOATS:
        # Storing rounds anyway; rounding the wider value there saves an instruction.
        source = node.inputs[0]
        if source.dtype in ("float32", "float64"):
            node = source
    return node, Output(0, dtype, identity(shape)), identity(shape)


def _order(source: Node, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """For each dimension of what is reduced, the output's: in another order if it is computed of transposes.

    Of operands any order will do, and accumulators are there in one alone.
    """
    turned = {
        one.inputs[0].primitive: tuple(one.params["permutation"])
        for one in (source, *ancestors(source))
        if one.primitive == "transpose" and (one.inputs[0].shape, one.shape) == (shape, source.shape)
    }
    if "accumulator" in turned:
        return turned["accumulator"]
    if source.shape == shape:
        return tuple(range(len(shape)))
    if sorted(source.shape) != sorted(shape):
        return None
    by_size = np.argsort(shape)[np.argsort(np.argsort(source.shape))]
    return next(iter(turned.values()), tuple(int(d) for d in by_size))


def _reduction(node: Node) -> Node | None:
    """The reduction that `node` is, but for dimensions of size one, and one cast that can do without its rounding."""
    casts = 0
    while _is_layout(node) or node.primitive == "convert_element_type":
        casts += node.primitive == "convert_element_type"
        node, outer = node.inputs[0], node
        if kind(node.dtype) != kind(outer.dtype) or casts > 1:
            return None
    # Cast from a register, a sum would not have wrapped, or become infinite, where it does in its dtype.
    if casts and node.primitive == "reduce_sum" and node.dtype in _SHORT_RANGE:
        return None
    return node if node.primitive in REDUCTIONS else None


def _is_layout(node: Node) -> bool:
    """Whether it changes dimensions alone; as does a reduction of a reduction, over dimensions that have size one."""
    if node.primitive in REDUCTIONS:
        source = node.inputs[0]
        return all(source.shape[axis] == 1 for axis in node.params["axes"]) and _reduces(node) is not None
    return node.primitive in LAYOUT


def _reduces(node: Node) -> str | None:
    """The name of a reduction among what `node` is computed from."""
    return next((one.primitive for one in ancestors(node) if one.primitive in REDUCTIONS), None)


def _carried(node: Node, reduction: Node, dimensions: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The dimensions of `node`, a rearrangement of `reduction`, which itself has `dimensions`."""
    if node is reduction:
        return dimensions
    source = node.inputs[0]
    dimensions = _carried(source, reduction, dimensions)
    if node.primitive == "convert_element_type":
        return dimensions
    # Where the argument's dimensions come from, with this node's own numbered in order, turned around.
    places = LAYOUT["squeeze" if node.primitive in REDUCTIONS else node.primitive](node, identity(node.shape))
    here = {place: dimension for place, dimension in zip(places, dimensions, strict=True) if place is not None}
    if any(size != 1 and d not in here for d, size in enumerate(node.shape)):
        raise node.unsupported("a reduction can only be the last step of what is returned")
    return tuple(here.get(d) for d in range(len(node.shape)))


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the function's first positional parameters."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "operand")
    return names[:count] + [f"{rest}{i}" for i in range(count - len(names))]


def _title(function: Callable[..., Any]) -> str:
    """The function's name, or the text of a lambda."""
    function = inspect.unwrap(function)
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if name != "<lambda>" or code is None:
        return name
    spans = [span for span in code.co_positions() if None not in span and span[0::2] != span[1::2]]
    parameters = ", ".join(code.co_varnames[: code.co_argcount])
    begin = min(((line, column) for line, _, column, _ in spans), default=(0, 0))
    end = max(((line, column) for _, line, _, column in spans), default=(0, 0))
    lines = [linecache.getline(code.co_filename, line).encode() for line in range(begin[0], end[0] + 1)]
    lines[-1] = lines[-1][: end[1]]
    lines[0] = lines[0][begin[1] :]
    body = " ".join(b" ".join(lines).decode(errors="replace").split())
    return f"lambda {parameters}: {body or '...'}"
