"""The step that copies operands which the kernel for Hopper's tensor cores can't load as they lie.

Its kernel is cpp/kernels/product/copy.cuh.
"""

from collections.abc import Sequence
from math import ceil

from jaxdnn.engines.product.problem import Matrix
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch

THREADS = 256  # of product/copy.cuh
TILE_BYTES = 128  # of a row of a tile, which has as many rows as that has elements


def copy_stage(copies: Sequence[tuple[Matrix, Matrix, bool]], batch: int) -> Stage:
    """Writes each second matrix, in the first scratch buffers in order, from the first one, transposed if so it says:
    all of a batch, of those that have one.
    """
    found: list[Parameter] = []
    sizes: list[int] = []
    blocks = 0
    for i, (source, copy, transposed) in enumerate(copies):
        matrices = batch if copy.batch_stride else 1
        size, tile = source.itemsize, TILE_BYTES // source.itemsize
        row_tiles, column_tiles = ceil(source.rows / tile), ceil(source.columns / tile)
        own = row_tiles * column_tiles * matrices
        lines = [line * size for line in (source.row_stride, source.batch_stride, source.columns)]
        words = not any(line % 4 for line in (*lines, source.buffer.offset))
        values = [
            Parameter("const unsigned char*", "from", "from", source.buffer),
            Parameter("unsigned char*", "to", "to", copy.buffer),
            *numbers(rows=source.rows, columns=source.columns),
            *numbers("long long", from_row=source.row_stride * size, from_batch=source.batch_stride * size),
            *numbers("long long", to_row=copy.row_stride * size, to_batch=copy.batch_stride * size),
            *numbers("unsigned", row_tiles=row_tiles, column_tiles=column_tiles, blocks=own),
            Parameter("bool", "transposes", "transposes", int(transposed)),
            Parameter("bool", "words", "words", int(words)),
        ]
        found += [Parameter(one.ctype, f"{one.name}{i}", f"copies[{i}].{one.field}", one.argument) for one in values]
        sizes.append(matrices * copy.rows * copy.row_stride * size)
        blocks += own
    config = struct_text("CopyConfig", {}, {"Bytes": copies[0][0].itemsize, "Copies": len(copies)})
    entry = entry_text("product_copy", "jaxdnn::ProductCopy<CopyConfig>", str(THREADS), found)
    launch = Launch("product_copy", arguments(found), (blocks, 1, 1), (THREADS, 1, 1))
    return Stage(("product/copy.cuh",), f"\n{config}\n{entry}", (launch,), tuple(sizes))
