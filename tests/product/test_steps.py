"""The steps before and after a product's multiplication: the kernels' own text, run on the CPU."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase
from jaxdnn.engines.product import reduce, split_k
from jaxdnn.engines.product.copies import copy_stage
from jaxdnn.engines.product.element_epilogue import element_epilogue
from jaxdnn.engines.product.operands import Copy
from jaxdnn.engines.product.problem import Matrix
from jaxdnn.engines.product.reduce import reduce_stage
from jaxdnn.engines.unit import joined
from jaxdnn.plan import Operand, Plan, Result, Scratch


@dataclass(frozen=True)
class Step:
    """A plan, its operands, and its result, whose rows may have a padding. `overwritten` is an operand's number and
    that of the result whose memory it is: 0, or 1 where it is lost.
    """

    plan: Plan
    operands: tuple[np.ndarray, ...]
    result: np.ndarray
    padding: int = 0
    overwritten: tuple[int, int] | None = None


def plan_of(stage):
    """A plan of one step, which reads the first operand in place of the first scratch buffer."""
    launches = [replace(one, arguments=(Operand(0), *one.arguments[1:])) for one in stage.launches]
    unit = "".join(f'#include "{header}"\n' for header in stage.headers) + stage.text
    return Plan(unit, "sm_90a", tuple(launches), stage.scratch)


def split(dtype: str, m: int, n: int, batch: int, splits: int, resident: int = split_k.RESIDENT) -> Step:
    """Its result takes the place of what is added to it, so that no element may be computed twice."""
    of_c = ("int32" if dtype == "int8" else dtype, (batch, m, n))
    case = ProductCase(m, n, 8, dtype, batch=batch, epilogue=lambda acc, c: acc + acc + c, operands=(of_c,))
    product = case.product()
    epilogue, after = element_epilogue(product, 1)
    assert not after.launches
    acc = np.random.default_rng(0).integers(-9, 9, (batch, splits, m, n)).astype(product.accumulator)
    with pytest.MonkeyPatch.context() as patch:  # with few blocks along rows and matrices, so that they stride
        patch.setattr(split_k, "MAX_GRID_YZ", 2)
        patch.setattr(split_k, "RESIDENT", resident)
        plan = plan_of(split_k.split_stage(product, epilogue, splits))
    c = np.random.default_rng(1).integers(-9, 9, (batch, m, n)).astype(product.results[0].dtype)
    b = c[:0]  # which this step does not read
    return Step(plan, (acc, b, c), (2 * acc.sum(1)).astype(c.dtype) + c, overwritten=(2, 0))


def reduction(kind: str, register: str, extents: tuple[int, int, int], blocks: int = reduce.BLOCKS) -> Step:
    of = f"jaxdnn::ReductionOf<jaxdnn::Reduction::{kind}, {register}>"
    with pytest.MonkeyPatch.context() as patch:  # with few blocks that are enough, of many columns
        patch.setattr(reduce, "BLOCKS", blocks)
        stage = reduce_stage(of, Scratch(0), (Result(0), register), extents, 0)
    launches = [
        replace(one, arguments=tuple(Result(1) if a == Scratch(0) else a for a in one.arguments))
        for one in stage.launches
    ]
    dtype = {"double": np.float64, "float": np.float32}.get(register, np.int32)
    values = np.random.default_rng(0).integers(-999, 999, extents).astype(dtype)
    plan = replace(joined([stage]).plan("sm_90a"), launches=tuple(launches))
    return Step(plan, (values,), getattr(np, kind)(values, axis=1), overwritten=(0, 1))


def copies(dtype: str, shapes: list[tuple[int, int, int]], *, transposed: bool) -> Step:
    """Of matrices that are not aligned, or run along M, whose copies as rows along K, all of one length, lie one behind
    the other.
    """
    size = np.dtype(dtype).itemsize
    arrays, stated, copied, at = [], [], [], 0
    for number, (batch, rows, columns) in enumerate(shapes):
        array = np.random.default_rng(number).integers(-9, 9, (batch, rows, columns)).astype(dtype)
        arrays.append(array)
        copied.append(np.swapaxes(array, 1, 2) if transposed else array)
        lines, length = copied[-1].shape[1:]
        stride = math.ceil(length * size / 16) * 16 // size
        source = Matrix(Operand(number), dtype, rows, columns, columns, rows * columns)
        stated.append(Copy(source, Matrix(Result(0, at), dtype, lines, length, stride, lines * stride), transposed))
        at += batch * lines * stride * size
    (batch,) = {batch for batch, _, _ in shapes}
    whole = np.concatenate([one.reshape(-1, one.shape[-1]) for one in copied])
    return Step(copy_stage(stated, batch).plan("sm_90a"), tuple(arrays), whole, -whole.shape[1] % (16 // size))


STEPS = {
    **{
        f"split {dtype} {sizes}": split(dtype, *sizes)
        for dtype in ("float32", "float64", "int8")
        for sizes in ((5, 3, 5, 2), (70, 1, 1, 6), (7, 257, 1, 5))
    },
    **{
        f"split {dtype} {sizes}, some rows a thread": split(dtype, *sizes, resident=0)
        for dtype, sizes in (("float32", (9, 200, 3, 7)), ("float32", (33, 130, 1, 1)), ("float64", (23, 40, 2, 5)))
    },
    **{
        f"{kind} {extents}": reduction(kind, register, extents)
        for kind, register in (("sum", "double"), ("max", "float"), ("min", "jaxdnn::int32"))
        for extents in ((1, 5000, 1), (3, 37, 1), (2, 9, 3), (1, 130, 33), (2, 8303, 33))  # the last in uneven parts
    },
    **{
        f"sum {extents}, columns of few lanes": reduction("sum", "float", extents, blocks=2)
        for extents in ((1, 1, 700), (1, 3, 700), (3, 8, 300), (1, 20, 300))
    },
    "copy of bytes": copies("int8", [(2, 150, 37)], transposed=True),
    "copy of words": copies("float32", [(1, 37, 44)], transposed=True),
    "copy of rows": copies("float16", [(2, 70, 37)], transposed=False),
    "copies of rows": copies("float16", [(2, 70, 37), (2, 9, 37), (2, 130, 37)], transposed=False),
    "copies of words": copies("float16", [(1, 38, 44), (1, 38, 200)], transposed=True),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return Emulated([step.plan for step in STEPS.values()], tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("name", STEPS)
def test_results(name, kernels):
    step = STEPS[name]
    *outer, columns = step.result.shape
    got = np.zeros((*outer, columns + step.padding), step.result.dtype)
    aliases = dict([] if step.overwritten is None else [step.overwritten])
    lost = [np.empty_like(step.operands[operand]) for operand, result in aliases.items() if result == 1]
    kernels.run(list(STEPS).index(name), step.operands, [got, *lost], aliases)
    np.testing.assert_array_equal(got[..., :columns], step.result)
