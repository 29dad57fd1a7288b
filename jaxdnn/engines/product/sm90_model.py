"""The time that is expected of the kernel for Hopper's tensor cores, for comparing knobs with each other.

Numbers in brackets are those of the notes on sm90 in benchmarks/results/product_kernels.md.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd, log2

import numpy as np

from jaxdnn.device import resident_clusters
from jaxdnn.engines.product.accumulators import ARITHMETIC
from jaxdnn.engines.product.operands import swapped
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.engines.product.sm90.knobs import L2_BYTES, Sm90Knobs, depth, loaded_columns, loaded_lines
from jaxdnn.engines.product.sm90_bytes import is_small, seconds_of_bytes
from jaxdnn.engines.product.sm90_grid import cluster_tiles
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES
from jaxdnn.engines.product.views import MOVE, view_k

# The model of `seconds` [6].
RATE = 700e12  # flops a second of 16-bit operands
# Bytes a second of a multiprocessor's shared memory: tiles are written there once, and each multiply of 64 rows reads
# its own rows and all columns. At 128 x 256 that takes as long as the multiplies, with narrower tiles longer.
SHARED_RATE = 185e9
ALONE_SHARED_RATE = 195e9  # likewise, of one warp group while the other computes the epilogue [24]
L2_RATE = 77e9  # bytes a second from the L2 cache to a multiprocessor
# Likewise in few rounds, when all blocks ask for the same part of K at once [15, 29]; of 8-bit elements [30]; of plain
# matrices, and of those whose lines lie across others [39].
TOGETHER_L2_RATE, TOGETHER_L2_RATE_OF_BYTES = 62e9, 85e9
ALIGNED_L2_RATE, ACROSS_L2_RATE = 78e9, 70e9
# Times as long takes what a block asks for itself, in lines of 128 bytes whose distance is a multiple of no more than
# so many: TMA asks for pieces of two lines [25, 33], of five sectors where they are a multiple of 16 alone [48, 53].
ACROSS_LINES = {64: 1.25, 32: 1.25, 16: 1.6}
# Seconds a tile that blocks of a cluster with the same columns, or four with the same rows [57], wait for each other,
# where their warp groups compute in turns, with functions that take long [24, 36] and without, by more than 128 columns
# [56].
CLUSTER_TURN = {True: 0.5e-6, False: 0.1e-6}
LONG_K = 2048  # from which tiles of other widths than chunks are as fast as the model says [24], and wide turns [25]
WIDE_TURNS = 1.09  # time of brief multiplies by more than 128 columns in turns, relative to others [25]
MULTICAST = 0.55  # [53] of what a cluster loads together, the part that its blocks don't load each by itself
# Time of multiplies by so many warp groups, relative to two. Those of one never overlap with another's; of three, two
# multiply while one adds up 8-bit floats, or stores.
TOGETHER = {1: 1.07, 2: 1.0, 3: 0.955}
# Time of 16-bit multiplies by 128 columns of three warp groups: of plain matrices in several rounds, of images in many
# [45, 54]; and of 8-bit ones without promotion [58].
NARROW_OF_THREE = 1.05
# Time of multiplies by more than 128 columns in turns, or of three warp groups, of one plain product of 16 bits and a
# short K, not transposed [80].
BRIEF_LARGE = 1.04
WIDE_BYTES = 1.05  # time of 8-bit elements by 256 columns, of blocks that share nothing, in several rounds [44]
WIDE_PROMOTED = 1.1  # of 8-bit floats by more than 128 columns that two warp groups share, with promotion [56, 58]
EPILOGUE = 4e-9  # seconds a column of 64 rows, to store 2 bytes of each sum
# Times as long, by two warp groups that share a tile, of a K so short [48, 80], or stored transposed in several rounds
# [64].
STORED_TOGETHER, BRIEF_K = 2.0, LONG_K * 3 // 4
FUNCTION = 2  # times as long, to compute something of it [20]
TRANSCENDENTAL = 3  # likewise, what is more than arithmetic, a gelu say, and seconds a tile besides [24]
SWAPPED = 2.5  # likewise, at least, to store it transposed: TMA writes rows of 32 bytes [31]
SWAPPED_TURNS = 2  # times as long then, of warp groups in turns: TMA writes one's rows after the other's [60]
# And of what they multiply, of blocks that share nothing, over a long K in several rounds [60], and in many [80].
SWAPPED_ALONE = 1.02
# Times as long the whole takes then, of matrices of 16-bit elements [59], and of others.
SWAPPED_TIME, SWAPPED_TIME_OF_OTHERS = 1.015, 1.03
TRANSCENDENTAL_START = 0.6e-6
WIDE_OF_THREE = 1.6e-6  # seconds a tile of more than 128 columns, whose three warp groups store all at once [29]
GATED_OF_THREE = 1.2e-6  # likewise, of two accumulators [46]
TILE = 0.1e-6  # seconds from the first copy of a tile to the first multiply, and from the last one to the results
NARROW_TURN = 6.6e-9  # seconds a row, at least, of tiles of one chunk in turns, of results that have more columns [57]
MEMORY_RATE = 4.1e12  # bytes a second
ONE_STAGE = 0.97  # times as long takes what memory bounds, by tiles of 64 rows of a K of one stage [28]
CLUSTER_MEMORY = 1.03  # times as long takes what memory bounds, in clusters: their blocks wait for each other [28]
SPLIT_LAUNCH = 3e-6  # seconds that the second kernel of a split takes at least
SPLIT_RATE = 1.2e12  # bytes a second that accumulators of splits are written and read at
# Likewise of up to so many splits whose accumulators, up to so many bytes, stay in the L2 cache [73].
KEPT_SPLITS, KEPT_SPLIT_BYTES, KEPT_SPLIT_RATE = 16, 16 * 2**20, 2.5e12
# In few rounds latency is the limit, and the blocks of a cluster wait for each other.
FEW_ROUNDS = 2
MANY_ROUNDS = 8  # in which the power limit holds 8-bit floats, and three warp groups take less energy than two [2]
FEW_OF_64 = 0.95  # time of tiles of 64 rows by 128 columns or more then [56]
CLUSTER_LATENCY = 0.91  # speed with few rounds [7]
CLUSTER_START = 0.2e-6  # seconds that its blocks wait for each other then, until they load and when they end [26]


def moved(product: Product) -> int:
    """Bytes of the operands and the result, each once."""
    operands = sum(matrix.rows * matrix.columns for matrix in (product.a, *product.b))
    full = sum(np.dtype(operand.dtype).itemsize for operand in product.operands if operand.broadcast == "full")
    return (product.a.itemsize * operands + (product.a.itemsize + full) * product.m * product.n) * product.batch


def overlapped(computing: float, product: Product, bounded: float = 1.0) -> float:
    """Seconds of what is computed and moved at once. What memory bounds takes `bounded` times as long."""
    moving = moved(product) / MEMORY_RATE
    return (bounded if moving > computing else 1.0) * at_once(computing, moving)


def at_once(computing: float, moving: float) -> float:
    """Seconds of what takes so many by itself: neither hides behind the other entirely, where they are alike."""
    return (computing**4 + moving**4) ** 0.25


def rounds(product: Product, knobs: Sm90Knobs, sm_count: int) -> float:
    """How often every block has a tile to work on, on average."""
    cluster = knobs.cluster_m * knobs.cluster_n
    return cluster_tiles(product, knobs) * product.batch * knobs.split_k / resident_clusters(cluster, sm_count)


def is_brief(product: Product) -> bool:
    """Whether what comes between tiles counts beside their multiplies: those of 8-bit floats, over a short K."""
    return product.a.itemsize == 1 and product.k < LONG_K


def in_row_order(product: Product) -> bool:
    """Whether tiles are worked through row by row: those of one stage of K, of a b that stays in the L2 cache, which
    keep no sums of their columns for the next one.
    """
    size = product.k * product.n * product.batch * sum(b.itemsize for b in product.b)
    return product.k <= depth(product) and size <= L2_BYTES // 4 and not product.reduced


def across_rows(matrix: Matrix, apart: int = 0) -> float:
    """How much longer it takes to load lines that may lie across those of the L2 cache, because of how long rows of a
    matrix are, or of tiles that begin so many elements apart.
    """
    return ACROSS_LINES.get(gcd(DEPTH_BYTES, matrix.row_stride * matrix.itemsize, apart * matrix.itemsize), 1.0)


def across_lines(matrix: Matrix, apart: int = 0) -> float:
    """Likewise 128 bytes of each row, less what there is not of a row's last ones."""
    row = matrix.columns * matrix.itemsize
    filled = row / (ceil(row / DEPTH_BYTES) * DEPTH_BYTES)
    return max(1.0, filled * across_rows(matrix, apart))


