"""What the heuristics choose first, among configurations of products that were timed on an H200 or an H100."""

import csv
import itertools
import statistics
from dataclasses import replace

import jax
import pytest

import jaxdnn
from checking.configurations import CONFIGURATIONS, named
from checking.product.calls import ProductCase
from checking.product.measured import problem
from checking.targets import H200
from jaxdnn.engines.product import sm90_model, unaligned
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.simt.engine import Simt
from jaxdnn.engines.product.skinny.engine import Skinny
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.sm90.short_k.heuristic import lines_reason
from jaxdnn.engines.product.sm90.short_k.knobs import whole_rows_reason
from jaxdnn.planning.calls import find_calls
from jaxdnn.planning.candidates import with_knobs

MEASURED = CONFIGURATIONS / "nvidia-h200-product.csv"
ON_H100 = CONFIGURATIONS / "nvidia-h100-product.csv"  # of pairs of columns, and of what was drawn
UNTUNED = CONFIGURATIONS / "nvidia-h200-untuned.csv"  # drawn, small and odd ones too, in rounds of one program
TRANSPOSED = CONFIGURATIONS / "nvidia-h200-transposed.csv"  # ragged ones, with what shapes came later
BYTES = CONFIGURATIONS / "nvidia-h200-bytes.csv"  # of 8-bit floats: drawn, in many configurations, and left out of fits
SMALL = CONFIGURATIONS / "nvidia-h200-simt.csv"  # of the kernel for any GPU, drawn
PRODUCT = ("m", "n", "k", "batch", "dtype", "a_transposed", "b_transposed", "epilogue")
KNOBS = ("tile_m", "tile_n", "stages", "cluster_m", "cluster_n", "consumers", "schedule", "split_k", "swapped")


def times(measured, configurations=MEASURED):
    """Of each product that the model was fitted to, was left out of that, or was drawn: times by engine and knobs."""
    with configurations.open() as file:
        rows = [row for row in csv.DictReader(file) if row["measured"] == measured]
    for product, group in itertools.groupby(rows, key=lambda row: tuple(row[name] for name in PRODUCT)):
        found = {}
        for row in group:
            knobs, time = (row["engine"], *named(KNOBS, row.get)), float(row["microseconds"])
            found[knobs] = min(time, found.get(knobs, time))
        yield product, found


def is_young(product, knobs):
    """Of the transposed product, by 64 of its rows or in turns, or of 8-bit floats, of which others came first."""
    transposed = isinstance(knobs, Sm90Knobs) and knobs.swapped
    return product.a.itemsize == 1 or (transposed and (knobs.tile_m == 64 or knobs.schedule == "pingpong"))


def choice(product, timed=(), young=is_young):
    """The engine that serves the product, and its first knobs: of shapes that are younger than most tables, the first
    that was `timed`.
    """
    for engine in (Skinny(), Sm90()):
        if not (engine.reason(product, H200) or engine.outdone(product, H200)):
            names = {"tile_m": "tile"} if engine.name == "skinny" else {}
            for knobs in engine.configurations(product, H200):
                of_these = {name: str(getattr(knobs, names.get(name, name), "")) for name in KNOBS}
                chosen = engine.name, *named(KNOBS, of_these.get)
                if not timed or chosen in timed or not young(product, knobs):
                    return chosen
    return "xla", *("" for _ in KNOBS)


