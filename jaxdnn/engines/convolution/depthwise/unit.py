"""The unit and the launch of a depthwise convolution on the tensor cores."""

from dataclasses import replace
from math import ceil

from jaxdnn.engines.convolution.depthwise.knobs import DepthwiseKnobs, Strips
from jaxdnn.engines.product.element_epilogue import ElementEpilogue, ctype
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch

_KERNEL = "depthwise_fprop"


def fprop(form: Strips, knobs: DepthwiseKnobs, epilogue: ElementEpilogue) -> Stage:
    """The kernel of outputs, and of gradients in the image."""
    y, x = form.windows
    constants = {
        "TapsX": x.filter,
        "TapsY": y.filter,
        "StrideX": x.stride,
        "StrideY": y.stride,
        "DilationX": x.dilation,
        "Across": knobs.across,
        "Images": knobs.images,
        "Warps": knobs.warps,
        "Stages": knobs.stages,
    }
    call, shared = "jaxdnn::DepthwiseFprop<Config>", form.shared_memory(knobs)
    found = _parameters(form, knobs) + epilogue.parameters()
    text = (
        f"\n{epilogue.text()}\n"
        + struct_text("Config", {**epilogue.types(), "T": ctype(form.source.dtype)}, constants)
        + f"static_assert({call}::kSharedBytes == {shared}, "
        + '"the plan and the kernel disagree about shared memory");\n\n'
        + entry_text(_KERNEL, call, f"{knobs.threads}, {knobs.resident}", found)
    )
    grid = (form.slabs * knobs.parts, 1, 1)
    launch = Launch(_KERNEL, arguments(found), grid, (knobs.threads, 1, 1), shared_memory=shared)
    return Stage(("convolution/depthwise/fprop.cuh",), text, (launch,))


def _parameters(form: Strips, knobs: DepthwiseKnobs) -> list[Parameter]:
    y, x = form.windows
    source, row, column, count = form.source, *_strides(form.source.spatial_strides), form.count(knobs)
    found = [
        Parameter(f"const {ctype(source.dtype)}*", "source", "source.data", source.buffer),
        *_fields("source", numbers("long long", image=source.n_stride)),
        *_fields("source", numbers(row=row, column=column, step=y.stride * form.classes * row)),
        *_filter(form),
    ]
    for name, window in (("x", x), ("y", y)):
        found += _fields(name, numbers(source=window.image, result=window.output, low=window.low))
    found += numbers(images=form.problem.n, channels=form.problem.groups, slabs=form.slabs)
    found += numbers(rows=form.rows, classes=form.classes, ranges=form.ranges(knobs))
    found += numbers(count=count, part_rows=ceil(count / knobs.parts))
    return found + numbers(result_step=form.classes * x.output * form.result.row_stride)


def _filter(form: Strips) -> list[Parameter]:
    """The filter from the first tap on: of a flipped dimension, its last place, from which it runs backwards."""
    tensor, offset, steps = form.filter, 0, list[int]()
    for stride, window in zip(_strides(tensor.spatial_strides), form.windows, strict=True):
        offset += (window.filter - 1) * stride * 2 if window.flipped else 0
        steps.append(-stride if window.flipped else stride)
    buffer = replace(tensor.buffer, offset=tensor.buffer.offset + offset)
    row, column = steps
    return [
        Parameter(f"const {ctype(tensor.dtype)}*", "filter", "filter", buffer),
        *numbers(filter_row=row, filter_column=column, filter_channel=tensor.group_stride),
    ]


def _strides(spatial: tuple[int, ...]) -> tuple[int, int]:
    """Of rows and places; one dimension has no rows."""
    row, column = (0, *spatial)[-2:]
    return row, column


def _fields(name: str, found: list[Parameter]) -> list[Parameter]:
    """Parameters of a member of the call."""
    return [replace(p, name=f"{name}_{p.name}", field=f"{name}.{p.name}") for p in found]