def is_across(product: Product) -> bool:
    """Whether TMA asks for most lines of an operand twice, which is what tiles wait for then."""
    return max(map(across_lines, (product.a, *product.b))) > ACROSS_LINES[64]


@dataclass(frozen=True)
class _Tile:
    """What the time of a product's tiles follows from.

    Attributes:
      product: as tiles have it, transposed or not.
      matrices: whether its operands lie in memory as it has them, so that what TMA asks for is known.
    """

    product: Product
    knobs: Sm90Knobs
    sm_count: int
    matrices: bool

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.product.a.itemsize

    @cached_property
    def transcendental(self) -> bool:
        """Whether the epilogue has functions that are more than arithmetic."""
        return not ARITHMETIC.issuperset(self.product.program.operations)

    @cached_property
    def length(self) -> int:
        """Elements of K."""
        return ceil(view_k(self.product, self.knobs.views) / self.knobs.split_k)

    @cached_property
    def loaded(self) -> int:
        """Lines of all matrices b that a stage has."""
        return loaded_lines(self.product, self.knobs) * len(self.product.b)

    @cached_property
    def width(self) -> int:
        """Columns of accumulators."""
        return self.knobs.tile_n * len(self.product.b)

    @cached_property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.knobs.cluster_m * self.knobs.cluster_n

    @cached_property
    def on_average(self) -> float:
        """Tiles of a block."""
        return rounds(self.product, self.knobs, self.sm_count)

    @cached_property
    def turns(self) -> int:
        """Tiles of the block that has most."""
        return ceil(self.on_average)

    @property
    def latent(self) -> bool:
        """Whether all blocks ask for the same part of K at once."""
        return self.turns <= FEW_ROUNDS and self.cluster <= 2

    @property
    def pingpong(self) -> bool:
        return self.knobs.schedule == "pingpong"

    @property
    def wide_of_three(self) -> bool:
        return self.knobs.consumers == 3 and self.width > 2 * CHUNK


