"""Products over a short K whose B stays in shared memory: which ones, with which knobs; tests of what they compute are
in test_short_k.py.
"""

import csv
import itertools
import re
import statistics
from dataclasses import replace
from math import ceil

import pytest

from checking.configurations import CONFIGURATIONS
from checking.product.calls import ProductCase
from checking.product.measured import problem
from checking.targets import H100, H200
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.short_k.heuristic import lines_reason, load_clocks
from jaxdnn.engines.product.sm90.short_k.knobs import knobs_reason

ENGINE = Sm90()
MEASURED = CONFIGURATIONS / "nvidia-h200-stationary.csv"
CUT = ((57_216, 3192, 23), (40_000, 501, 64), (20_000, 344, 96), (25_000, 264, 128))  # rows that are no whole lines
NAMES = ("tile_m", "tile_n", "stages", "cluster_m", "cluster_n", "consumers", "schedule", "whole_rows", "stationary")
KNOBS = Sm90Knobs(
    tile_m=64,
    tile_n=64,
    stages=4,
    cluster_m=1,
    schedule="pingpong",
    swizzle=1,
    store="rows",
    whole_rows=True,
    stationary=4,
)


def measured():
    """Of each product: its problem, microseconds by knobs, and of XLA."""
    with MEASURED.open() as file:
        rows = list(csv.DictReader(file))
    for size, group in itertools.groupby(
        rows, key=lambda row: tuple(row[name] for name in ("epilogue", "m", "n", "k"))
    ):
        epilogue, m, n, k = size
        times = {(row["engine"], *map(row.get, NAMES)): float(row["microseconds"]) for row in group}
        xla = next(time for (engine, *_), time in times.items() if engine == "xla")
        ours = {knobs: time for (engine, *knobs), time in times.items() if engine == "sm90" for knobs in [tuple(knobs)]}
        yield problem(m, n, k, 1, "bfloat16", "0", "0", epilogue), ours, xla


def first(product, target=H200):
    return next(iter(ENGINE.configurations(product, target)))


def test_the_choice_is_fast():
    ratios, without, plain = {}, {}, {}
    for product, times, xla in measured():
        size = product.m, product.n, product.k
        knobs = first(product)
        chosen = tuple(str(getattr(knobs, name)) for name in NAMES)
        assert chosen in times, f"{size}: nobody measured {chosen}"
        ratios[size] = times[chosen] / min(times.values())
        if knobs.stationary:
            plain[size] = xla / times[chosen]
            without[size] = min(time for (*_, stays), time in times.items() if stays == "0") / times[chosen]
    assert len(ratios) == 22
    assert len(plain) == 15
    assert statistics.fmean(ratios.values()) <= 1.04, ratios
    assert max(ratios.values()) <= 1.15, ratios
    assert min(without.values()) > 0.97, without
    assert statistics.geometric_mean(without.values()) > 1.15, without
    cut = [plain.pop(size) for size in CUT]  # which had been slower than plain JAX
    assert statistics.geometric_mean(plain.values()) > 1.5, plain
    assert min(cut) > 0.98, cut
    assert statistics.geometric_mean(cut) > 1.05, cut


@pytest.mark.parametrize(
    ("size", "stays"),
    [
        ((40_000, 200, 96), True),
        ((4000, 200, 96), False),  # few tiles of 64 rows for as many multiprocessors
        ((40_000, 64, 96), False),  # there is one tile of columns, which is little
        ((40_000, 200, 40), False),  # was not timed
        ((60_000, 400, 40), False),  # nor were results that the L2 cache holds
        ((70_000, 400, 40), True),
        ((40_000, 200, 200), False),
    ],
)
def test_many_rows_pass_what_stays(size, stays):
    product = ProductCase(*size, "bfloat16", precision="default").product()
    assert any(knobs.stationary for knobs in ENGINE.configurations(product, H200)) == stays


def test_as_many_columns_stay_as_leave_room_for_two_lines():
    product = ProductCase(57_216, 3192, 23, "bfloat16", precision="default").product()
    found = [knobs for knobs in ENGINE.configurations(product, H200) if knobs.stationary]
    assert [(knobs.consumers, knobs.tile_n, knobs.stationary) for knobs in found] == [
        (3, 128, 13),
        (3, 64, 25),
        (2, 128, 13),
        (2, 64, 25),
    ]
    assert {(knobs.store, knobs.epilogue_stages) for knobs in found} == {("lines", 2)}


