"""The step that copies operands which the kernel for Hopper's tensor cores can't load as they lie, and its time.

Its kernel is cpp/kernels/product/copy.cuh.
"""

from collections.abc import Sequence
from math import ceil

from jaxdnn.engines.product.operands import Copy
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch

THREADS = 256  # of product/copy.cuh
# Seconds that a copy takes, before which the product can't start, and one more of the same launch: [34] of the notes on
# sm90 in benchmarks/results/product_kernels.md.
COPY, ANOTHER_COPY = 4.5e-6, 2e-6
REACHED = 0.87  # of a GPU's bandwidth: 4,158 of 4,800 GB/s, of an H200
RESIDENT = 8e6  # bytes of copies that stay in the L2 cache until they are read
TILE_BYTES = 128  # of a row of a tile, which has as many rows as that has elements


def copied_bytes(copies: Sequence[Copy], batch: int) -> int:
    """Of what is copied."""
    sizes = (one.source.rows * one.source.columns * one.source.itemsize for one in copies)
    return sum(size * (batch if one.matrix.batch_stride else 1) for one, size in zip(copies, sizes, strict=True))


def copy_seconds(copies: Sequence[Copy], batch: int, bandwidth: float) -> float:
    """An estimate of the time that the copies take."""
    if not copies:
        return 0.0
    copied = copied_bytes(copies, batch)
    return COPY + ANOTHER_COPY * (len(copies) - 1) + (1 if copied <= RESIDENT else 2) * copied / (REACHED * bandwidth)


def copy_stage(copies: Sequence[Copy], batch: int) -> Stage:
    """Makes the copies, in the first scratch buffers in order: all of a batch, of those that have one."""
    found: list[Parameter] = []
    sizes: list[int] = []
    blocks = 0
    for i, (source, copy, transposed, views, step) in enumerate(copies):
        matrices = batch if copy.batch_stride else 1
        size, tile = source.itemsize, TILE_BYTES // source.itemsize
        columns = source.columns if transposed else copy.columns
        row_tiles, column_tiles = ceil(source.rows / tile), ceil(columns / tile)
        own = row_tiles * column_tiles * matrices
        lines = [line * size for line in (source.row_stride, source.batch_stride, source.columns)]
        words = views == 1 and not any(line % 4 for line in (*lines, source.buffer.offset))
        values = [
            Parameter("const unsigned char*", "from", "from", source.buffer),
            Parameter("unsigned char*", "to", "to", copy.buffer),
            *numbers(rows=source.rows, columns=source.columns),
            *numbers("long long", from_row=source.row_stride * size, from_batch=source.batch_stride * size),
            *numbers("long long", to_row=copy.row_stride * size, to_batch=copy.batch_stride * size),
            *numbers("unsigned", row_tiles=row_tiles, column_tiles=column_tiles, blocks=own),
            Parameter("bool", "transposes", "transposes", int(transposed)),
            Parameter("bool", "words", "words", int(words)),
            Parameter("int", "views", "views", views),
            Parameter("int", "view_step", "view_step", step),
            *numbers(to_columns=copy.columns),
        ]
        found += [Parameter(one.ctype, f"{one.name}{i}", f"copies[{i}].{one.field}", one.argument) for one in values]
        sizes.append(matrices * copy.rows * copy.row_stride * size)
        blocks += own
    config = struct_text("CopyConfig", {}, {"Bytes": copies[0].source.itemsize, "Copies": len(copies)})
    entry = entry_text("product_copy", "jaxdnn::ProductCopy<CopyConfig>", str(THREADS), found)
    launch = Launch("product_copy", arguments(found), (blocks, 1, 1), (THREADS, 1, 1))
    return Stage(("product/copy.cuh",), f"\n{config}\n{entry}", (launch,), tuple(sizes))
