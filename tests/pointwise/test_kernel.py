"""The kernel of pointwise functions of arrays: what it plans, and its own text, run on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import refusal
from checking.cases.dtypes import BF16, F16, F32, F64
from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.pointwise.tolerance import APPROXIMATE, OPERATION, exact_and_tolerance, wrong_elements
from checking.targets import A100, H100
from jaxdnn import device
from jaxdnn.engines.pointwise.pointwise import PointwiseEngine, PointwiseKnobs
from jaxdnn.planning.calls import find_calls

ENGINE = PointwiseEngine()


def gelu(acc, bias):
    return jax.nn.gelu(acc + bias)


def summed(acc, bias):
    y = jax.nn.silu(acc + bias)
    return y, jnp.sum(y, axis=-2)


def gated(acc, bias, gate):
    return jax.nn.gelu(acc + bias) * gate


# Of a, of b, their dtype, the epilogue, its operands; and the places of axes that the derivative is mapped over.
CASES = {
    "gelu": ((64, 40), (40, 96), BF16, gelu, [((96,), BF16)]),
    "gelu, float32 bias": ((37, 24), (24, 264), BF16, gelu, [((264,), F32)]),
    "float32": ((37, 24), (24, 130), F32, gelu, [((130,), F32)]),
    "float16": ((9, 8), (8, 35), F16, gelu, [((35,), F16)]),
    "float64": ((21, 8), (8, 36), F64, gelu, [((36,), F64)]),
    "rows in two dimensions": ((3, 17, 8), (8, 24), BF16, gelu, [((24,), BF16)]),
    "batch": ((3, 17, 8), (3, 8, 24), BF16, gelu, [((3, 1, 24), BF16)]),
    "bias of a batch": ((3, 17, 8), (3, 8, 24), BF16, gelu, [((24,), F32)]),
    "sum": ((33, 8), (8, 20), F32, summed, [((20,), F32)]),
    "two sums": ((33, 8), (8, 20), F32, gated, [((20,), F32), ((20,), F32)]),
    "one column": ((33, 8), (8, 1), BF16, gelu, [((1,), BF16)]),
    "mapped a": ((5, 8), (8, 24), BF16, gelu, [((24,), F32)], (0, None, None)),
    "mapped bias": ((5, 8), (8, 24), F32, gelu, [((24,), F32)], (None, None, 0)),
    "mapped twice": ((5, 8), (8, 24), F32, summed, [((24,), F32)], (0, None, None), (None, 0, 0)),
}


def function_of(name):
    a, b, dtype, epilogue, operands, *mapped = CASES[name]

    def backward(*arrays):
        y, pull_back = jax.vjp(lambda *given: jaxdnn.matmul(*given, epilogue=epilogue), *arrays)
        return pull_back(jax.tree.map(lambda one: jnp.sin(one.astype(jnp.float32)).astype(one.dtype), y))

    arrays = [(a, dtype), (b, dtype), *operands]
    for size, axes in enumerate(mapped, 2):
        backward = jax.vmap(backward, axes)
        pairs = zip(arrays, axes, strict=True)
        arrays = [(shape if axis is None else (size, *shape), dtype) for (shape, dtype), axis in pairs]
    return backward, arrays


def call_of(name):
    """The call of the pointwise op in the derivative of a case."""
    function, arrays = function_of(name)
    found = find_calls(function, *(jax.ShapeDtypeStruct(*one) for one in arrays))
    return next(call for call in found if call.spec.op == "epilogue")


@pytest.mark.parametrize("target", [A100, H100], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", CASES)
def test_it_serves(name, target):
    call = call_of(name)
    assert refusal(ENGINE, call, target) is None
    assert len(list(ENGINE.configurations(call.problem, target))) >= 3


@pytest.mark.parametrize("target", [A100, H100], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", CASES)
def test_configurations_compile(name, target):
    call = call_of(name)
    offered = list(ENGINE.configurations(call.problem, target))
    for knobs in offered if target is H100 else offered[:1]:
        compile_checked(ENGINE.build(knobs, call.problem, target), knobs)


def plan_of_few_threads(name):
    """With few threads along the columns, so that there are edges in both directions."""
    call = call_of(name)
    rows = 4 if list(CASES).index(name) % 2 else 1
    width = next(iter(ENGINE.configurations(call.problem, H100))).width
    knobs = PointwiseKnobs(width, 8 if rows == 1 else 2, rows, blocks=1)
    target = device.Target("cuda", "sm_90", "few multiprocessors", 3)
    return ENGINE.build(knobs, call.problem, target)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return Emulated([plan_of_few_threads(name) for name in CASES], tmp_path_factory.mktemp("pointwise"))


@pytest.mark.parametrize("name", CASES)
def test_results(name, emulated):
    call = call_of(name)
    random = np.random.default_rng(0)
    types = call.signature.operands.values()
    operands = [np.asarray(random.normal(size=one.shape)).astype(one.dtype) for one in types]
    results = [np.zeros(one.shape, one.dtype) for one in call.signature.results.values()]
    emulated.run(list(CASES).index(name), operands, results, call.spec.aliases(call.signature))
    expected = exact_and_tolerance(call.spec.evaluate, operands, APPROXIMATE if call.problem.approximate else OPERATION)
    for got, (exact, tolerance), result in zip(results, expected, call.spec.results, strict=True):
        wrong = wrong_elements(got, exact, tolerance)
        assert not wrong.any(), f"{result}: {wrong.sum()} of {wrong.size} elements are wrong"


def test_units_are_short():
    call = call_of("gelu")
    plan = ENGINE.build(next(iter(ENGINE.configurations(call.problem, H100))), call.problem, H100)
    assert len(plan.unit.splitlines()) <= 60