def seconds(
    product: Product,
    knobs: Sm90Knobs,
    sm_count: int,
    *,
    multiplied: float = 1.0,
    copies: tuple[float, float] = (1.0, 1.0),
    matrices: bool = False,
) -> float:
    """An estimate of the time, for comparing knobs with each other. `multiplied` is the part of K that is no padding;
    `copies` are how many there are of each operand, for as many bytes as a line of DEPTH_BYTES has; `matrices` says
    that operands lie in memory as a product has them, so that what TMA asks for is known.
    """
    product = swapped(product) if knobs.swapped else product
    tile = _Tile(product, knobs, sm_count, matrices)
    if matrices and is_small(product):
        start = TRANSCENDENTAL_START if tile.transcendental else 0.0
        time = overlapped(seconds_of_bytes(product, knobs, tile.length, tile.on_average, _work(tile), start), product)
    else:
        time = _seconds(tile, multiplied, copies)
    if knobs.split_k > 1:
        stored = product.m * product.n * product.batch * len(product.b) * 4 * knobs.split_k
        stays = stored <= KEPT_SPLIT_BYTES and knobs.split_k <= KEPT_SPLITS
        time += SPLIT_LAUNCH + 2 * stored / (KEPT_SPLIT_RATE if stays else SPLIT_RATE)
    return time


