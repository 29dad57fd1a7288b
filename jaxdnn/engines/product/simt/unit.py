"""The unit and the launches of a product on any GPU."""

import math
from dataclasses import replace

from jaxdnn.engines.product.atom import TENSOR, threads
from jaxdnn.engines.product.element_epilogue import ElementEpilogue, ctype
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.simt.knobs import SimtKnobs, grid_of, product_atom, runs_of, shared_bytes, vector
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, shared_memory_text, struct_text
from jaxdnn.plan import Launch
from jaxdnn.pointwise.cuda import register_type


def multiply(product: Product, knobs: SimtKnobs, epilogue: ElementEpilogue) -> Stage:
    """The kernel that multiplies, and what follows each sum (or each split's sum)."""
    atom, accumulators = product_atom(product), len(product.b)
    along = runs_of(product)
    matrices = (product.a, product.b[0])
    far = any(
        (knobs.depth if runs else tile) * matrix.row_stride * matrix.itemsize >= 2**32
        for matrix, runs, tile in zip(matrices, along, (knobs.tile_m, knobs.tile_n), strict=True)
    )
    dimensions, grid = grid_of(product, knobs)
    types = {
        **epilogue.types(),
        "A": ctype(product.a.dtype),
        "B": ctype(product.b[0].dtype),
        "Accumulator": ctype(register_type(product.accumulator)),
    }
    constants = {
        "MMajorA": along[0],
        "NMajorB": along[1],
        "Far": far,
        "Half": atom is TENSOR,
        "Dimensions": dimensions,
        "Accumulators": accumulators,
        "TileM": knobs.tile_m,
        "TileN": knobs.tile_n,
        "ThreadM": knobs.thread_m,
        "ThreadN": knobs.thread_n,
        "Depth": knobs.depth,
        "Stages": knobs.stages,
        "SliceK": knobs.slice_k,
        "VectorA": vector(atom, product.a, along[0]),
        "VectorB": min(vector(atom, b, along[1]) for b in product.b),
    }
    call = "jaxdnn::ProductSimt<Config>"
    needed, block = shared_bytes(product, knobs), threads(atom, knobs, knobs.slice_k)
    found = _matrix("a", "a", product.a)
    for i, b in enumerate(product.b):
        found += _matrix(f"b{i}", "b", b, f"[{i}]")
    found += epilogue.parameters()
    found += numbers(m=product.m, n=product.n, k=product.k)
    if dimensions == 1:
        found += numbers(swizzle=knobs.swizzle)
    if knobs.split_k > 1:
        depth = math.ceil(product.k / (knobs.split_k * knobs.depth)) * knobs.depth
        found += numbers(splits=knobs.split_k, split_depth=depth)
    text = (
        f"\n{epilogue.text()}\n{struct_text('Config', types, constants)}\n"
        f"{shared_memory_text(call, needed)}\n" + entry_text("product_simt", call, f"{block}, {knobs.resident}", found)
    )
    launch = Launch(
        "product_simt",
        arguments(found),
        grid,
        (block, 1, 1),
        shared_memory=needed,
    )
    return Stage(("product/simt.cuh",), text, (launch,))


def _matrix(name: str, field: str, matrix: Matrix, index: str = "") -> list[Parameter]:
    """The address and strides of an operand."""
    pointer = Parameter(f"const {ctype(matrix.dtype)}*", name, f"{field}{index}", matrix.buffer)
    strides = {f"{name}_stride": matrix.row_stride, f"{name}_batch": matrix.batch_stride}
    found = [replace(p, field=f"{field}_{p.name.rsplit('_')[-1]}{index}") for p in numbers("long long", **strides)]
    return [pointer, *found]
