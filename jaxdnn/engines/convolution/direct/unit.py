"""The unit and the launches of a direct convolution."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxdnn.engines.convolution.direct.knobs import (
    Axis,
    ConvolutionDirectKnobs,
    Tiling,
    axes,
    channels,
    itemsize,
    shared_memory,
    slides,
    source,
    still,
    tap_tile,
    threads,
    vector,
)
from jaxdnn.engines.convolution.problem import Convolution, Tensor
from jaxdnn.engines.convolution.reasons import AXES
from jaxdnn.engines.product.element_epilogue import ElementEpilogue, ctype
from jaxdnn.engines.product.length import is_long
from jaxdnn.engines.product.reduce import reduce_stage
from jaxdnn.engines.unit import (
    Parameter,
    Stage,
    arguments,
    entry_text,
    joined,
    numbers,
    shared_memory_text,
    struct_text,
)
from jaxdnn.plan import Launch, Scratch
from jaxdnn.pointwise.cuda import register_type


def fprop(problem: Convolution, knobs: ConvolutionDirectKnobs, epilogue: ElementEpilogue) -> Stage:
    """The kernel of outputs, and of gradients in the image."""
    slid, filter_ = source(problem), problem.a if problem.result == "image" else problem.b
    own, other = channels(problem)
    tiling = Tiling(problem, knobs)
    types = {
        **epilogue.types(),
        "Source": ctype(slid.dtype),
        "Filter": ctype(filter_.dtype),
        "Accumulator": ctype(register_type(problem.accumulator)),
        **_axis_types(axes(problem)),
    }
    constants = {
        "Groups": knobs.groups,
        "Own": own,
        "Other": other,
        "Width": knobs.width,
        "Strips": knobs.strips,
        "Stages": knobs.stages,
        "Vector": vector(slid, other * knobs.groups),
        "LongEpilogue": is_long(problem.program),
    }
    of_own, of_other = filter_.k_stride, filter_.c_stride
    if problem.result == "image":
        of_own, of_other = of_other, of_own
    found = [
        *_array("source", slid),
        *_array("filter", filter_),
        *numbers("long long", filter_group=filter_.group_stride, filter_own=of_own, filter_other=of_other),
        *epilogue.parameters(),
        *_lengths(axes(problem)),
        *numbers(groups=problem.groups, blocks=tiling.blocks_of_groups),
        *_tiles(tiling),
    ]
    return _stage("convolution_fprop", "ConvolutionFprop", epilogue.text(), (types, constants), found, problem, knobs)


def wgrad(problem: Convolution, knobs: ConvolutionDirectKnobs, number: int) -> Stage:
    """The sums of parts of all places in a scratch buffer, and their sum in the next one, by reduction `number`."""
    slid, unmoved = source(problem), still(problem)
    own, other = channels(problem)
    tiling, rows_and_columns = Tiling(problem, knobs), tap_tile(problem, knobs)
    register = ctype(register_type(problem.accumulator))
    types = {
        "Source": ctype(slid.dtype),
        "Still": ctype(unmoved.dtype),
        "Accumulator": register,
        **_axis_types(axes(problem)),
    }
    constants = {
        "Groups": knobs.groups,
        "Sources": other,
        "Stills": own,
        "Exchanged": slides(problem) == "output",
        **dict(zip(("TapRows", "TapColumns"), rows_and_columns, strict=True)),
        "Width": knobs.width,
        "Strips": knobs.strips,
        "Stages": knobs.stages,
        "VectorSource": vector(slid, other * knobs.groups),
        "VectorStill": vector(unmoved, own * knobs.groups),
    }
    found = [
        *_array("source", slid),
        *_array("still", unmoved),
        Parameter(f"{register}*", "sums", "sums", Scratch(0)),
        *_lengths(axes(problem)),
        *numbers(groups=problem.groups, blocks=tiling.blocks_of_groups),
        *_tiles(tiling),
    ]
    sums = _stage("convolution_wgrad", "ConvolutionWgrad", "", (types, constants), found, problem, knobs)
    size = problem.rows * problem.columns
    add = f"jaxdnn::ReductionOf<jaxdnn::Reduction::sum, {register}>"
    extents = (problem.batch, knobs.parts, size)
    added = reduce_stage(add, Scratch(0), (Scratch(1), register), extents, number)
    scratch = Stage(scratch=(problem.batch * knobs.parts * size * itemsize(problem.accumulator),))
    return joined([sums, scratch, added])


def _stage(
    kernel: str,
    struct: str,
    epilogue: str,
    config: tuple[dict[str, str], dict[str, bool | int | str]],
    found: Sequence[Parameter],
    problem: Convolution,
    knobs: ConvolutionDirectKnobs,
) -> Stage:
    call = f"jaxdnn::{struct}<Config>"
    needed, count = shared_memory(problem, knobs), threads(problem, knobs)
    text = f"\n{epilogue}\n{struct_text('Config', *config)}\n{shared_memory_text(call, needed)}\n" + entry_text(
        kernel, call, f"{count}, {knobs.resident}", found
    )
    launch = Launch(
        kernel, arguments(found), (Tiling(problem, knobs).blocks, 1, 1), (count, 1, 1), shared_memory=needed
    )
    return Stage((f"convolution/direct/{kernel.removeprefix('convolution_')}.cuh",), text, (launch,))


def _axis_types(found: Sequence[Axis]) -> dict[str, str]:
    """How windows move, which is part of the code."""

    def one(axis: Axis) -> str:
        window = axis.window
        steps = (window.filter, window.stride, window.dilation, window.base_dilation)
        return f"jaxdnn::WindowAxis<{', '.join(map(str, steps))}, {str(window.flipped).lower()}>"

    return dict(zip(("Depth", "Row", "Column"), map(one, found), strict=True))


def _lengths(found: Sequence[Axis]) -> list[Parameter]:
    """Of the arrays that windows slide over, and where they begin."""
    parameters = []
    for name, axis in zip(("depths", "rows", "columns"), found, strict=True):
        window = axis.window
        lengths = {"source": window.image, "result": window.output, "low": window.low}
        parameters += _fields(name, numbers("int", **lengths))
    return parameters


def _tiles(tiling: Tiling) -> list[Parameter]:
    sizes = {
        "columns": tiling.columns,
        "rows": tiling.rows,
        "depths": axes(tiling.problem)[0].places,
        "height": tiling.knobs.height,
    }
    return [
        *_fields("tiles", numbers("int", **sizes)),
        *numbers(parts=tiling.knobs.parts, count=tiling.count, part_tiles=tiling.part_tiles),
    ]


def _array(name: str, tensor: Tensor) -> list[Parameter]:
    """The address and strides of an array; a filter has no n."""
    depth, row, column = [*(AXES - len(tensor.spatial_strides)) * [0], *tensor.spatial_strides]
    pointer = Parameter(f"const {ctype(tensor.dtype)}*", name, f"{name}.data", tensor.buffer)
    outer = numbers("long long", batch=tensor.batch_stride, n=tensor.n_stride, depth=depth, row=row)
    return [pointer, *_fields(name, [*outer, *numbers(column=column)])]


def _fields(name: str, found: Iterable[Parameter]) -> list[Parameter]:
    """Parameters of a member of the call."""
    return [replace(p, name=f"{name}_{p.name}", field=f"{name}.{p.name}") for p in found]
