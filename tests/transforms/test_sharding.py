"""Sharded jit: the partitioner splits calls along the dimensions that an op allows, and gathers nothing else."""

import functools
import math
import re

import jax
import pytest
from jax.sharding import AxisType

from checking.cases import TABLE
from checking.compare import as_tuple, assert_close
from checking.sharding import collectives, make_mesh, native_calls, placed
from checking.transforms import vjp, with_cotangents

each_row = pytest.mark.parametrize("row", TABLE.split, ids=str)


def only_forward(function, primals, cotangents):
    del cotangents
    return function(*primals)


def compile_and_check(mesh, row, transform):
    """The text of the program of `transform`, after its results are checked."""
    primals, cotangents = with_cotangents(row.case)
    with jax.set_mesh(mesh):
        primals = placed(mesh, row.operands, primals)
        cotangents = placed(mesh, row.outputs, cotangents) if row.outputs else cotangents
        compiled = jax.jit(functools.partial(transform, as_tuple(row.case.call))).lower(primals, cotangents).compile()
        assert_close(compiled(primals, cotangents), transform, row.case, with_cotangents)
    return compiled.as_text()


def share(shape, spec):
    """How many elements of an array one device has."""
    return math.prod(shape) // 2 ** len(jax.tree.leaves(tuple(spec)))


@each_row
def test_forward(cpus, row):
    text = compile_and_check(make_mesh(cpus, AxisType.Auto), row, only_forward)
    if row.sends is None:
        return
    assert set(collectives(text)) == row.sends
    calls = native_calls(text)
    assert len(calls) == row.calls[0]
    if row.outputs and calls:
        specs = zip((*row.case.operands, *row.case.outputs), (*row.operands, *row.outputs), strict=True)
        shares = [share(row.case.shape_of(name), spec) for name, spec in specs]
        sizes = {math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", calls[0])}
        assert shares[0] in sizes
        assert max(sizes) == max(shares), "the custom call works on one device's share"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        pytest.param(row, kind, id=f"{row}-{kind}")
        for row in TABLE.split
        for kind in (AxisType.Auto, AxisType.Explicit)
        if row.explicit or kind == AxisType.Auto
    ],
)
def test_gradient(cpus, row, kind):
    text = compile_and_check(make_mesh(cpus, kind), row, vjp)
    if row.gradient_sends is not None:
        assert set(collectives(text)) == row.gradient_sends
        assert len(native_calls(text)) == row.calls[1], "each device runs its share natively"
