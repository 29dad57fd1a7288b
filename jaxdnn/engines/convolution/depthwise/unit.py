"""The unit and the launches of a depthwise convolution on the tensor cores."""

from math import ceil

from jaxdnn.engines.convolution.depthwise.knobs import STRIP, DepthwiseKnobs, Strips
from jaxdnn.engines.convolution.problem import Tensor
from jaxdnn.engines.convolution.sliding import in_fields, sliding_stage, strides_of
from jaxdnn.engines.product.element_epilogue import ElementEpilogue, ctype
from jaxdnn.engines.unit import Parameter, Stage, numbers
from jaxdnn.plan import Scratch


def fprop(form: Strips, knobs: DepthwiseKnobs, epilogue: ElementEpilogue) -> Stage:
    """The kernel of outputs, and of gradients in the image."""
    step = knobs.across * STRIP if form.linear else form.classes * form.windows[1].output
    buffer, row, column = form.first_tap
    found = [
        *_walk(form, knobs),
        Parameter(f"const {ctype(form.other.dtype)}*", "filter", "filter", buffer),
        *numbers(lead=form.lead),
        *numbers(filter_row=row, filter_column=column, filter_channel=form.other.group_stride),
        *numbers(result_step=2 * step * form.problem.columns),
        *epilogue.parameters(),
    ]
    return _stage("depthwise_fprop", epilogue, form, knobs, found)


def wgrad(form: Strips, knobs: DepthwiseKnobs) -> Stage:
    """The sums of parts of all places, in the first scratch buffer."""
    y, x = form.windows
    first, row, column = form.filter_steps
    found = [
        *_walk(form, knobs),
        *_array("output", form, form.other, knobs.across * STRIP if form.linear else form.classes),
        *in_fields("output_x", numbers(source=x.output)),
        *in_fields("output_y", numbers(source=y.output)),
        *numbers(filter_first=first, filter_row=row, filter_column=column),
        Parameter("float*", "accumulators", "accumulators", Scratch(0)),
    ]
    return _stage("depthwise_wgrad", None, form, knobs, found)


def _stage(
    kernel: str, epilogue: ElementEpilogue | None, form: Strips, knobs: DepthwiseKnobs, found: list[Parameter]
) -> Stage:
    y, x = form.windows
    constants = {
        "StrideX": x.stride,
        "StrideY": y.stride,
        "DilationX": x.dilation,
        "Across": knobs.across,
        "Images": knobs.images,
        "Slab": knobs.slab,
        "Warps": knobs.warps,
        "Stages": knobs.stages,
        "Linear": form.linear,
    }
    return sliding_stage(
        kernel,
        form,
        constants,
        found,
        epilogue=epilogue,
        blocks=form.slabs(knobs) * knobs.parts,
        threads=knobs.threads,
        shared=form.shared_memory(knobs),
    )


def _walk(form: Strips, knobs: DepthwiseKnobs) -> list[Parameter]:
    """What both kernels have: the source, and how blocks walk along it."""
    y, x = form.windows
    count = form.count(knobs)
    found = _array(
        "source", form, form.source, knobs.across * STRIP * x.stride if form.linear else y.stride * form.classes
    )
    for name, window in (("x", x), ("y", y)):
        found += in_fields(name, numbers(source=window.image, result=window.output, low=window.low))
    found += numbers(images=form.problem.n, channels=form.problem.groups, slabs=form.slabs(knobs))
    found += numbers(rows=form.rows(knobs), classes=form.classes, ranges=form.ranges(knobs))
    return found + numbers(count=count, part_rows=ceil(count / knobs.parts))


def _array(name: str, form: Strips, tensor: Tensor, step: int) -> list[Parameter]:
    """Of a walk whose steps are so many rows apart; or in one dimension, places."""
    row, column = strides_of(tensor)
    return [
        Parameter(f"const {ctype(tensor.dtype)}*", name, f"{name}.data", tensor.buffer),
        *in_fields(name, numbers("long long", image=tensor.n_stride)),
        *in_fields(name, numbers(row=row, column=column, step=step * (column if form.linear else row))),
    ]
