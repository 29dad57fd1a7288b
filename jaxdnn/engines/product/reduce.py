"""The end of a result that an epilogue reduces (cpp/kernels/product/reduce.cuh)."""

import math

from jaxdnn.engines.product.problem import Reduced
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, joined, numbers
from jaxdnn.plan import Launch, Result, Scratch

MOST_THREADS = 1024  # kMostThreads in product/reduce.cuh
FEW_THREADS = 256
COLUMNS = 32  # neighbours of a block: whole sectors of memory, and many lanes
# An axis of which a thread would have more values than this is cut into parts of fewer, for so many blocks as draw a
# GPU's bandwidth: 50,176 rows of 64 columns took two blocks 200 us (benchmarks/results/convolution_kernels.md). The
# numbers are reckoned, by what a round trip to the L2 cache and a launch take; they were not measured.
MOST_VALUES, FEW_VALUES, BLOCKS = 64, 16, 256


def reduction(result: Reduced, register: str) -> str:
    """The C++ type of a reduction of values of the type `register`."""
    return f"jaxdnn::ReductionOf<jaxdnn::Reduction::{result.reduction}, {register}>"


def reduce_stage(
    reduction: str,
    source: Scratch,
    result: tuple[Scratch | Result, str],
    extents: tuple[int, int, int],
    number: int,
) -> Stage:
    """Reduces values [outer, length, kept] over the axis in the middle, to a result with its C++ type. The values are
    lost.
    """
    outer, length, kept = extents
    columns = min(COLUMNS, 1 << (kept - 1).bit_length())
    # A large block where even its threads have a few values each: there may be no other.
    threads = MOST_THREADS if length * columns >= 4 * MOST_THREADS else FEW_THREADS
    tiles = math.ceil(kept / columns)

    def stage(name: str, to: Scratch | Result, to_type: str, parts: int, beside: list[Parameter]) -> Stage:
        call = f"jaxdnn::ProductReduce<{reduction}, {to_type}>"
        found = [
            Parameter(f"const {call}::Value*", "values", "values", source),
            Parameter(f"{to_type}*", "result", "result", to),
            *numbers("long long", length=length, kept=kept),
            *numbers("unsigned", tiles=tiles),
            *beside,
        ]
        text = "\n" + entry_text("product_reduce", call, str(MOST_THREADS), found, name)
        launch = Launch(name, arguments(found), (outer * parts * tiles, 1, 1), (columns, threads // columns, 1))
        return Stage(("product/reduce.cuh",), text, (launch,))

    name, lanes = f"product_reduce_{number}", threads // columns
    parts = min(math.ceil(length / (FEW_VALUES * lanes)), BLOCKS // (outer * tiles))
    if length <= MOST_VALUES * lanes or parts < 2:
        return stage(name, *result, 1, [])
    part = math.ceil(length / parts)
    parts = math.ceil(length / part)
    cut = [*numbers("unsigned", parts=parts), *numbers("long long", part=part)]
    return joined(
        [
            stage(f"{name}_parts", source, f"{reduction}::Type", parts, cut),
            stage(name, *result, 1, numbers("long long", neighbour=part)),
        ]
    )
