"""The unit and the launches of a convolution of an image with few channels on Hopper.

The kernel is cpp/kernels/convolution/sm90_few_channels.cuh.
"""

from dataclasses import replace
from math import prod

from jaxdnn.engines.convolution.sm90.few_channels.knobs import stage
from jaxdnn.engines.convolution.sm90.unit import axis_parameters
from jaxdnn.engines.convolution.window_lines import SEGMENT, STAGE_SEGMENTS, WindowLines
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, PROMOTE_256, SWIZZLE, element_type, promotion
from jaxdnn.engines.unit import Constant, Parameter, map_parameter, numbers
from jaxdnn.plan import TensorMap


class FewChannelsUnit(Unit):
    """The text, the launches and the scratch buffers of one convolution."""

    kernel = "convolution_sm90_few_channels"
    call = "ConvolutionSm90FewChannels"
    instruction = "WGMMA_RS"
    brief_batches = False  # of groups, of which they were not timed

    def __init__(self, lines: WindowLines, knobs: Sm90Knobs, sm_count: int) -> None:
        self.lines = lines
        super().__init__(lines.product, knobs, sm_count)

    @property
    def straight(self) -> bool:
        return self.lines.straight

    def stage(self, product: Product) -> int:
        return stage(self.lines, product, self.knobs)

    def load_constants(self, product: Product) -> dict[str, Constant]:
        lines = self.lines
        own = {"Lines": lines.lines, "Elements": lines.elements, "PlaceStep": lines.place_step}
        own |= {"Early": lines.early, "Lead": lines.lead}
        if lines.to_filter:
            own |= {"Segments": STAGE_SEGMENTS, "WholeLines": lines.axes[0].result % SEGMENT == 0}
        return {**super().load_constants(product), **own, "Straight": lines.straight}

    def tiles(self, product: Product) -> int:
        return super().tiles(replace(product, m=self.lines.rows))

    def load_parameters(self, product: Product) -> list[Parameter]:
        lines = self.lines
        right = self._output_map(product) if lines.to_filter else self._filter_map(product)
        found = [map_parameter("a", "a", self._image_map(product)), map_parameter("b0", "b[0]", right)]
        for i, axis in enumerate(lines.axes):
            found += axis_parameters(f"axis{i}", f"axes[{i}]", axis)
        found += numbers(rows=lines.rows, channels=lines.channels)
        if lines.to_filter:
            found += numbers(lines=lines.places // lines.axes[0].places)
        if product.batch > 1:
            found += numbers(image_batch=lines.image_batch)
        return found

    def _image_map(self, product: Product) -> TensorMap:
        """Lines of an image, and what lies outside of it as zeros."""
        lines, (width, *outer) = self.lines, self.lines.axes
        line = product.a.row_stride * product.a.itemsize
        return TensorMap(
            buffer=product.a.buffer,
            dtype=element_type(product.a.dtype, multiplied=True),
            dimensions=(width.image * lines.channels, *(axis.image for axis in outer), lines.images),
            strides=tuple(line * prod(axis.image for axis in outer[:i]) for i in range(len(outer) + 1)),
            box=(lines.pitch, *(axis.filter for axis in outer), 1),
            element_strides=(1, 1, 1, 1),
            l2_promotion=PROMOTE_256,
        )

    def _filter_map(self, product: Product) -> TensorMap:
        """The filter by lines of its window, which are filled up with zeros."""
        lines, (matrix,) = self.lines, product.b
        row = matrix.row_stride * matrix.itemsize
        return TensorMap(
            buffer=matrix.buffer,
            dtype=element_type(matrix.dtype, multiplied=True),
            dimensions=(matrix.columns, lines.elements, lines.lines, product.batch if matrix.batch_stride else 1),
            strides=(row, row * lines.elements, row * matrix.rows),
            box=(CHUNK, lines.padded, lines.filter_lines, 1),
            element_strides=(1, 1, 1, 1),
            swizzle=SWIZZLE[DEPTH_BYTES],
            l2_promotion=promotion(row),
        )

    def _output_map(self, product: Product) -> TensorMap:
        """The output by lines of places, which are filled up with zeros."""
        lines, (matrix,) = self.lines, product.b
        row, width = matrix.row_stride * matrix.itemsize, lines.axes[0].result
        count = matrix.rows // width * (product.batch if matrix.batch_stride else 1)
        return TensorMap(
            buffer=matrix.buffer,
            dtype=element_type(matrix.dtype, multiplied=True),
            dimensions=(matrix.columns, width, count),
            strides=(row, row * width),
            box=(CHUNK, SEGMENT, 1),
            element_strides=(1, 1, 1),
            swizzle=SWIZZLE[DEPTH_BYTES],
            l2_promotion=promotion(row),
        )
