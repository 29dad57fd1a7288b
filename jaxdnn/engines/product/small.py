"""Who serves products so small that starting a kernel is most of their time, or so narrow that XLA reads their rows by
threads: `small_reason`. Numbers in brackets are those of the notes on sm90 in benchmarks/results/product_kernels.md.
"""

from math import inf
from typing import Literal

from jaxdnn.device import Target
from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.simt import heuristic as simt
from jaxdnn.engines.product.sm90_model import moved
from jaxdnn.engines.product.tma import CHUNK, tma_reason

# Bytes in all and elements of K, up to which XLA's kernels took 1.0 to 3.2 us of an H100, and ours 2.3 to 4.2: theirs
# begin before the one ahead has ended [35]. Of an H200 3.2 to 3.8 and 4.7 to 5.2, of up to 3 MB [56]; and of several
# matrices of up to 5 MB in all [76].
SMALL, SEVERAL_SMALL, SHORT_K = 3.2e6, 5e6, 128
# Likewise over a longer K, of whole chunks, and up to 256 of few columns over any such K [58, 59, 60]; and with a bias
# and an activation, over 384 at least [63], and larger ones of few columns over a multiple of 512 [71] or of few rows
# [74]; and plain ones over 512 at least, of a b whose rows TMA refuses [74].
LONGER_K, LONGER_K_SMALL = 1024, 0.6e6
FEW, FEW_K = 16, 256
FUSED_K, FUSED_SMALL = 384, 0.5e6
FUSED_FEW, FUSED_FEW_K, FUSED_FEW_SMALL = 128, 512, 1.2e6
FUSED_FEW_ROWS = 32
REFUSED_K, REFUSED_SMALL = 512, 1.5e6
# Seconds that the others of our kernels take at least, besides for an element of K, and with a function, of one matrix
# up to so large [63]; skinny, of more than FEWEST rows.
BEGUN_SMALL = 1.2e6
BEGUN = {"sm90": (2.8e-6, 2.1e-9, 0.6e-6), "skinny": (3.1e-6, 0.8e-9, 0.0)}
FEWEST = 8
MANY_OF = 64  # rows, columns and K, up to which many matrices take 0.68 to 0.93 of our time [56]
# Columns and rows: 32 columns are the fewest that a tile stores, and one matrix of so few took 0.52 to 0.81 of their
# time [41], many matrices of 24 columns 0.70 to 0.94 of ours [59], and of fewer rows 0.68 to 0.97; over a longer K 64
# and more of up to 40 columns 0.62 to 1.01 [76, 79]; and over a K of few elements up to 48 rows 0.66 to 0.97 [79].
NARROW, MANY_ROWS, STORED = 8, 64, 32
MANY_NARROW, NARROW_OF_MANY, NARROW_K = 64, 40, 1024
FEW_ROWS, FEW_OF_K = 48, 32

BEGIN = "begin in less time, which is most of so small a product's"


def small_reason(product: Product, target: Target, engine: Literal["skinny", "sm90", "simt"]) -> str | None:
    """Why others serve a product of 16-bit floats in less time on Hopper than the engine, or None: a plain one, or one
    with a function of it and of rows or columns.
    """
    if product.a.itemsize != 2:
        return None
    if product.is_plain and (reason := _plain_reason(product)):
        return reason
    one = product.batch == len(product.results) == 1 and not product.reduced
    if not one or product.k > LONGER_K or any(operand.broadcast == "full" for operand in product.operands):
        return None
    fused = not product.is_plain and len(product.b) == 1
    few = product.m <= FUSED_FEW_ROWS or (product.n <= FUSED_FEW and product.k % FUSED_FEW_K == 0)
    whole = product.k >= FUSED_K and product.k % CHUNK == 0
    if fused and whole and moved(product) <= (FUSED_FEW_SMALL if few else FUSED_SMALL):
        return f"XLA's kernels {BEGIN}"
    return f"kernels for any GPU {BEGIN}" if engine != "simt" and _simt_begins(product, target, engine) else None


def _simt_begins(product: Product, target: Target, engine: Literal["skinny", "sm90"]) -> bool:
    """Whether the kernel for any GPU is done before the engine's would be, of few tiles."""
    if moved(product) > BEGUN_SMALL or (engine == "skinny" and product.m <= FEWEST):
        return False
    start, of_k, function = BEGUN[engine]
    others = start + of_k * product.k + (0.0 if product.is_plain else function)
    return min(simt.timed(product, target).values(), default=inf) < others


def _plain_reason(product: Product) -> str | None:
    """Why XLA's kernels serve a product with nothing fused in less time, or None."""
    short = product.k <= SHORT_K
    whole = product.k <= LONGER_K and product.k % CHUNK == 0
    longer = whole or (product.k <= FEW_K and product.n <= FEW)
    refused = whole and product.k >= REFUSED_K and any(tma_reason(b, "b") for b in product.b)
    many = product.batch > 1
    most = (SEVERAL_SMALL if many else SMALL) if short else 0.0
    if not short and not many:
        most = REFUSED_SMALL if refused else LONGER_K_SMALL if longer else 0.0
    if moved(product) <= most:
        return f"XLA's kernels {BEGIN}, and nothing is fused"
    if many and max(product.m, product.n, product.k) <= MANY_OF:
        return f"XLA's kernels take less time for many matrices of {MANY_OF} rows and columns, and nothing is fused"
    narrow = product.n < STORED if many else product.n <= NARROW
    longer = product.batch >= MANY_NARROW and product.k <= NARROW_K and product.n <= NARROW_OF_MANY
    if product.m > MANY_ROWS and (narrow if short else longer):
        return f"XLA's kernels take less time for {product.n} columns over a K of {product.k}, and nothing is fused"
    few_rows = product.m < STORED or (product.m <= FEW_ROWS and product.k <= FEW_OF_K)
    if many and short and product.n > MANY_ROWS and few_rows:
        return f"XLA's kernels take less time for {product.m} rows over a K of {product.k}, and nothing is fused"
    return None
