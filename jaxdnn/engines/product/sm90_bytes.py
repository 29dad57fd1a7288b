"""The time that is expected of the kernel for Hopper's tensor cores of small products of 8-bit matrices.

A model of its own: they multiply twice as fast, so that what is between multiplies takes a larger part, and what is
loaded never bounds them. Numbers in brackets are those of the notes on sm90 in
benchmarks/results/product_kernels.md; constants are fitted to what [75] says.
"""

from math import ceil

from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs, loaded_lines
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES

SMALL = 300e9  # flops, up to which they were timed: of larger ones nothing but what is chosen was [65]
RATE = 11e12  # flops a second of a multiprocessor
SHARED_RATE = 212e9  # bytes a second of its shared memory, of what is written there and what multiplies read
THREE = 1.08  # time of the multiplies of three warp groups, relative to two, without promotion or by few columns
PROMOTED = 55e-9  # seconds that 64 columns of sums take to be added up in float32
EPILOGUE = 7e-9  # seconds a column of 64 rows, to store 2 bytes of each sum
HIDDEN, FEW = 0.65, 2  # the part of it that takes time of warp groups that share more than so many tiles
RAGGED = 1.2  # times as long then, where its subtiles are of 16 columns
LAST = 0.5  # the part of the last tile's that takes time, in turns


def is_small(product: Product) -> bool:
    """Whether it has 8-bit elements, and no more flops than those that were timed."""
    return product.a.itemsize == 1 and 2 * product.m * product.n * product.k * product.batch * len(product.b) <= SMALL


def seconds_of_bytes(
    product: Product, knobs: Sm90Knobs, length: int, on_average: float, work: float = 1.0, start: float = 0.0
) -> float:
    """Seconds that are computed, of a product as tiles have it, transposed or not, over so many elements of K. Each
    block has so many tiles on average; results take `work` times as long as one of 2 bytes, and `start` seconds a tile
    besides.
    """
    turns = ceil(on_average)
    width = knobs.tile_n * len(product.b)
    multiplies = 2 * knobs.tile_m * width * length / RATE
    lines = knobs.tile_m + loaded_lines(product, knobs) * len(product.b)
    accesses = lines + knobs.tile_m // 64 * (64 + width)
    multiplying = max(multiplies, accesses * length / SHARED_RATE)
    if knobs.consumers == 3 and (not knobs.promotion or width < 2 * CHUNK):
        multiplying *= THREE
    if knobs.promotion:
        multiplying += length / (knobs.promotion * DEPTH_BYTES) * PROMOTED * width / CHUNK
    storing = start + EPILOGUE * width * (knobs.consumer_rows // 64) * work
    if knobs.schedule == "pingpong" and turns > 1:
        return turns * max(multiplying, (multiplying + storing) / 2) + LAST * storing
    storing *= (HIDDEN if turns > FEW else 1.0) * (RAGGED if width % 32 else 1.0)
    return turns * (multiplying + storing)
