"""The CPU matmul engine: what it computes, on every instruction set that runs here, and what it refuses."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.native_tools import run_python
from checking.product.calls import ProductCase, run
from checking.product.cases import EXACT as CASES
from checking.product.cases import reductions
from checking.product.tolerance import check
from jaxdnn import _native, device
from jaxdnn.engines.product.host.engine import Host
from jaxdnn.engines.product.host.knobs import HostKnobs, streams
from jaxdnn.plan import Constant

ENGINE = Host()
CPU = device._cpu()
ISAS = _native.host()["isas"]

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def compute(case, config=None, isa=CPU.arch, arrays=None):
    product, target = case.product(), replace(CPU, arch=isa)
    assert ENGINE.reason(product, target) is None
    config = config or next(iter(ENGINE.configurations(product, target)))
    plan = replace(ENGINE.build(config, product, target), arch=isa)
    return run(plan, product, case.arrays() if arrays is None else arrays)


def same(results, others):
    return all(one.tobytes() == other.tobytes() for one, other in zip(results, others, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_results(name, isa):
    case = CASES[name]
    results = compute(case, isa=isa)
    check(case, results)
    if isa == CPU.arch:
        assert same(results, compute(case, isa=isa)), "it is not deterministic"


# Tiles that fit nothing.
ODD = {
    "tiles": HostKnobs(rows=7, columns=20, depth=64),
    "one tile": HostKnobs(rows=1000, columns=1000, depth=10048),
    "many panels": HostKnobs(rows=50, columns=130, depth=64),
    "tasks of many tiles": HostKnobs(rows=5, columns=33, depth=128, tiles_per_task=7),
    "splits": HostKnobs(rows=17, columns=31, depth=64, splits=3, tiles_per_task=2),
    "packed a": HostKnobs(rows=19, columns=40, depth=64, pack_a=True),
    "packed b": HostKnobs(rows=19, columns=40, depth=64, pack_b=True),
    "packed, splits": HostKnobs(rows=19, columns=40, depth=128, splits=2, pack_a=True, pack_b=True),
    "streams": HostKnobs(rows=9, columns=35, depth=64, streams=True),
    "streams, splits": HostKnobs(rows=4, columns=300, depth=128, splits=5, streams=True),
}


SOME = [
    *(f"{dtype} {layout}" for dtype in ("float32", "bfloat16", "float64", "int8") for layout in ("nn odd", "tt batch")),
    *("float32 nn", "float64 nn", "float32 gated", "float32 reductions", "bfloat16 gated", "float16 several"),
    *("int8 reductions", "float8_e5m2 nt", "mixed float8"),
]


@pytest.mark.parametrize("knobs", ODD)
@pytest.mark.parametrize("name", SOME)
def test_any_knobs_compute_the_same(name, knobs):
    case = CASES[name]
    if knobs.startswith("streams") and not streams(case.product()):
        pytest.skip("such matrices are packed")
    check(case, compute(case, ODD[knobs]))


@pytest.mark.parametrize("transposed", [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float64", "float8_e5m2"])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 12, 13, 29])
def test_few_rows(m, dtype, transposed):
    out = "float32" if "float8" in dtype else ""
    a, b = transposed
    for n, k in ((1, 1), (3, 130), (77, 67), (300, 513)):
        case = ProductCase(m, n, k, dtype, out=out, a_transposed=a, b_transposed=b, padding=2)
        check(case, compute(case))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("accumulators", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8"])
def test_who_packs_does_not_matter(dtype, accumulators, isa):
    case = ProductCase(301, 500, 700, dtype, accumulators=accumulators, padding=3)
    best = next(iter(ENGINE.configurations(case.product(), replace(CPU, arch=isa))))
    ways = [replace(best, pack_a=a, pack_b=b) for a, b in itertools.product((False, True), repeat=2)]
    first, *others = (compute(case, config, isa) for config in ways)
    assert all(same(first, other) for other in others)


def test_int8_wraps():
    case = ProductCase(3, 40, 140_000, "int8")
    arrays = [np.full(array.shape, -128, np.int8) for array in case.arrays()]
    (result,) = compute(case, arrays=arrays)
    assert (result == np.int64(128 * 128 * 140_000).astype(np.int32)).all()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_nan_and_infinity_stay_in_their_row_and_column(dtype, transposed, streams):
    case = ProductCase(11, 45, 70, dtype, b_transposed=transposed)
    arrays = case.arrays()
    arrays[0][0, 2, 5] = np.nan
    arrays[0][0, 7, 69] = np.inf
    (arrays[1].swapaxes(1, 2) if transposed else arrays[1])[0, 3, 44] = -np.inf
    config = HostKnobs(rows=11, columns=45, depth=128, streams=streams)
    (result,) = compute(case, config, arrays=arrays)
    with np.errstate(invalid="ignore"):
        exact = np.matmul(*case.matrices(arrays))
    result = result[0].astype(np.float64)
    assert np.array_equal(np.isnan(result), np.isnan(exact[0]))
    assert np.array_equal(result[np.isinf(exact[0])], exact[0][np.isinf(exact[0])])
    assert np.isfinite(result[np.isfinite(exact[0])]).all()


@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_tiles_leave_of_a_sum_is_added_in_double(dtype, axes):
    """One is nothing to 2^24 in float32, and here every element is a tile."""
    case = ProductCase(40, 30, 1, dtype, out="float32", batch=5, epilogue=lambda acc: jnp.sum(acc, axis=axes))
    a, b = (np.ones_like(array) for array in case.arrays())
    a[0, 0], b[0, 0, 0] = 2.0**13, 2.0**11
    (result,) = compute(case, HostKnobs(rows=1, columns=1, depth=64), arrays=[a, b])
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64)).sum(axes)
    np.testing.assert_array_equal(result, exact.astype(np.float32))


def test_not_a_number_passes_through_reductions():
    case = CASES["float32 reductions"]
    arrays = case.arrays()
    arrays[0][1, 5, 7] = jnp.nan
    _, largest, by_column, by_row, _, _ = compute(case, arrays=arrays)
    assert np.isnan(largest)
    assert np.isnan(by_column[1]).all()
    assert np.isnan(by_row).sum() == 1


def test_calls_may_run_at_once():
    names = ["float32 nn odd", "bfloat16 nn batch", "float64 gelu", "int8 nt", "float32 reductions", "float16 several"]
    calls = [*itertools.product((CASES[name] for name in names), (None, ODD["packed, splits"]))] * 3

    def compute_here(call):
        with jax.default_device(jax.devices("cpu")[0]):  # which a thread does not inherit
            return compute(*call)

    alone = [compute(*call) for call in calls]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(compute_here, calls))
    assert all(same(*pair) for pair in zip(alone, together, strict=True))


THREADS = """
import os
os.sched_setaffinity(0, {cpus})

