"""Operands of which a joined coordinate has some dimensions and not others, or in another order, and tables: every one
is read where it lies, by the kernel of the product."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import native_calls
from checking.compare import platform
from checking.pointwise.layouts import array

BATCH, HEADS, QUERIES, KEYS, DEPTH = 3, 4, 5, 7, 6
SCORES = ((BATCH, HEADS, QUERIES, DEPTH), (BATCH, HEADS, DEPTH, KEYS))
IMAGE = ((2, 3, 5, 6), (6, 7))  # pixels of channels, and weights


@dataclass(frozen=True)
class Case:
    """matmul(a, b, *operands, epilogue=epilogue): shapes, types of the operands, the range of integers among them."""

    epilogue: Callable[..., Any]
    operands: tuple[str, ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = SCORES
    integers: tuple[int, int] = (0, 3)

    def arrays(self) -> list[np.ndarray]:
        random = np.random.default_rng(7)
        found = [random.standard_normal(shape).astype(np.float32) for shape in self.shapes]
        for number, type_ in enumerate(self.operands):
            like = array(type_, str(number))
            integers = random.integers(*self.integers, like.shape, endpoint=True)
            found.append(integers.astype(like.dtype) if like.dtype.kind in "iu" else like)
        return found

    def call(self, *arrays: Any) -> Any:
        return jaxdnn.matmul(*arrays, epilogue=self.epilogue, precision="highest")

    def reference(self, a: Any, b: Any, *operands: Any) -> Any:
        return self.epilogue(jnp.matmul(a, b, precision="highest"), *operands)


CASES = {
    "bias that a batch shares": Case(lambda acc, b: acc + b, ("float32[1,4,5,7]",)),
    "bias that heads share": Case(lambda acc, b: acc * b, ("bfloat16[3,1,5,7]",)),
    "slopes": Case(lambda acc, s: acc + s[:, None, None] * distances(), ("float32[4]",)),
    "key padding": Case(lambda acc, m: jnp.where(m, acc, -1.0), ("bool[3,1,1,7]",)),
    "segments": Case(
        lambda acc, q, k: jnp.where(q[:, None, :, None] == k[:, None, None, :], acc, 0.0), ("int32[3,5]", "int8[3,7]")
    ),
    "one of each head, transposed": Case(lambda acc, b: acc * b.T[:, :, None, None], ("float32[4,3]",)),
    "gate of an image": Case(lambda acc, g: acc * g, ("float32[2,1,1,7]",), IMAGE),
    "gate of each pixel's line": Case(lambda acc, g: acc * g, ("float32[3,1,1]",), IMAGE),
    "position bias": Case(lambda acc, p: acc + p, ("float32[3,5,1]",), IMAGE),
    "position bias and channels": Case(lambda acc, p: acc + p, ("float16[3,5,7]",), IMAGE),
    "two of different forms": Case(
        lambda acc, p, g, b: (acc + p) * g + b, ("float32[3,5,1]", "float32[2,1,1,7]", "float32[7]"), IMAGE
    ),
    "channels in the middle": Case(
        lambda acc, b: acc + b[:, None, None, None], ("float32[3]",), ((2, 3, 1, 5, 6), (6, 9))
    ),
    "large batch with one modulus": Case(
        lambda acc, b: acc + b, ("float32[1,3,2,2]",), ((301, 3, 2, 4), (301, 3, 4, 2))
    ),
    "odd sizes": Case(lambda acc, b: acc + b, ("float32[5,1,131]",), ((3, 5, 37, 6), (6, 131))),
    # Looked up by integers.
    "relative positions": Case(lambda acc, table: acc + table[:, distances() + QUERIES - 1], ("float32[4,11]",)),
    "relative positions, of operands": Case(
        lambda acc, table, q, k: acc + jnp.take(table, q[:, None, :, None] - k[:, None, None, :] + 3, axis=0),
        ("float32[7]", "int32[3,5]", "int32[3,7]"),
    ),
    "rows of a table": Case(lambda acc, t, ids: acc + t[ids], ("bfloat16[9,7]", "int32[2,3,5]"), IMAGE, (-9, 8)),
    "out of bounds: fill": Case(
        lambda acc, t, ids: jnp.nan_to_num(acc + jnp.take(t, ids, axis=0), nan=5.0),
        ("float32[9,7]", "int32[2,3,5]"),
        IMAGE,
        (-20, 20),
    ),
    "out of bounds: another fill": Case(
        lambda acc, t, ids: acc + t.at[ids].get(mode="fill", fill_value=3.0),
        ("float32[9,7]", "int16[2,3,5]"),
        IMAGE,
        (-20, 20),
    ),
    "out of bounds: clip": Case(
        lambda acc, t, ids: acc + jnp.take(t, ids, axis=0, mode="clip"),
        ("float32[9,7]", "int8[2,3,5]"),
        IMAGE,
        (-128, 127),
    ),
    "columns of a table": Case(
        lambda acc, t, ids: acc + jnp.take(t, ids, axis=1), ("float32[5,9]", "uint8[7]"), IMAGE, (0, 8)
    ),
    "two indices": Case(
        lambda acc, t, i, j: acc * t[i[..., None], j], ("float32[9,4]", "int32[2,3,5]", "int32[7]"), IMAGE, (-4, 3)
    ),
    "transposed, widened table": Case(
        lambda acc, t, ids: acc + t.T.astype("float32")[ids] * 2, ("int8[7,4]", "int32[2,3,5]"), IMAGE, (-4, 3)
    ),
    "one row of a table": Case(lambda acc, t, i: acc + t[i], ("float32[9,7]", "int32[]"), IMAGE, (2, 5)),
    "table of a table": Case(
        lambda acc, t, u, i: acc + t[u[i]], ("float32[9,7]", "int32[4]", "int32[2,3,5]"), IMAGE, (0, 3)
    ),
    "table and gate": Case(
        lambda acc, t, i, g: acc * g + t[i], ("float32[9,7]", "int32[2,3,5]", "float32[2,1,1,7]"), IMAGE, (-4, 8)
    ),
}


def distances() -> Any:
    """Coordinates: an array that the function closes over could not be in a kernel."""
    return jnp.arange(KEYS) - jnp.arange(QUERIES)[:, None]


def forward(function: Callable[..., Any], arrays: list[Any]) -> Any:
    return function(*arrays)


def gradient(function: Callable[..., Any], arrays: list[Any]) -> Any:
    moving = [i for i, one in enumerate(arrays) if jnp.issubdtype(one.dtype, jnp.floating)]

    def loss(*some: Any) -> Any:
        merged = dict(enumerate(arrays)) | dict(zip(moving, some, strict=True))
        y = function(*merged.values())
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return jax.grad(loss, tuple(range(len(moving))))(*(arrays[i] for i in moving))


def mapped(function: Callable[..., Any], arrays: list[Any], axes: tuple[int, ...]) -> Any:
    """Mapped over two copies, of which one has its rows turned around, of the arrays with an axis."""
    given = [jnp.stack([one, one[::-1]]) if i in axes and one.ndim else one for i, one in enumerate(arrays)]
    return jax.vmap(function, [0 if i in axes and one.ndim else None for i, one in enumerate(arrays)])(*given)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "gradient": gradient,
    "mapped a": lambda function, arrays: mapped(function, arrays, (0,)),
    "mapped operands": lambda function, arrays: mapped(function, arrays, tuple(range(2, len(arrays)))),
    "mapped all": lambda function, arrays: mapped(function, arrays, tuple(range(len(arrays)))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CASES)
def test_products(name, transform):
    case, run = CASES[name], TRANSFORMS[transform]
    if transform in ("mapped a", "mapped operands") and len(case.shapes[1]) > 2:
        pytest.skip("b carries some of the batch dimensions and not others, whatever the epilogue")
    arrays = case.arrays()
    with jaxdnn.options(fallback=False):
        compiled = jax.jit(lambda *given: run(case.call, list(given))).lower(*arrays).compile()
    assert native_calls(compiled.as_text()) >= 1
    with jax.enable_x64(True):
        wide = [jnp.asarray(one, "float64") if jnp.issubdtype(one.dtype, jnp.floating) else one for one in arrays]
        expected = run(case.reference, wide)
    for got, want in zip(jax.tree.leaves(compiled(*arrays)), jax.tree.leaves(expected), strict=True):
        error = np.abs(np.asarray(got, np.float64) - np.asarray(want))
        unit = max(float(jnp.finfo(got.dtype).eps), 2e-6)
        terms = max(one.size for one in arrays) / np.size(want)  # of a gradient that is summed
        assert np.all(error <= 4 * unit * (np.abs(want) + np.std(want) + np.sqrt(max(1, terms)))), error.max()


def test_a_gathered_operand_is_not_written_in_place():
    rows = jnp.ones((4, 4))
    with pytest.raises(ValueError, match="or gathered"):
        jaxdnn.matmul(
            rows, rows, rows, epilogue=lambda acc, c: acc + c[jnp.arange(4)[::1] * 0], input_output_aliases={0: 0}
        )


@pytest.mark.skipif(platform() != "cpu", reason="the host engine serves it")
def test_a_table_is_never_read_out_of_bounds():
    """With extreme indices of every width, whatever the mode promises."""
    for dtype in ("int8", "uint8", "int16", "int32", "uint32"):
        about = np.iinfo(dtype)
        ids = np.array([about.min, about.max, 0, 3, about.max // 2], dtype)
        for mode in ("clip", "promise_in_bounds"):

            def function(acc: Any, t: Any, i: Any, mode: str = mode) -> Any:
                return acc + t.at[i].get(mode=mode, wrap_negative_indices=False)

            y = jaxdnn.matmul(
                np.zeros((2, 3), np.float32),
                np.zeros((3, 5), np.float32),
                np.arange(4.0, dtype=np.float32),
                ids,
                epilogue=function,
            )
            assert set(np.asarray(y).reshape(-1).tolist()) <= {0.0, 1.0, 2.0, 3.0}
            if mode == "clip":
                np.testing.assert_array_equal(y, function(jnp.zeros((2, 5)), jnp.arange(4.0), jnp.asarray(ids)))