def _seconds(tile: _Tile, multiplied: float, copies: tuple[float, float]) -> float:
    """Likewise of what is no small product of 8-bit matrices."""
    product, knobs, matrices = tile.product, tile.knobs, tile.matrices
    storing = _storing(tile)
    whole = _whole(tile, _multiplying(tile, multiplied), _loading(tile, copies), storing)
    # Nothing is multiplied while the last tile's functions are computed, or its rows of 32 bytes are stored.
    last = storing if tile.pingpong and ((knobs.swapped and matrices) or not product.is_plain) else 0.0
    small = in_row_order(product) and knobs.tile_m == 64
    bounded = CLUSTER_MEMORY ** log2(tile.cluster) if tile.cluster > 1 else ONE_STAGE if small else 1.0
    bounded *= loaded_columns(product, knobs) / knobs.tile_n  # some of which two tiles load
    time = overlapped(tile.turns * whole + last, product, bounded)
    if knobs.swapped:
        time *= SWAPPED_TIME if matrices and tile.size > 1 else SWAPPED_TIME_OF_OTHERS
    return time


def _multiplying(tile: _Tile, multiplied: float) -> float:
    """Seconds that the tensor cores take for a tile, or shared memory if that is longer."""
    product, knobs, size, width, turns = tile.product, tile.knobs, tile.size, tile.width, tile.turns
    own = width // knobs.groups  # of what a line of a's meets
    # Float32 elements are multiplied half as fast as 16-bit ones.
    multiplies = 2 * knobs.tile_m * own * tile.length * multiplied / (RATE * 2 / size / tile.sm_count)
    accesses = knobs.tile_m + tile.loaded + knobs.tile_m // 64 * (64 + own) * multiplied
    shared_rate = ALONE_SHARED_RATE if tile.transcendental and tile.pingpong else SHARED_RATE
    together = TOGETHER[2 if tile.wide_of_three else knobs.consumers]
    time = max(multiplies, accesses * tile.length * size / shared_rate) * together
    narrow = size > 1 and width <= 2 * CHUNK and turns > (FEW_ROUNDS if tile.matrices else MANY_ROUNDS)
    narrow |= tile.matrices and size == 1 and width == 2 * CHUNK and not knobs.promotion
    if knobs.consumers == 3 and narrow:
        time *= NARROW_OF_THREE
    promoted = tile.matrices and knobs.promotion > 0 and width > 2 * CHUNK and not knobs.swapped
    if not tile.pingpong and promoted:
        time *= WIDE_PROMOTED
    time += MOVE[knobs.views] * knobs.tile_m * width
    if is_brief(product) and tile.pingpong and width > 2 * CHUNK:
        time *= WIDE_TURNS
    brief = tile.matrices and size == 2 and product.k < LONG_K and product.is_plain and product.batch == 1
    large = knobs.consumers == 3 or (tile.pingpong and width > 2 * CHUNK)
    if brief and large and not knobs.swapped:
        time *= BRIEF_LARGE
    if tile.matrices and size == 1 and width == 4 * CHUNK and tile.cluster == 1 and turns > 1:
        time *= WIDE_BYTES
    return time


