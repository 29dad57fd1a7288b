"""What kernels for a GPU are told of an epilogue's operands: that it is where their elements lie."""

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.cases.operands import OPERANDS
from checking.targets import H100
from jaxdnn.engines.pointwise.pointwise import _scattered
from jaxdnn.engines.product.element_epilogue import ElementEpilogue
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.plan import Operand
from jaxdnn.planning.calls import find_calls
from jaxdnn.pointwise import Term, functor


def offsets(operand, extents):
    """Of an operand's element for each one of the output's."""
    found = np.full(extents, operand.buffer.offset // np.dtype(operand.dtype).itemsize)
    strides = (operand.batch_stride, operand.row_stride, operand.column_stride)
    for places, stride, terms in zip(np.indices(extents), strides, operand.terms, strict=True):
        found += places * stride
        for term in terms:
            quotient = places // term.divisor
            found += (quotient % term.modulus if term.modulus else quotient) * term.stride
    return found


def test_pairs_of_columns_are_words():
    """Of dense columns, if all that moves the beginning of a row is even."""
    ways = [*((stride, ()) for stride in range(4)), (0, (Term(3, 1, 2),)), (0, (Term(4, 2, 0), Term(2, 1, 2)))]
    for offset, (batch, of_batch), (row, of_row) in itertools.product((0, 2, 4), ways, ways):
        operand = EpilogueOperand(Operand(0, offset), "bfloat16", "full", batch, row, 1, (of_batch, of_row, ()))
        assert operand.pairs == (not (offsets(operand, (2, 3, 4))[..., ::2] % 2).any()), operand


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_vector_is_neighbours_in_every_row(width):
    """Of columns that repeat, too, unless a row begins within a vector."""
    of_columns = [(Term(1, 1, n),) for n in (3, 4, 6, 8, 12)]
    of_columns += [(Term(1, 2, 0),), (Term(2, 1, 4),), (Term(1, 4, 3),), (Term(1, 1, 4), Term(1, 8, 0))]
    ways = [*((stride, ()) for stride in (0, 4, 8, 12)), (0, (Term(6, 1, 2),)), (0, (Term(8, 2, 0),))]
    for terms, (batch, of_batch), (row, of_row) in itertools.product(of_columns, ways, ways):
        operand = EpilogueOperand(Operand(0), "float32", "full", batch, row, 0, (of_batch, of_row, terms))
        found = offsets(operand, (3, 4, 24)).reshape(-1, width)
        vectors = (np.diff(found, axis=1) == 1).all() and not (found[:, 0] % width).any()
        assert _scattered(operand, width) != vectors, operand


def of_columns(operand, epilogue):
    """A product whose columns are two dimensions, with an operand of the epilogue."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((10, 8), (8, 4, 6), operand)]

    def call(a, b, operand):
        return jaxdnn.dot_general(a, b, (((1,), (0,)), ((), ())), operands=[operand], epilogue=epilogue)

    return call, arrays


CALLS = {name: (one.call, one.arrays()) for name, one in OPERANDS.items()} | {
    "columns": of_columns((4, 6), lambda acc, x: acc + x),
    "columns of each row": of_columns((10, 4, 6), lambda acc, x: acc + x),
    "first part of columns": of_columns((4, 1), lambda acc, x: acc + x),
    "first part of columns, each row": of_columns((10, 4, 1), lambda acc, x: acc + x),
    "last part of columns": of_columns((6,), lambda acc, x: acc + x),
    "transposed columns": of_columns((6, 4), lambda acc, x: acc + x.T),
    "columns before rows": of_columns((4, 6, 10), lambda acc, x: acc + x.transpose(2, 0, 1)),
    "table of columns": of_columns((9, 6), lambda acc, x: acc + x[jnp.arange(4) + 2]),
}


def on_sm90(name):
    """The product of a call, and its unit, whose threads load all operands."""
    function, arrays = CALLS[name]
    (call,) = find_calls(function, *arrays)
    product = replace(call.problem, exact=False)
    knobs = replace(next(Sm90().configurations(product, H100)), fetch="direct")
    return product, Unit(product, knobs, H100.sm_count)


@pytest.mark.parametrize("name", CALLS)
def test_columns_of_operands_lie_as_the_code_says(name):
    product, unit = on_sm90(name)
    types = unit.traits(product, functor(product.program))["Operands"]
    said = re.findall(r"EpilogueOperand<\w+, Broadcast::\w+(?:, Columns::(\w+))?>", types)
    for operand, lie in zip(product.operands, said, strict=True):
        columns = lie or "single"
        assert (columns == "table") == bool(operand.gathered)
        if columns in ("pairs", "single") and operand.broadcast in ("row", "full"):
            found = offsets(operand, (product.batch, product.m, product.n))
            assert (np.diff(found) == 1).all()
            assert columns == "single" or not (found[..., ::2] % 2).any()


@pytest.mark.parametrize("name", CALLS)
def test_engines_tell_their_kernels_the_same_of_operands(name):
    """But for the stride of dense columns, which sm90's code knows, unless it looks them up."""
    product, unit = on_sm90(name)
    element = ElementEpilogue(functor(product.program), product.operands, ())
    dense = {i for i, one in enumerate(product.operands) if one.column_stride == 1 and not one.gathered}
    told = {one.field for one in element.parameters()} - {f"operands[{i}].column_stride" for i in dense}
    assert {one.field for one in unit.operand_parameters(product)} == told
