"""The epilogue of tiles that tensor cores leave in registers, core/epilogue.cuh and what it includes, on the CPU: of
given accumulators, without the kernel that multiplies."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.cases.operands import OPERANDS
from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase, result_types
from checking.product.cases import gated, gelu, looked_up, narrow, several
from checking.product.tolerance import accumulators, check
from jaxdnn.engines.product.length import is_long
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, store_columns
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.unit import Parameter, arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch, Operand, Plan, Scratch
from jaxdnn.planning.calls import find_calls
from jaxdnn.pointwise import Functor

# A block of four warps takes a tile of 64 rows, whose accumulators lie in memory as one matrix after the other.
KERNEL = """
template <class Config>
struct GivenTiles {
    using Epilogue = TileEpilogue<Config>;
    const typename Config::Accumulator* accumulators = nullptr;
    OperandAddress operands[Epilogue::kOperands];
    ResultAddress results[Epilogue::kResults];
    int m = 0, n = 0;
};

template <class Config>
void given_tiles(const GivenTiles<Config>& call) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    constexpr int kWidth = Config::kTileN / Config::kAccumulators, kRegisters = kWidth / 2;
    using Epilogue = TileEpilogue<Config>;
    const int warp = threadIdx.x / 32;
    const unsigned shared = ptx::cvta_to_shared(shared_memory), barriers = shared + 4 * Epilogue::kSharedBytes;
    Epilogue epilogue{call.operands, call.results, call.m, call.n,
                      shared + warp * Epilogue::kSharedBytes, barriers + warp * Epilogue::kBarrierBytes};
    if (threadIdx.x == 0) Epilogue::init(barriers, 4);
    __syncthreads();
    // Two tiles after one another, so that stages of shared memory are used again.
    for (int tile = 0; tile < 2; ++tile) {
        const int row = (2 * blockIdx.y + tile) * 64 + warp * 16, column = blockIdx.x * kWidth, batch = blockIdx.z;
        typename Config::Accumulator accumulators[1][Config::kAccumulators * kRegisters] = {};
        for (int s = 0; s < Config::kAccumulators; ++s) {
            const auto* matrix = call.accumulators + (s * gridDim.z + batch) * call.m * call.n;
            for (int i = 0; i < kRegisters; ++i) {
                const auto at = FragmentCoordinate::of_lane(row, column + i / 8 * 16, batch, call.m, call.n);
                const Coordinate element = at.element(i % 8);
                if (element.row >= call.m || element.column >= call.n) continue;
                accumulators[0][s * kRegisters + i] = matrix[element.row * call.n + element.column];
            }
        }
        epilogue.template prefetch<1, kWidth>(row, column, batch);
        epilogue.apply(accumulators, row, column, batch);
    }
    epilogue.finish();
}
"""


class GivenTiles(Unit):
    """What the engine makes of a product, but with the first operand in place of what is multiplied."""

    lines_of_blocks = 0  # a block has one tile

    def _copies(self, product: Product) -> Product:
        return product

    def multiply(
        self, product: Product, epilogue: Functor, config: str, partials: dict[int, tuple[str, Scratch]]
    ) -> None:
        knobs = self.knobs
        constants = {
            "TensorStore": knobs.store == "tma",
            "PairedStore": product.n % 2 == 0,
            "PieceBytes": 0,
            "StoreLines": False,
            "EvictFirst": False,
            "LongEpilogue": is_long(product.program),
            "Swapped": False,
            "OwnLines": self.reductions.own_lines,
            "BlockLines": False,
            "Accumulators": len(product.b),
            "StoreColumns": store_columns(product, knobs),
            "EpilogueStages": knobs.epilogue_stages,
            "TileN": knobs.tile_n * len(product.b),
        }
        self.headers.append("core/epilogue.cuh")
        self.texts += [epilogue.source, struct_text(config, self.traits(product, epilogue), constants), KERNEL]
        found = [Parameter(f"const {product.accumulator}*", "accumulators", "accumulators", Operand(0))]
        found += self.result_parameters(product, knobs, product.batch, partials) + self.operand_parameters(product)
        found += numbers(m=product.m, n=product.n)
        stages = (max(1024, 16 * store_columns(product, knobs) * result.itemsize) for result in product.stored)
        shared = 4 * knobs.epilogue_stages * sum(stages, 8) if knobs.store == "tma" else 0
        self.texts.append(entry_text("given_tiles", f"GivenTiles<{config}>", "128", found, "given_tiles_of"))
        self.launches.append(
            Launch(
                "given_tiles_of",
                arguments(found),
                grid=(math.ceil(product.n / knobs.tile_n), math.ceil(product.m / 128), product.batch),
                block=(128, 1, 1),
                shared_memory=shared,
            )
        )


def plan_of(product: Product, knobs: Sm90Knobs) -> Plan:
    unit = GivenTiles(product, knobs, 1)
    return Plan(unit.text, "sm_90a", tuple(unit.launches), tuple(unit.scratch))


def long(acc, bias):
    return jnp.sin(acc) + jnp.arctan2(acc, bias)


def several_stored(acc, bias):
    return acc + bias, acc.astype(jnp.bfloat16), acc > 0


def reductions(acc, full):
    """Of values that the zeros outside of the matrix would change."""
    product = acc * full
    return (
        product,
        jnp.max(1 - jnp.abs(acc)),
        jnp.sum(product + 1, axis=1),
        jnp.min(jnp.abs(acc), axis=2),
        jnp.sum(product, axis=(0, 1)),
        jnp.max(acc.astype(jnp.int32), axis=(1, 2)),
    )


def residual(acc, bias, added):
    return acc * bias + added


def mixed_tiles(acc, narrow, row, wide, byte, half):
    """Of which the first and the last result take the place of tiles, and a reduction between them does not."""
    half_result = (acc + half).astype(jnp.bfloat16)
    return half_result, jnp.sum(acc * wide, axis=2), acc * row + wide, (acc * narrow + byte).astype(jnp.float16)


TABLES = (("float32", (1, 37, 9)), ("bfloat16", (1, 9, 42)), ("int8", (1, 37, 1)), ("uint8", (1, 1, 42)))
DIRECT = Sm90Knobs(tile_m=64, tile_n=32, consumers=1, store="direct")
TMA = replace(DIRECT, tile_n=64, store="tma")
TILES = replace(TMA, tile_n=128, fetch="tma")
RESIDUAL = (("bfloat16", (1, 1, 136)), ("bfloat16", (2, 150, 136)))
SMALL_RESIDUAL = (("float32", (1, 1, 72)), ("bfloat16", (1, 70, 72)))
SHARED_RESIDUAL = (("bfloat16", (1, 1, 136)), ("bfloat16", (1, 150, 136)))
WIDE_RESIDUAL = (("bfloat16", (1, 1, 132)), ("float32", (2, 150, 132)))
MIXED_TILES = (
    ("float16", (2, 70, 136)),
    ("float32", (1, 1, 136)),
    ("float32", (1, 70, 136)),
    ("int8", (2, 70, 136)),
    ("bfloat16", (2, 70, 136)),
)
MIXED = (("bfloat16", (1, 1, 41)), ("float32", (2, 37, 41)), ("int8", (1, 37, 1)), ("bool", (1, 1, 1)))
PRODUCTS = {
    "odd": (ProductCase(37, 41, 8, epilogue=several, batch=2, operands=MIXED), DIRECT),
    "pairs": (ProductCase(150, 42, 8, epilogue=gelu, batch=2, operands=(("bfloat16", (2, 150, 42)),)), DIRECT),
    "long": (ProductCase(37, 42, 8, epilogue=long, operands=(("float32", (1, 1, 42)),)), DIRECT),
    "gated": (ProductCase(70, 41, 8, epilogue=gated, accumulators=2), DIRECT),
    "looked up": (ProductCase(37, 42, 8, epilogue=looked_up, operands=TABLES), DIRECT),
    "narrow": (ProductCase(37, 42, 8, epilogue=narrow), DIRECT),
    "reductions": (ProductCase(37, 41, 8, epilogue=reductions, batch=2, operands=(("float32", (2, 37, 41)),)), DIRECT),
    "tma": (ProductCase(150, 48, 8, epilogue=several_stored, batch=2, operands=(("float32", (1, 1, 48)),)), TMA),
    "tma of 16 bits": (ProductCase(150, 136, 8, "bfloat16"), TMA),
    "tiles": (ProductCase(150, 136, 8, "bfloat16", epilogue=residual, batch=2, operands=RESIDUAL), TILES),
    "tiles, one stage": (
        ProductCase(70, 72, 8, "bfloat16", epilogue=residual, operands=SMALL_RESIDUAL),
        replace(TILES, epilogue_stages=1),
    ),
    "tiles, broadcast": (
        ProductCase(150, 136, 8, "bfloat16", epilogue=residual, batch=2, operands=SHARED_RESIDUAL),
        TILES,
    ),
    "tiles of 32 bits": (
        ProductCase(150, 132, 8, epilogue=residual, batch=2, operands=WIDE_RESIDUAL),
        replace(TILES, epilogue_stages=3),
    ),
    "tiles of several sizes": (ProductCase(70, 136, 8, epilogue=mixed_tiles, batch=2, operands=MIXED_TILES), TILES),
}
LOADS = {name: case for name, case in OPERANDS.items() if name != "large batch with one modulus"}


@functools.cache
def problem_of(name: str) -> Product:
    types = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in LOADS[name].arrays()]
    (call,) = find_calls(LOADS[name].call, *types)
    assert isinstance(call.problem, Product)
    return call.problem


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Emulated:
    plans = [plan_of(case.product(), knobs) for case, knobs in PRODUCTS.values()]
    plans += [plan_of(problem_of(name), DIRECT) for name in LOADS]
    return Emulated(plans, tmp_path_factory.mktemp("epilogue"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_results(name, kernels):
    case, _ = PRODUCTS[name]
    product, arrays = case.product(), case.arrays()
    given = np.stack([one.exact for one in accumulators(case, arrays)]).astype(case.accumulator)
    results = [np.zeros(one.shape, one.dtype) for one in result_types(product)]
    kernels.run(list(PRODUCTS).index(name), [given, *arrays[1:]], results)
    check(case, results)


@pytest.mark.parametrize("name", ["tiles", "tiles, one stage", "tiles of 32 bits"])
def test_a_result_takes_the_place_of_a_tile(name, kernels):
    case, _ = PRODUCTS[name]
    arrays = case.arrays()
    given = np.stack([one.exact for one in accumulators(case, arrays)]).astype(case.accumulator)
    results = [np.zeros(one.shape, one.dtype) for one in result_types(case.product())]
    kernels.run(list(PRODUCTS).index(name), [given, *arrays[1:]], results, {3: 0})
    check(case, results)


@pytest.mark.parametrize("name", LOADS)
def test_operands(name, kernels):
    """Parts of coordinates, and tables, which are looked up inside of the matrix alone."""
    a, b, *operands = LOADS[name].arrays()
    given = np.matmul(a, b)
    results = [np.zeros(given.shape, np.float32)]
    kernels.run(len(PRODUCTS) + list(LOADS).index(name), [given, b, *operands], results)
    want = LOADS[name].epilogue(*map(jnp.asarray, (given, *operands)))
    np.testing.assert_allclose(results[0], want, rtol=1e-5, atol=1e-5)
