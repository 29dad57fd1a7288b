"""The unit and the launches of a convolution by patches on Hopper (cpp/kernels/convolution/sm90_halo.cuh)."""

from dataclasses import replace
from math import prod

from jaxdnn.engines.convolution.sm90.halo.knobs import Patches, columns_of_tiles
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs
from jaxdnn.engines.convolution.sm90.unit import ConvolutionUnit
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.product.tma import SWIZZLE, element_type, promotion
from jaxdnn.engines.unit import Constant, Parameter, numbers
from jaxdnn.plan import TensorMap


class HaloUnit(ConvolutionUnit):
    """The text, the launches and the scratch buffers of one convolution."""

    kernel = "convolution_sm90_halo"
    call = "ConvolutionSm90Halo"

    def __init__(self, patches: Patches, knobs: ConvolutionKnobs, sm_count: int) -> None:
        self.patches, self.halo = patches, knobs
        product = replace(patches.gemm.product, k=patches.stages * patches.depth)
        gemm = replace(patches.gemm, product=product, axes=patches.axes, rows=patches.rows, line=knobs.patch)
        self.kept = columns_of_tiles(product, knobs) if knobs.resident else 1
        super().__init__(gemm, knobs, sm_count)

    @property
    def straight(self) -> bool:
        return False

    def depth(self, product: Product) -> int:
        return self.patches.plane_taps * self.halo.patch // product.a.itemsize

    def shared_memory(self, product: Product) -> int:
        return self.patches.shared_memory(product, self.halo)

    def load_constants(self, product: Product) -> dict[str, Constant]:
        width, height, _ = self.patches.axes
        own = {"TapsX": width.filter, "TapsY": height.filter, "StepX": width.step, "StepY": height.step}
        flipped = {"FlippedX": width.filter_step < 0, "FlippedY": height.filter_step < 0}
        ring = {"Line": self.halo.patch, "FilterStages": self.halo.filter_stages, "Resident": self.halo.resident}
        patches, tile_m = self.patches, self.halo.tile_m
        lines: dict[str, Constant] = {"Pitch": 0, "PatchLines": 0, "Ahead": 0, "BlockWidth": patches.block[0]}
        if patches.along_lines:
            lines |= {"Pitch": patches.pitch, "PatchLines": patches.lines(tile_m), "Ahead": patches.ahead(tile_m)}
        return {**Unit.load_constants(self, product), **own, **flipped, **ring, **lines}

    def load_parameters(self, product: Product) -> list[Parameter]:
        return super().load_parameters(product) + numbers(images=self.patches.images)

    def result_map(self, result: Matrix, batch: int, columns: int) -> TensorMap:
        """Of a warp's rows, or of half of them."""
        places, row = [axis.result for axis in self.patches.axes], result.row_stride * result.itemsize
        return TensorMap(
            buffer=result.buffer,
            dtype=element_type(result.dtype),
            dimensions=(result.columns, *places, batch * self.patches.images),
            strides=tuple(row * prod(places[:i]) for i in range(len(places) + 1)),
            box=(columns, *self.patches.box, 1, 1),
            element_strides=(1, 1, 1, 1, 1),
            swizzle=SWIZZLE[columns * result.itemsize],
            l2_promotion=promotion(row),
        )

    def image_map(self, product: Product) -> TensorMap:
        box = (self.halo.patch // product.a.itemsize, *self.patches.sides, 1, 1)
        return replace(super().image_map(product), box=box, corners=())
