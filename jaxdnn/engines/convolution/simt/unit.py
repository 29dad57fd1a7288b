"""The unit and the launches of a convolution on any GPU."""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from jaxdnn.engines.convolution.matrices import product_of_group
from jaxdnn.engines.convolution.problem import Convolution, Tensor, Window
from jaxdnn.engines.convolution.simt.knobs import (
    ConvolutionSimtKnobs,
    blocks,
    convolution_atom,
    shared_bytes,
    sides,
    vector,
)
from jaxdnn.engines.product.affine import divisor_magic
from jaxdnn.engines.product.atom import TENSOR, threads
from jaxdnn.engines.product.element_epilogue import ElementEpilogue, ctype
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, shared_memory_text, struct_text
from jaxdnn.plan import Launch
from jaxdnn.pointwise.cuda import register_type

AXES = ("depth", "row", "column")


def windows(problem: Convolution) -> list[Window]:
    """Of depth, row and column: those of the array that A is gathered from."""
    own = [window.transposed if problem.result == "image" else window for window in problem.windows]
    return [*(len(AXES) - len(own)) * [Window(1, 1, 1)], *own]


def multiply(problem: Convolution, knobs: ConvolutionSimtKnobs, epilogue: ElementEpilogue) -> Stage:
    """The kernel that multiplies, and what follows each sum (or each split's sum)."""
    atom, product = convolution_atom(problem), product_of_group(problem)
    a, b = sides(problem)
    types = {
        **epilogue.types(),
        "A": ctype(a.tensor.dtype),
        "B": ctype(b.tensor.dtype),
        "Accumulator": ctype(register_type(problem.accumulator)),
        **dict(zip(("Depth", "Row", "Column"), map(_axis, windows(problem)), strict=True)),
    }
    constants = {
        "Filter": problem.result == "filter",
        "RunsA": a.runs,
        "RunsB": b.runs,
        "Half": atom is TENSOR,
        "Accumulators": 1,
        "TileM": knobs.tile_m,
        "TileN": knobs.tile_n,
        "ThreadM": knobs.thread_m,
        "ThreadN": knobs.thread_n,
        "Depth": knobs.depth,
        "VectorA": vector(atom, a),
        "VectorB": vector(atom, b),
    }
    # Of B: how far apart the channels that are summed are, and columns.
    channel, column = b.tensor.c_stride, b.tensor.k_stride
    if problem.result == "image":
        channel, column = column, channel
    found = [
        *_array("source", a.tensor),
        *_array("other", b.tensor),
        *numbers("long long", channel_stride=channel, column_stride=column),
        *_window(problem, problem.k if problem.result == "image" else problem.c),
        *epilogue.parameters(),
        *numbers(m=product.m, n=product.n, k=product.k, groups=problem.groups),
    ]
    if knobs.split_k > 1:
        depth = ceil(product.k / (knobs.split_k * knobs.depth)) * knobs.depth
        found += numbers(splits=knobs.split_k, split_depth=depth)
    call = "jaxdnn::ConvolutionSimt<Config>"
    needed, count = shared_bytes(problem, knobs), threads(atom, knobs)
    text = (
        f"\n{epilogue.text()}\n{struct_text('Config', types, constants)}\n"
        f"{shared_memory_text(call, needed)}\n"
        + entry_text("convolution_simt", call, f"{count}, {knobs.resident}", found)
    )
    grid = (blocks(problem, knobs), 1, 1)
    launch = Launch("convolution_simt", arguments(found), grid, (count, 1, 1), shared_memory=needed)
    return Stage(("convolution/simt.cuh",), text, (launch,))


def _axis(window: Window) -> str:
    steps = (window.filter, window.stride, window.dilation, window.base_dilation)
    return f"jaxdnn::WindowAxis<{', '.join(map(str, steps))}, {str(window.flipped).lower()}>"


def _window(problem: Convolution, channels: int) -> list[Parameter]:
    """The lengths of the arrays, where windows begin, and how indices are taken apart."""
    parameters = numbers(channels=channels)
    divisors = {"channel_divisor": channels}
    for name, window in zip(AXES, windows(problem), strict=True):
        lengths = {"source": window.image, "result": window.output, "low": window.low}
        parameters += _fields(f"{name}s", numbers("int", **lengths))
        divisors[f"{name}_divisor"] = window.output
    magic = {name: divisor_magic(divisor) for name, divisor in divisors.items()}
    parameters += [replace(p, field=f"{p.field}.magic") for p in numbers("long long", **magic)]
    return [replace(p, field=f"window.{p.field}") for p in parameters]


def _array(name: str, tensor: Tensor) -> list[Parameter]:
    """The address and strides of an array; a filter has no n."""
    depth, row, column = [*(len(AXES) - len(tensor.spatial_strides)) * [0], *tensor.spatial_strides]
    outer = {"batch": tensor.batch_stride, "n": tensor.n_stride, "group": tensor.group_stride}
    pointer = Parameter(f"const {ctype(tensor.dtype)}*", name, f"{name}.data", tensor.buffer)
    return [pointer, *_fields(name, numbers("long long", **outer, depth=depth, row=row, column=column))]


def _fields(name: str, found: Iterable[Parameter]) -> list[Parameter]:
    """Parameters of a member of the call."""
    return [replace(p, name=f"{name}_{p.name}", field=f"{name}.{p.field}") for p in found]
