"""Who serves products so small that starting a kernel is most of their time, or so narrow that XLA reads their rows by
threads: `small_reason`.
"""

from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90_model import moved

# Bytes in all and elements of K, up to which XLA's kernels took 1.0 to 3.2 us of an H100, and ours 2.3 to 4.2: theirs
# begin before the one ahead has ended [35 in benchmarks/results/product_kernels.md].
SMALL, SHORT_K = 2.5e6, 128
# Columns and rows: 32 columns are the fewest that a tile stores, and one matrix of so few took 0.52 to 0.81 of their
# time [41].
NARROW, MANY_ROWS = 8, 64


def small_reason(product: Product) -> str | None:
    """Why XLA's kernels serve a plain product of 16-bit floats in less time on Hopper, or None."""
    if not product.is_plain or product.a.itemsize != 2 or product.k > SHORT_K:
        return None
    if moved(product) <= SMALL:
        return "XLA's kernels begin in less time, which is most of so small a product's, and nothing is fused"
    if product.n <= NARROW and product.m > MANY_ROWS:
        return f"XLA's kernels take less time for {product.n} columns over a short K, and nothing is fused"
    return None
