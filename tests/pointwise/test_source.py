"""The CUDA source that a program is emitted as."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.pointwise.programs import ROW, SHAPE, collapsed, traced
from jaxdnn.pointwise import bytecode, functor

EXAMPLE = """\
// lambda acc, b, residual: jax.nn.gelu(acc + b) + residual
struct Epilogue {
    static __forceinline__ void compute(float acc, float b, float residual, float& out) {
        const float v0 = acc + b;
        const float v1 = v0 * (0.5f * math::one_plus_tanh(0.7978846f * (v0 + 0.044715f * (v0 * (v0 * v0)))));
        out = v1 + residual;
    }

    template <class Accumulators, class Operands, class Context, class Results>
    static __forceinline__ void apply(const Accumulators& accumulator, const Operands& operand, const Context& context,
                                      Results& result) {
        compute(accumulator[0], operand[0], operand[1], result[0]);
    }
};
"""


def test_emitted_source():
    residual = jax.ShapeDtypeStruct(SHAPE, "bfloat16")
    program = collapsed(lambda acc, b, residual: jax.nn.gelu(acc + b) + residual, ROW, residual)
    emitted = functor(program)
    assert emitted.source == EXAMPLE
    assert [(field.name, field.dtype, field.load.strides) for field in emitted.operands] == [
        ("b", "float32", (0, 0, 1)),
        ("residual", "bfloat16", (0, 6, 1)),
    ]
    assert emitted.results == ("float",)


def test_results_of_16_bits_are_computed_with_fewer_instructions():
    def function(acc):
        return jax.nn.gelu(acc), jax.nn.silu(acc), jnp.tanh(acc * 2)

    exact = collapsed(function)
    rounded = exact.with_output_dtype("bfloat16")
    for name in ("one_plus_tanh", "logistic", "tanh"):
        assert f"math::{name}(" in functor(exact).source
        assert f"math::approximate_{name}(" in functor(rounded).source
    for narrow in ("float16", "int8", "bool"):  # beside results of 32 bits
        mixed = collapsed(lambda acc, dtype=narrow: (acc.astype(dtype), *function(acc)))
        assert "approximate" not in functor(mixed).source


def test_tanh_is_the_hardwares_where_that_is_allowed_and_not_in_its_derivative():
    def capped(acc):
        return 30 * jnp.tanh(acc / 30)

    assert "ptx::tanh_approx(" in functor(collapsed(capped), hardware_tanh=True).source
    assert "ptx::tanh_approx(" not in functor(collapsed(capped), approximate=True).source
    slope = collapsed(jax.grad(lambda acc: jnp.sum(capped(acc))))
    assert "ptx::tanh_approx(" not in functor(slope, hardware_tanh=True).source


def test_the_derivative_of_gelu_has_no_cancelling_sums():
    source = functor(collapsed(jax.grad(lambda acc: jnp.sum(jax.nn.gelu(acc))))).source
    assert "math::tanh(" not in source
    assert "math::one_plus_tanh(-" in source
    assert "math::one_plus_tanh(v" in source
    assert " - " not in source
    # Both of the derivative's terms have it.
    assert source.count("one_plus_tanh(v") == 1


def test_a_tanh_that_is_used_by_itself_stays():
    def function(acc):
        tanh = jnp.tanh(acc)
        return 1 + tanh, tanh

    source = functor(collapsed(function)).source
    assert "math::one_plus_tanh(acc)" in source
    assert "math::tanh(acc)" in source


def test_names_of_arguments_are_made_valid():
    def function(float, v0, out, größe, row):  # noqa: A002
        return float + v0 + out + größe + row

    source = functor(collapsed(function, *[ROW] * 4)).source
    assert "compute(float float_, float v0_, float out, float gr__e, float row_, float& out_)" in source


@pytest.mark.parametrize(
    ("function", "title"),
    [
        (lambda acc: acc + 1, "lambda acc: acc + 1"),
        (lambda x: (x, x.astype("bfloat16")), 'lambda x: (x, x.astype("bfloat16"))'),
        (jax.nn.relu, "relu"),
    ],
)
def test_title(function, title):
    assert traced(function).title == title
    assert repr(traced(function)) == f"Program({title!r})"


def test_literals():
    source = functor(collapsed(lambda acc: (acc * 0.1, acc + np.float32(np.inf), acc * np.float32(np.nan)))).source
    assert "acc * 0.1f" in source
    assert "math::infinity<float>()" in source
    assert "math::not_a_number<float>()" in source


def test_negative_literals():
    source = functor(collapsed(lambda acc: (-(acc * -0.5), acc - np.float32(-3), acc * -np.float32(np.inf)))).source
    assert "out0 = -(acc * -0.5f);" in source
    assert "out1 = acc - -3.0f;" in source
    assert "out2 = acc * -math::infinity<float>();" in source


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b, c: a + b + c, "a + b + c"),
        (lambda a, b, c: a + (b + c), "a + (b + c)"),
        (lambda a, b, c: a - (b - c), "a - (b - c)"),
        (lambda a, b, c: a * (b * c), "a * (b * c)"),
        (lambda a, b, c: (a + b) * c, "(a + b) * c"),
        (lambda a, b, c: -(a * b) - -c, "-(a * b) - -c"),
        (lambda a, b, c: jnp.exp(a * b) + c, "math::exp(a * b) + c"),
        (lambda a, b, c: jnp.where(a > b + c, a, b), "a > b + c ? a : b"),
    ],
)
def test_parentheses(function, expected):
    """The operations are done in the function's order, for floats are not associative."""
    assert f"out = {expected};" in functor(collapsed(function, ROW, ROW)).source


def test_what_is_used_once_stands_where_it_is_used():
    source = functor(collapsed(lambda acc, b: jnp.sin(acc * b) + b * b * b, ROW)).source
    assert "out = math::sin(acc * b) + b * b * b;" in source
    both = functor(collapsed(lambda acc, b: (acc * b, jnp.sin(acc * b)), ROW)).source
    assert "const float v0 = acc * b;\n        out0 = v0;\n        out1 = math::sin(v0);" in both


def test_both_sides_of_a_select_are_computed_before_it():
    source = functor(collapsed(lambda acc: jnp.where(acc > 0, jnp.exp(acc), acc * 2))).source
    assert "const float v0 = math::exp(acc);" in source
    assert "out = acc > 0.0f ? v0 : v1;" in source


def test_what_c_promotes_to_int_is_named():
    source = functor(collapsed(lambda acc: jnp.invert(acc.astype("int8") & np.int8(3)))).source
    assert "const int8 v0 = math::convert<int8>(acc) & int8(3);" in source
    assert "math::invert(v0)" in source


def test_lines_are_no_longer_than_people_read():
    def function(acc, a_long_name):
        for _ in range(30):
            acc = jnp.sin(acc * a_long_name) + a_long_name
        return acc

    source = functor(collapsed(function, ROW)).source
    assert max(map(len, source.splitlines())) <= 120
    assert source.count("const float") < 20


def test_a_functor_is_emitted_of_collapsed_programs_only():
    with pytest.raises(ValueError, match="the program has 2 dimensions; collapse it"):
        functor(traced(jax.nn.relu))
    with pytest.raises(ValueError, match="the program has 2 dimensions; collapse it"):
        bytecode(traced(jax.nn.relu))