@pytest.mark.parametrize(
    ("fields", "stays"),
    [
        ({"batch": 8, "shared": "b"}, True),
        ({"batch": 8}, False),
        ({"epilogue": lambda acc: acc.sum(axis=2)}, False),
    ],
)
def test_one_b_stays_for_all(fields, stays):
    product = ProductCase(20_000, 200, 96, "bfloat16", precision="default", **fields).product()
    assert any(knobs.stationary for knobs in ENGINE.configurations(product, H200)) == stays


@pytest.mark.parametrize(
    ("size", "knobs", "grid", "shared_memory"),
    [
        ((40_000, 200, 72), KNOBS, 125, 4 * 9216 + 8 * 4096 + 64 + 264 + 696 + 4 * (80 * 128 + 16)),
        ((40_000, 296, 72), replace(KNOBS, stationary=2), 126, None),  # three parts, each of 42 blocks
        ((40_000, 296, 72), replace(KNOBS, stationary=1), 125, None),  # five, each of 25
        ((64, 296, 72), replace(KNOBS, stationary=1), 5, None),
    ],
)
def test_blocks_keep_to_their_columns(size, knobs, grid, shared_memory):
    plan = ENGINE.build(knobs, ProductCase(*size, "bfloat16", precision="default").product(), H100)
    (launch,) = plan.launches
    assert launch.grid == (grid, 1, 1)
    assert shared_memory is None or launch.shared_memory == shared_memory


@pytest.mark.parametrize("k", [72, 129, 176])
def test_of_fewer_parts_too_many_columns_would_stay(k):
    """With the fewest stages that warp groups can have."""
    parted = 0
    for n in range(392, 4096, 264):
        product = ProductCase(60_000, n, k, "bfloat16", precision="default").product()
        for knobs in filter(lambda knobs: knobs.stationary, ENGINE.configurations(product, H200)):
            tiles = ceil(n / knobs.tile_n)
            if (parts := ceil(tiles / knobs.stationary)) == 1:
                continue
            least = {"stages": knobs.consumers, "epilogue_stages": 2 if knobs.store == "lines" else 1}
            fewer = replace(knobs, stationary=ceil(tiles / (parts - 1)), **least)
            assert "bytes of shared memory" in (knobs_reason(product, fewer, H200.shared_memory) or ""), knobs
            parted += 1
    assert parted > 20


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"tile_m": 128}, "a warp group has 128 rows; expected 64"),
        ({"swizzle": 8, "stationary": 2}, "swizzle is 8; expected 1"),
        ({"consumers": 3}, "there are 4 stages; expected as many of each of 3 warp groups"),
        ({"stages": 20}, "bytes of shared memory, and a block has"),
        ({"whole_rows": False}, "expected a product over a short K"),
        ({"store": "lines", "stationary": 0}, "store is 'lines'; its tiles of a row are computed by several blocks"),
        ({"store": "lines", "tile_n": 96}, "expected one result of 16 bits, and whole 64 columns of tiles"),
        ({"store": "lines", "epilogue_stages": 1}, "epilogue_stages is 1; expected 2, of the line that is stored"),
    ],
)
def test_knobs_that_do_not_fit(knobs, said):
    product = ProductCase(4000, 200, 72, "bfloat16", precision="default").product()
    with pytest.raises(ValueError, match=re.escape(said)):
        ENGINE.build(replace(KNOBS, **knobs), product, H100)


@pytest.mark.parametrize("count", [-1, 1.5])
def test_no_number_of_columns(count):
    with pytest.raises(ValueError, match="stationary must be an int of at least 0"):
        replace(KNOBS, stationary=count)


def test_columns_that_are_summed_do_not_stay():
    product = ProductCase(
        4000, 200, 72, "bfloat16", precision="default", epilogue=lambda acc: acc.sum(axis=2)
    ).product()
    with pytest.raises(ValueError, match="what is reduced is so of a tile's columns; expected no reduction"):
        ENGINE.build(KNOBS, product, H100)


@pytest.mark.parametrize(("k", "clocks"), [(77, 16), (61, 24), (95, 32), (63, 60), (129, 60), (102, 8), (62, 16)])
def test_rows_meet_in_banks(k, clocks):
    """Eight loads of single elements, or four of pairs; rows of 63 are 31.5 words apart, and there are 32 banks."""
    assert load_clocks(k) == clocks


@pytest.mark.parametrize(("m", "k", "copied"), [(4000, 61, False), (4000, 63, True), (20_000, 63, False)])
def test_rows_that_meet_in_the_same_banks_are_copied(m, k, copied):
    """Where no columns of b stay: then each row is read from shared memory for every tile of columns."""
    reason = lines_reason(ProductCase(m, 2048, k, "bfloat16", precision="default").product(), H200)
    assert ("more than copies of all rows take" in (reason or "")) == copied
