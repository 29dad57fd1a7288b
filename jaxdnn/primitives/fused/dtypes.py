"""The dtypes of a product: of its operands, of its accumulators, and of what JAX returns for them."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import DotDimensionNumbers
from jax.sharding import NamedSharding

from jaxdnn.primitives._define import weakly_typed

# Factors of a product, both of one matrix of a batch, that XLA:GPU hands to kernels of products at least
# (`xla_gpu_gemm_rewrite_size_threshold`): of fewer it makes a loop, which multiplies in the factors' own dtype.
FEWEST_FACTORS = 100
FEW_FLOAT8 = 2**20  # products of 8-bit floats, so many that widening these takes next to no time

# What allows float32 operands to be rounded to tf32. (For HIGH too, JAX documents tf32 on GPUs.)
_ROUNDED = (None, lax.Precision.DEFAULT, lax.Precision.HIGH)
_ROUNDED_ALGORITHMS = ("DEFAULT", "TF32_TF32_F32")

# JAX keeps what it has traced of functions that it jits, so that calls of the same types take no time to check.
_dot = jax.jit(
    partial(lax.dot_general, dimension_numbers=(((0,), (0,)), ((), ()))),  # of vectors
    static_argnames=("precision",),
)


def accumulator(operands: np.dtype, result: np.dtype) -> np.dtype:
    """The dtype to sum products in: wide enough for the operands and for the result."""
    if jnp.issubdtype(operands, jnp.floating):
        if jnp.issubdtype(result, jnp.complexfloating) or result == jnp.bool_:
            return result
        return jnp.dtype("float64" if "float64" in (operands.name, result.name) else "float32")
    signed = all(jnp.issubdtype(dtype, jnp.signedinteger) for dtype in (operands, result))
    return jnp.dtype("int32") if signed and result.itemsize < 4 else result


def promoted(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike, result: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Arrays of one dtype that is wide enough for both, for a product whose dtype is `result`; or two of float8."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.dtype == b.dtype or _both_float8(a, b):
        return a, b
    inexact = any(jnp.issubdtype(array.dtype, jnp.inexact) for array in (a, b))
    if jnp.issubdtype(result, jnp.complexfloating) or not (inexact or jnp.issubdtype(result, jnp.floating)):
        dtype = result  # integers wrap alike in it
    elif not inexact:
        dtype = jnp.promote_types(jnp.float32, result)
    elif any(jnp.issubdtype(array.dtype, jnp.complexfloating) for array in (a, b)):
        dtype = _product_dtype(a, b)
    else:
        try:
            dtype = jnp.promote_types(a.dtype, b.dtype)
        except ValueError:  # float8 and a wider float, or strict promotion
            dtype = _product_dtype(a, b)
    return a.astype(dtype), b.astype(dtype)


def preferred_type(
    caller: str, a: jax.typing.ArrayLike, b: jax.typing.ArrayLike, preferred: jax.typing.DTypeLike | None
) -> str | None:
    """The dtype that was preferred; or what `jax.numpy` needs to be told of two arrays of float8, which its promotion
    rules refuse.
    """
    name = checked_dtype(f"{caller}: preferred_element_type", preferred)
    return _product_dtype(a, b).name if name is None and _both_float8(a, b) else name


def _product_dtype(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> np.dtype:
    """The dtype that `lax.dot_general` gives a product."""
    vectors = [jax.ShapeDtypeStruct((1,), jnp.result_type(array)) for array in (a, b)]
    return jax.eval_shape(partial(lax.dot_general, dimension_numbers=(((0,), (0,)), ((), ()))), *vectors).dtype


def _both_float8(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> bool:
    dtypes = [getattr(array, "dtype", None) for array in (a, b)]
    return all(dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1 for dtype in dtypes)


def algorithm(a: np.dtype, b: np.dtype, precision: jax.lax.PrecisionLike) -> Any:
    """What JAX makes of the precision of a product: its canonical form."""
    vectors = [jax.ShapeDtypeStruct((1,), of) for of in (a, b)]
    traced = _dot.trace(*vectors, precision=precision).jaxpr
    return next(e.params["precision"] for e in traced.eqns if e.primitive is lax.dot_general_p)


def allows_rounding(algorithm: Any) -> bool:
    """Whether float32 operands may be rounded to tf32 before they are multiplied."""
    both = algorithm if isinstance(algorithm, tuple) else (algorithm,)
    return all(one in _ROUNDED or getattr(one, "name", "") in _ROUNDED_ALGORITHMS for one in both)


def allows_fast_accumulation(algorithm: Any) -> bool:
    """Whether products of float8 may be summed with less bits than float32 has."""
    imprecise = getattr(algorithm, "allow_imprecise_accumulation", False)  # of a `DotAlgorithm`
    return imprecise or getattr(algorithm, "name", "").endswith("_FAST_ACCUM")


def summed(
    a: jax.Array,
    b: jax.Array,
    numbers: DotDimensionNumbers,
    algorithm: Any,
    accumulator: str,
    sharding: NamedSharding | None,
    dtype: str,
) -> jax.Array:
    """`lax.dot_general` that sums in the accumulator's dtype, where needs be of operands that are widened to it, and
    rounds the sums to `dtype`.
    """
    wide, narrow = jnp.dtype(accumulator), jnp.dtype(dtype)

    def multiply(a: jax.Array, b: jax.Array, preferred: np.dtype = wide) -> jax.Array:
        return lax.dot_general(a, b, numbers, algorithm, preferred, out_sharding=sharding).astype(narrow)

    def multiply_narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        # cuBLAS rounds 16-bit results itself, of sums in float32.
        return multiply(a, b, narrow)

    def multiply_wide(a: jax.Array, b: jax.Array) -> jax.Array:
        return multiply(a.astype(wide), b.astype(wide))

    given = (a.dtype, b.dtype)
    if wide in given or any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in (wide, *given)):
        return multiply(a, b)
    # XLA:CPU lacks products of narrow operands with wide results that it has fused an operand's transpose into.
    of_cuda = multiply_narrow if a.dtype == b.dtype == narrow and narrow.itemsize == 2 else multiply
    of_cuda = multiply_wide if _is_inexact_on_cuda(a, b, numbers, wide) else of_cuda
    return lax.platform_dependent(a, b, cpu=multiply_wide, cuda=of_cuda, default=multiply)


def _is_inexact_on_cuda(a: jax.Array, b: jax.Array, numbers: DotDimensionNumbers, wide: np.dtype) -> bool:
    """Whether XLA may return something else than accumulator in `wide` of exact products: JAX 0.11.2, on an H200."""
    if jnp.issubdtype(wide, jnp.integer):
        return True  # accumulators of int8 came out twice as large, for some shapes
    if wide.itemsize > 4:
        return True  # summed in float32
    if a.dtype == b.dtype == jnp.float8_e5m2:
        return True  # cuBLAS does not multiply them, and what does is untested
    (of_a, of_b), (batch_of_a, batch_of_b) = numbers
    k = math.prod(a.shape[i] for i in of_a)
    m, n = (
        math.prod(size for i, size in enumerate(array.shape) if i not in (*contracted, *batch))
        for array, contracted, batch in ((a, of_a, batch_of_a), (b, of_b, batch_of_b))
    )
    # Products are rounded to the operands' dtype, where these have few factors or one operand is a vector; and those of
    # 8-bit floats are summed with 14 bits.
    few = [(m, 1), (n, 1), ((m + n) * k, FEWEST_FACTORS - 1)]
    few += [(m * n * k, FEW_FLOAT8)] * (a.dtype.itemsize == 1)
    return any(isinstance(size, int) and size <= least for size, least in few)


def saved_dtype(operands: np.dtype, results: Iterable[np.dtype], accumulator: np.dtype) -> np.dtype:
    """The dtype in which accumulators wait for the derivative of a function of them.

    It is that of the gradient's factors, unless accumulators may not fit in it or the function's results are wider.
    """
    if not jnp.issubdtype(accumulator, jnp.floating) or operands == jnp.float16:
        return accumulator
    floats = [dtype for dtype in results if jnp.issubdtype(dtype, jnp.floating)]
    wide = any(dtype.itemsize > gradient_dtype(operands).itemsize for dtype in floats)
    return accumulator if wide else gradient_dtype(operands)


def gradient_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which cotangents are multiplied by arrays of `dtype`: that, if it has a mantissa worth the name."""
    return jnp.dtype("bfloat16") if dtype.itemsize == 1 else dtype


def checked_dtype(title: str, dtype: jax.typing.DTypeLike | None) -> str | None:
    """The name of what JAX makes of a user's dtype, or None. Raises TypeError, with what it is for, if it is none."""
    if dtype is None:
        return None
    expected = f'{title} must be a dtype, such as jnp.bfloat16 or "bfloat16"; got {dtype!r}'
    if isinstance(dtype, tuple | list):  # NumPy makes records of these
        raise TypeError(f"{expected}: to give each of several results its own, cast them in the epilogue")
    try:
        return jax.eval_shape(lambda: jnp.zeros((), dtype)).dtype.name
    except TypeError as error:
        raise TypeError(expected) from error


def as_weak(y: Any, jax_type: Any, epilogue: Any, out_dtype: Any) -> Any:
    """A product as weakly typed as JAX's own, unless an epilogue or the caller has given it a dtype."""
    return weakly_typed(y) if jax_type.weak_type and epilogue is None and out_dtype is None else y
