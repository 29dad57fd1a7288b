"""Who serves products of which rows are not aligned as TMA wants them: `unaligned_reason`, and of convolutions
`copies_reason`.

Such an operand is copied before the kernel for Hopper multiplies it, which takes a launch; the kernel for any GPU and
XLA's take operands as they lie. Numbers in brackets are those of the notes on sm90 in
benchmarks/results/product_kernels.md.
"""

from math import ceil, gcd, inf
from typing import Literal

from jaxdnn.device import Target
from jaxdnn.engines.product import sm90_model as model
from jaxdnn.engines.product.copies import copied_bytes, copy_seconds
from jaxdnn.engines.product.element_reason import element_reason
from jaxdnn.engines.product.operands import Copy, packed
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.simt import heuristic as simt
from jaxdnn.engines.product.sm90.heuristic import candidates
from jaxdnn.engines.product.sm90.short_k.heuristic import lines_reason
from jaxdnn.engines.product.sm90.short_k.knobs import whole_rows_reason
from jaxdnn.engines.product.sm90_model import MEMORY_RATE, moved
from jaxdnn.engines.product.tma import DEPTH_BYTES, tma_reason

LAUNCH = 2e-6  # seconds that one more kernel takes at least
# Short products are not held by the power limit that the model of sm90's time was fitted under [20].
SHORT, SHORT_SPEED = 40e-6, 1.3
MANY_COPIED = 16 * 2**20  # bytes of a convolution's copies, from which on they are compared with XLA's kernels
# Bytes in all, up to which the times that the model of the kernel for any GPU was fitted to were from the L2 cache, and
# how much longer larger products wait for memory [63].
SIMT_NEAR, SIMT_FAR = 0.5e6, 1.2
# Seconds, and then bytes a second, that results take without TMA, by the bytes that their rows are aligned to: straight
# from registers, or row by row; few take less [18, 20, 23].
STORE = {1: (15e-6, 0.5e12), 2: (3e-6, 0.9e12), 4: (2.2e-6, 1.1e12)}
FEW_STORE_RATE = 0.1e12
ANYWHERE = 4.5e-6  # seconds that rows that begin anywhere take at least [66]
GATED_STORE = 1 / 3  # of these, what results of two sums each take: half as wide as the tile is [57]
# XLA's kernels for tensor cores, of such products: flops a second of 16-bit operands by the bytes that their rows are
# aligned to, bytes a second of such results, and the time with an epilogue, but for its traffic, relative to none,
# [14, 18, 20, 59].
XLA_RATE = {2: 120e12, 4: 200e12, 8: 400e12}
# Of float32, flops a second, and seconds that these take besides, for more than so many elements [38].
XLA_FLOAT32_RATE, XLA_FLOAT32_START, XLA_FEW = 320e12, 4e-6, 160_000
XLA_STORE_RATE = 2e12
XLA_EPILOGUE = 1.35
XLA_EPILOGUE_OF_FLOAT32 = 2.7e-12  # seconds of a number [38, 54]
# Rows and columns that they multiply at least, of one matrix [51].
XLA_TILE = (128, 64)
XLA_SUM_BYTES = 4  # of what an epilogue is of, which is stored before it and read again
# Operations of a bias and an activation that XLA has cuBLASLt compute in a product of float32 [32].
XLA_FUSED = frozenset(("add", "mul", "max", "tanh"))
# Seconds that these take at least, and for 128 bytes of K, one after the other, of aligned rows and of others [20, 34].
XLA_START = 2e-6
XLA_STAGE = {True: 0.15e-6, False: 0.8e-6}
XLA_IN_TURN = 60  # aligned stages that one block waits for: a longer K is split [20]
# Elements of a result, and of float32 ones [38], of which a shorter K is split, too, and in how many parts [34].
XLA_FEW_RESULTS, XLA_FEW_OF_FLOAT32, XLA_PARTS = 128 * 128, 3 * 128 * 128, 3


def unaligned_reason(product: Product, target: Target, engine: Literal["sm90", "simt"]) -> str | None:
    """Why others than the engine serve a product that is not aligned in less time, or None."""
    scattered = sum(size(result, product.batch) for result in unaligned_results(product))
    _, copies = packed(product)
    if not (copies or scattered) or product.a.itemsize < 2:
        return None
    aligned = multiplying(product, target)
    times = {"xla": LAUNCH + xla_seconds(product, aligned, scattered), "simt": simt_seconds(product, target)}
    if engine == "sm90":
        times["sm90"], copies = sm90_seconds(product, target, aligned)
    fastest = min(times, key=times.__getitem__)
    if times[fastest] == times[engine]:
        return None
    if fastest == "simt":
        return "copies of its operands would take longer than the kernel for any GPU, which takes them as they lie"
    copied = copied_bytes(copies, product.batch)
    sizes = f"operands, {copied / 2**20:.1f} MiB, and storing unaligned results, {scattered / 2**20:.1f} MiB"
    return f"aligned copies of its {sizes}, would take longer than XLA's kernels without"


def copies_reason(product: Product, target: Target) -> str | None:
    """Why XLA's kernels take less time than copies of the operands of a convolution, as a product, or None.

    A coarser estimate than `unaligned_reason`'s: of many bytes that are copied, and not of results.
    """
    copied = copied_bytes(packed(product)[1], product.batch)
    if copied < MANY_COPIED or product.a.itemsize != 2:
        return None
    knobs = next(candidates(product, target))
    ours = model.seconds(product, knobs, target.sm_count) + 2 * copied / MEMORY_RATE
    flops = 2 * product.m * product.n * product.k * product.batch
    if ours < max(flops / XLA_RATE[4], moved(product) / MEMORY_RATE):
        return None
    return f"aligned copies of its operands, {copied / 2**20:.0f} MiB, would take longer than XLA's kernels without"


