"""The end of a result that an epilogue reduces (cpp/kernels/product/reduce.cuh)."""

import math

from jaxdnn.engines.product.problem import Reduced
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers
from jaxdnn.plan import Launch, Result, Scratch

MOST_THREADS = 1024  # kMostThreads in product/reduce.cuh
FEW_THREADS = 256
COLUMNS = 32  # neighbours of a block: whole sectors of memory, and many lanes


def reduction(result: Reduced, register: str) -> str:
    """The C++ type of a reduction of values of the type `register`."""
    return f"jaxdnn::ReductionOf<jaxdnn::Reduction::{result.reduction}, {register}>"


def reduce_stage(
    reduction: str,
    source: Scratch | Result,
    result: tuple[Scratch | Result, str],
    extents: tuple[int, int, int],
    number: int,
) -> Stage:
    """Reduces values [outer, length, kept] over the axis in the middle, to a result with its C++ type."""
    to, to_type = result
    outer, length, kept = extents
    columns = min(COLUMNS, 1 << (kept - 1).bit_length())
    # A large block where even its threads have a few values each: there may be no other.
    threads = MOST_THREADS if length * columns >= 4 * MOST_THREADS else FEW_THREADS
    tiles = math.ceil(kept / columns)
    call, name = f"jaxdnn::ProductReduce<{reduction}, {to_type}>", f"product_reduce_{number}"
    found = [
        Parameter(f"const {call}::Value*", "values", "values", source),
        Parameter(f"{to_type}*", "result", "result", to),
        *numbers("long long", length=length, kept=kept),
        *numbers("unsigned", tiles=tiles),
    ]
    text = "\n" + entry_text("product_reduce", call, str(MOST_THREADS), found, name)
    launch = Launch(name, arguments(found), (outer * tiles, 1, 1), (columns, threads // columns, 1))
    return Stage(("product/reduce.cuh",), text, (launch,))
