"""The end of a result that an epilogue reduces (cpp/kernels/product/reduce.cuh)."""

import math
from collections.abc import Sequence

from jaxdnn.engines.product.problem import Reduced
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, joined, numbers
from jaxdnn.plan import Launch, Result, Scratch

MOST_THREADS = 1024  # kMostThreads in product/reduce.cuh
FEW_THREADS = 256
# Neighbours of a block: whole lines of memory, and many lanes; or sectors, and more of them.
COLUMNS, FEW_COLUMNS = 32, 8
AT_ONCE = 8  # kAtOnce: values that a thread waits for together
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
    return reduce_together(reduction, [(source, result[0])], result[1], extents, number)


def reduce_together(
    reduction: str,
    buffers: Sequence[tuple[Scratch, Scratch | Result]],
    to_type: str,
    extents: tuple[int, int, int],
    number: int,
) -> Stage:
    """Likewise several results, alike but for their buffers, in as many launches as one."""
    outer, length, kept = extents
    columns = min(COLUMNS, 1 << (kept - 1).bit_length())
    # Of a long axis a sector of each line, where that does not make too many blocks.
    if length * columns > FEW_VALUES * MOST_THREADS and outer * math.ceil(kept / FEW_COLUMNS) <= BLOCKS:
        columns = min(columns, FEW_COLUMNS)
    # A large block where even its threads have a few values each: there may be no other.
    threads = MOST_THREADS if length * columns >= 4 * MOST_THREADS else FEW_THREADS
    # Of a short axis each has several, where enough blocks are left: 3 values of 476,288 columns took 14,884 blocks.
    while (
        columns < min(threads, kept)
        and 2 * length * columns <= AT_ONCE * threads
        and outer * math.ceil(kept / (2 * columns)) >= BLOCKS
    ):
        columns *= 2
    tiles, count = math.ceil(kept / columns), len(buffers)
    sources = [source for source, _ in buffers]

    def stage(name: str, results: Sequence[Scratch | Result], ctype: str, parts: int, beside: list[Parameter]) -> Stage:
        call = f"jaxdnn::ProductReduce<{reduction}, {ctype}{f', {count}' if count > 1 else ''}>"
        found = [
            *(Parameter(f"const {call}::Value*", f"values{i}", f"values[{i}]", one) for i, one in enumerate(sources)),
            *(Parameter(f"{ctype}*", f"result{i}", f"results[{i}]", one) for i, one in enumerate(results)),
            *numbers("long long", length=length, kept=kept),
            *numbers("unsigned", tiles=tiles),
            *beside,
        ]
        text = "\n" + entry_text("product_reduce", call, str(MOST_THREADS), found, name)
        grid = (outer * parts * tiles, count, 1)
        launch = Launch(name, arguments(found), grid, (columns, threads // columns, 1))
        return Stage(("product/reduce.cuh",), text, (launch,))

    name, lanes, results = f"product_reduce_{number}", threads // columns, [result for _, result in buffers]
    parts = min(math.ceil(length / (FEW_VALUES * lanes)), BLOCKS // (outer * tiles * count))
    if length <= MOST_VALUES * lanes or parts < 2:
        return stage(name, results, to_type, 1, [])
    part = math.ceil(length / parts)
    parts = math.ceil(length / part)
    cut = [*numbers("unsigned", parts=parts), *numbers("long long", part=part)]
    return joined(
        [
            stage(f"{name}_parts", sources, f"{reduction}::Type", parts, cut),
            stage(name, results, to_type, 1, numbers("long long", neighbour=part)),
        ]
    )
