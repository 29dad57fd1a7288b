"""The unit and the launches of a depthwise convolution of whole lines."""

from dataclasses import replace
from math import ceil

from jaxdnn.engines.convolution.lines.knobs import Lines, LinesKnobs
from jaxdnn.engines.convolution.problem import Tensor
from jaxdnn.engines.convolution.sliding import in_fields, sliding_stage
from jaxdnn.engines.product.element_epilogue import ElementEpilogue, ctype
from jaxdnn.engines.unit import Parameter, Stage, numbers
from jaxdnn.plan import Scratch

_ITEM = 2  # bytes of an element


def fprop(form: Lines, knobs: LinesKnobs, epilogue: ElementEpilogue) -> Stage:
    """The kernel of outputs, and of gradients in the image."""
    filter_ = form.other
    buffer, row, column = form.first_tap
    found = [
        *_walk(form, knobs),
        Parameter(f"const {ctype(filter_.dtype)}*", "filter", "filter", buffer),
        *numbers(filter_row=row, filter_column=column, filter_channel=filter_.group_stride),
        *epilogue.parameters(),
    ]
    return _stage("lines_fprop", epilogue, form, knobs, found)


def wgrad(form: Lines, knobs: LinesKnobs) -> Stage:
    """The sums of parts of all places, in the first scratch buffer."""
    y, x = form.windows
    first, row, column = form.filter_steps
    found = [
        *_walk(form, knobs),
        *_array("output", form.other, 0, y.output, x.output, 0),
        *numbers(filter_first=first, filter_row=row, filter_column=column),
        Parameter("float*", "accumulators", "accumulators", Scratch(0)),
    ]
    return _stage("lines_wgrad", None, form, knobs, found)


def _stage(
    kernel: str, epilogue: ElementEpilogue | None, form: Lines, knobs: LinesKnobs, found: list[Parameter]
) -> Stage:
    x = form.windows[1]
    constants = {
        "Channels": form.channels,
        "Width": knobs.width,
        "Strips": x.output // knobs.width,
        "Stages": knobs.stages,
    }
    return sliding_stage(
        kernel,
        form,
        constants,
        found,
        epilogue=epilogue,
        blocks=knobs.parts,
        threads=form.threads(knobs),
        shared=form.shared_memory(knobs),
    )


def _walk(form: Lines, knobs: LinesKnobs) -> list[Parameter]:
    """What both kernels have: the source, and how blocks walk along it."""
    y, _ = form.windows
    found = _array("source", form.source, form.first, y.image, form.copied, form.zeros)
    return found + numbers(low=y.low, rows=y.output, count=form.count, part_rows=ceil(form.count / knobs.parts))


def _array(name: str, tensor: Tensor, first: int, rows: int, places: int, zeros: int) -> list[Parameter]:
    """Lines of which `places` are copied from place `first` on, behind so many zeros."""
    row, column = tensor.spatial_strides
    buffer = replace(tensor.buffer, offset=tensor.buffer.offset + first * column * _ITEM)
    return [
        Parameter(f"const {ctype(tensor.dtype)}*", name, f"{name}.data", buffer),
        *in_fields(name, numbers("long long", image=tensor.n_stride)),
        *in_fields(name, numbers(row=row, rows=rows, bytes=places * column * _ITEM, zeros=zeros)),
    ]
