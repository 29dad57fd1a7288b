"""Operands that a coordinate has parts of, and tables, in kernels for GPUs: they compile without spills, depend on no
size, and compute the same as the host where a CPU can run them."""

import ctypes
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import refusal
from checking.cases.operands import OPERANDS, OperandCase
from checking.compiler_log import compile_checked, kernels
from checking.emulation.compile import compiled_for_cpu
from checking.emulation.plans import Emulated
from checking.targets import H100
from jaxdnn import _native, device
from jaxdnn.engines.pointwise.pointwise import PointwiseEngine, PointwiseKnobs
from jaxdnn.engines.product.affine import divisor_magic
from jaxdnn.engines.product.simt.engine import Simt
from jaxdnn.engines.product.skinny.engine import Skinny
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.planning.calls import find_calls

ENGINES = {engine.name: engine for engine in (Sm90(), Simt(), Skinny(), PointwiseEngine())}

# ------------------------------------------------------------ division

EDGES = sorted(
    {
        *range(1, 300),
        *(min(2**31 - 1, max(1, 2**i + j)) for i in range(32) for j in (-2, -1, 0, 1, 2)),
        *(2**31 // i + j for i in range(1, 50) for j in (-1, 0)),
    }
    - {2**31}
)


def coordinates(divisor: int) -> np.ndarray:
    """Those around multiples of the divisor, where a quotient that is off would show: few, many and the last ones."""
    last = (2**31 - 1) // divisor
    multiples = {*range(min(last, 40) + 1), *range(max(0, last - 40), last + 1), *(last // i for i in range(1, 40))}
    near = np.array([m * divisor + j for m in multiples for j in (-1, 0, 1)] + [2**31 - 1], np.int64)
    return near[(near >= 0) & (near < 2**31)]


def test_division_is_a_multiplication():
    for divisor in EDGES:
        magic = divisor_magic(divisor)
        x, multiplier, shift = coordinates(divisor), magic & (2**32 - 1), magic >> 32
        assert multiplier < 2**32
        assert shift < 64
        quotient = x.astype(np.uint64) * np.uint64(multiplier) >> np.uint64(shift)
        np.testing.assert_array_equal(quotient.astype(np.int64), x // divisor)


@pytest.mark.parametrize("divisor", [0, -1, 2**31])
def test_divisors_out_of_range(divisor):
    with pytest.raises(ValueError, match="divisor_magic: expected 1"):
        divisor_magic(divisor)


def test_division_on_the_device(tmp_path):
    source = """
    #include "cuda.h"
    #include "core/affine.cuh"
    extern "C" unsigned quotient(long long magic, unsigned x) {
        jaxdnn::Divisor divisor;
        divisor.magic = magic;
        return divisor.quotient(x);
    }
    """
    quotient = compiled_for_cpu(source, tmp_path).quotient
    quotient.argtypes, quotient.restype = (ctypes.c_int64, ctypes.c_uint32), ctypes.c_uint32
    for divisor in EDGES[::7]:
        magic = divisor_magic(divisor)
        for x in coordinates(divisor)[::5].tolist():
            assert quotient(magic, x) == x // divisor


# ------------------------------------------------------------ kernels

# Of the size that each kernel is for.
LARGE = {
    "sm90": (((4, 8, 256, 128), (4, 8, 128, 384)), ((4, 16, 16, 128), (128, 256)), "bfloat16"),
    "simt": (((4, 8, 32, 16), (4, 8, 16, 48)), ((4, 8, 8, 16), (16, 48)), "float32"),
    "skinny": (((4, 2, 32, 128), (4, 2, 128, 384)), ((2, 4, 4, 128), (128, 4096)), "bfloat16"),
}


def scaled(name: str, engine: str) -> OperandCase | None:
    """A case of checking/cases/operands.py whose operands have the same dimensions, of the sizes of a kernel."""
    case, (scores, image, _) = OPERANDS[name], LARGE[engine]
    shapes = scores if len(case.shapes[1]) == 4 else image
    if case.shapes not in (OPERANDS["slopes"].shapes, OPERANDS["position bias"].shapes) or "distances" in repr(
        case.epilogue.__code__.co_names
    ):
        return None
    old = [*case.shapes[0][:-1], case.shapes[1][-1]]
    new = [*shapes[0][:-1], shapes[1][-1]]
    sizes = dict(zip(old, new, strict=True))
    operands = []
    for type_ in case.operands:
        dtype, shape = type_.removesuffix("]").split("[")
        operands.append(f"{dtype}[{','.join(str(sizes.get(int(s), int(s))) for s in shape.split(',') if s)}]")
    return OperandCase(case.epilogue, tuple(operands), shapes)


def call_of(case: OperandCase, dtype: str):
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in case.shapes]
    for type_ in case.operands:
        own, shape = type_.removesuffix("]").split("[")
        types.append(jax.ShapeDtypeStruct(tuple(int(s) for s in shape.split(",") if s), own))
    return next(iter(find_calls(case.call, *types)))


PAIRS = [(engine, name) for engine, name in itertools.product(LARGE, OPERANDS) if scaled(name, engine)]


@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_kernels_compile(engine, name):
    case = scaled(name, engine)
    assert case is not None
    call = call_of(case, LARGE[engine][2])
    reason = refusal(ENGINES[engine], call, H100, slow=True)
    assert reason is None, reason
    for knobs in itertools.islice(ENGINES[engine].configurations(call.problem, H100), 2):
        compile_checked(ENGINES[engine].build(knobs, call.problem, H100), knobs)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")
@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_results_of_a_gpu(engine, name):
    case, dtype = scaled(name, engine), LARGE[engine][2]
    assert case is not None
    a, b, *operands = case.arrays()
    a, b = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
    with jaxdnn.options(engine=engine, fallback=False):
        got = jax.jit(lambda *arrays: jaxdnn.matmul(*arrays, epilogue=case.epilogue))(a, b, *operands)
    with jax.enable_x64(True):
        wide = [jnp.asarray(one, "float64") if jnp.issubdtype(one.dtype, jnp.floating) else one for one in operands]
        want = np.asarray(case.reference(a.astype("float64"), b.astype("float64"), *wide))
    unit = max(float(jnp.finfo(got.dtype).eps), 2e-6)
    error = np.abs(np.asarray(got, np.float64) - want)
    assert np.all(error <= 4 * unit * (np.abs(want) + np.sqrt(a.shape[-1]))), error.max()


@pytest.mark.parametrize("engine", LARGE)
def test_kernels_do_not_depend_on_sizes(engine):
    """A batch or a sequence of another length is the same kernel, with other numbers."""
    dtype, kernel, units, knobs = LARGE[engine][2], ENGINES[engine], set(), None
    for batch, lines in ((2, 40), (3, 48), (5, 64)):
        case = OperandCase(
            lambda acc, b, m: jnp.where(m, acc + b, 0),
            (f"{dtype}[1,4,{lines},256]", f"bool[{batch},1,1,256]"),
            ((batch, 4, lines, 128), (batch, 4, 128, 256)),
        )
        call = call_of(case, dtype)
        knobs = knobs or next(iter(kernel.configurations(call.problem, H100)))
        units.add(kernel.build(knobs, call.problem, H100).unit)
    assert len(units) == 1


# ------------------------------------------------------------ the pointwise kernel, run on the CPU


def backward(case: OperandCase):
    def function(*arrays):
        # Not linear, so that sums are saved.
        y, pull_back = jax.vjp(lambda a, b: jnp.sin(case.call(a, b, *arrays[2:])), *arrays[:2])
        return pull_back(y)

    return function


def nonlinear(case: OperandCase) -> OperandCase:
    return OperandCase(
        lambda acc, *operands: jnp.tanh(case.epilogue(jnp.sin(acc), *operands)), case.operands, case.shapes
    )


@functools.cache
def derivative_of(name):
    case = nonlinear(OPERANDS[name])
    types = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in case.arrays()]
    return next(call for call in find_calls(backward(case), *types) if call.spec.op == "epilogue")


def derivative_plan(name):
    call, engine = derivative_of(name), ENGINES["pointwise"]
    assert refusal(engine, call, H100) is None
    width = next(iter(engine.configurations(call.problem, H100))).width
    target = device.Target("cuda", "sm_90", "few multiprocessors", 3)
    return engine.build(PointwiseKnobs(width, 2, 2, blocks=1), call.problem, target)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return Emulated([derivative_plan(name) for name in OPERANDS], tmp_path_factory.mktemp("derivatives"))


@pytest.mark.parametrize("name", OPERANDS)
def test_derivatives(name, emulated):
    call, number = derivative_of(name), list(OPERANDS).index(name)
    for kernel, (_, spilled) in kernels(_native.compile(emulated.plans[number].unit, "sm_90a").log).items():
        assert not spilled, kernel
    random = np.random.default_rng(0)
    operands = [
        np.asarray(random.normal(size=one.shape) * 3).astype(one.dtype) for one in call.signature.operands.values()
    ]
    results = [np.zeros(one.shape, one.dtype) for one in call.signature.results.values()]
    emulated.run(number, operands, results)
    for got, want in zip(results, call.spec.evaluate(*map(jnp.asarray, operands)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(np.nanmax(np.abs(want))))
