"""Products over a short K, of rows that lie one behind the other: which are, what serves them, and that their code
computes what is right, on the CPU and on a GPU.
"""

import csv
import functools
import itertools
import re
import statistics
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.compiler_log import compile_checked
from checking.configurations import CONFIGURATIONS
from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase
from checking.product.cases import gated, gelu
from checking.product.results import check_emulated, check_plan
from checking.targets import H100, H200
from jaxdnn import device
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.short_k.heuristic import lines_reason
from jaxdnn.engines.product.sm90.short_k.knobs import whole_rows_reason
from jaxdnn.engines.product.small import small_reason
from jaxdnn.plan import TensorMap

ENGINE = Sm90()
GPU = jax.default_backend() == "gpu"
MEASURED, ANYWHERE = CONFIGURATIONS / "nvidia-h200-short_k.csv", CONFIGURATIONS / "nvidia-h200-anywhere.csv"
KNOBS = Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=1, store="rows", whole_rows=True)
IN_TURNS = replace(KNOBS, schedule="pingpong")
STAYS = replace(IN_TURNS, tile_m=64, stages=4, stationary=4, swizzle=1)
NARROW = Sm90Knobs(tile_m=384, tile_n=32, stages=3, cluster_m=1, consumers=3, store="rows", whole_rows=True)


def two(acc, bias):
    return acc + bias, acc.astype(jnp.float32)


def sums(acc, bias):
    return acc + bias, jnp.sum(acc, axis=(0, 1)), jnp.max(acc, axis=2)


def case(m, n, k, dtype="bfloat16", **fields):
    return ProductCase(m, n, k, dtype, precision="default", **fields)


# Rows are a half step longer than whole ones of 16 elements, or not; and the last tile's rows are few, or all there.
PRODUCTS = {
    "one half step": (case(150, 40, 8), KNOBS),
    "one step": (case(150, 40, 16), KNOBS),
    "five and a half": (case(200, 40, 88), IN_TURNS),
    "ten": (case(131, 56, 160), replace(IN_TURNS, tile_m=64)),
    "sixteen": (case(130, 24, 256), replace(KNOBS, tile_m=64, tile_n=32, consumers=1)),
    "float16": (case(385, 24, 40, "float16"), NARROW),
    "eight columns": (case(400, 8, 24), NARROW),
    "whole lines of results": (case(200, 128, 72), replace(IN_TURNS, store="tma")),
    "three in turns": (case(500, 40, 72), replace(IN_TURNS, consumers=3)),
    "several columns of tiles": (case(200, 200, 72), replace(KNOBS, tile_n=96)),
    "straight from registers": (case(200, 72, 40), replace(KNOBS, store="direct")),
    "gelu": (case(150, 136, 72, epilogue=gelu, operands=(("bfloat16", (1, 1, 136)),)), IN_TURNS),
    "residual": (case(150, 40, 72, batch=2, epilogue=gelu, operands=(("bfloat16", (2, 150, 40)),)), KNOBS),
    "two results": (case(150, 40, 72, epilogue=two, operands=(("bfloat16", (1, 1, 40)),)), KNOBS),
    "reductions": (case(150, 40, 72, batch=3, epilogue=sums, operands=(("bfloat16", (1, 1, 40)),)), KNOBS),
    "batch": (case(137, 40, 72, batch=3), KNOBS),
    "batch, in turns": (case(137, 40, 72, batch=3), IN_TURNS),
    "batch, one a": (case(137, 40, 72, batch=3, shared="a"), KNOBS),
    "batch, one b": (case(137, 40, 72, batch=3, shared="b"), KNOBS),
    "few rows": (case(5, 40, 72, batch=3), KNOBS),
    # Rows that begin anywhere: of an even length, and of an odd one; and a last tile that ends within 16 bytes.
    "of 102": (case(201, 40, 102), IN_TURNS),
    "of 254": (case(130, 24, 254), replace(KNOBS, tile_m=64, tile_n=32, consumers=1)),
    "of 73": (case(397, 40, 73, "float16"), NARROW),
    "of one": (case(150, 40, 1), KNOBS),
    "less than 16 bytes": (case(2, 40, 3), KNOBS),
    "of 30, a batch": (case(132, 40, 30, batch=3), KNOBS),
    "of 31, one b": (case(136, 200, 31, batch=2, shared="b"), replace(IN_TURNS, tile_n=96)),
    "of 45, a copy of b": (case(200, 29, 45), KNOBS),
    # B stays, all of it or as much as a block has of it.
    "b stays": (case(1000, 200, 72), STAYS),
    "b stays, whole lines of results": (case(700, 256, 16), replace(STAYS, store="tma", stages=2)),
    "b stays, of 73": (case(1001, 200, 73), STAYS),
    "b stays, of 254, three in turns": (case(1003, 136, 254),
                                        replace(STAYS, consumers=3, stages=3, epilogue_stages=1, stationary=3)),
    "b stays, shared rows": (case(700, 200, 72), replace(STAYS, tile_m=128, schedule="cooperative")),
    "two columns of b stay": (case(1000, 296, 80), replace(STAYS, stationary=2)),
    "one column of b stays": (case(1000, 200, 72), replace(STAYS, tile_n=96, stationary=1)),
    "b stays, few rows": (case(50, 200, 72), replace(STAYS, consumers=3, stages=6)),
    "b stays, gelu": (case(700, 136, 72, epilogue=gelu, operands=(("bfloat16", (1, 1, 136)),)), STAYS),
    "b stays, residual": (case(300, 136, 72, batch=2, shared="b", epilogue=gelu,
                               operands=(("bfloat16", (2, 300, 136)),)), STAYS),
    "b stays, two matrices": (case(700, 200, 72, accumulators=2, epilogue=gated), STAYS),
    "whole lines": (case(1000, 296, 80), replace(STAYS, store="lines", stationary=2)),
    "whole lines, odd rows": (case(1001, 229, 73), replace(STAYS, store="lines", stationary=2)),
    "whole lines, even rows": (case(300, 274, 72, batch=2, shared="b"), replace(STAYS, store="lines", tile_n=128)),
    "whole lines, gated": (case(700, 140, 72, accumulators=2, epilogue=gated), replace(STAYS, store="lines")),
    "two matrices": (case(200, 40, 72, accumulators=2, epilogue=gated), KNOBS),
    "two matrices of 77, copies": (case(152, 36, 77, batch=2, accumulators=2, epilogue=gated), IN_TURNS),
}  # fmt: skip