@pytest.mark.parametrize(
    ("configurations", "measured", "mean", "worst"),
    [
        (MEASURED, "fitted", 1.05, 1.16),
        (MEASURED, "left out", 1.05, 1.15),
        (ON_H100, "fitted", 1.05, 1.15),
        (ON_H100, "drawn", 1.05, 1.15),
        (MEASURED, "lines", 1.05, 1.2),
        (MEASURED, "drawn", 1.04, 1.26),
        (MEASURED, "batches", 1.04, 1.15),
        (MEASURED, "far off", 1.34, 1.42),
        (UNTUNED, "drawn", 1.05, 1.27),
        (UNTUNED, "in shuffled order", 1.04, 1.22),
        (UNTUNED, "splits", 1.04, 1.19),
        (UNTUNED, "many tokens", 1.018, 1.08),
        (TRANSPOSED, "drawn", 1.05, 1.19),
        (TRANSPOSED, "few rows", 1.02, 1.16),
        (BYTES, "drawn", 1.01, 1.06),
        (BYTES, "swept", 1.016, 1.05),
        (BYTES, "left out", 1.02, 1.1),
        (BYTES, "whole", 1.015, 1.065),
        (TRANSPOSED, "whole", 1.025, 1.2),
    ],
)
def test_first_choices_are_fast(configurations, measured, mean, worst):
    """Within 5% of the fastest in the mean, and 15% at worst; where rows lie across lines 20%.

    But for two that are far off: of fewer columns than a tile, and a batch whose tiles of 64 columns are best. Of what
    was drawn for an H200, in all configurations, two of 76 are 16% and 25% off, and in rounds three of 52 are 18% to
    27%, two of them with one row and with three; of 42 in shuffled order, to which nothing is fitted, one is 22% off.
    Of ragged ones one is 18% off, whose rows lie across lines. Of 8-bit floats, timed as often as each other, none is
    9% off. Since transposed tiles leave whole a gelu over two stages is 19% off, one whose tiles are few 13%.
    """
    ratios = {}
    for product, found in times(measured, configurations):
        call = problem(*product)
        if not (whole_rows_reason(call) or lines_reason(call, H200)):
            continue  # these were timed by lines alone; test_short_k.py has others
        if measured == "whole" or (configurations is TRANSPOSED and call.a.itemsize == 1):  # of few that were timed
            chosen = choice(call, found, young=lambda *_: True)
        else:
            chosen = choice(call, () if configurations is TRANSPOSED else found)
        assert chosen in found, f"{product}: nobody measured {chosen}"
        fastest = min(time for (engine, *_), time in found.items() if engine in ("skinny", "sm90", chosen[0]))
        ratios[product] = found[chosen] / fastest
    assert statistics.fmean(ratios.values()) <= mean, ratios
    assert max(ratios.values()) <= worst, ratios


def test_small_products_are_fast_on_tensor_cores_of_any_gpu():
    """Within 1.5% of the fastest in the mean, 12% at worst."""
    knobs = ("tile_m", "tile_n", "thread_m", "thread_n", "depth", "stages", "split_k", "slice_k")
    with SMALL.open() as file:
        rows = list(csv.DictReader(file))
    ratios = {}
    for product, group in itertools.groupby(
        rows, key=lambda row: tuple(row[n] for n in ("m", "n", "k", "dtype", "epilogue"))
    ):
        found = {tuple(row[name] for name in knobs): float(row["microseconds"]) for row in group}
        m, n, k, dtype, epilogue = product
        first = next(iter(Simt().configurations(problem(m, n, k, 1, dtype, "0", "0", epilogue), H200)))
        chosen = tuple(str(getattr(first, name)) for name in knobs)
        assert chosen in found, f"{product}: nobody measured {chosen}"
        ratios[product] = found[chosen] / min(found.values())
    assert statistics.fmean(ratios.values()) <= 1.015, ratios
    assert max(ratios.values()) <= 1.12, ratios


@pytest.mark.parametrize(
    ("sizes", "epilogue", "tile"),
    [
        ((7040, 1280, 1024), "", (192, 128)),  # 21 us, by 128 x 128 22.5
        ((10_272, 2048, 3072), "", (192, 128)),  # 111 us, by 128 x 144 116
        ((1152, 14_336, 4096), "fast", (128, 144)),  # transposed and in turns 104 us, by 128 x 128 111
        ((768, 2304, 3584), "fast", (128, 112)),  # transposed 15.1 us, by 128 x 128 15.3
        ((4096, 4096, 4096), "fast", (128, 128)),  # in turns 113 us, by 128 x 256 in pairs 117
        ((768, 10_240, 6144), "fast", (128, 160)),  # 80 us in 3 rounds, by 128 x 128 87
        ((384, 5120, 2048), "fast", (128, 128)),  # 10.6 us, by 64 x 256 11.0
        ((1280, 3584, 5120), "", (128, 144)),  # 41.7 us, by 128 x 96 45.4
    ],
)
def test_tiles_of_bytes_leave_few_multiprocessors_idle(sizes, epilogue, tile):
    _, *found = choice(problem(*sizes, 1, "float8_e4m3fn", "0", "1", epilogue))
    assert tuple(map(int, found[:2])) == tile


