"""The Hopper matmul engine: what it plans and refuses, that it all compiles, and that a GPU computes what is right."""

from dataclasses import replace
from itertools import islice

import jax
import jax.numpy as jnp
import pytest

from checking.compiler_log import compile_checked
from checking.cubin import opcodes
from checking.product.calls import ProductCase
from checking.product.cases import gated, gated_and_saved, residual, swiglu_backward
from checking.product.results import check_configurations
from checking.targets import A100, H100
from jaxdnn import device
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, knobs_reason
from jaxdnn.plan import TensorMap

ENGINE = Sm90()
GPU = jax.default_backend() == "gpu"
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# The lowest 12 bits of the instructions by which a warp group multiplies, by the dtype that is multiplied: what
# nvdisasm shows as HGMMA, IGMMA and QGMMA.
OPCODES = {"bfloat16": 0x9F0, "float16": 0x9F0, "float32": 0x9F0, "int8": 0x9F1, **dict.fromkeys(FLOAT8, 0x9F3)}
FROM_REGISTERS = 0xDF0  # likewise, of rows that are there


def gelu(acc, bias):
    return jax.nn.gelu(acc + bias)


def saved(acc, bias):
    return jax.nn.gelu(acc + bias), acc.astype(jnp.bfloat16)


def long(acc, bias):
    """Whose code is too long to stand in each place."""
    return jnp.sin(acc + bias) * jnp.cos(acc) + jax.nn.mish(acc)


def several(acc, row, full, column, scalar):
    index = jax.lax.broadcasted_iota(acc.dtype, acc.shape, 2)
    return acc * scalar + row + full * column, (acc + index).astype(jnp.float16), acc > 0


def narrow(acc, row):
    return acc.astype(jnp.float8_e4m3fn), acc.astype(jnp.float8_e5m2), acc.astype(jnp.int8), acc + row


def wide_and_narrow(acc):
    return acc.astype(jnp.int8), acc, acc > 0, acc.astype(jnp.bfloat16)


def reductions(acc, full):
    product = acc * full
    return (
        product,
        jnp.max(jnp.abs(acc)),
        jnp.sum(product, axis=1),
        jnp.min(acc, axis=2),
        jnp.sum(product, axis=(0, 1)),
        jnp.max(acc, axis=(1, 2)),
    )


def backward(cotangent, acc, bias):
    (gradient,) = jax.vjp(lambda x: jax.nn.gelu(x + bias), acc.astype(jnp.float32))[1](cotangent)
    return gradient, jnp.sum(gradient, axis=(0, 1))


def scaled(acc, scale, bias):
    return jax.nn.gelu(acc * scale + bias)


def quantized(acc, scale):
    return (acc.astype(jnp.float32) * scale).astype(jnp.int8)


def case(m, n, k, dtype="bfloat16", **fields):
    fields.setdefault("out", "bfloat16" if dtype in FLOAT8 else "")
    return ProductCase(m, n, k, dtype, precision="default", **fields)


