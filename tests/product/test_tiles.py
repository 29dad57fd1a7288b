"""Which operands of an epilogue are tiles, that TMA loads where results leave from."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from checking.product.calls import ProductCase
from checking.product.cases import residual
from checking.targets import H100
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, knobs_reason
from jaxdnn.engines.product.tiles import tile_operands, tile_reason
from jaxdnn.plan import Operand, TensorMap
from jaxdnn.pointwise import Term

ENGINE = Sm90()
RESIDUAL = (("bfloat16", (1, 1, 4096)), ("bfloat16", (1, 4096, 4096)))


# Of (2, 300, 264), with another operand before it.
@pytest.mark.parametrize(
    ("dtype", "shape", "out", "tiles"),
    [
        ("bfloat16", (2, 300, 264), "bfloat16", (1,)),
        ("bfloat16", (1, 300, 264), "bfloat16", (1,)),
        ("float32", (2, 300, 264), "float32", (1,)),
        ("int16", (2, 300, 264), "float16", (1,)),
        ("float32", (2, 300, 264), "bfloat16", ()),  # other elements than those that leave from there
        ("bool", (2, 300, 264), "int8", ()),
        ("bfloat16", (2, 1, 264), "bfloat16", ()),
        ("bfloat16", (2, 300, 1), "bfloat16", ()),
    ],
)
def test_operands_of_the_results_shape_are_tiles(dtype, shape, out, tiles):
    def added(acc, row, full):
        return acc * row + full

    operands = (("float32", (1, 1, 264)), (dtype, shape))
    case = ProductCase(300, 264, 128, "bfloat16", batch=2, out=out, epilogue=added, operands=operands)
    product = case.product()
    assert tile_operands(product) == tiles
    knobs = next(ENGINE.configurations(product, H100))
    assert knobs.fetch == ("tma" if tiles else "direct")
    if tiles:
        maps = [one for one in ENGINE.build(knobs, product, H100).launches[0].arguments if isinstance(one, TensorMap)]
        *_, result, operand = maps
        assert (operand.box, operand.dimensions[2], result.dimensions[2]) == (result.box, shape[0], 2)
        assert operand.dimensions[:2] == result.dimensions[:2] == (264, 300)


def test_each_tile_lies_where_a_result_leaves_from():
    def added(acc, a, b, c):
        return (acc + a).astype(jnp.bfloat16), jnp.sum(acc), acc + b, acc * c

    wide, narrow = ("float32", (1, 300, 264)), ("bfloat16", (1, 300, 264))
    for operands, tiles in (
        ((narrow, wide, wide), (0, 1, 2)),
        ((narrow, narrow, wide), (0, 2)),
        ((wide, narrow, narrow), (1,)),
        ((wide, narrow, wide), (1, 2)),
    ):
        product = ProductCase(300, 264, 128, "bfloat16", out="float32", epilogue=added, operands=operands).product()
        assert tile_operands(product) == tiles


@pytest.mark.parametrize("knobs", [{"store": "direct"}, {"tile_n": 128, "split_k": 2}])
def test_tiles_lie_where_tma_stores_results(knobs):
    product = ProductCase(4096, 4096, 4096, "bfloat16", epilogue=residual, operands=RESIDUAL).product()
    assert knobs_reason(product, Sm90Knobs(fetch="tma"), H100.shared_memory) is None
    said = knobs_reason(product, Sm90Knobs(fetch="tma", **knobs), H100.shared_memory)
    assert "expected store = 'tma' and one split" in (said or "")


def test_what_has_no_tiles_is_refused():
    product = ProductCase(4096, 4096, 4096, "bfloat16").product()
    said = knobs_reason(product, Sm90Knobs(fetch="tma"), H100.shared_memory)
    assert "no operand of the epilogue can be a tile" in (said or "")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"row_stride": 268}, "row stride of it is 536 bytes"),
        ({"batch_stride": 264 * 300 + 4}, "batch stride of it"),
        ({"buffer": Operand(2, 8)}, "starts at byte 8"),
        ({"column_stride": 2}, "its columns are not dense"),
        ({"terms": ((Term(264, 2, 0),), (), ())}, "no rows of a batch"),
    ],
)
def test_what_tma_asks_of_a_tile(fields, said):
    operands = (("bfloat16", (2, 300, 264)),)
    case = ProductCase(300, 264, 128, "bfloat16", batch=2, epilogue=lambda acc, full: acc + full, operands=operands)
    product = case.product()
    (operand,) = product.operands
    assert tile_reason(operand, product) is None
    other = replace(operand, **fields)
    assert said in (tile_reason(other, product) or "")
    assert tile_operands(replace(product, operands=(other,))) == ()
