"""The unit and the launches of a convolution by patches on Hopper (cpp/kernels/convolution/sm90_halo.cuh)."""

from dataclasses import replace
from math import prod

from jaxdnn.engines.convolution.sm90.halo.knobs import HaloKnobs, Patches
from jaxdnn.engines.convolution.sm90.unit import axis_parameters
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, PROMOTE_256, SWIZZLE, element_type
from jaxdnn.engines.unit import Constant, Parameter, map_parameter, numbers
from jaxdnn.plan import TensorMap


class HaloUnit(Unit):
    """The text, the launches and the scratch buffers of one convolution."""

    kernel = "convolution_sm90_halo"
    call = "ConvolutionSm90Halo"

    def __init__(self, patches: Patches, knobs: HaloKnobs, sm_count: int) -> None:
        self.patches, self.halo = patches, knobs
        depth = patches.stages(knobs.line) * patches.depth(knobs.line)
        super().__init__(replace(patches.gemm.product, k=depth), knobs, sm_count)

    def depth(self, product: Product) -> int:
        return self.patches.depth(self.halo.line)

    def shared_memory(self, product: Product) -> int:
        return self.patches.shared_memory(product, self.halo)

    def tiles(self, product: Product) -> int:
        return super().tiles(replace(product, m=self.patches.rows))

    def load_constants(self, product: Product) -> dict[str, Constant]:
        width, height, _ = self.patches.axes
        own = {"TapsX": width.filter, "TapsY": height.filter, "StepX": width.step, "StepY": height.step}
        flipped = {"FlippedX": width.filter_step < 0, "FlippedY": height.filter_step < 0}
        return {**super().load_constants(product), **own, **flipped}

    def load_parameters(self, product: Product) -> list[Parameter]:
        gemm = self.patches.gemm
        found = [map_parameter("a", "a", self._image_map(product))]
        found += [map_parameter("b0", "b[0]", self._filter_map(product))]
        for i, axis in enumerate(self.patches.axes):
            found += axis_parameters(f"axis{i}", f"axes[{i}]", axis)
        found += numbers(rows=self.patches.rows)
        if product.batch > 1:
            filters = gemm.taps if product.b[0].batch_stride else 0
            found += numbers(image_batch=gemm.image_batch, filter_batch=filters)
        return found

    def _image_map(self, product: Product) -> TensorMap:
        gemm, line, images = self.patches.gemm, self.halo.line, [axis.image for axis in self.patches.axes]
        pixel = product.a.row_stride * product.a.itemsize
        return TensorMap(
            buffer=product.a.buffer,
            dtype=element_type(product.a, multiplied=True),
            dimensions=(product.a.columns, *images, gemm.images),
            strides=tuple(pixel * prod(images[:i]) for i in range(len(images) + 1)),
            box=(line // product.a.itemsize, *self.patches.sides(line), 1, 1),
            element_strides=(1, 1, 1, 1, 1),
            swizzle=SWIZZLE[line],
            l2_promotion=PROMOTE_256,
        )

    def _filter_map(self, product: Product) -> TensorMap:
        """The filter as a matrix at each tap, of which a box has those of a plane."""
        gemm, (matrix,), line = self.patches.gemm, product.b, self.halo.line
        rows = matrix.rows // gemm.taps
        along_n, channels = not product.b_transposed, line // matrix.itemsize
        box = (CHUNK, channels) if along_n else (channels, self.halo.tile_n)
        return TensorMap(
            buffer=matrix.buffer,
            dtype=element_type(matrix, multiplied=True),
            dimensions=(matrix.columns, rows, gemm.taps * (product.batch if matrix.batch_stride else 1)),
            strides=(matrix.row_stride * matrix.itemsize, rows * matrix.row_stride * matrix.itemsize),
            box=(*box, self.patches.plane_taps),
            element_strides=(1, 1, 1),
            swizzle=SWIZZLE[DEPTH_BYTES if along_n else line],
            l2_promotion=PROMOTE_256,
        )