def test_large_products_of_bytes_have_the_tiles_that_were_timed():
    product = problem(8192, 14_336, 1536, 1, "float8_e4m3fn", "0", "1", "fast")
    _, tile_m, tile_n, _, _, _, _, schedule, *_ = choice(product)
    assert (tile_m, tile_n, schedule) == ("128", "192", "pingpong")


@pytest.mark.parametrize("sizes", [(8192, 28672, 4096), (8192, 8192, 8192)])
def test_large_products_of_bytes_have_three_warp_groups(sizes):
    """1 to 2% faster where the power limit holds them; what 128 columns cost 16-bit operands counts for those alone."""
    _, tile_m, tile_n, *_ = choice(problem(*sizes, 1, "float8_e4m3fn", "0", "1", ""))
    assert (tile_m, tile_n) == ("192", "128")


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((960, 4608, 1280), (192, 192, 3)),  # 120 tiles, of 132 multiprocessors
        ((2048, 5504, 8192), (128, 176, 2)),  # 279 us transposed, by 256 x 176 too, and 293 by 385 of 192 x 160
        ((8560, 1536, 768), (128, 160, 2)),  # 360, but three rounds of tiles that are stored all at once
    ],
)
def test_tiles_of_192_rows_fill_few_rounds(sizes, tile):
    _, tile_m, tile_n, _, _, _, consumers, *_ = choice(problem(*sizes, 1, "bfloat16", "0", "0", ""))
    assert (tile_m, tile_n, consumers) == tuple(map(str, tile))


@pytest.mark.parametrize(
    ("product", "swapped"),
    [
        (("304", "45968", "6144", 1, "bfloat16", "0", "0", "gelu"), True),  # 317 us, 371 as it is
        (("176", "32000", "4096", 1, "bfloat16", "0", "0", ""), True),  # 81 and 90
        (("400", "9000", "3000", 1, "bfloat16", "0", "0", ""), False),  # 61 and 56: lines of b lie across others
        (("960", "4608", "1280", 1, "bfloat16", "0", "0", ""), False),  # 22.6 and 21.0: nothing hides the stores
        (("53632", "1400", "448", 1, "bfloat16", "0", "0", ""), False),  # 173 and 122: nor where warp groups take turns
        (("3322", "320", "9920", 1, "bfloat16", "0", "0", ""), True),  # 37.5 and 52.7
    ],
)
def test_products_are_transposed_where_they_are_faster(product, swapped):
    assert choice(problem(*product))[-1] == str(swapped)


@pytest.mark.parametrize(
    ("product", "tile"),
    [
        ((960, 960, 872, 1, "bfloat16", "0", "0", "gelu"), (64, 128)),  # 6.5 us, 9.0 by 128 x 64
        ((384, 1584, 696, 1, "bfloat16", "0", "0", ""), (64, 128)),  # 5.7 and 6.2
        ((64, 8192, 768, 1, "bfloat16", "0", "0", "gelu"), (64, 64)),  # 7.4, and 10.2 by skinny
        ((170, 144_800, 512, 1, "bfloat16", "0", "0", ""), (192, 192)),  # 64, and 70 by 128 x 192 in pairs
        ((162, 154_624, 896, 1, "bfloat16", "0", "0", ""), (128, 176)),  # 98.7 transposed in turns, 109 by 192 x 128
        ((174, 45_024, 5120, 1, "bfloat16", "0", "0", "swiglu"), (192, 64)),  # two rows of 128 are empty by a third
    ],
)
def test_few_rounds_take_tiles_that_fit(product, tile):
    engine, tile_m, tile_n, *_ = choice(problem(*product))
    assert (engine, int(tile_m), int(tile_n)) == ("sm90", *tile)


