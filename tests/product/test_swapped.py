"""Products of few rows on Hopper that are computed transposed: which can be, and that their code computes what is
right, on the CPU and on a GPU.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from checking.compiler_log import compile_checked
from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase
from checking.product.cases import gated, gelu, residual
from checking.product.results import check_emulated, check_plan
from checking.targets import H100
from jaxdnn import device
from jaxdnn.engines.product.operands import swapped
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.heuristic import fitted
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, knobs_reason

ENGINE = Sm90()
GPU = jax.default_backend() == "gpu"
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
COOPERATIVE = Sm90Knobs(tile_m=128, tile_n=80, stages=3, cluster_m=1, epilogue_stages=1, swapped=True)
IN_PARTS = replace(COOPERATIVE, epilogue_stages=2)
INTERLEAVED = replace(COOPERATIVE, tile_n=48, schedule="pingpong")
OF_THREE = replace(COOPERATIVE, tile_m=192, tile_n=112, consumers=3)
WIDEST = replace(IN_PARTS, tile_m=384, tile_n=64, consumers=3)
SHARED = replace(IN_PARTS, tile_n=64, cluster_m=2)


def scaled(acc, scale, bias):
    return jax.nn.gelu(acc * scale + bias)


def sums(acc):
    return acc, jnp.sum(acc, -2), jnp.max(acc * acc, (0, -2))


def shortcut(acc, bias, c):
    return jnp.maximum(acc + bias + c, 0)


def by_row(acc, row, column):
    return acc * column.astype(acc.dtype) + row


def case(m, n, k, dtype="bfloat16", **fields):
    fields.setdefault("out", "bfloat16" if dtype in FLOAT8 else "")
    return ProductCase(m, n, k, dtype, precision="default", **fields)


PRODUCTS = {
    "plain": (case(75, 136, 200), COOPERATIVE),
    "in parts": (case(75, 136, 200), IN_PARTS),
    "narrow": (case(3, 8, 16), COOPERATIVE),
    **{f"{width} columns": (case(247, 136, 72), replace(COOPERATIVE, tile_n=width)) for width in (144, 208, 240)},
    "gelu": (case(150, 264, 136, epilogue=gelu, operands=(("bfloat16", (1, 1, 264)),)), COOPERATIVE),
    "two blocks of rows": (case(101, 520, 136), replace(COOPERATIVE, tile_m=256)),
    "interleaved": (case(101, 272, 136, epilogue=gelu, operands=(("bfloat16", (1, 1, 272)),)), INTERLEAVED),
    "of three": (case(113, 200, 136, "float16"), OF_THREE),
    "widest": (case(40, 520, 136, epilogue=gelu, operands=(("bfloat16", (1, 1, 520)),)), WIDEST),
    "shared": (case(70, 520, 136), SHARED),
    "shared by four": (case(390, 520, 136), replace(SHARED, cluster_n=2)),
    "shared by four, of columns": (case(392, 520, 136, a_transposed=True), replace(SHARED, cluster_n=2)),
    "shared by four, few rows": (  # of the second tile 4, and of the last cluster one block has rows
        case(100, 1128, 136, epilogue=gelu, operands=(("bfloat16", (1, 1, 1128)),)),
        replace(COOPERATIVE, tile_n=96, cluster_m=4),
    ),
    "along k": (case(81, 136, 136, b_transposed=True), COOPERATIVE),
    "both transposed": (case(88, 136, 136, a_transposed=True, b_transposed=True), COOPERATIVE),
    "batch": (case(37, 136, 72, batch=3, shared="b"), INTERLEAVED),
    "sums": (case(101, 136, 136, epilogue=sums, batch=2), COOPERATIVE),
    "sums, interleaved": (case(101, 272, 136, epilogue=sums), INTERLEAVED),
    "sums of two rows of tiles": (case(301, 136, 136, epilogue=sums), COOPERATIVE),
    "sums, in parts": (case(301, 136, 136, epilogue=sums), IN_PARTS),
    "sums of two rows, interleaved": (case(301, 136, 136, epilogue=sums), INTERLEAVED),
    "sums of three": (case(340, 136, 136, "float16", epilogue=sums), OF_THREE),
    "sums, shared": (case(301, 264, 136, epilogue=sums), SHARED),
    "sums, shared by four": (case(390, 264, 136, epilogue=sums), replace(SHARED, cluster_n=2)),
    "shortcut": (
        case(150, 264, 136, epilogue=shortcut, operands=(("bfloat16", (1, 1, 264)), ("bfloat16", (1, 150, 264)))),
        replace(COOPERATIVE, fetch="tma"),
    ),
    "shortcut, in parts": (
        case(150, 264, 136, epilogue=shortcut, operands=(("bfloat16", (1, 1, 264)), ("bfloat16", (1, 150, 264)))),
        replace(IN_PARTS, fetch="tma"),
    ),
    "shortcut, interleaved": (
        case(
            101, 272, 136, "float16", batch=2, epilogue=shortcut,
            operands=(("float32", (2, 1, 272)), ("float16", (2, 101, 272))),
        ),
        replace(INTERLEAVED, fetch="tma"),
    ),
    "columns": (
        case(85, 136, 72, batch=2, epilogue=by_row, operands=(("float32", (2, 1, 136)), ("int8", (1, 85, 1)))),
        COOPERATIVE,
    ),
}  # fmt: skip
# What the CPU has no multiplies for.
FLOATS_OF_8_BITS = {
    "float8": (case(75, 272, 336, FLOAT8[0], b_dtype=FLOAT8[1], b_transposed=True), replace(COOPERATIVE, promotion=2)),
    "float8 scaled": (
        case(
            150, 272, 336, FLOAT8[0], b_transposed=True, epilogue=scaled,
            operands=(("float32", (1, 1, 1)), ("bfloat16", (1, 1, 272))),
        ),
        OF_THREE,
    ),
}  # fmt: skip


@functools.cache
def product_of(name):
    return (PRODUCTS | FLOATS_OF_8_BITS)[name][0].product()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    few = replace(H100, sm_count=2)
    plans = [ENGINE.build(knobs, product_of(name), few) for name, (_, knobs) in PRODUCTS.items()]
    return Emulated(plans, tmp_path_factory.mktemp("swapped"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_its_text_computes_what_is_right(name, emulated):
    check_emulated(emulated, list(PRODUCTS).index(name), PRODUCTS[name][0])


@pytest.mark.parametrize("name", PRODUCTS | FLOATS_OF_8_BITS)
def test_it_compiles(name):
    _, knobs = (PRODUCTS | FLOATS_OF_8_BITS)[name]
    compile_checked(ENGINE.build(knobs, product_of(name), H100), knobs)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PRODUCTS | FLOATS_OF_8_BITS)
def test_results(name):
    one, knobs = (PRODUCTS | FLOATS_OF_8_BITS)[name]
    check_plan(ENGINE.build(knobs, product_of(name), replace(device.gpus()[0], sm_count=2)), one)


@pytest.mark.parametrize(
    ("tile", "stages", "left"),
    [
        ((128, 112, 2), 8, (6, 1)),
        ((128, 208, 2), 8, (4, 1)),  # in parts there were five stages
        ((192, 192, 3), 8, (3, 1)),  # in parts there were no more
        ((384, 112, 3), 3, (3, 2)),  # whole there were two stages
    ],
)
def test_tiles_leave_whole_where_that_leaves_enough_stages(tile, stages, left):
    tile_m, tile_n, consumers = tile
    shape = Sm90Knobs(tile_m, tile_n, stages, cluster_m=1, consumers=consumers, swapped=True)
    found = fitted(swapped(case(400, 16_384, 1024).product()), shape, H100, "tma")
    assert found is not None
    assert (found.stages, found.epilogue_stages) == left


@pytest.mark.parametrize(
    ("product", "knobs", "said"),
    [
        (case(64, 256, 64, accumulators=2, epilogue=gated), {}, "two matrices b"),
        (case(64, 256, 64, "float32"), {}, "or copies"),
        (case(64, 256, 64, out="float32"), {}, "one matrix of 16-bit elements"),
        (case(64, 255, 64, b_transposed=True), {}, "that TMA can store"),
        (case(64, 256, 64, epilogue=lambda acc: (acc, acc * 2)), {}, "one matrix of"),
        (case(64, 256, 64, epilogue=lambda acc: jnp.sum(acc, axis=1)), {}, "one matrix of"),
        (case(64, 256, 64, epilogue=lambda acc: (acc, jnp.sum(acc, axis=-1))), {}, "over other than rows"),
        (case(64, 256, 64, epilogue=lambda acc: (acc, jnp.sum(acc))), {}, "over other than rows"),
        (
            case(64, 256, 64, epilogue=residual, operands=(("bfloat16", (1, 1, 256)), ("float32", (1, 64, 256)))),
            {},
            "no tile that TMA can load",
        ),
        (
            case(64, 256, 64, epilogue=residual, operands=(("bfloat16", (1, 1, 256)), ("bfloat16", (1, 64, 256)))),
            {},
            "expected fetch = 'tma'",
        ),
        (
            case(64, 256, 64, epilogue=lambda acc: acc + jax.lax.broadcasted_iota(acc.dtype, acc.shape, 1)),
            {},
            "depends on where",
        ),
        (case(64, 256, 512), {"split_k": 2}, "K is split"),
        (case(64, 256, 64), {"store": "direct"}, "TMA"),
    ],
)
def test_what_is_not_swapped(product, knobs, said):
    assert said in (knobs_reason(product.product(), replace(COOPERATIVE, **knobs), H100.shared_memory) or "")