BIAS = (("bfloat16", (1, 1, 4096)),)
FULL = ("bfloat16", (1, 4096, 4096))
SEVERAL = (("bfloat16", (1, 1, 520)), ("float32", (2, 300, 520)), ("int8", (1, 300, 1)), ("float32", (1, 1, 1)))
# Large enough for every tile that the heuristic knows.
CASES = {
    "square": case(4096, 4096, 4096),
    "transposed": case(4096, 4096, 4096, "float16", a_transposed=True, b_transposed=True),
    "gelu": case(4096, 4096, 4096, epilogue=gelu, operands=BIAS),
    "saved": case(4096, 4096, 4096, epilogue=saved, operands=BIAS),
    "silu": case(4096, 4096, 4096, epilogue=lambda acc, bias: jax.nn.silu(acc + bias), operands=BIAS),
    "elu": case(4096, 4096, 4096, epilogue=jax.nn.elu),
    "rows": case(4096, 4096, 4096, epilogue=lambda acc, a, b: acc * a + b, operands=BIAS * 2),
    "long": case(4096, 4096, 512, epilogue=long, operands=BIAS),
    "gated": case(4096, 4096, 4096, accumulators=2, epilogue=gated),
    "gated and saved": case(4096, 4096, 4096, accumulators=2, epilogue=gated_and_saved, operands=BIAS * 2),
    "several": case(300, 520, 136, batch=2, epilogue=several, operands=SEVERAL),
    "several, unaligned": case(
        300, 521, 136, batch=2, b_transposed=True, epilogue=several,
        operands=(("bfloat16", (1, 1, 521)), ("float32", (2, 300, 521)), *SEVERAL[2:]),
    ),
    "narrow": case(4096, 4096, 512, epilogue=narrow, operands=(("uint8", (1, 1, 4096)),)),
    "reductions": case(4096, 4096, 512, epilogue=reductions, operands=(("bfloat16", (1, 4096, 4096)),)),
    "backward": case(
        4096, 4096, 4096, b_transposed=True, epilogue=backward, operands=(("bfloat16", (1, 4096, 4096)), *BIAS)
    ),
    "residual": case(4096, 4096, 4096, epilogue=residual, operands=(*BIAS, FULL)),
    "residual, float32": case(
        4096, 4096, 1024, epilogue=residual, out="float32", operands=(*BIAS, ("float32", (1, 4096, 4096)))
    ),
    "swiglu backward": case(4096, 4096, 1024, epilogue=swiglu_backward, operands=(FULL, FULL)),
    "residual, float8": case(4096, 4096, 1024, FLOAT8[0], b_transposed=True, epilogue=residual, operands=(*BIAS, FULL)),
    "float8": case(8192, 8192, 4096, FLOAT8[0], b_dtype=FLOAT8[1], b_transposed=True),
    "float8, scaled": case(
        8192, 4096, 4096, FLOAT8[0], b_transposed=True, epilogue=scaled, operands=(("float32", (1, 1, 1)), *BIAS)
    ),
    "float8, copied": case(4096, 4096, 512, FLOAT8[1]),
    "float32": case(2048, 2048, 2048, "float32"),
    "int8": case(4096, 4096, 4096, "int8", b_transposed=True),
    "int8 to int8": case(
        4096, 4096, 512, "int8", epilogue=quantized, out="int8", operands=(("float32", (1, 1, 4096)),)
    ),
    "many results": case(256, 256, 512, batch=2, epilogue=lambda acc: tuple(acc * i for i in range(2, 18))),
    "deep": case(512, 512, 16384, epilogue=gelu, operands=(("bfloat16", (1, 1, 512)),)),
    "small": case(33, 47, 72, batch=3, padding=3),
    "matrices": case(128, 64, 128, batch=4096),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_configurations_compile(name):
    product = CASES[name].product()
    assert ENGINE.reason(product, H100) is None
    offered = list(ENGINE.configurations(product, H100))
    # What differs in numbers alone is the same code.
    found = list(dict.fromkeys(replace(knobs, split_k=min(knobs.split_k, 2), swizzle=8) for knobs in offered))
    assert found
    if name not in ("square", "gelu", "residual", "several", "reductions", "deep"):  # those try every tile
        found = found[:3]
    for knobs in found:
        plan = ENGINE.build(knobs, product, H100)
        assert all(launch.shared_memory <= H100.shared_memory for launch in plan.launches)
        unit = compile_checked(plan, knobs)
        kernel, opcode = "product_sm90", OPCODES[product.a.dtype]
        if knobs.whole_rows:
            kernel, opcode = "product_short_k", FROM_REGISTERS
        assert opcode in opcodes(unit.cubin, kernel), f"no tensor cores under {knobs}"


def test_a_plan_is_what_it_is():
    plan = ENGINE.build(Sm90Knobs(), CASES["square"].product(), H100)
    (launch,) = plan.launches
    # 16 x 16 pairs of tiles in four rounds: 64 clusters of two, not the 66 that there is room for.
    assert (launch.grid, launch.block, launch.cluster) == ((128, 1, 1), (384, 1, 1), (2, 1, 1))
    a, b, edge, result = (one for one in launch.arguments if isinstance(one, TensorMap))
    assert (a.dimensions, a.strides, a.box) == ((4096, 4096, 1), (8192, 8192 * 4096), (64, 128, 1))
    assert (edge.dimensions, edge.box) == (a.dimensions, a.box)  # all of which is there
    assert (b.dimensions, b.box) == ((4096, 4096, 1), (64, 32, 1))  # a row of 64 columns; half of 64 rows of K
    assert (result.dimensions, result.box) == ((4096, 4096, 1), (64, 16, 1))
    assert plan.arch == "sm_90a"
    assert plan.workspace == 0
    assert len(plan.unit.splitlines()) < 80


def test_a_split_adds_sums_in_a_second_launch():
    knobs = Sm90Knobs(tile_m=64, tile_n=64, consumers=1, cluster_m=1, split_k=4)
    plan = ENGINE.build(knobs, CASES["deep"].product(), H100)
    first, second = plan.launches
    assert (first.kernel, first.grid) == ("product_sm90", (128, 1, 1))
    assert (second.kernel, second.grid) == ("product_split", (2, 512, 1))
    assert plan.scratch == (4 * 512 * 512 * 4,)


def test_reductions_that_are_alike_take_one_more_launch():
    plan = ENGINE.build(Sm90Knobs(tile_n=128), CASES["reductions"].product(), H100)
    assert [launch.kernel for launch in plan.launches] == [
        "product_sm90",
        *(f"product_reduce_{i}" for i in range(1, 4)),  # the fourth with the second, and the last with the first
    ]
    rows, columns = 4096 // 16, 4096 // 128
    parts = (rows * columns, rows * 4096, columns * 4096, rows * 4096, rows * columns)
    assert plan.scratch == tuple(4 * count for count in parts)


def test_operands_that_do_not_run_along_k_are_transposed():
    plan = ENGINE.build(Sm90Knobs(tile_n=128), CASES["float8, copied"].product(), H100)
    copy, _ = plan.launches
    assert (copy.kernel, copy.grid) == ("product_copy", (4 * 32, 1, 1))  # tiles of 128 x 128
    assert plan.scratch == (512 * 4096,)
    assert "transposes = 1" in plan.unit


@pytest.mark.parametrize(("views", "scratch"), [(1, (3 * 33 * 72 * 2, 3 * 72 * 48 * 2)), (4, (3 * 33 * 256 * 2,))])
def test_operands_that_tma_refuses_are_copied(views, scratch):
    """Both, or a alone, whose K is in the order of the views of b."""
    product = CASES["small"].product()
    knobs = next(one for one in ENGINE.configurations(product, H100) if one.views == views)
    plan = ENGINE.build(knobs, product, H100)
    assert [launch.kernel for launch in plan.launches] == ["product_copy", "product_sm90"]
    assert plan.scratch == scratch
    assert "transposes = 1" not in plan.unit


def test_sizes_are_not_in_the_code():
    units = {ENGINE.build(Sm90Knobs(), case(m, 512, 8 * k).product(), H100).unit for m in (7, 3000) for k in (7, 3000)}
    assert len(units) == 1


@pytest.mark.parametrize(
    ("product", "target", "said"),
    [
        (case(8, 8, 8).product(), A100, "compute capability 9.0"),
        (case(8, 8, 8, "float64").product(), H100, "don't multiply float64 by float64"),
        (case(8, 8, 8, "float32", b_dtype="bfloat16").product(), H100, "float32 by bfloat16"),
        (ProductCase(8, 8, 8, "float32", precision="highest").product(), H100, "precision HIGHEST forbids"),
        (replace(case(8, 8, 8).product(), m=2**31), H100, "32-bit index"),
        (case(8, 8, 8, batch=2**28).product(), H100, None),
        (case(8, 8, 8, batch=2**30).product(), H100, "more tiles"),
        (case(8, 8, 8, epilogue=lambda acc: jnp.sum(acc, axis=0), batch=2).product(), H100, "over the batch alone"),
        (case(8, 8, 8, epilogue=lambda acc: jnp.sum(acc, axis=0)).product(), H100, None),
        (
            case(8, 8, 8, epilogue=lambda acc: (acc.astype("float64") * 2).astype("float16")).product(),
            H100,
            "computed as a double",
        ),
    ],
)
def test_reasons(product, target, said):
    reason = ENGINE.reason(product, target)
    assert reason is None if said is None else said in (reason or "")


@pytest.mark.parametrize(
    ("knobs", "name", "said"),
    [
        (Sm90Knobs(tile_n=100), "square", "100 columns at once"),
        (Sm90Knobs(tile_n=96), "gated", "need a multiple of 64"),
        (Sm90Knobs(tile_n=8), "gated", "tile_n is 8; expected a multiple of 16"),
        (Sm90Knobs(groups=2), "square", "groups is 2; expected 1"),
        (Sm90Knobs(stages=9), "square", "bytes of shared memory"),
        (Sm90Knobs(split_k=65), "square", "split_k is 65"),
        (Sm90Knobs(split_k=2), "reductions", "can't be split"),
        (Sm90Knobs(tile_m=256, tile_n=256), "square", "256 acc"),
        (Sm90Knobs(promotion=1), "square", "8-bit floats"),
        (Sm90Knobs(promotion=1), "float8", "256 acc"),
        (Sm90Knobs(tile_n=128), "several, unaligned", "expected store = 'direct'"),
        (Sm90Knobs(tile_n=128), "small", "and TMA needs a multiple of 16; expected store = 'rows' or 'direct'"),
        (Sm90Knobs(tile_m=64, tile_n=64, cluster_m=1, consumers=1), "many results", "it would take 19 tensor maps"),
    ],
)
def test_knobs_that_do_not_fit(knobs, name, said):
    product = CASES[name].product()
    assert said in (knobs_reason(product, knobs, H100.shared_memory) or "")
    with pytest.raises(ValueError, match="does not fit"):
        ENGINE.build(knobs, product, H100)


@pytest.mark.parametrize(
    "knobs",
    [
        {"tile_m": 192},
        {"stages": 0},
        {"schedule": "pingpong", "consumers": 1, "tile_m": 64},
        {"stagger": 4},
        {"cluster_m": 3},
        {"promotion": 1, "tile_m": 256},
    ],
)
def test_knobs_are_validated(knobs):
    with pytest.raises(ValueError, match=r"Sm90Knobs: .* (must be|expected) "):
        Sm90Knobs(**knobs)


def shrunk():
    """What a GPU computes: small arrays, with edges in every direction."""
    found = {name: one for name, one in CASES.items() if one.batch * one.m * one.n * one.k < 2**30}
    for dtype in OPCODES:
        for a in (False, True):
            for b in (False, True):
                fields = {"a_transposed": a, "b_transposed": b}
                found[f"{dtype} {'nt'[a]}{'nt'[b]}"] = case(300, 264, 136, dtype, **fields)
                shared = "a" if a else "b"
                found[f"{dtype} {'nt'[a]}{'nt'[b]} odd"] = case(37, 131, 61, dtype, batch=3, shared=shared, **fields)
        found[f"{dtype} one"] = case(1, 1, 1, dtype)
        found[f"{dtype} deep"] = case(40, 30, 9000, dtype)
        operands = (("float32", (1, 300, 264)),)
        found[f"{dtype} reductions"] = case(300, 264, 136, dtype, epilogue=reductions, operands=operands, out="float32")
    found["wide and narrow"] = case(300, 272, 136, epilogue=wide_and_narrow, out="float32")
    found["wide and narrow, odd"] = case(
        300, 131, 136, b_transposed=True, epilogue=lambda acc: (acc * 2, acc.astype("bfloat16")), out="float32"
    )
    found["gelu, in pairs"] = case(300, 262, 136, epilogue=gelu, operands=(("bfloat16", (1, 1, 262)),))
    found["gelu"] = case(300, 264, 136, epilogue=gelu, operands=(("bfloat16", (1, 1, 264)),))
    found["gated"] = case(300, 264, 136, accumulators=2, epilogue=gated)
    found["gated and saved"] = case(300, 264, 136, accumulators=2, epilogue=gated_and_saved)
    found["saved"] = case(300, 264, 136, epilogue=saved, operands=(("bfloat16", (1, 1, 264)),))
    found["long"] = case(300, 264, 136, epilogue=long, operands=(("bfloat16", (1, 1, 264)),))
    row, full = ("bfloat16", (1, 1, 264)), ("bfloat16", (1, 300, 264))
    found["residual"] = case(300, 264, 136, batch=3, epilogue=residual, operands=(row, full))
    found["swiglu backward"] = case(300, 264, 136, epilogue=swiglu_backward, operands=(full, full))
    found["narrow"] = case(300, 264, 136, epilogue=narrow, operands=(("uint8", (1, 1, 264)),))
    return found


# Two multiprocessors work through so many tiles that three warp groups are among the first choices.
MANY_ROUNDS = {
    "bfloat16": case(1130, 632, 1008),
    "float8": case(1130, 632, 1008, FLOAT8[0], b_transposed=True),
    "float8 mixed": case(1130, 632, 1010, FLOAT8[0], b_dtype=FLOAT8[1]),
    "float8 scaled": case(
        1130, 632, 1008, FLOAT8[0], b_transposed=True, epilogue=scaled,
        operands=(("float32", (1, 1, 1)), ("bfloat16", (1, 1, 632))),
    ),
}  # fmt: skip


TRIED = 4  # configurations of each


@pytest.mark.parametrize("name", MANY_ROUNDS)
def test_three_warp_groups_are_near_in_many_rounds_of_8_bit_floats(name):
    first = islice(ENGINE.configurations(MANY_ROUNDS[name].product(), replace(H100, sm_count=2)), TRIED)
    assert any(knobs.consumers == 3 for knobs in first) == ("float8" in name)


COMPUTED = shrunk() | {f"{name}, many rounds": one for name, one in MANY_ROUNDS.items()}
COMPUTED["more than the L2 cache holds"] = case(51_205, 520, 64)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", COMPUTED)
def test_results(name):
    target = device.gpus()[0]
    if "many rounds" in name:
        target = replace(target, sm_count=2)
    check_configurations(ENGINE, COMPUTED[name], target, TRIED)