def test_three_warp_groups_by_128_columns_are_for_few_rounds():
    """Of eight, 74.7 us; two in turns 66.6 to 68.7."""
    knobs = next(iter(Sm90().configurations(problem(23_936, 1024, 768, 1, "bfloat16", "0", "0", ""), H200)))
    assert (knobs.tile_m, knobs.tile_n, knobs.consumers, knobs.schedule) == (128, 128, 2, "pingpong")


def test_blocks_share_columns_whose_lines_lie_across_others():
    """Of tiles that are taken to be as fast: 245 us in pairs, 264 where each block loads all of its own; and 240 by the
    transposed ones in turns.
    """
    tried = list(Sm90().configurations(problem(1848, 29_848, 1160, 1, "bfloat16", "0", "0", ""), H200))
    of_three = next(knobs for knobs in tried if (knobs.tile_m, knobs.swapped) == (192, False))
    for knobs, tile in ((of_three, (192, 192)), (tried[0], (128, 192))):
        assert (knobs.tile, knobs.cluster) == (tile, (2, 1))


def test_transposed_products_over_a_long_k_are_in_pairs():
    """In turns, 310 us, and 337 where each block loads all of its own."""
    knobs = next(iter(Sm90().configurations(problem(11_632, 3584, 2560, 1, "bfloat16", "0", "0", ""), H200)))
    assert (knobs.swapped, knobs.schedule, knobs.cluster_m * knobs.cluster_n) == (True, "pingpong", 2)


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        # 28.0 us, in pairs along columns and rows 29.1 and 31.0.
        ((2048, 4096, 960), (128, 128)),
        # 29.5 us, 33.4 by 128 x 256 that two warp groups share.
        ((1184, 6144, 1024), (128, 160)),
    ],
)
def test_clusters_of_a_short_k_that_gain_nothing_are_none(sizes, tile):
    knobs = next(iter(Sm90().configurations(problem(*sizes, 1, "bfloat16", "0", "0", ""), H200)))
    assert (knobs.tile, knobs.cluster) == (tile, (1, 1))


def test_products_of_one_stage_of_k_are_not_transposed():
    """Their results are written row by row."""
    product = problem(3000, 14_208, 48, 1, "bfloat16", "0", "0", "gelu")
    assert not any(knobs.swapped for knobs in Sm90().configurations(product, H200))


def test_one_round_has_no_turns():
    """Of 8-bit floats, 9.6 us by a warp group that works alone, 7.9 by two that share a tile."""
    assert "pingpong" not in choice(problem(304, 3584, 896, 1, "float8_e4m3fn", "0", "1", "fast"))


def test_knobs_are_set_in_a_configuration_that_can_have_them():
    """The first one is of three warp groups, each of which would have 43 rows."""
    configurations = list(Sm90().configurations(problem(960, 4608, 1280, 1, "bfloat16", "0", "0", ""), H200))
    asked = with_knobs(Sm90(), configurations, {"tile_m": 128})
    assert (configurations[0].consumers, asked.tile_m, asked.consumers) == (3, 128, 2)
    with pytest.raises(ValueError, match="a warp group would have"):
        with_knobs(Sm90(), configurations, {"tile_m": 40})


def test_copies_are_made_where_they_pay():
    """XLA, whose kernels take unaligned arrays as they lie, is a choice where they would have to be copied."""
    unaligned = 0
    for product, found in (*times("fitted"), *times("left out")):
        if packed(problem(*product))[1]:
            chosen = choice(problem(*product), found)
            least = 1.28 if product[:3] == ("448", "8192", "2048") else 1.2  # whose tiles another table has as others
            assert found[chosen] <= least * min(found.values()), f"{product}: {chosen}"
            unaligned += 1
    assert unaligned > 5


def test_float8_is_summed_in_float32_unless_the_call_says_otherwise():
    numbers, arrays = (((1,), (1,)), ((), ())), [jax.ShapeDtypeStruct((512, 512), "float8_e4m3fn")] * 2
    fast = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    imprecise = jax.lax.DotAlgorithm("float8_e4m3fn", "float8_e4m3fn", "float32", allow_imprecise_accumulation=True)
    for precision, promoted in ((None, True), (fast, False), (imprecise, False)):
        (call,) = find_calls(lambda x, w, p=precision: jaxdnn.dot_general(x, w, numbers, p), *arrays)
        assert {knobs.promotion > 0 for knobs in Sm90().configurations(call.problem, H200)} == {promoted}


