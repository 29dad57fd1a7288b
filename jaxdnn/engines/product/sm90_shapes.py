"""Tiles that the kernel for Hopper's tensor cores is tried with, of products and convolutions; heuristics fit them.

Numbers in brackets are those of the notes on sm90 in benchmarks/results/product_kernels.md.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from jaxdnn.engines.product.sm90.knobs import Sm90Knobs

# Of these tiles pairs are faster, but where few would leave a half of the last one idle: the model can't tell [25].
ALONE = Sm90Knobs(tile_m=128, tile_n=192, cluster_m=1, schedule="pingpong")
PAIRED, FEW_PAIRS = replace(ALONE, cluster_m=2), 8

SHAPES = (
    Sm90Knobs(),
    Sm90Knobs(tile_m=256, tile_n=192, stages=3),
    PAIRED,
    ALONE,
    # Of columns that wider tiles would cut badly [24].
    Sm90Knobs(tile_m=128, tile_n=160, stages=5, schedule="pingpong"),
    Sm90Knobs(tile_m=256, tile_n=128),
    # Of which a result has as many as there are multiprocessors, or a few less than a multiple of that [29].
    Sm90Knobs(tile_m=192, tile_n=192, cluster_m=1, consumers=3),
    Sm90Knobs(tile_m=192, tile_n=160, cluster_m=1, consumers=3),
    Sm90Knobs(tile_m=192, tile_n=192, consumers=3),
    Sm90Knobs(tile_m=192, tile_n=160, consumers=3),
    # Large products of 8-bit floats [10].
    Sm90Knobs(tile_n=192, cluster_m=1, epilogue_stages=3),
    Sm90Knobs(tile_m=192, tile_n=128, cluster_m=1, consumers=3),
    Sm90Knobs(tile_n=192),
    Sm90Knobs(tile_m=128, tile_n=128, stages=6, schedule="pingpong"),
    # Whose rows of tiles may be odd, and which ask for the same rows of a at once [21, 36].
    Sm90Knobs(tile_m=128, tile_n=128, stages=6, cluster_m=1, cluster_n=2, schedule="pingpong"),
    # With few rows memory is the limit, and three stages are faster than four [11].
    Sm90Knobs(stages=3, cluster_m=1),
    Sm90Knobs(tile_n=160, stages=5, cluster_m=1, epilogue_stages=5),
    Sm90Knobs(tile_m=128, tile_n=128, stages=5, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=128, tile_n=128, stages=6, cluster_m=1),
    # Of a b whose rows run along k: else as many columns are loaded as of 128 [30].
    Sm90Knobs(tile_m=128, tile_n=96, stages=6, cluster_m=1, epilogue_stages=3),
    Sm90Knobs(tile_m=64, tile_n=256, stages=5, cluster_m=1, consumers=1),
    Sm90Knobs(tile_m=64, tile_n=128, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=128, tile_n=64, stages=6, cluster_m=1, schedule="pingpong"),
    # Many small matrices [12].
    Sm90Knobs(tile_m=64, tile_n=64, stages=8, cluster_m=1, schedule="pingpong"),
    Sm90Knobs(tile_m=64, tile_n=128, stages=8, cluster_m=1, consumers=1),
    Sm90Knobs(tile_m=128, tile_n=64, stages=8, cluster_m=1),
    Sm90Knobs(tile_m=64, tile_n=64, stages=8, cluster_m=1, consumers=1),
)

ENOUGH_STAGES = 4  # with which swapped tiles leave whole, though in parts they had room for more [78]

# Of columns that 256 would cut badly, over a long K, whose multiplies are what takes time [43].
LONG_SHAPES = (Sm90Knobs(tile_n=224), Sm90Knobs(tile_n=224, cluster_m=1))

# Of 8-bit elements: of more columns than 128 and fewer than 160, and as many stages as there is room for [75].
BYTES_SHAPES = (
    Sm90Knobs(tile_n=144, stages=6, cluster_m=1),
    Sm90Knobs(tile_n=192, stages=5, cluster_m=1),
    replace(ALONE, stages=5),
)

# Of the transposed product: as many rows of the result, few or many, as a tile's columns can be, in steps of 16.
SWAPPED_SHAPES = tuple(
    Sm90Knobs(tile_m=tile_m, tile_n=tile_n, stages=8, cluster_m=1, consumers=consumers, swapped=True)
    for tile_m, most, consumers in ((128, 256, 2), (256, 192, 2), (192, 192, 3))
    for tile_n in range(80, most + 1, 16)
)
# Likewise of matrices, whose few tiles fill the device [60].
SWAPPED_FEW_SHAPES = tuple(
    Sm90Knobs(tile_m=64, tile_n=tile_n, stages=12, cluster_m=1, cluster_n=cluster_n, consumers=1, swapped=True)
    for tile_n in range(48, 257, 16)
    for cluster_n in (1, 2)
)
# And of few rows, by so many columns that each block has one tile [70].
SWAPPED_WIDE_SHAPES = tuple(
    Sm90Knobs(tile_m=384, tile_n=tile_n, stages=3, cluster_m=1, consumers=3, swapped=True)
    for tile_n in range(48, 113, 16)
)
# And of which there are many, in turns.
SWAPPED_MANY_SHAPES = tuple(
    replace(shape, cluster_m=cluster_m, cluster_n=cluster_n)
    for shape in (
        Sm90Knobs(tile_m=128, tile_n=tile_n, stages=12, schedule="pingpong", swapped=True)
        for tile_n in range(80, 193, 16)
    )
    for cluster_m, cluster_n in ((1, 1), (1, 2), (2, 1))
)

# Of rows across lines of the L2 cache, of which each block of a cluster asks for a part, for all [33].
ACROSS_SHAPES = (
    Sm90Knobs(tile_m=128, tile_n=176, stages=5, schedule="pingpong"),  # over a long K [48]
    *(
        replace(shape, cluster_m=cluster_m, cluster_n=cluster_n)
        for shape in (
            Sm90Knobs(),
            Sm90Knobs(tile_m=256, tile_n=192, stages=3),
            ALONE,
            Sm90Knobs(tile_m=128, tile_n=160, stages=5, schedule="pingpong"),
            Sm90Knobs(tile_m=128, tile_n=128, stages=6, schedule="pingpong"),
        )
        for cluster_m, cluster_n in ((1, 2), (1, 4), (2, 2), (4, 1), (2, 4), (4, 2))
    ),
)
SWAPPED_ACROSS_SHAPES = (
    *(
        replace(shape, cluster_m=2, cluster_n=cluster_n)
        for shape in SWAPPED_SHAPES
        if shape.tile_n >= 128
        for cluster_n in (1, 2)
    ),
    # Of few rows, which up to four blocks share [69].
    *(
        replace(shape, cluster_m=cluster_m)
        for shape in SWAPPED_SHAPES
        if shape.tile_m == 128 and shape.tile_n < 128
        for cluster_m in (2, 4)
    ),
)


def deepest(knobs: Sm90Knobs, reason: Callable[[Sm90Knobs], str | None]) -> Sm90Knobs | None:
    """The knobs with as many of their stages as there is room for, by `reason`; or None."""
    if not knobs.swapped:
        return _deepest(knobs, range(knobs.epilogue_stages, 0, -1), reason)
    whole, parts = (_deepest(knobs, (epilogue_stages,), reason) for epilogue_stages in (1, 2))
    if whole is None or parts is None:
        return whole or parts
    return whole if whole.stages >= min(parts.stages, ENOUGH_STAGES) else parts


def _deepest(
    knobs: Sm90Knobs, epilogue_stages: Iterable[int], reason: Callable[[Sm90Knobs], str | None]
) -> Sm90Knobs | None:
    """Likewise, with the first of these `epilogue_stages` that there is room for."""
    for stages in range(knobs.stages, 1, -1):
        stagger = min(knobs.stagger, stages - 1)
        for one in epilogue_stages:
            choice = replace(knobs, stages=stages, epilogue_stages=one, stagger=stagger)
            if reason(choice) is None:
                return choice
    return None
