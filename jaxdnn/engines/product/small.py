"""Who serves products so small that starting a kernel is most of their time: `small_reason`."""

from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.heuristic import moved

# Bytes in all and elements of K, up to which XLA's kernels took 1.0 to 3.2 us of an H100, and ours 2.3 to 4.2: theirs
# begin before the one ahead has ended [35 in benchmarks/results/product_kernels.md].
SMALL, SHORT_K = 2.5e6, 128


def small_reason(product: Product) -> str | None:
    """Why XLA's kernels serve a plain product of 16-bit floats in less time on Hopper, or None."""
    if not product.is_plain or product.a.itemsize != 2 or product.k > SHORT_K or moved(product) > SMALL:
        return None
    return "XLA's kernels begin in less time, which is most of so small a product's, and nothing is fused"