def in_turns(product):
    """The clusters of tiles of 128 x 192 that two warp groups multiply in turns."""
    tried = Sm90().configurations(product, H200)
    wide = (knobs for knobs in tried if (knobs.tile_n, knobs.schedule, knobs.swapped) == (192, "pingpong", False))
    return {knobs.cluster_m for knobs in wide}


@pytest.mark.parametrize(("rows", "clusters"), [(9, {1}), (8, {2}), (47, {2}), (1, {1})])
def test_tiles_are_paired_unless_few_pairs_would_be_half_idle(rows, clusters):
    assert in_turns(ProductCase(128 * rows, 4096, 3072, "bfloat16", precision=None).product()) == clusters


@pytest.mark.parametrize(("k", "clusters"), [(1280, {1}), (4096, {1, 2})])
def test_8_bit_floats_of_a_short_sum_are_loaded_by_each_block(k, clusters):
    case = ProductCase(1024, 4096, k, "float8_e4m3fn", out="bfloat16", b_transposed=True, precision=None)
    assert in_turns(replace(case.product(), fast=True)) == clusters


@pytest.mark.parametrize(("n", "k", "clusters"), [(256, 64, 1), (512, 128, 1), (2048, 128, 1), (4096, 4096, 2)])
def test_what_memory_bounds_is_loaded_by_each_block(n, k, clusters):
    product = ProductCase(65_536, n, k, "bfloat16").product()
    knobs = next(iter(Sm90().configurations(product, H200)))
    assert knobs.cluster_m * knobs.cluster_n == clusters


@pytest.mark.parametrize(
    ("m", "n", "k", "swizzle"), [(802_816, 256, 64, 1), (256, 802_816, 64, 8), (200_704, 512, 128, 8)]
)
def test_a_k_of_one_stage_is_in_the_order_of_its_rows_where_b_stays(m, n, k, swizzle):
    knobs = next(iter(Sm90().configurations(ProductCase(m, n, k, "bfloat16").product(), H200)))
    assert (knobs.swizzle, knobs.tile_m == 64) == (swizzle, swizzle == 1)


def test_columns_of_a_batch_are_one_tile():
    """191 us, and 241 by tiles of 64 in turns."""
    product = ProductCase(480, 144, 64, "bfloat16", batch=2776, precision=None).product()
    assert next(iter(Sm90().configurations(product, H200))).tile_n == 192


def test_a_long_k_of_few_tiles_is_split():
    """14.6 us in five parts, and 20.0 in one, transposed; 13.2 in five, 17.2 in one, but 12.5 in one, transposed."""
    case = ProductCase(800, 256, 8352, "bfloat16", precision=None)
    assert next(iter(Sm90().configurations(case.product(), H200))).split_k == 5
    case = ProductCase(192, 1024, 8192, "float8_e4m3fn", out="bfloat16", b_transposed=True, precision=None)
    tried = list(Sm90().configurations(replace(case.product(), fast=True), H200))
    assert (tried[0].tile, tried[0].swapped, tried[0].split_k) == ((64, 48), True, 1)


def test_a_warp_group_that_has_the_only_tile_works_alone():
    """One round in turns takes more than half of two: nobody multiplies while results are stored."""
    knobs = Sm90Knobs(tile_m=128, tile_n=128, stages=6, cluster_m=1, schedule="pingpong")
    one, two = (problem(128 * tiles, 128, 1024, 1, "bfloat16", "0", "1", "") for tiles in (132, 264))
    alone, in_turns = (sm90_model.seconds(call, knobs, 132, matrices=True) for call in (one, two))
    assert alone > 0.52 * in_turns


def test_unaligned_results_of_two_sums_are_half_as_many():
    """3591 x 518 x 320 took 14.0 us of an H100."""
    call = problem(3591, 519, 320, 1, "bfloat16", "0", "0", "swiglu")
    assert unaligned.sm90_seconds(call, H200, unaligned.multiplying(call, H200))[0] < 19e-6
