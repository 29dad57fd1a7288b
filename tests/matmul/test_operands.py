"""Operands of which a joined coordinate has some dimensions and not others, or in another order, and tables: every one
is read where it lies, by the kernel of the product."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import native_calls
from checking.cases.operands import OPERANDS
from checking.compare import platform


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
@pytest.mark.parametrize("name", OPERANDS)
def test_products(name, transform):
    case, run = OPERANDS[name], TRANSFORMS[transform]
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