import hashlib
import jax, jax.numpy as jnp, numpy as np, jaxdnn

def epilogue(sums):
    return sums, jnp.sum(sums), jnp.sum(sums, axis=0), jnp.max(sums, axis=1)

random = np.random.default_rng(0)
digest = hashlib.sha256()
for m, k, n in ((500, 300, 400), (20, 9000, 30), (3, 5000, 900)):
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    with jaxdnn.options(engine="host"):
        for result in jax.jit(lambda a, b: jaxdnn.matmul(a, b, epilogue=epilogue))(a, b):
            digest.update(np.asarray(result).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system can't restrict a process to a processor")
def test_results_do_not_depend_on_threads():
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("there is one processor")
    printed = {run_python(THREADS.replace("{cpus}", repr(some))).stdout for some in (cpus[:1], cpus)}
    assert len(printed) == 1
    assert len(printed.pop().strip()) == 64


BFLOAT16 = """
import jax.numpy as jnp, numpy as np, jaxdnn

random = np.random.default_rng(0)
a, b = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in ((65, 700), (700, 70)))
with jaxdnn.options(engine="host", knobs={"rows": 65, "columns": 70, "depth": 704}, fallback=False):
    print(np.asarray(jaxdnn.matmul(a, b, preferred_element_type=jnp.float32)).tobytes().hex())
"""


def test_instructions_for_pairs_can_be_ruled_out():
    """Products of bfloat16 are exact in float32, so sums differ only where instructions add pairs of them first."""
    by_isa = {isa: run_python(BFLOAT16, JAXDNN_HOST_ISA=isa) for isa in ("avx512", "baseline")}
    assert by_isa["avx512"].stdout == by_isa["baseline"].stdout != "", by_isa


def test_a_plan_is_what_it_is():
    product = ProductCase(300, 200, 700, "float32").product()
    config = HostKnobs(96, 128, 256, splits=2, tiles_per_task=3, pack_a=True, pack_b=True)
    plan = ENGINE.build(config, product, CPU)
    kernels = [(launch.kernel, launch.grid) for launch in plan.launches]
    assert kernels == [
        ("product_pack", ((4 + 2) * 3, 1, 1)),
        ("product_multiply", (-(-4 * 2 * 2 // 3), 1, 1)),
        ("product_finish", (-(-4 * 2 // 3), 1, 1)),
    ]
    assert plan.scratch == (4 * 3 * 96 * 256 * 4, 2 * 3 * 128 * 256 * 4, 2 * 300 * 200 * 4)
    assert plan.unit == ""
    words = {launch.arguments[0] for launch in plan.launches}
    assert len(words) == 1
    assert isinstance(words.pop(), Constant)


def test_a_small_product_is_one_task():
    product = ProductCase(32, 48, 64, "float32").product()
    config = next(iter(ENGINE.configurations(product, CPU)))
    plan = ENGINE.build(config, product, CPU)
    assert [(launch.kernel, launch.grid) for launch in plan.launches] == [("product_multiply", (1, 1, 1))]
    assert plan.workspace == 0


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_pack_for_themselves_where_many_threads_share_them(dtype, isa):
    product = ProductCase(2048, 2048, 1024, dtype).product()

    def best(threads):
        return next(iter(ENGINE.configurations(product, replace(CPU, arch=isa, sm_count=threads))))

    few, many = best(2), best(64)
    assert few.pack_a
    # Panels that are copies are packed by the multiplications then, with AVX-512 always.
    assert few.pack_b == ((dtype, isa) != ("float32", "avx512"))
    assert not many.pack_a
    assert not many.pack_b


def orders_of_sums(product, limit):
    """Where sums are cut, of the configurations for different numbers of threads."""
    for threads in (0, 1, 2, 5, 16, 200):
        target = replace(CPU, arch="avx512", sm_count=threads)
        plans = ((one, ENGINE.build(one, product, target)) for one in ENGINE.configurations(product, target))
        config = next(config for config, plan in plans if plan.workspace <= limit)
        yield (config.depth, config.splits, *((config.rows, config.columns) if product.reduced else ()))


@pytest.mark.parametrize("limit", [0, 100_000, 400_000, 1_000_000, 10_000_000])
def test_the_order_of_sums_does_not_depend_on_threads(limit):
    for m, n, k in ((300, 64, 6144), (64, 4096, 4096), (700, 900, 300), (40, 30, 9000), (1024, 1024, 1024)):
        assert len(set(orders_of_sums(ProductCase(m, n, k, "float32").product(), limit))) == 1


def test_the_order_of_reductions_does_not_depend_on_threads():
    bias = (("float32", (1, 1, 1024)),)
    case = ProductCase(1024, 1024, 1024, "float32", epilogue=reductions, operands=bias)
    assert len(set(orders_of_sums(case.product(), 10**9))) == 1


@pytest.mark.parametrize("name", ["float32 nn", "float64 nn", "bfloat16 nt", "float32 gelu"])
def test_tiles_of_any_shape_compute_the_same_bits(name):
    shapes = [HostKnobs(rows, columns, depth=64) for rows, columns in ((7, 20), (42, 33), (100, 72), (29, 64))]
    case = CASES[name]
    results = [compute(case, shape) for shape in shapes]
    assert all(same(results[0], others) for others in results[1:])


@pytest.mark.parametrize("shape", [(1024, 1024, 1024), (500, 1100, 1024), (4096, 128, 1024), (2000, 512, 4)])
def test_more_threads_get_no_fewer_tiles(shape):
    product, found = ProductCase(*shape, "float32").product(), []
    for threads in (1, 2, 4, 8, 16, 24, 26, 64, 200):
        config = next(iter(ENGINE.configurations(product, replace(CPU, arch="avx512", sm_count=threads))))
        found.append(-(-product.m // config.rows) * -(-product.n // config.columns))
    assert found == sorted(found)
    assert shape[2] == 4 or found[0] < found[-1]


def test_some_configuration_needs_no_workspace():
    for m, n, k in ((1024, 1024, 1024), (37, 131, 61), (40, 30, 9000), (3, 500, 5000)):
        product = ProductCase(m, n, k).product()
        plans = [ENGINE.build(config, product, CPU) for config in ENGINE.configurations(product, CPU)]
        assert min(plan.workspace for plan in plans) == 0


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float16", "float8_e4m3fn"])
def test_sums_that_leave_their_range(dtype):
    """A cast does not bring back what the sum before it has lost: as in JAX, where no kernel sums more widely."""
    wide = {"int8": "int32", "uint16": "uint32"}.get(dtype, "float32")

    def epilogue(acc):
        return jax.lax.reduce_sum(acc.astype(dtype), (0, 1)).astype(wide)

    ones = jnp.ones((256, 64))
    total = jax.jit(lambda a: jaxdnn.matmul(a, a.T, epilogue=epilogue))(ones)
    plain = jax.jit(lambda a: epilogue(a @ a.T))(ones)
    assert total.dtype == plain.dtype
    np.testing.assert_array_equal(total, plain)
    assert total != 64 * 256**2


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (ProductCase(8, 8, 8, "float64", b_dtype="float32"), "don't multiply float64 by float32"),
        (ProductCase(8, 8, 8, "int16"), "don't multiply int16 by int16"),
        (ProductCase(8, 8, 8, "float32", b_dtype="int8"), "don't multiply float32 by int8"),
    ],
)
def test_reasons(case, said):
    assert said in (ENGINE.reason(case.product(), CPU) or "")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"rows": 0}, "rows must be an int of at least 1; got 0"),
        ({"splits": 1.5}, "splits must be an int of at least 1; got 1.5"),
        ({"depth": 100}, "depth must be a multiple of 64; got 100"),
    ],
)
def test_knobs_are_validated(knobs, said):
    with pytest.raises(ValueError, match=said):
        replace(HostKnobs(64, 64, 64), **knobs)
