"""Depthwise convolutions of 16-bit floats as windows that slide over rows of a source, for kernels that walk along
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jaxdnn.engines.convolution.problem import Convolution, Tensor, Window
from jaxdnn.engines.product.element_epilogue import ElementEpilogue, ctype
from jaxdnn.engines.product.problem import Matrix
from jaxdnn.engines.unit import Constant, Parameter, Stage, arguments, entry_text, shared_memory_text, struct_text
from jaxdnn.plan import Launch, Operand, Result, Scratch

_DIMENSIONS = 2
_VECTOR = 8  # channels that are copied at once
_ALIGNMENT = 16  # bytes
_LARGEST = 2**31 - 2**16  # of what is counted with 32 bits
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Sliding:
    """A convolution whose windows slide over a source, in two dimensions."""

    problem: Convolution

    @cached_property
    def windows(self) -> tuple[Window, Window]:
        """Of rows, and of the places of a row."""
        windows = self.problem.windows
        if self.problem.result == "image":
            windows = tuple(window.transposed for window in windows)
        y, x = (Window(1, 1, 1), *windows)[-_DIMENSIONS:]
        return y, x

    @property
    def source(self) -> Tensor:
        """The array that windows slide over."""
        return self.problem.b if self.problem.result == "image" else self.problem.a

    @property
    def other(self) -> Tensor:
        """The filter; or of its gradient, the output."""
        return self.problem.a if self.problem.result == "image" else self.problem.b

    @property
    def to_filter(self) -> bool:
        return self.problem.result == "filter"

    @property
    def linear(self) -> bool:
        """Whether it has one dimension."""
        return len(self.problem.windows) == 1

    @property
    def classes(self) -> int:
        """Of rows, which share none of the source's."""
        y = self.windows[0]
        return y.dilation if y.filter > 1 else 1

    @property
    def filter_steps(self) -> tuple[int, int, int]:
        """The first tap's place in a filter's gradient, and how far it is from there to the next row and column."""
        width = self.windows[1].filter
        first = [window.filter - 1 if window.flipped else 0 for window in self.windows]
        steps = [-1 if window.flipped else 1 for window in self.windows]
        return first[0] * width + first[1], steps[0] * width, steps[1]

    @property
    def first_tap(self) -> tuple[Operand | Result | Scratch, int, int]:
        """Where a filter's first tap lies, and the strides of the others: in a flipped dimension they run backwards."""
        offset, steps, filter_ = 0, list[int](), self.other
        for stride, window in zip(strides_of(filter_), self.windows, strict=True):
            offset += (window.filter - 1) * stride * 2 if window.flipped else 0
            steps.append(-stride if window.flipped else stride)
        row, column = steps
        return replace(filter_.buffer, offset=filter_.buffer.offset + offset), row, column


def sliding_reason(problem: Convolution) -> str | None:
    """Why kernels that walk along rows can't have the convolution, or None."""
    if problem.c * problem.k > 1:
        return f"its groups have {problem.c} x {problem.k} channels, and it is for depthwise convolutions"
    if len(problem.windows) not in (1, _DIMENSIONS):
        return f"it has 1 or {_DIMENSIONS} spatial dimensions, and the convolution {len(problem.windows)}"
    if problem.batch > 1:
        return "each of several convolutions has a filter of its own, and a walk goes through images of one"
    form = Sliding(problem)
    if any(window.base_dilation > 1 for window in form.windows):
        return "what its windows slide over is dilated, and most of a band's rows would meet zeros"
    if max(problem.rows, problem.n * form.windows[0].image * form.windows[1].image) >= _LARGEST:
        return "there are more places than its 32-bit index counts"
    y, x = form.windows
    if 2 * form.classes * y.stride * max(x.image, x.output) * problem.groups >= _LARGEST:
        return "a row has more bytes than its 32-bit index counts"
    if problem.a.dtype != problem.b.dtype or problem.a.dtype not in _HALVES:
        return f"it multiplies 16-bit floats of one type, and these are {problem.a.dtype} and {problem.b.dtype}"
    if not all(map(_aligned, [form.source, form.other] if form.to_filter else [form.source])):
        return f"channels are no vectors of {_VECTOR} that are aligned"
    return None if form.to_filter else _epilogue_reason(problem)


def _aligned(tensor: Tensor) -> bool:
    strides = (tensor.n_stride, *tensor.spatial_strides, tensor.buffer.offset // 2)
    return tensor.group_stride == 1 and not any(stride % _VECTOR for stride in strides)


def _epilogue_reason(problem: Convolution) -> str | None:
    for result in problem.results:
        if not isinstance(result, Matrix) or result.dtype not in _HALVES:
            return "its results are 16-bit floats, and none is reduced"
        if result.row_stride != problem.columns or result.buffer.offset % _ALIGNMENT:
            return "its results lie one row after the other"
    if any(one.broadcast not in ("scalar", "row") or one.gathered for one in problem.operands):
        return "an operand of its epilogue varies with more than the channel"
    if problem.program.indexed:
        return "its epilogue is not told which element it computes"
    return None


def strides_of(tensor: Tensor) -> tuple[int, int]:
    """Of rows and places; one dimension has no rows."""
    row, column = (0, *tensor.spatial_strides)[-_DIMENSIONS:]
    return row, column


def in_fields(name: str, found: list[Parameter]) -> list[Parameter]:
    """Parameters of a member of the call."""
    return [replace(p, name=f"{name}_{p.name}", field=f"{name}.{p.name}") for p in found]


def sliding_stage(
    kernel: str,
    form: Sliding,
    constants: Mapping[str, Constant],
    found: list[Parameter],
    *,
    epilogue: ElementEpilogue | None,
    blocks: int,
    threads: int,
    shared: int,
) -> Stage:
    """The kernel that walks, of a family's folder: "lines_fprop" of convolution/lines/fprop.cuh."""
    family, name = kernel.split("_")
    y, x = form.windows
    types = {"T": ctype(form.source.dtype), **(epilogue.types() if epilogue else {})}
    call = f"jaxdnn::{family.capitalize()}{name.capitalize()}<Config>"
    text = (
        f"\n{epilogue.text() if epilogue else ''}\n"
        + struct_text("Config", types, {"TapsX": x.filter, "TapsY": y.filter, **constants})
        + f"{shared_memory_text(call, shared)}\n"
        + entry_text(kernel, call, f"{threads}, 1", found)
    )
    launch = Launch(kernel, arguments(found), (blocks, 1, 1), (threads, 1, 1), shared_memory=shared)
    return Stage((f"convolution/{family}/{name}.cuh",), text, (launch,))
