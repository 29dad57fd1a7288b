"""A convolution as the product of matrices that each of its groups is; no memory holds the image's matrix of windows.

What is made for products, of their sizes, their epilogue and the sums of their splits, so serves convolutions.
"""

from dataclasses import replace
from math import prod

from jaxdnn.engines.convolution.problem import Convolution, Tensor
from jaxdnn.engines.product.problem import Matrix, Product


def product_of_group(problem: Convolution) -> Product:
    """Rows are those of the epilogue, columns the channels of one group. All that strides say is left out."""
    taps = prod(window.filter for window in problem.windows)
    summed = {
        "output": taps * problem.c,
        "image": taps * problem.k,
        "filter": problem.n * prod(window.output for window in problem.windows),
    }[problem.result]
    m, n = problem.rows, problem.columns // problem.groups

    def matrix(tensor: Tensor, rows: int, columns: int) -> Matrix:
        return Matrix(tensor.buffer, tensor.dtype, rows, columns, columns, tensor.batch_stride)

    return Product(
        m=m,
        n=n,
        k=summed,
        batch=problem.batch,
        a=matrix(problem.a, m, summed),
        b=(matrix(problem.b, summed, n),),
        program=problem.program,
        results=problem.results,
        operands=problem.operands,
        exact=problem.exact,
    )


def product_of_groups(problem: Convolution) -> Product:
    """The product whose epilogue a convolution has: columns are the channels of all groups."""
    return replace(product_of_group(problem), n=problem.columns)