@functools.cache
def product_of(name):
    return PRODUCTS[name][0].product()


def plan_of(name, target):
    return ENGINE.build(PRODUCTS[name][1], product_of(name), replace(target, sm_count=4))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return Emulated([plan_of(name, H100) for name in PRODUCTS], tmp_path_factory.mktemp("short_k"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_its_text_computes_what_is_right(name, emulated):
    check_emulated(emulated, list(PRODUCTS).index(name), PRODUCTS[name][0])


@pytest.mark.parametrize(
    ("k", "knobs"), [(24, KNOBS), (72, KNOBS), (73, KNOBS), (102, KNOBS), (72, STAYS), (73, STAYS)]
)
def test_what_is_not_finite_stays_in_its_row(k, knobs, tmp_path):
    """A row ends in the middle of a step: neither the next one's elements are multiplied, nor its own by zeros."""
    one = case(150, 40, k)
    a, b = one.arrays()
    a[:, 1::3] = np.nan
    a[:, 2::3, -1] = np.inf
    results = [np.zeros((1, 150, 40), a.dtype)]
    Emulated([ENGINE.build(knobs, one.product(), H100)], tmp_path).run(0, [a, b], results)
    found, exact_a, exact_b = (array.astype(np.float64) for array in (results[0], a, b))
    assert np.isnan(found[:, 1::3]).all()
    np.testing.assert_array_equal(found[:, 2::3], np.broadcast_to(np.inf * exact_b[:, -1:], found[:, 2::3].shape))
    want = np.einsum("bmk,bkn->bmn", exact_a[:, ::3], exact_b)
    np.testing.assert_allclose(found[:, ::3], want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", PRODUCTS)
def test_it_compiles(name):
    compile_checked(plan_of(name, H100), PRODUCTS[name][1])


@pytest.mark.parametrize(
    "size", [(2000, 24, 40), (60000, 280, 191), (20000, 300, 24), (3000, 200, 152), (9001, 50, 237)]
)
def test_configurations_compile(size):
    product = case(*size).product()
    for knobs in itertools.islice(ENGINE.configurations(product, H100), 6):
        compile_checked(ENGINE.build(knobs, product, H100), knobs)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PRODUCTS)
def test_results(name):
    check_plan(plan_of(name, device.gpus()[0]), PRODUCTS[name][0])


def test_a_plan_is_what_it_is():
    """A's rows are copied from where they lie, and b's are filled up with zeros to whole steps."""
    plan = ENGINE.build(replace(KNOBS, stages=4), case(416, 40, 72, batch=7).product(), H100)
    (launch,) = plan.launches
    assert (launch.grid, launch.block, launch.cluster) == ((28, 1, 1), (384, 1, 1), (1, 1, 1))
    (b,) = (argument for argument in launch.arguments if isinstance(argument, TensorMap))
    assert (b.dimensions, b.box) == ((40, 72, 7), (64, 80, 1))
    assert "kRowElements = 72" in plan.unit


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (case(200, 40, 72, "float32"), "a is float32; expected 16-bit floats"),
        (case(200, 40, 72, a_transposed=True), "one of these is transposed"),
        (case(200, 40, 72, b_transposed=True), "one of these is transposed"),
        (case(200, 40, 264), "k is 264; expected at most 256"),
        (case(201, 40, 73, batch=2), "a matrix of a begins at byte 29346"),
        (case(200, 40, 72, batch=2, padding=16), "rows of a are 88 elements apart; expected k, 72"),
    ],
)
def test_what_has_no_whole_rows(one, said):
    product = one.product()
    assert said in (whole_rows_reason(product) or "")
    assert not any(knobs.whole_rows for knobs in ENGINE.configurations(product, H100))
    with pytest.raises(ValueError, match="whole_rows is True; .*" + re.escape(said)):
        ENGINE.build(KNOBS, product, H100)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"cluster_m": 2}, "expected no cluster, one split"),
        ({"split_k": 2}, "expected no cluster, one split"),
        ({"stagger": 1}, "no stagger"),
        ({"tile_n": 48}, "tile_n is 48; expected one of"),
        ({"store": "tma"}, "expected store = 'rows'"),
        ({"stages": 12}, "bytes of shared memory"),
        ({"tile_m": 384, "tile_n": 128, "consumers": 3}, "registers of accumulators and rows"),
    ],
)
def test_knobs_that_do_not_fit_have_a_reason(knobs, said):
    product = case(200, 40, 72).product()
    with pytest.raises(ValueError, match=re.escape(said)):
        ENGINE.build(replace(KNOBS, **knobs), product, H100)


