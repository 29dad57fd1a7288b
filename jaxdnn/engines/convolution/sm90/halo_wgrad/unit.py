"""The plan of a filter's gradient by patches on Hopper (cpp/kernels/convolution/sm90_halo_wgrad.cuh)."""

from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul

from jaxdnn.engines.convolution.sm90.halo_wgrad.knobs import WgradKnobs, WgradPatches
from jaxdnn.engines.convolution.sm90.unit import axis_parameters
from jaxdnn.engines.product.copies import copy_stage
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.split_k import split_accumulators, split_stage
from jaxdnn.engines.product.tma import DEPTH_BYTES, SWIZZLE, element_type, promotion
from jaxdnn.engines.unit import (
    Parameter,
    Stage,
    arguments,
    entry_text,
    joined,
    map_parameter,
    numbers,
    shared_memory_text,
    struct_text,
)
from jaxdnn.plan import Launch, Plan, TensorMap

_KERNEL = "convolution_sm90_halo_wgrad"
_MOST = 2**31 - 1


def plan(patches: WgradPatches, knobs: WgradKnobs) -> Plan:
    """What one call does: copies of what TMA can't load as it lies; multiplies that leave the accumulators of each
    split; and a kernel that adds them up.
    """
    product, copies = packed(patches.gemm.product)
    loaded = replace(patches, gemm=replace(patches.gemm, product=product))
    copied = copy_stage(copies, product.batch) if copies else Stage()
    scratch = len(copies)
    epilogue, after = element_epilogue(product, scratch + 1)
    added = split_stage(product, epilogue, knobs.split_k, scratch, patches.diagonal)
    return joined((copied, _multiply(loaded, knobs, scratch), added, after)).plan("sm_90a")


def _multiply(patches: WgradPatches, knobs: WgradKnobs, scratch: int) -> Stage:
    """Leaves the accumulators in the scratch buffer of that number."""
    product = patches.gemm.product
    x, y, _ = patches.dimensions
    constants = {
        "Line": knobs.patch,
        "Lines": knobs.lines,
        "Run": knobs.run,
        "Runs": knobs.runs,
        "ColumnBlocks": knobs.column_blocks,
        "Width": knobs.width,
        "Height": knobs.height,
        "Images": knobs.images,
        "Stages": knobs.stages,
        "TapsX": x.filter,
        "TapsY": y.filter,
        "StepX": x.step,
        "StepY": y.step,
    }
    call, shared = "jaxdnn::ConvolutionSm90HaloWgrad<WgradConfig>", patches.shared_memory(knobs)
    found = _parameters(patches, knobs, scratch)
    text = (
        f"\nJAXDNN_WGMMA({patches.multiplied(knobs)});\n"
        + struct_text("WgradConfig", {"A": f"jaxdnn::{product.a.dtype}"}, constants)
        + shared_memory_text(call, shared)
        + entry_text(_KERNEL, call, f"{knobs.threads}, 1", found)
    )
    grid = (patches.blocks(knobs) * knobs.split_k, 1, 1)
    launch = Launch(_KERNEL, arguments(found), grid, (knobs.threads, 1, 1), shared_memory=shared)
    return Stage(("convolution/sm90_halo_wgrad.cuh",), text, (launch,))


def _parameters(patches: WgradPatches, knobs: WgradKnobs, scratch: int) -> list[Parameter]:
    gemm, product = patches.gemm, patches.gemm.product
    (accumulators,) = split_accumulators(product, scratch, patches.diagonal)
    found = [
        map_parameter("image", "image", _image_map(patches, knobs)),
        *(map_parameter(f"output{i}", f"output[{i}]", _output_map(patches, knobs, i)) for i in range(4)),
        Parameter("float*", "accumulators", "accumulators", accumulators.buffer),
    ]
    for i, axis in enumerate(patches.axes(knobs)):
        found += axis_parameters(f"axis{i}", f"axes[{i}]", axis)
    group_columns = gemm.group_columns if gemm.groups > 1 else _MOST
    found += numbers(tiles=patches.tiles(knobs), channels=gemm.channels, columns=product.n, group_columns=group_columns)
    found += numbers(splits=knobs.split_k)
    if product.batch > 1:
        output_batch = patches.images if product.b[0].batch_stride else 0
        found += numbers(batches=product.batch, image_batch=gemm.image_batch, output_batch=output_batch)
    return found


def _image_map(patches: WgradPatches, knobs: WgradKnobs) -> TensorMap:
    matrix, sizes = patches.gemm.product.a, [axis.image for axis in patches.dimensions]
    pixel = matrix.row_stride * matrix.itemsize
    return TensorMap(
        buffer=matrix.buffer,
        dtype=element_type(matrix.dtype),
        dimensions=(matrix.columns, *sizes, patches.gemm.images),
        strides=tuple(accumulate(sizes, mul, initial=pixel)),
        box=(knobs.patch // matrix.itemsize, *patches.sides(knobs), 1, knobs.images),
        element_strides=(1, 1, 1, 1, 1),
        swizzle=SWIZZLE[knobs.patch],
        l2_promotion=promotion(pixel),
    )


def _output_map(patches: WgradPatches, knobs: WgradKnobs, last: int) -> TensorMap:
    """Of tiles that are the last ones of a line (bit 0 of `last`), or of an image (bit 1): from the first place on that
    no tile before has.
    """
    product, axes = patches.gemm.product, patches.axes(knobs)
    (matrix,), sizes = product.b, [axis.result for axis in axes]
    images = matrix.rows // prod(sizes) * (product.batch if matrix.batch_stride else 1)
    strides = tuple(accumulate(sizes, mul, initial=matrix.row_stride * matrix.itemsize))
    begin = [(axis.places - 1) * axis.period if last >> i & 1 else 0 for i, axis in enumerate(axes)]
    offset = sum(place * stride for place, stride in zip(begin, strides, strict=False))
    return TensorMap(
        buffer=replace(matrix.buffer, offset=matrix.buffer.offset + offset),
        dtype=element_type(matrix.dtype),
        dimensions=(matrix.columns, *(size - place for size, place in zip(sizes, begin, strict=True)), images),
        strides=strides,
        box=(knobs.block_columns, knobs.width, knobs.height, 1, knobs.images),
        element_strides=(1, 1, 1, 1, 1),
        swizzle=SWIZZLE[DEPTH_BYTES // knobs.lines],
        l2_promotion=promotion(strides[0]),
    )
