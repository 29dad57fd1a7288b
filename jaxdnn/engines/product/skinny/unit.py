"""The unit and the launch of a skinny product."""

from jaxdnn.engines.product.element_epilogue import ElementEpilogue, ctype
from jaxdnn.engines.product.problem import Matrix
from jaxdnn.engines.product.skinny.knobs import SkinnyKnobs, SkinnyProduct
from jaxdnn.engines.product.tma import PROMOTE_128, operand_map
from jaxdnn.engines.unit import (
    Parameter,
    Stage,
    arguments,
    entry_text,
    map_parameter,
    numbers,
    shared_memory_text,
    struct_text,
)
from jaxdnn.plan import Launch
from jaxdnn.pointwise.cuda import register_type


def multiply(one: SkinnyProduct, knobs: SkinnyKnobs, epilogue: ElementEpilogue) -> Stage:
    """The kernel that multiplies, and the epilogue of each element."""
    product = one.product
    types = {
        **epilogue.types(),
        "Streamed": ctype(one.streamed[0].dtype),
        "Stationary": ctype(one.stationary.dtype),
        "Accumulator": ctype(register_type(product.accumulator)),
    }
    constants = {
        "StreamedMnMajor": one.streamed_mn_major,
        "StationaryMnMajor": one.stationary_mn_major,
        "Swapped": one.swapped,
        "Accumulators": len(one.streamed),
        "Tile": knobs.tile,
        "Stationary": one.width,
        "Stages": knobs.stages,
        "Splits": knobs.split_k,
        "Once": product.batch == 1 or one.streamed[0].batch_stride != 0,
    }

    def parameter(name: str, field: str, matrix: Matrix, along: bool, extent: int) -> Parameter:
        # 57.0 us against 59.4 with promotion to 256 bytes, at 16 x 28672 x 4096.
        argument = operand_map(matrix, product.batch, along, extent, l2_promotion=PROMOTE_128)
        return map_parameter(name, field, argument)

    found = [
        parameter(f"streamed{i}", f"streamed[{i}]", matrix, one.streamed_mn_major, knobs.tile)
        for i, matrix in enumerate(one.streamed)
    ]
    found.append(parameter("stationary", "stationary", one.stationary, one.stationary_mn_major, one.width))
    found += epilogue.parameters()
    found += numbers(rows=one.rows, columns=one.columns, k=product.k, tiles=one.tiles(knobs))
    if product.batch > 1:
        streamed, stationary = (int(matrix.batch_stride != 0) for matrix in (one.streamed[0], one.stationary))
        found += numbers(streamed_batched=streamed, stationary_batched=stationary)
    call, needed = "jaxdnn::ProductSkinny<Config>", one.shared_memory(knobs)
    text = (
        f"\nJAXDNN_WGMMA({one.width});\n\n{epilogue.text()}\n{struct_text('Config', types, constants)}\n"
        f"{shared_memory_text(call, needed)}\n" + entry_text("product_skinny", call, str(one.threads(knobs)), found)
    )
    launch = Launch(
        "product_skinny",
        arguments(found),
        (one.tiles(knobs) * product.batch * knobs.split_k, 1, 1),
        (one.threads(knobs), 1, 1),
        (knobs.split_k, 1, 1),
        needed,
    )
    return Stage(("product/skinny.cuh",), text, (launch,))