@pytest.mark.parametrize(
    ("one", "whole"),
    [
        (case(40000, 40, 72), True),
        (case(40000, 24, 16, batch=2), True),
        (case(40000, 40, 64), False),
        (case(40000, 40, 96), False),
        (case(40000, 40, 200), False),
        (case(49_433, 272, 32), True),  # 14.9 us, and 16.5 in lines
        (case(30_000, 200, 64), True),
        # 16.0 us, and 18.9 in rows.
        (case(30_000, 200, 64, epilogue=gelu, operands=(("bfloat16", (1, 1, 200)),)), False),
        (case(20_000, 344, 96), True),  # b stays, 10.2 us, and 11.0 in lines
        (case(20_000, 392, 96), True),
        (case(1000, 200, 64, batch=30), False),
        (case(30_000, 256, 64), False),
        (case(30_000, 128, 64), False),
        (case(10_000, 1000, 64), False),  # 11.5 us, and 15.5 in rows
        (case(443, 480, 72, batch=180), True),
        (case(751, 920, 168, batch=51), False),  # 49 us, and 56 in rows
        (case(751, 128, 168, batch=51), True),
        (case(38301, 920, 168), True),
    ],
)
def test_lines_are_cut_where_rows_are_whole(one, whole):
    product = one.product()
    assert whole == (lines_reason(product, H100) is None)
    offered = list(ENGINE.configurations(product, H100))
    assert offered[0].whole_rows == whole
    assert {knobs.whole_rows for knobs in offered} == {True, False}


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (case(2000, 40, 72), "begin in less time"),
        (case(40000, 8, 72), "less time for 8 columns"),
        (case(40000, 16, 72), None),
        (case(40000, 8, 136), None),
        (case(16184, 72, 16), "begin in less time"),
        (case(20_736, 72, 56), None),
        (case(64, 64, 64, batch=8192), "many matrices"),
        (case(64, 64, 72, batch=8192), None),
        (case(40000, 8, 72, epilogue=gelu, operands=(("bfloat16", (1, 1, 8)),)), None),
    ],
)
def test_what_xla_serves(one, said):
    found = small_reason(one.product(), H200, "sm90")
    assert found is None if said is None else said in found


@pytest.mark.parametrize(("m", "tile_m"), [(22_672, 192), (16_000, 128), (33_000, 256), (1_000_000, 256)])
def test_rows_that_begin_anywhere_leave_no_multiprocessors_idle(m, tile_m):
    """In few rounds: 22,672 rows with a gelu took 7.7 us by 89 tiles of 256 rows, and 6.2 by 119 of 192."""
    one = case(m, 64, 23, epilogue=gelu, operands=(("bfloat16", (1, 1, 64)),))
    first = next(iter(ENGINE.configurations(one.product(), H100)))
    assert (first.tile_m, first.tile_n, first.whole_rows) == (tile_m, 64, True)