def _loading(tile: _Tile, copies: tuple[float, float]) -> float:
    """Seconds until a tile's operands are there."""
    product, knobs, size = tile.product, tile.knobs, tile.size
    apart = knobs.columns if tile.matrices and not product.b_transposed else 0
    across = across_lines(product.a), across_lines(product.b[0], apart)
    if knobs.views > 1:  # a is a copy, in whole lines; b's lie anywhere
        across = 1.0, max(ACROSS_LINES.values())
    # Of a cluster at the end of the result some blocks load for nobody.
    sharing = (ceil(product.n / knobs.columns), knobs.cluster_n), (ceil(product.m / knobs.tile_m), knobs.cluster_m)
    shared_a, shared_b = (
        ((1 - MULTICAST) + (MULTICAST + longer - 1) * ceil(tiles / n) / tiles) * copied
        for (tiles, n), longer, copied in zip(sharing, across, copies, strict=True)
    )
    loaded_bytes = (knobs.tile_m * shared_a + tile.loaded * shared_b) * tile.length * size
    if not tile.latent:
        return loaded_bytes / L2_RATE
    if size == 1:
        return loaded_bytes / TOGETHER_L2_RATE_OF_BYTES
    if tile.matrices:
        return loaded_bytes / (ACROSS_L2_RATE if max(across) > 1 else ALIGNED_L2_RATE)
    return loaded_bytes / TOGETHER_L2_RATE


def _work(tile: _Tile) -> float:
    """Times as long, to store and compute the results of a sum, as it takes to store 2 bytes of it."""
    computing = 0 if tile.product.is_plain else TRANSCENDENTAL if tile.transcendental else FUNCTION
    return sum(result.itemsize for result in tile.product.stored) / 2 + computing


def _storing(tile: _Tile) -> float:
    """Seconds that a tile's epilogue takes."""
    product, knobs, turns = tile.product, tile.knobs, tile.turns
    work = max(_work(tile), SWAPPED) if knobs.swapped else _work(tile)
    time = TILE + EPILOGUE * tile.width * (knobs.consumer_rows // 64) * work
    time += TRANSCENDENTAL_START if tile.transcendental else 0.0
    shared = tile.matrices and not tile.pingpong and knobs.consumers == 2 and tile.size == 2
    briefly = product.k <= BRIEF_K and turns > 1
    if shared and product.is_plain and (briefly or (knobs.swapped and turns > FEW_ROUNDS)):
        time *= STORED_TOGETHER
    if tile.wide_of_three:
        time += WIDE_OF_THREE
    elif knobs.consumers == 3 and len(product.b) > 1:
        time += GATED_OF_THREE
    return time


def _whole(tile: _Tile, multiplying: float, loading: float, storing: float) -> float:
    """Seconds from a tile to the next one, of which the parts take so many."""
    product, knobs, turns, cluster = tile.product, tile.knobs, tile.turns, tile.cluster
    if tile.pingpong and turns == 1:  # who has a tile works alone
        time = max(multiplying * TOGETHER[1] + storing, loading)
    elif tile.pingpong:
        one_chunk = tile.matrices and tile.width == CHUNK < product.n
        time = max(multiplying, loading, (multiplying + storing) / 2, NARROW_TURN * knobs.tile_m * one_chunk)
        if knobs.swapped and tile.matrices:
            alone = cluster == 1 and turns > (FEW_ROUNDS if product.k >= LONG_K else MANY_ROUNDS)
            time = max(time * (SWAPPED_ALONE if alone else 1.0), SWAPPED_TURNS * storing)
        waiting = knobs.cluster_m > 1 or knobs.cluster_n > 2
        if waiting and (tile.transcendental or (tile.matrices and tile.size == 2 and tile.width > 2 * CHUNK)):
            time += CLUSTER_TURN[tile.transcendental]
    else:
        time = max(multiplying + storing, loading)
    if tile.matrices and turns <= FEW_ROUNDS and knobs.tile_m == 64 and tile.width >= 2 * CHUNK and knobs.split_k == 1:
        time *= FEW_OF_64
    if turns <= FEW_ROUNDS and cluster > 1:
        time = time / (CLUSTER_LATENCY if tile.latent else 1.0) + CLUSTER_START / turns
    return time
