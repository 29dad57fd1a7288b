"""Bad input of the matmul family is an error while tracing, which says what was expected."""

import functools
import inspect
import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn

A, B, C = (jnp.ones(shape, jnp.float32) for shape in ((3, 4), (4, 5), (3, 5)))
NUMBERS = (((1,), (0,)), ((), ()))


def with_epilogue(epilogue, *operands, **keywords):
    return lambda: jaxdnn.matmul(A, B, *operands, epilogue=epilogue, **keywords)


def closing_over():
    return jax.jit(lambda bias: jaxdnn.matmul(A, B, epilogue=lambda acc: acc + bias))(jnp.ones(5))


def softmax(acc, c):
    """Which no kernel has as an epilogue."""
    return jax.nn.softmax(acc + c)


def prints(acc):
    jax.debug.print("acc {}", acc[0, 0])
    return acc


BAD = {
    "contracted sizes": (
        lambda: jaxdnn.matmul(A, A),
        TypeError,
        r"^matmul: the last dimension of a must be the last but one of b, .*got a float32\[3, 4\] and b float32",
    ),
    "contracted sizes of a matrix and a vector": (
        lambda: jaxdnn.matmul(A, A[:, 0]),
        TypeError,
        r"^matmul: the last dimension of a .*, or its only one; got a float32\[3, 4\] and b float32\[3\]",
    ),
    "contracted sizes of gated_linear_unit": (
        lambda: jaxdnn.gated_linear_unit(A, A, A),
        TypeError,
        r"^gated_linear_unit: the last dimension of x .*got x float32\[3, 4\] and gate float32\[3, 4\]",
    ),
    "contracted sizes of dot_general": (
        lambda: jaxdnn.dot_general(A, A, NUMBERS),
        TypeError,
        r"(?s)contracting dimensions .*\(4,\) and \(3,\).*\ndot_general was called with lhs float32\[3, 4\], rhs",
    ),
    **{
        f"dimension numbers {numbers}": (
            lambda numbers=numbers: jaxdnn.dot_general(A, B, numbers),
            (TypeError, ValueError),
            r"^dot_general: dimension_numbers must be \(\(lhs_contracting, .*, as \(\(\(1,\), \(0,\)\), .*; got ",
        )
        for numbers in (((1,), (0,)), 1, (((1,), (0,)),), "kk")
    },
    "batch sizes": (
        lambda: jaxdnn.matmul(jnp.ones((2, 3, 4)), jnp.ones((3, 4, 5))),
        ValueError,
        r"Incompatible .*matmul arguments.*\[2,3,4\].*\[3,4,5\]",
    ),
    "a scalar": (lambda: jaxdnn.matmul(A, 2.0), ValueError, "must have ndim at least 1"),
    "no array": (lambda: jaxdnn.matmul(A, None), TypeError, "None"),
    "dimension numbers": (
        lambda: jaxdnn.dot_general(A, B, (((7,), (0,)), ((), ()))),
        TypeError,
        "lhs_contracting|dimensions",
    ),
    "precision": (lambda: jaxdnn.matmul(A, B, precision="highestest"), ValueError, "highestest"),
    **{
        f"{argument} of {name}": (
            lambda call=call, argument=argument: call(**{argument: "bfloat"}),
            TypeError,
            f"^{name}: {argument} must be a dtype, such as .*; got 'bfloat'",
        )
        for argument in ("out_dtype", "preferred_element_type")
        for name, call in (
            ("matmul", functools.partial(jaxdnn.matmul, A, B)),
            ("dot_general", functools.partial(jaxdnn.dot_general, A, B, NUMBERS)),
            ("gated_linear_unit", functools.partial(jaxdnn.gated_linear_unit, A, B, B)),
        )
    },
    **{
        f"keyword {keyword} of {name}": (
            lambda call=call, keyword=keyword: call(**{keyword: A}),
            TypeError,
            f"^{name}: there is no keyword {keyword}=; .*{meant}.*; the keywords are ",
        )
        for name, call, keyword, meant in (
            ("matmul", functools.partial(jaxdnn.matmul, A, B), "bias", r"epilogue=lambda acc, bias: acc \+ bias"),
            (
                "matmul",
                functools.partial(jaxdnn.matmul, A, B),
                "activation",
                r"epilogue=lambda acc: jax.nn.gelu\(acc\)",
            ),
            ("dot_general", functools.partial(jaxdnn.dot_general, A, B, NUMBERS), "bias", r"operands=\[bias\]"),
            ("gated_linear_unit", functools.partial(jaxdnn.gated_linear_unit, A, B, B), "bias", "gate_bias= and up_"),
            ("matmul", functools.partial(jaxdnn.matmul, A, B), "epilog", r"did you mean epilogue=\?"),
        )
    },
    **{
        f"an operand for {parameter} of {name}": (
            with_epilogue(function, *operands),
            TypeError,
            f"^matmul: .* parameters without a default; got operand {len(operands) - 1} for {parameter} of {name}. .*"
            rf"epilogue=lambda acc, bias: {called}\(acc \+ bias\)",
        )
        for function, parameter, name, called, operands in (
            (jax.nn.leaky_relu, "negative_slope=0.01", "leaky_relu", "leaky_relu", [jnp.ones(5)]),
            (jax.nn.elu, "alpha=1.0", "elu", "elu", [0.3]),
            (jax.nn.gelu, "approximate=True", "gelu", "gelu", [jnp.ones(5)]),
            (lambda acc, bias, slope=2.0: (acc + bias) * slope, "slope=2.0", "<lambda>", "f", [jnp.ones(5), 3.0]),
        )
    },
    "an operand for a parameter of an epilogue of dot_general": (
        lambda: jaxdnn.dot_general(A, B, NUMBERS, operands=[jnp.ones(5)], epilogue=jax.nn.elu),
        TypeError,
        "^dot_general: an epilogue's operands must be parameters without a default",
    ),
    "an array in the place of operands": (
        lambda: jaxdnn.dot_general(A, B, NUMBERS, operands=jnp.ones(5), epilogue=lambda acc, bias: acc + bias),
        TypeError,
        r"^dot_general: operands must be a sequence of arrays; got float\d+\[5\]",
    ),
    "a dtype for each result": (
        lambda: jaxdnn.matmul(A, B, epilogue=lambda acc: (acc, acc), out_dtype=("float32", "bfloat16")),
        TypeError,
        r"^matmul: out_dtype must be a dtype, .*; got \('float32', 'bfloat16'\): .*, cast them in the epilogue",
    ),
    "operands without an epilogue": (
        lambda: jaxdnn.matmul(A, B, jnp.ones(5)),
        ValueError,
        "^matmul: got 1 operand for an epilogue, and none; pass epilogue=",
    ),
    "an operand that does not broadcast": (
        with_epilogue(lambda acc, bias: acc + bias, jnp.ones(7, jnp.float32)),
        ValueError,
        r"lambda acc, bias: acc \+ bias: tracing it on acc: float32\[3, 5\], bias: float32\[7\] failed",
    ),
    "another shape": (with_epilogue(lambda acc: acc[:, :2]), ValueError, "slice|output's shape"),
    "transposed": (
        with_epilogue(lambda acc: acc.T),
        ValueError,
        r"float32\[5, 3\]; expected the output's shape \[3, 5\]",
    ),
    "more dimensions": (with_epilogue(lambda acc: acc[None] + jnp.zeros((2, 1, 1))), ValueError, "output's shape"),
    **{
        f"{len(operands)} operands of {name}": (
            with_epilogue(function, *operands),
            TypeError,
            rf"^matmul: the epilogue {name} takes {taken}, and is given the accumulator and {given}\. .*"
            rf"epilogue=lambda acc, bias: {called}\(acc \+ bias\)",
        )
        for function, name, called, taken, operands, given in (
            (jax.nn.relu, "relu", "relu", "1 array", [jnp.ones(5)], "1 operand"),
            (lambda acc, b, c=None: acc + b + c, "<lambda>", "f", "3 arrays", [0.3, 0.3, 0.3], "3 operands"),
            (lambda acc, b, c, d=None: acc + b + c + d, "<lambda>", "f", "3 arrays", [0.3], "1 operand"),
            (lambda acc, b: acc + b, "<lambda>", "f", "2 arrays", [], "0 operands"),
        )
    },
    "an epilogue that is no function": (with_epilogue(3), TypeError, "epilogue must be a function .*got 3"),
    "an operand that is no array": (
        with_epilogue(lambda acc, b: acc + b["x"], {"x": A}),
        TypeError,
        "operand 0 of the epilogue must be an array; got a dict",
    ),
    "an operand of dot_general that is no array": (
        lambda: jaxdnn.dot_general(A, B, NUMBERS, operands=[{"x": A}], epilogue=lambda acc, b: acc + b["x"]),
        TypeError,
        "^dot_general: operand 0 of the epilogue must be an array; got a dict",
    ),
    "operands of dot_general without an epilogue": (
        lambda: jaxdnn.dot_general(A, B, NUMBERS, operands=[A]),
        ValueError,
        "^dot_general: got 1 operand for an epilogue",
    ),
    "aliases of dot_general": (
        lambda: jaxdnn.dot_general(A, B, NUMBERS, epilogue=lambda acc: acc, input_output_aliases={0: 0}),
        ValueError,
        "^dot_general: input_output_aliases=.*no operand 0; .* there are 0",
    ),
    "aliases of no result of what is not fused": (
        lambda: jaxdnn.matmul(A, B, C, epilogue=softmax, input_output_aliases={0: 5}),
        ValueError,
        "^matmul: input_output_aliases=.*there is no result 5; the epilogue returns 1",
    ),
    "aliases of another dtype, of what is not fused": (
        lambda: jaxdnn.matmul(A, B, C.astype("bfloat16"), epilogue=softmax, input_output_aliases={0: 0}),
        ValueError,
        "operand 0 is bfloat16.*, and result 0 is float32",
    ),
    "a bias that is no array": (
        lambda: jaxdnn.gated_linear_unit(A, B, B, {"x": A}),
        TypeError,
        "^gated_linear_unit: gate_bias must be an array; got a dict",
    ),
    "an activation that is no function": (
        lambda: jaxdnn.gated_linear_unit(A, B, B, activation="silu"),
        TypeError,
        "activation must be a function of an array; got 'silu'",
    ),
    "no result": (with_epilogue(lambda _: None), TypeError, "return one array or more"),
    "a side effect": (with_epilogue(prints), ValueError, "side effects"),
    "closes over an array": (closing_over, TypeError, "closes over|pass it"),
    "gate and up of two shapes": (
        lambda: jaxdnn.gated_linear_unit(A, B, B[:, :3]),
        ValueError,
        r"gate and up must be two matrices of one shape .*float32\[4, 5\] and float32\[4, 3\]",
    ),
    "gate and up of two dtypes": (
        lambda: jaxdnn.gated_linear_unit(A, B, B.astype(jnp.bfloat16)),
        ValueError,
        r"one dtype; got float32\[4, 5\] and bfloat16\[4, 5\]",
    ),
    "gate that is no matrix": (
        lambda: jaxdnn.gated_linear_unit(A, jnp.ones((2, 4, 5)), jnp.ones((2, 4, 5))),
        ValueError,
        "two matrices",
    ),
    "a bias of another shape": (
        lambda: jaxdnn.gated_linear_unit(A, B, B, jnp.ones(4)),
        ValueError,
        r"gate_bias must have shape \(5,\); got \(4,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["another shape", "transposed", "a side effect", "closes over an array"])
def test_without_a_fallback_too(name):
    call, error, message = BAD[name]
    with jaxdnn.options(fallback=False), pytest.raises(error, match=message):
        call()


def clip(acc, low=None, high=None):
    return jnp.clip(acc, low, high)


def scaled(acc, scale=3.0):
    return acc * scale


@pytest.mark.parametrize(
    ("epilogue", "operands", "expected"),
    [(clip, (1.0, 2.5), 2.5), (scaled, (), 12.0), (lambda acc, *rest, scale=2.0: acc * rest[0] * scale, (3.0,), 24.0)],
)
def test_defaults_that_are_no_settings_of_an_operand(epilogue, operands, expected):
    np.testing.assert_array_equal(jaxdnn.matmul(A, B, *operands, epilogue=epilogue), expected)


def frames(call, error):
    """What Python would print of an error and of what caused it: the names of files."""
    with pytest.raises(error) as caught:
        call()
    printed = "".join(traceback.format_exception(caught.value))
    return {Path(path).resolve() for path in re.findall(r'File "([^"]+)"', printed)}, printed


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("name", "fallback"),
    [
        ("an operand that does not broadcast", True),
        ("an operand for negative_slope=0.01 of leaky_relu", True),
        ("contracted sizes of dot_general", True),
        ("another shape", False),
        ("keyword bias of matmul", True),
    ],
)
def test_errors_end_in_the_users_code(name, fallback, jitted):
    call, error, _ = BAD[name]
    with jaxdnn.options(fallback=fallback):
        files, printed = frames(jax.jit(call) if jitted else call, error)
    inside = [file for file in files if Path(jaxdnn.__file__).parent in file.parents and file.name != "api_boundary.py"]
    inside += [file for file in files if not jitted and Path(jax.__file__).parent in file.parents]
    assert not inside, printed
    assert Path(__file__) in files
    assert len(printed.splitlines()) < 50


def test_frames_that_are_asked_for_are_kept():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        files, _ = frames(BAD["an operand that does not broadcast"][0], ValueError)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert {"api.py", "trace.py", "lax.py"} <= {file.name for file in files}


def draw(acc):
    return acc * jax.random.bernoulli(jax.random.key(0), 0.5, acc.shape)


def draw_of(acc, key):
    return acc * jax.random.bernoulli(key, 0.5, acc.shape)


@pytest.mark.parametrize(("epilogue", "operands"), [(draw, ()), (draw_of, (jax.random.key(0),))])
def test_random_numbers(epilogue, operands):
    message = "kernels draw no random numbers; draw them before, and pass them as an operand"
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.UnsupportedOperation, match=message):
        jaxdnn.matmul(A, B, *operands, epilogue=epilogue)
    np.testing.assert_array_equal(jaxdnn.matmul(A, B, *operands, epilogue=epilogue), draw(A @ B))


def test_the_place_of_an_epilogue_of_jax_is_the_call():
    line = inspect.currentframe().f_lineno + 2
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.UnsupportedOperation) as caught:
        jaxdnn.matmul(A, B, epilogue=jax.nn.softmax)
    assert f"`reduce_sum` at {__file__}:{line}" in str(caught.value)
    assert caught.value.__notes__ == ["Apply it to what matmul returns, or let XLA do so: options(fallback=True)"]


def test_an_operation_that_kernels_lack():
    """It is named, with where it stands; and runs after the kernel where that is allowed."""

    def epilogue(acc):
        return jnp.sort(acc, axis=-1)

    a = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    call = functools.partial(jaxdnn.matmul, epilogue=epilogue, precision="highest")
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.UnsupportedOperation, match=r"`sort` at .*\.py:\d+"):
        call(a, B)
    np.testing.assert_allclose(call(a, B), np.sort(a @ np.asarray(B), axis=-1), rtol=1e-5)
    text = str(jaxdnn.explain(call, a, B))
    assert "Not fused" in text
    assert "sort" in text
