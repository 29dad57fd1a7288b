"""The unit and the launches of a convolution on Hopper: a product's, but for how its operands are loaded.

The kernel is cpp/kernels/convolution/sm90.cuh.
"""

from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul

from jaxdnn.engines.convolution.axis import Axis
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm
from jaxdnn.engines.product.affine import divisor_magic
from jaxdnn.engines.product.operands import transposes
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, box_lines, depth
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.product.split_k import Diagonal
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, SWIZZLE, element_type, operand_map, promotion
from jaxdnn.engines.unit import Constant, Parameter, map_parameter, numbers
from jaxdnn.plan import Scalar, TensorMap

_MOST = 2**31 - 1
_IN_NAMES = str.maketrans({"[": "", "]": "", ".": "_"})


class ConvolutionUnit(Unit):
    """The text, the launches and the scratch buffers of one convolution."""

    kernel = "convolution_sm90"
    call = "ConvolutionSm90"
    brief_batches = False  # of groups, of which they were not timed

    def __init__(self, gemm: ImplicitGemm, knobs: Sm90Knobs, sm_count: int) -> None:
        self.gemm = gemm
        if gemm.crossed:
            self.diagonal = Diagonal(gemm.merged, gemm.channels // gemm.merged, gemm.group_columns // gemm.merged)
        super().__init__(gemm.product, knobs, sm_count)

    @property
    def straight(self) -> bool:
        return self.gemm.straight

    def load_constants(self, product: Product) -> dict[str, Constant]:
        phases = max(len(axis.phases) for axis in self.gemm.axes)
        own = {
            "Line": self.gemm.line,
            "Steps": self.gemm.steps,
            "Lines": self.gemm.lines if self.gemm.last_steps < self.gemm.steps else 1,
            "LastSteps": self.gemm.last_steps,
            "Spatial": len(self.gemm.axes),
            "Phases": phases,
            "Straight": self.gemm.straight,
            "Blocks": self.gemm.filter_rows is not None,
        }
        return {**super().load_constants(product), **own}

    def fewest_stages(self, product: Product) -> int:
        """Those of the phase that meets the fewest taps; K is that of the one with most."""
        taps = [[phase.taps for phase in axis.phases] for axis in self.gemm.axes]
        fewest, most = prod(map(min, taps)), prod(map(max, taps))
        return super().fewest_stages(product) * fewest // most

    def tiles(self, product: Product) -> int:
        rows = product.m if self.knobs.swapped else self.gemm.rows
        return super().tiles(replace(product, m=rows, batch=product.batch * self.gemm.phases))

    def load_parameters(self, product: Product) -> list[Parameter]:
        gemm, knobs = self.gemm, self.knobs
        left = self.image_map(product)
        if gemm.product.a_transposed:
            right = operand_map(product.b[0], product.batch, True, knobs.tile_n, sharers=knobs.cluster_m)
        else:
            right = self._filter_map(product)
        if knobs.swapped:
            left, right = right, left
        found = [map_parameter("a", "a", left)]
        found += [map_parameter(f"b{i}", f"b[{i}]", right) for i in range(len(product.b))]
        for i, axis in enumerate(gemm.axes):
            found += axis_parameters(f"axis{i}", f"axes[{i}]", axis)
        # Tiles beyond the last column are of one group too.
        group_columns = gemm.group_columns if gemm.groups > 1 else _MOST
        rows = product.m if knobs.swapped else gemm.rows
        found += numbers(rows=rows, channels=gemm.channels, group_columns=group_columns)
        if gemm.filter_rows is not None:
            first, step = gemm.filter_rows
            found += numbers(filter_row=first, filter_row_step=step)
        if gemm.phases > 1:
            found += numbers(phases=gemm.phases)
        if product.batch > 1:
            filters = gemm.taps if gemm.product.b[0].batch_stride else 0
            found += numbers(image_batch=gemm.image_batch, filter_batch=filters)
        return found

    def image_map(self, product: Product) -> TensorMap:
        gemm, knobs = self.gemm, self.knobs
        image, places = (product.b[0], knobs.tile_n) if knobs.swapped else (product.a, knobs.tile_m)
        strides = accumulate((axis.image for axis in gemm.axes), mul, initial=image.row_stride * image.itemsize)
        lines = depth(product) if gemm.product.a_transposed else places
        return TensorMap(
            buffer=image.buffer,
            dtype=element_type(image.dtype, multiplied=True),
            dimensions=(image.columns, *(axis.image for axis in gemm.axes), gemm.images),
            strides=tuple(strides),
            box=(gemm.line // image.itemsize, lines // knobs.cluster_n),
            element_strides=(1, *(axis.stride for axis in gemm.axes), 1),
            swizzle=SWIZZLE[gemm.line],
            l2_promotion=promotion(image.row_stride * image.itemsize),
            corners=tuple(axis.corners for axis in gemm.axes),
        )

    def _filter_map(self, product: Product) -> TensorMap:
        """The filter as a matrix at each tap."""
        gemm, knobs = self.gemm, self.knobs
        matrix, along_k = product.b[0], product.b_transposed
        lines = box_lines(product, knobs)
        if knobs.swapped:
            matrix, along_k = product.a, not product.a_transposed
            lines = knobs.tile_m if along_k else depth(product)
        taps = gemm.taps * (product.batch if matrix.batch_stride else 1)
        if transposes(gemm.product, "b"):  # each row has the channels of all taps
            dimensions, tap = (gemm.channels, matrix.rows, taps), gemm.channels
        else:
            rows = matrix.rows // gemm.taps
            dimensions, tap = (matrix.columns, rows, taps), rows * matrix.row_stride
        line = gemm.line // matrix.itemsize
        box = (line, lines // knobs.cluster_m, 1) if along_k else (CHUNK, min(line, lines) // knobs.cluster_m, 1)
        return TensorMap(
            buffer=matrix.buffer,
            dtype=element_type(matrix.dtype, multiplied=True),
            dimensions=dimensions,
            strides=(matrix.row_stride * matrix.itemsize, tap * matrix.itemsize),
            box=box,
            element_strides=(1, 1, 1),
            swizzle=SWIZZLE[gemm.line if along_k else DEPTH_BYTES],
            l2_promotion=promotion(matrix.row_stride * matrix.itemsize),
        )


def axis_parameters(name: str, field: str, axis: Axis) -> list[Parameter]:
    """The members of a `ConvolutionAxis`."""
    values = {
        "places": axis.places,
        "stride": axis.stride,
        "start": axis.start,
        "step": axis.step,
        "filter": axis.filter,
        "filter_step": axis.filter_step,
        "result": axis.result,
        "period": axis.period,
    }
    for i, phase in enumerate(axis.phases):
        values[f"phases[{i}].taps"] = phase.taps
        values[f"phases[{i}].offset"] = phase.start - axis.start if phase.taps else 0
        values[f"phases[{i}].first"] = phase.first
    magic = Scalar("int64", divisor_magic(axis.places))
    found = [Parameter("long long", f"{name}_divisor", f"{field}.divisor.magic", magic)]
    for key, value in values.items():
        parameter = f"{name}_{key.translate(_IN_NAMES)}"
        found.append(Parameter("int", parameter, f"{field}.{key}", Scalar("int32", value)))
    return found
