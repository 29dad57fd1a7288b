"""The norm family's cases."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from jaxdnn.bench.timing import Case, Implementation
from jaxdnn.bench.untuned import Class, Sizes

_SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "gpu": ((32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384), (1048576, 128)),
    "cpu": ((4096, 1024), (512, 16384)),
}
_DTYPES = ("bfloat16", "float32")
_PARAMETER_DTYPE = jnp.dtype(jnp.float32)


def cases(shapes: Sequence[tuple[int, int]] = (), dtypes: Sequence[str] = ()) -> Iterator[Case]:
    """Forward, backward alone, and both in one program, for each norm, shape (rows, columns) and dtype."""
    for dtype, shape in product(dtypes or _DTYPES, shapes or _SHAPES[jax.default_backend()]):
        yield from _directions(shape, jnp.dtype(dtype))


def _directions(shape: tuple[int, int], dtype: np.dtype) -> Iterator[Case]:
    for direction in (_forward, _backward, _forward_backward):
        yield direction("layer_norm", jaxdnn.layer_norm, plain_layer_norm, shape, dtype, parameters=2)
        yield direction("rms_norm", jaxdnn.rms_norm, plain_rms_norm, shape, dtype, parameters=1)
    yield _residual(shape, dtype)


def _of_rows(*columns: int) -> Class:
    """Rows of between so many columns, or of a model's width."""

    def one(sizes: Sizes) -> Case:
        width = sizes.size(*columns) if columns else sizes.width()
        # As many rows as make arrays of one to a hundred million elements, on a GPU.
        rows = sizes.size(2**20, 2**27) // width if jax.default_backend() == "gpu" else sizes.size(16, 2**22 // width)
        return sizes.one(*_directions((max(1, rows), width), jnp.dtype(sizes.one(*_DTYPES))))

    return one


CLASSES = (_of_rows(), _of_rows(16, 256), _of_rows(257, 16_384), _of_rows(16_385, 300_000))


def plain_layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Without jaxdnn."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centered = wide - wide.mean(-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)
    return (centered * rstd * scale + bias).astype(x.dtype)


def plain_rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Without jaxdnn."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _plain_residual(x: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = x + residual
    return plain_rms_norm(total, scale), total


def _jaxdnn_residual(x: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jaxdnn.rms_norm(x, scale, residual=residual)


def _operands(shape: tuple[int, int], dtype: np.dtype, arrays: int, parameters: int, key: jax.Array) -> list[jax.Array]:
    """`arrays` arrays of `shape`, then `parameters` vectors near one."""
    keys = iter(jax.random.split(key, arrays + parameters))
    wide = [jax.random.normal(next(keys), shape, dtype) for _ in range(arrays)]
    narrow = [1 + 0.1 * jax.random.normal(next(keys), shape[-1:], _PARAMETER_DTYPE) for _ in range(parameters)]
    return wide + narrow


def _case(
    call: str,
    shape: tuple[int, int],
    dtype: np.dtype,
    *,
    arrays: int,
    parameters: int,
    moved: int,
    parameters_moved: int,
    implementations: list[Implementation],
) -> Case:
    """A case whose operands are `arrays` large arrays; `moved` counts how often a large array is read or written."""
    return Case(
        call=call,
        shape=" x ".join(map(str, shape)),
        dtype=dtype.name,
        bytes=moved * shape[0] * shape[1] * dtype.itemsize + parameters_moved * shape[1] * _PARAMETER_DTYPE.itemsize,
        flops=0,
        operands=partial(_operands, shape, dtype, arrays, parameters),
        jaxdnn=implementations[0],
        xla=implementations[1],
    )


def _unprepared(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


def _forward(
    name: str, ours: Callable, plain: Callable, shape: tuple[int, int], dtype: np.dtype, *, parameters: int
) -> Case:
    return _case(
        f"{name} forward",
        shape,
        dtype,
        arrays=1,
        parameters=parameters,
        moved=2,
        parameters_moved=parameters,
        implementations=[Implementation(_unprepared, norm) for norm in (ours, plain)],
    )


def _residual(shape: tuple[int, int], dtype: np.dtype) -> Case:
    return _case(
        "rms_norm + residual forward",
        shape,
        dtype,
        arrays=2,
        parameters=1,
        moved=4,
        parameters_moved=1,
        implementations=[Implementation(_unprepared, norm) for norm in (_jaxdnn_residual, _plain_residual)],
    )


def _backward(
    name: str, ours: Callable, plain: Callable, shape: tuple[int, int], dtype: np.dtype, *, parameters: int
) -> Case:
    """x and dy are read, dx and the gradient of each parameter written.

    What the forward pass saves is computed beforehand: `vjp` is a pytree that crosses from one jitted function into
    another.
    """

    def implementation(norm: Callable) -> Implementation:
        return Implementation(
            prepare=lambda dy, *inputs: (jax.vjp(norm, *inputs)[1], dy),
            run=lambda vjp, dy: vjp(dy),
        )

    return _case(
        f"{name} backward",
        shape,
        dtype,
        arrays=2,
        parameters=parameters,
        moved=3,
        parameters_moved=parameters + 1,  # the bias is not read again
        implementations=[implementation(norm) for norm in (ours, plain)],
    )


def _forward_backward(
    name: str, ours: Callable, plain: Callable, shape: tuple[int, int], dtype: np.dtype, *, parameters: int
) -> Case:
    """The sum of the two others, in one program."""

    def implementation(norm: Callable) -> Implementation:
        def run(dy: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            y, vjp = jax.vjp(norm, *inputs)
            # In a network dy comes from y, so that no program can work on both passes at once.
            dy, _ = jax.lax.optimization_barrier((dy, y))
            return y, vjp(dy)

        return Implementation(_unprepared, run)

    return _case(
        f"{name} forward + backward",
        shape,
        dtype,
        arrays=2,
        parameters=parameters,
        moved=5,
        parameters_moved=2 * parameters + 1,
        implementations=[implementation(norm) for norm in (ours, plain)],
    )
