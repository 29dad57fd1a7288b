"""Which unaligned products XLA serves sooner than copies of their operands are made: `unaligned_reason`.

Numbers in brackets are those of the notes on sm90 in benchmarks/results/product_kernels.md.
"""

from jaxdnn.device import Target
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.sm90.heuristic import MEMORY_RATE, candidates, moved, seconds
from jaxdnn.engines.product.sm90.knobs import packed
from jaxdnn.engines.product.tma import tma_reason

MANY = 2 * 2**20  # bytes of operands to copy and of results that TMA can't store, which are worth a thought
LAUNCH = 2e-6  # seconds that one more kernel takes at least
# Seconds, and then bytes a second, that results take without TMA, by their bytes that are stored at once [18].
STORE = {2: (25e-6, 0.85e12), 4: (8e-6, 1.7e12)}
# XLA's kernels for tensor cores, of such products: flops a second, bytes a second of such results, and the time with an
# epilogue, but for its traffic, relative to none [14, 18].
XLA_RATE = 200e12
XLA_STORE_RATE = 0.8e12
XLA_EPILOGUE = 1.25


def unaligned_reason(product: Product, target: Target) -> str | None:
    """Why XLA, whose kernels take operands and results as they lie, serves a product sooner than copies of the operands
    are made and results stored without TMA, or None.
    """
    _, copies = packed(product)
    copied = copied_bytes(product)
    unaligned = [result for result in product.stored if tma_reason(result, "a result")]
    scattered = sum(size(result, product.batch) for result in unaligned)
    if copied + scattered < MANY or product.a.itemsize < 2:
        return None
    knobs = next(candidates(product, target), None)
    if knobs is None:
        return None
    multiplying = seconds(product, knobs, target.sm_count)
    storing = 0.0
    for result in unaligned:
        start, rate = STORE[2 if result.row_stride * result.itemsize % 4 else 4]
        storing += start + size(result, product.batch) / rate
    ours = multiplying + LAUNCH * len(copies) + 2 * copied / MEMORY_RATE + storing
    flops = 2 * product.m * product.n * product.k * product.batch * len(product.b)
    xla = max(multiplying, flops / XLA_RATE, moved(product) / MEMORY_RATE) + scattered / XLA_STORE_RATE
    xla += LAUNCH * (len(product.b) - 1)
    if not product.is_plain:
        xla = XLA_EPILOGUE * xla + 2 * sum(size(result, product.batch) for result in product.stored) / MEMORY_RATE
    if ours < xla + LAUNCH:
        return None
    sizes = f"operands, {copied / 2**20:.0f} MiB, and storing unaligned results, {scattered / 2**20:.0f} MiB"
    return f"aligned copies of its {sizes}, would take longer than XLA's kernels without"


def copied_bytes(product: Product) -> int:
    """Of operands that are copied before they are multiplied."""
    _, copies = packed(product)
    return sum(size(source, product.batch if copy.batch_stride else 1) for _, source, copy in copies)


def size(matrix: Matrix, batch: int) -> int:
    """Bytes of a matrix's elements."""
    return matrix.rows * matrix.columns * matrix.itemsize * batch