def sm90_seconds(product: Product, target: Target, aligned: float) -> tuple[float, list[Copy]]:
    """An estimate of the time with copies, of a product that takes so long when all is aligned; and the copies."""
    storing = 0.0
    for result in unaligned_results(product):
        start, rate = STORE[gcd(4, result.row_stride * result.itemsize)]
        stored = size(result, product.batch)
        storing += min(start, stored / FEW_STORE_RATE) + stored / rate
    storing *= GATED_STORE if len(product.b) > 1 else 1
    multiplied = aligned
    alone = product.batch == 1 or not product.is_plain  # of a batch with nothing fused XLA's kernels are faster [52]
    if alone and whole_rows_reason(product) is None and lines_reason(product, target) is None:
        _, copies = packed(product, whole_rows=True)
        if tma_reason(product.a, "a"):
            multiplied = max(aligned, ANYWHERE)
    else:
        knobs = next(candidates(product, target, matrices=True))
        _, copies = packed(product, knobs.views)
        if knobs.views > 1:
            multiplied = hastened(product, model.seconds(product, knobs, target.sm_count, matrices=True))
    return multiplied + copy_seconds(copies, product.batch, target.bandwidth or MEMORY_RATE) + storing, copies


def simt_seconds(product: Product, target: Target) -> float:
    """An estimate of the time of the kernel for any GPU; infinite if it does not serve the product."""
    found = simt.timed(product, target)
    if product.m * product.n * product.k * product.batch >= simt.MANY or element_reason(product, found):
        return inf
    bytes_moved = moved(product)
    farther = SIMT_FAR if bytes_moved > SIMT_NEAR else 1.0
    return max(farther * min(found.values()), bytes_moved / MEMORY_RATE)


def xla_seconds(product: Product, aligned: float, scattered: int) -> float:
    """An estimate of the time of XLA's kernels, which are no faster than ours when all is aligned."""
    rows, columns = product.m, product.n
    if product.batch == 1:  # many have smaller ones
        rows, columns = (ceil(size / tile) * tile for size, tile in zip((rows, columns), XLA_TILE, strict=True))
    flops = 2 * rows * columns * product.k * product.batch * len(product.b)
    itemsize, operands = product.a.itemsize, (product.a, *product.b)
    whole = all(tma_reason(matrix, "an operand") is None for matrix in operands)
    multiple = gcd(8, *(one.row_stride * itemsize for one in operands))
    if product.batch > 1:  # of which odd rows take no longer than others: 2196 times 63 x 256 x 683 333 us [59]
        multiple = max(multiple, 4)
    rate = XLA_RATE[multiple] * 2 / itemsize
    start, few = 0.0, XLA_FEW_RESULTS
    if product.a.dtype == "float32":
        few = XLA_FEW_OF_FLOAT32
        rate, start = XLA_FLOAT32_RATE, XLA_FLOAT32_START if product.m * product.n > XLA_FEW else 0.0
    stages = ceil(product.k * itemsize / DEPTH_BYTES)
    computing = max(aligned, flops / rate, moved(product) / MEMORY_RATE)
    storing = scattered / XLA_STORE_RATE
    in_turn = min(stages, XLA_IN_TURN) if whole else stages
    if product.m * product.n <= few:
        in_turn /= XLA_PARTS
    waiting = max(XLA_START, in_turn * XLA_STAGE[whole]) + storing
    epilogue = XLA_EPILOGUE if itemsize == 2 and not product.is_plain else 1.0
    seconds = start + max(epilogue * (computing + storing), waiting)
    if itemsize > 2 and not product.is_plain:
        seconds += XLA_EPILOGUE_OF_FLOAT32 * product.m * product.n * product.batch * len(product.b)
    if product.is_plain or xla_fuses(product):
        return seconds
    sums = product.m * product.n * product.batch * len(product.b) * XLA_SUM_BYTES
    return seconds + LAUNCH + 2 * sums / MEMORY_RATE


def xla_fuses(product: Product) -> bool:
    """Whether XLA's library computes the epilogue too."""
    rows = all(operand.broadcast == "row" for operand in product.operands)
    one = len(product.b) == len(product.results) == 1 and not product.reduced
    return product.a.dtype == "float32" and rows and one and XLA_FUSED.issuperset(product.program.operations)


def multiplying(product: Product, target: Target) -> float:
    """What the kernel for Hopper takes when all is aligned."""
    knobs = next(candidates(product, target), None)
    return inf if knobs is None else hastened(product, model.seconds(product, knobs, target.sm_count))


def hastened(product: Product, seconds: float) -> float:
    """What the kernel takes of which its model says so many seconds, if it is not held by the power limit."""
    return max(seconds / SHORT_SPEED, moved(product) / MEMORY_RATE) if seconds < SHORT else seconds


def unaligned_results(product: Product) -> list[Matrix]:
    """Those that TMA can't store."""
    return [result for result in product.stored if tma_reason(result, "a result")]


def size(matrix: Matrix, batch: int) -> int:
    """Bytes of a matrix's elements."""
    return matrix.rows * matrix.columns * matrix.itemsize * batch
