"""Products that are split along K: where the splits' accumulators lie, and the step that adds them and applies the
epilogue.

The kernel of that step is cpp/kernels/product/split.cuh.
"""

import math
from dataclasses import dataclass

from jaxdnn.engines.product.element_epilogue import ElementEpilogue, Stored, ctype
from jaxdnn.engines.product.problem import Matrix, Product, identity
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch, Scratch
from jaxdnn.pointwise import functor
from jaxdnn.pointwise.cuda import register_type

THREADS = 256  # of product/split.cuh
ROWS = 4  # of a thread, where there are more than RESIDENT blocks of one row each
RESIDENT = 1056  # of a device of 132 multiprocessors
MAX_GRID_YZ = 65_535


@dataclass(frozen=True)
class Diagonal:
    """Blocks of accumulators that are summed, where groups were multiplied together: those of a group by itself.

    Attributes:
      groups: how many lie one behind the other, first of the rows, and so on; and of the columns.
      rows, columns: of a block.
    """

    groups: int = 1
    rows: int = 1
    columns: int = 1


def split_accumulators(product: Product, scratch: int, diagonal: Diagonal = Diagonal()) -> tuple[Matrix, ...]:
    """The accumulators of each split, [batch, split, m, n], in scratch buffers that are numbered from `scratch`; with a
    diagonal, rows are those of all groups.
    """
    m, n = product.m * diagonal.groups, product.n
    return tuple(Matrix(Scratch(scratch + i), product.accumulator, m, n, n, m * n) for i in range(len(product.b)))


def identity_epilogue(product: Product) -> ElementEpilogue:
    """The epilogue that leaves the accumulators of each split in the first scratch buffers."""
    register = ctype(register_type(product.accumulator))
    emitted = functor(identity(len(product.b), product.accumulator, product.accumulator), "Store")
    stored = (Stored(one.buffer, register, one.row_stride, one.batch_stride) for one in split_accumulators(product, 0))
    return ElementEpilogue(emitted, (), tuple(stored))


def split_stage(
    product: Product, epilogue: ElementEpilogue, splits: int, scratch: int = 0, diagonal: Diagonal = Diagonal()
) -> Stage:
    """Adds the splits' accumulators, whose scratch buffers are numbered from `scratch`, and applies the epilogue."""
    m, n, batches = product.m, product.n, product.batch
    register = ctype(register_type(product.accumulator))
    matrices = split_accumulators(product, scratch, diagonal)
    found = [
        Parameter(f"const {register}*", f"accumulators{i}", f"accumulators[{i}]", one.buffer)
        for i, one in enumerate(matrices)
    ]
    found += epilogue.parameters() + numbers("unsigned", m=m, n=n, batches=batches, splits=splits)
    if diagonal.groups > 1:
        found += numbers("unsigned", groups=diagonal.groups, group_rows=diagonal.rows, group_columns=diagonal.columns)
    columns = min(THREADS, 1 << (n - 1).bit_length())
    blocks = math.ceil(n / columns), math.ceil(m * columns / THREADS), batches
    rows = ROWS if math.prod(blocks) > RESIDENT else 1
    constants = {"Accumulators": len(matrices), "Rows": rows}
    config = struct_text("SplitConfig", {**epilogue.types(), "Accumulator": register}, constants)
    entry = entry_text("product_split", "jaxdnn::ProductSplit<SplitConfig>", str(THREADS), found)
    grid = (blocks[0], min(math.ceil(blocks[1] / rows), MAX_GRID_YZ), min(batches, MAX_GRID_YZ))
    launch = Launch("product_split", arguments(found), grid, (columns, THREADS // columns, 1))
    sizes = tuple(batches * splits * one.rows * n * one.itemsize for one in matrices)
    return Stage(("product/split.cuh",), f"\n{epilogue.text()}\n{config}\n{entry}", (launch,), sizes)
