"""The text of the norm kernels, run on the CPU: every way in which a row is laid over threads, of few threads."""

import functools
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from checking.calls import calls_of
from checking.cases import BF16, F16, F32, F64, NormCase
from checking.compare import compare
from checking.emulation.plans import Emulated
from checking.targets import H100
from checking.tolerance import exact_and_tolerance
from checking.transforms import vjp
from jaxdnn.engines.norm.direct.engine import DirectNorm
from jaxdnn.engines.norm.direct.knobs import NormKnobs
from jaxdnn.engines.norm.problem import Rows

ENGINE = DirectNorm()
# So few that blocks stride over the rows.
TARGET = replace(H100, sm_count=2)
MAPPED = 4  # elements, as in `calls_of`


def layer(*shape, **fields):
    return NormCase("layer_norm", shape, **fields)


def rms(*shape, **fields):
    return NormCase("rms_norm", shape, **fields)


@dataclass(frozen=True)
class Run:
    """A case, under vmap with the in_axes `mapped`, and the knobs of its forward and its backward pass."""

    case: NormCase
    forward: NormKnobs
    backward: NormKnobs
    mapped: tuple[int | None, ...] | None = None


PARAMETERS = {"scale": F32, "bias": F32}
RUNS = {
    "one column": Run(layer(37, 1, **PARAMETERS), NormKnobs(1, 1, 1, 32, turns=1), NormKnobs(1, 1, 1, 32)),
    "rows of one block": Run(
        layer(3, 36, x=BF16, scale=BF16, bias=F16),
        NormKnobs(4, 3, 4, 8, turns=1),
        NormKnobs(4, 2, 8, 4),
    ),
    "odd": Run(
        layer(17, 31, x=BF16, scale=BF16, bias=BF16),
        NormKnobs(1, 8, 4, 8, turns=1, parameters="memory"),
        NormKnobs(1, 8, 4, 16),
    ),
    "everything": Run(
        layer(13, 36, scale=BF16, bias=F16, residual=BF16, statistics=True, scale_offset=1.0),
        NormKnobs(4, 3, 4, 8, turns=2),
        NormKnobs(4, 2, 8, 4),
    ),
    "everything, in stages": Run(
        layer(13, 36, scale=F32, bias=F32, residual=F32, statistics=True, scale_offset=1.0),
        NormKnobs(4, 2, 8, 4, stages=2, turns=3, parameters="shared"),
        NormKnobs(4, 2, 8, 4, stages=2, parameters="shared", hold=False),
    ),
    "rows of two warps": Run(
        layer(13, 260, data="large_mean", **PARAMETERS),
        NormKnobs(4, 2, 64, 2, stages=3, parameters="shared"),
        NormKnobs(4, 2, 64, 2, stages=2, hold=False),
    ),
    "whole rows of two warps": Run(
        layer(11, 256, data="large_mean", statistics=True, **PARAMETERS),
        NormKnobs(4, 1, 64, 2, stages=2),
        NormKnobs(4, 1, 64, 2, stages=2),
    ),
    "whole rows, prefetched": Run(
        layer(11, 256, x=BF16, residual=BF16, **PARAMETERS),
        NormKnobs(4, 2, 32, 2, turns=1, prefetch=1),
        NormKnobs(4, 2, 32, 2, blocks_per_sm=2, parameters="memory"),
    ),
    "parameters ahead": Run(
        rms(7, 259, x=BF16, scale=F32),
        NormKnobs(1, 5, 64, 1, turns=2, parameters="memory", ahead=2),
        NormKnobs(1, 5, 64, 1, parameters="memory"),
    ),
    "many partial sums a lane": Run(
        rms(25, 2052, x=BF16, scale=F32),
        NormKnobs(4, 9, 64, turns=1),
        NormKnobs(4, 9, 64, blocks_per_sm=12),
    ),
    "float16": Run(
        rms(9, 36, x=F16, scale=F16, residual=F16, statistics=True),
        NormKnobs(4, 3, 4, 8, stages=1, turns=1),
        NormKnobs(4, 3, 4, 8, stages=1),
    ),
    "float64": Run(
        layer(5, 36, x=F64, scale=F64, bias=F64, residual=F64, statistics=True),
        NormKnobs(2, 5, 4, 8, turns=1),
        NormKnobs(2, 1, 32, 2),
    ),
    "cluster": Run(
        layer(5, 260, scale=F32, bias=F32, residual=BF16, statistics=True),
        NormKnobs(4, 1, 64, turns=3, splits=2),
        NormKnobs(4, 1, 64, splits=2),
    ),
    "cluster of whole rows": Run(
        layer(5, 512, data="large_mean", **PARAMETERS),
        NormKnobs(4, 1, 32, stages=2, turns=3, splits=4),
        NormKnobs(4, 1, 32, stages=2, splits=4),
    ),
    "cluster, a row ahead": Run(
        rms(9, 520, x=BF16, scale=F32),
        NormKnobs(4, 2, 32, stages=1, turns=4, splits=4, parameters="memory"),
        NormKnobs(4, 2, 32, stages=2, splits=4, hold=False),
    ),
    "cluster, float64": Run(
        rms(3, 130, x=F64, scale=F64), NormKnobs(2, 2, 32, turns=2, splits=2), NormKnobs(2, 2, 32, splits=2)
    ),
    "launches": Run(
        layer(5, 196, residual=F32, statistics=True, data="large_mean", **PARAMETERS),
        NormKnobs(4, 1, 32, turns=2, splits=2, join="launches"),
        NormKnobs(4, 1, 32, splits=2, join="launches"),
    ),
    "launches, in groups": Run(
        layer(3, 196, data="large_mean", **PARAMETERS),
        NormKnobs(4, 1, 32, turns=2, splits=2, join="launches"),
        NormKnobs(4, 1, 32, splits=2, join="launches"),
        mapped=(0, 0, None),
    ),
    "launches of one block": Run(
        layer(7, 260, x=BF16, scale=BF16, bias=F16),
        NormKnobs(4, 1, 32, turns=2, splits=3, join="launches"),
        NormKnobs(4, 1, 32, splits=3, stages=2, join="launches"),
    ),
    "launches in stages": Run(
        layer(7, 196, x=BF16, residual=F32, statistics=True, data="large_mean", **PARAMETERS),
        NormKnobs(4, 1, 32, turns=4, splits=2, stages=2, join="launches"),
        NormKnobs(4, 1, 32, turns=3, splits=2, stages=2, join="launches"),
    ),
    "skewed": Run(
        layer(13, 131, x=BF16, residual=BF16, statistics=True, data="large_mean", **PARAMETERS),
        NormKnobs(4, 2, 32, 2, turns=3),
        NormKnobs(4, 2, 32, 2),
    ),
    "skewed, eight rows in stages": Run(
        rms(70, 139, x=BF16, scale=BF16),
        NormKnobs(4, 2, 32, 8, stages=2, turns=8),
        NormKnobs(4, 2, 32, 8, stages=2),
    ),
    "narrow rows of half a warp": Run(
        layer(41, 61, x=BF16, scale=BF16, bias=BF16, statistics=True),
        NormKnobs(1, 4, 16, 16, turns=1),
        NormKnobs(1, 4, 16, 16),
    ),
    "skewed, in stages": Run(
        layer(27, 261, x=F16, scale=F16, bias=F16, data="large_mean"),
        NormKnobs(8, 1, 64, 2, stages=2, turns=3),
        NormKnobs(8, 1, 64, 2, stages=2, hold=False),
    ),
    "skewed, in a cluster": Run(
        layer(9, 259, x=BF16, scale=BF16, bias=F32, residual=F32),
        NormKnobs(4, 2, 32, turns=2, splits=2, parameters="memory", ahead=1),
        NormKnobs(4, 2, 32, splits=2),
    ),
    "skewed, in launches": Run(
        layer(21, 259, x=BF16, residual=BF16, statistics=True, data="large_mean", **PARAMETERS),
        NormKnobs(8, 1, 32, turns=2, splits=3, stages=2, join="launches"),
        NormKnobs(8, 1, 32, turns=2, splits=3, stages=1, join="launches"),
    ),
    "skewed, prefetched, in groups": Run(
        layer(4, 133, residual=F32, **PARAMETERS),
        NormKnobs(4, 2, 32, 2, turns=1, prefetch=1),
        NormKnobs(4, 2, 32, 2),
        mapped=(0, None, 0, 0),
    ),
    "rms launches, in groups": Run(
        rms(3, 196, x=BF16, scale=F32, residual=F32),
        NormKnobs(4, 1, 32, turns=1, splits=2, join="launches"),
        NormKnobs(4, 1, 32, splits=2, join="launches"),
        mapped=(0, None, 0),
    ),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    plans = []
    for run in RUNS.values():
        for call, knobs in zip(calls_of(run.case, run.mapped), (run.forward, run.backward), strict=True):
            assert isinstance(call.problem, Rows)
            plans.append(ENGINE.build(knobs, call.problem, TARGET))
    return Emulated(plans, tmp_path_factory.mktemp("norm"))


def arguments(run):
    """Primals and cotangents, of several elements along axes that are mapped."""
    if run.mapped is None:
        return run.case.primals(), run.case.cotangents()
    cases = [run.case.replace(seed=seed) for seed in range(MAPPED)]
    primals = zip(run.mapped, zip(*(case.primals() for case in cases), strict=True), strict=True)
    cotangents = zip(*(case.cotangents() for case in cases), strict=True)
    return (
        tuple(arrays[0] if axis is None else np.stack(arrays, axis) for axis, arrays in primals),
        tuple(map(np.stack, cotangents)),
    )


@pytest.mark.parametrize("name", RUNS)
def test_results(name, kernels):
    run, number = RUNS[name], 2 * list(RUNS).index(name)
    primals, cotangents = arguments(run)
    arrays = dict(zip(run.case.operands, primals, strict=True))
    given = {f"d_{name}": array for name, array in zip(run.case.outputs, cotangents, strict=True)}
    for i, call in enumerate(calls_of(run.case, run.mapped)):
        if i == 1:  # the backward pass sees the sum
            arrays |= {"x": arrays.get("sum", arrays["x"]), **given}
        results = {name: np.zeros(of.shape, of.dtype) for name, of in call.signature.results.items()}
        operands = [arrays[name].reshape(of.shape) for name, of in call.signature.operands.items()]
        kernels.run(number + i, operands, list(results.values()))
        arrays |= results

    gradients = {name: arrays["d_x" if name == "residual" else f"d_{name}"] for name in run.case.operands}
    got = (
        tuple(arrays[name] for name in run.case.outputs),
        tuple(gradients[name].astype(dtype) for name, dtype in run.case.dtypes.items()),
    )

    def transform(function, primals, cotangents):
        of_one = functools.partial(vjp, function)
        return (
            of_one(primals, cotangents)
            if run.mapped is None
            else jax.vmap(of_one, (run.mapped, 0))(primals, cotangents)
        )

    compare(got, *exact_and_tolerance(transform, run.case, (primals, cotangents)), run.case)