@pytest.mark.parametrize(
    ("m", "n", "tile"), [(11_264, 164, (128, 64)), (11_264, 256, (64, 128)), (60_000, 164, (256, 128))]
)
def test_few_tiles_leave_no_half_of_one_empty(m, n, tile):
    """11264 x 164 x 24 with a gelu took 12.6 us by tiles of 64 x 128, and 9.5 of 128 x 64."""
    first = next(iter(ENGINE.configurations(case(m, n, 24).product(), H200)))
    assert (first.tile_m, first.tile_n, first.whole_rows) == (*tile, True)


@pytest.mark.parametrize(("m", "tile_m"), [(60, 64), (130, 192), (400, 384)])
def test_a_tile_has_no_more_rows_than_a_matrix_fills(m, tile_m):
    first = next(iter(ENGINE.configurations(case(m, 24, 40, batch=3000).product(), H100)))
    assert (first.tile_m, first.tile_n, first.whole_rows) == (tile_m, 32, True)


def measured():
    """Of each product: microseconds by how a is loaded, and tile; of lines, that which the model chose."""
    with MEASURED.open() as file:
        rows = list(csv.DictReader(file))
    for size, group in itertools.groupby(
        rows, key=lambda row: tuple(int(row[name]) for name in ("m", "n", "k", "batch"))
    ):
        names = ("a", "tile_m", "tile_n", "schedule", "consumers")
        yield size, {tuple(row[name] for name in names): float(row["microseconds"]) for row in group}


def anywhere():
    """Of each product of rows that begin anywhere: its problem, and microseconds by how a is loaded, and tile."""
    with ANYWHERE.open() as file:
        rows = list(csv.DictReader(file))
    fields = {"": {}, "gelu": {"epilogue": gelu}, "swiglu": {"accumulators": 2, "epilogue": gated}}
    for (epilogue, *size), group in itertools.groupby(
        rows, key=lambda row: tuple(row[name] for name in ("epilogue", "m", "n", "k"))
    ):
        m, n, k = map(int, size)
        more = fields[epilogue] | ({"operands": (("bfloat16", (1, 1, n)),)} if epilogue == "gelu" else {})
        names = ("a", "tile_m", "tile_n", "schedule", "consumers")
        times = {tuple(row[name] for name in names): float(row["microseconds"]) for row in group}
        yield case(m, n, k, out="bfloat16", **more).product(), times


def before_b_stayed(product, target):
    """The first configuration among those that these tables have."""
    return next(knobs for knobs in ENGINE.configurations(product, target) if not knobs.stationary)


def test_the_choice_of_rows_that_begin_anywhere_is_fast():
    ratios, copied, plain = [], [], []
    for product, times in anywhere():
        knobs = before_b_stayed(product, H200)
        key = ("rows", *map(str, (knobs.tile_m, knobs.tile_n, knobs.schedule, knobs.consumers)))
        copies = times["copies", "", "", "", ""]
        found = times[key] if knobs.whole_rows else copies
        ours = [time for key, time in times.items() if key[0] in ("rows", "copies")]
        ratios.append(found / min(ours))
        copied.append(copies / found)
        plain.append(times["plain_jax", "", "", "", ""] / found)
    assert len(ratios) > 15
    assert statistics.geometric_mean(ratios) < 1.03
    assert max(ratios) < 1.2
    assert statistics.geometric_mean(copied) > 1.3
    assert statistics.geometric_mean(plain) > 1.25
    assert min(plain) > 0.85


def test_the_choice_is_fast():
    """Results that are more than the L2 cache holds, of rows that are no whole sectors, take very different times."""
    ratios, before = [], []
    for (m, n, k, batch), times in measured():
        product = case(m, n, k, out="bfloat16", batch=batch).product()
        lines = times["lines", "", "", "", ""]
        knobs = before_b_stayed(product, H100)
        key = ("whole rows", *map(str, (knobs.tile_m, knobs.tile_n, knobs.schedule, knobs.consumers)))
        found = times[key] if knobs.whole_rows else lines
        ratios.append(found / min(times.values()))
        before.append(lines / found)
    assert len(ratios) > 40
    assert statistics.geometric_mean(ratios) < 1.07
    assert max(ratios) < 1.7
    assert statistics.geometric_mean(before) > 1.2
    assert min(before) > 0.85
