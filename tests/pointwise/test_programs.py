"""What tracing makes of a function, what it refuses, and what is emitted."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from checking.pointwise.cases import ACTIVATIONS, jvp, vjp
from checking.pointwise.programs import F32, ROW, SHAPE, traced
from jaxdnn.pointwise import Program, bytecode, collapse, functor, trace
from jaxdnn.pointwise.bytecode import EXTRA
from jaxdnn.pointwise.operations import DTYPES, OPERATIONS

E4M3 = jnp.float8_e4m3fn


def collapsed(function: Any, *operands: Any, groups: tuple[int, int, int] = (0, 1, 1)) -> Program:
    program = collapse(traced(function, *operands), SHAPE, [operand.shape for operand in operands], groups)
    assert isinstance(program, Program)
    return program


# ---- What is emitted -------------------------------------------------------------------------------------------------

EXAMPLE = """\
// lambda acc, b, residual: jax.nn.gelu(acc + b) + residual
struct Epilogue {
    static __forceinline__ void compute(float acc, float b, float residual, float& out) {
        const float v0 = acc + b;
        const float v1 = v0 * (0.5f * math::one_plus_tanh(0.7978846f * (v0 + 0.044715f * (v0 * (v0 * v0)))));
        out = v1 + residual;
    }

    template <class Sums, class Operands, class Place, class Results>
    static __forceinline__ void apply(const Sums& sum, const Operands& operand, const Place& place, Results& result) {
        compute(sum[0], operand[0], operand[1], result[0]);
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


def test_codes_are_those_of_the_interpreter():
    header = (Path(__file__).parents[2] / "cpp/host/pointwise/bytecode.h").read_text()

    def names(enumeration: str) -> list[str]:
        body = re.search(rf"enum class {enumeration} [^{{]*{{(.*?)}}", header, re.DOTALL)
        assert body
        return [name.rstrip("_") for name in re.findall(r"\w+", body[1])]

    assert names("Dtype") == list(DTYPES)
    assert names("Operation") == [*(operation.name for operation in OPERATIONS), *EXTRA]


def test_registers_are_used_again():
    def long(acc):
        for _ in range(50):
            acc = jnp.tanh(acc) + 1
        return acc

    words = bytecode(collapsed(long))
    width, registers, literals, steady, instructions, outputs = words[:6]
    assert (width, literals, steady, instructions, outputs) == (4, 1, 0, 101, 1)
    assert registers <= 4


def test_what_is_the_same_in_every_row_is_computed_once():
    column = jax.ShapeDtypeStruct((4, 1), "float32")
    words = bytecode(collapsed(lambda acc, b, c: (acc + 2 * b) * c, ROW, column))
    literals, steady, instructions = words[2:5]
    assert (literals, steady, instructions) == (1, 2, 4)


# ---- A program is the function, and nothing else ---------------------------------------------------------------------


def test_program_does_not_depend_on_sizes():
    def function(acc, b):
        return jax.nn.gelu(acc + b), jnp.max(jnp.abs(acc))

    one = traced(function, ROW)
    other = trace(function, (512, 384), ["float32"], [jax.ShapeDtypeStruct((384,), "float32")])
    assert one == other
    assert hash(one) == hash(other)


def test_programs_differ():
    programs = [
        traced(function, ROW)
        for function in (
            lambda acc, b: acc + b,
            lambda acc, c: acc + c,
            lambda acc, b: acc - b,
            lambda acc, b: (acc + b,),
            lambda acc, b: acc + b.astype("bfloat16"),
            lambda acc, b: acc * b + 0.0,
            lambda acc, b: acc * b + -0.0,
        )
    ]
    assert len(set(programs)) == len(programs)


def operations(function: Any) -> tuple[str, ...]:
    return traced(function).operations


def test_simplifications():
    assert operations(lambda acc: acc * 1 / 1 - 0.0) == ()
    assert operations(lambda acc: acc / 4) == ("mul",)
    assert operations(lambda acc: acc / 3) == ("div",)
    assert operations(lambda acc: acc.astype(E4M3) / E4M3(2**-8) * 2) == ("convert", "mul", "mul")
    assert operations(lambda acc: acc.astype(E4M3) / E4M3(2**-9) * 2) == ("convert", "div", "mul")  # it has no 512
    assert operations(lambda acc: acc + 0.0) == ("add",)  # -0 + 0 is 0
    assert operations(lambda acc: acc.astype("float32")) == ()
    assert operations(lambda acc: jnp.exp(acc) + jnp.exp(acc)) == ("exp", "add")
    assert operations(lambda acc: (acc * jnp.exp(acc), acc)[1]) == ()
    assert operations(lambda acc: acc + (jnp.float32(2) * 3 - jnp.sqrt(jnp.float32(4)))) == ("add",)
    assert operations(lambda acc: jnp.where(jnp.float32(1) > 2, jnp.exp(acc), acc)) == ()
    assert operations(lambda acc: acc.astype("bfloat16")) == ()  # rounded when it is stored
    assert operations(lambda acc: acc.astype("bfloat16") + 1) == ("convert", "add")
    assert operations(lambda acc: acc**5) == ("mul", "mul", "mul")
    assert operations(lambda acc: acc**0) == ()


def test_outputs():
    program = traced(
        lambda acc: {"y": acc, "bf16": acc.astype("bfloat16"), "amax": jnp.max(jnp.abs(acc)), "sum": jnp.sum(acc, 0)}
    )
    kinds = [(output.dtype, output.reduction, output.axes, output.shape(SHAPE)) for output in program.outputs]
    assert kinds == [
        ("float32", "max", (0, 1), ()),
        ("bfloat16", None, (), SHAPE),
        ("float32", "sum", (0,), (6,)),
        ("float32", None, (), SHAPE),
    ]
    assert jax.tree.unflatten(program.tree, range(4)) == {"amax": 0, "bf16": 1, "sum": 2, "y": 3}


def test_output_dtype():
    def function(acc):
        return acc, acc.astype("float16"), acc > 0, jnp.sum(acc)

    outputs = traced(function).with_output_dtype("bfloat16").outputs
    assert [output.dtype for output in outputs] == ["bfloat16", "float16", "bool", "float32"]
    dequantized = traced(lambda acc: acc * 2, sums=("int32",)).with_output_dtype("float32")
    assert dequantized.operations == ("mul", "convert")
    assert traced(function).with_output_dtype("float32") == traced(function)


def test_sum_of_bfloat16_stays_in_float32_until_it_is_stored():
    (output,) = traced(lambda acc: jnp.sum(acc.astype("bfloat16"), axis=0, keepdims=True)).outputs
    assert (output.dtype, output.reduction, output.shape(SHAPE)) == ("bfloat16", "sum", (1, 6))


def test_casts_of_reductions():
    """What a register holds as its dtype would is cast when it is stored."""
    kept = {
        "int8": lambda acc: jnp.max(acc.astype("int8")).astype("int32"),
        "bfloat16": lambda acc: lax.reduce_sum(acc.astype("bfloat16"), (0,)).astype("float32"),
        "int32": lambda acc: lax.reduce_sum(acc.astype("int32"), (0,)).astype("int8"),
        "float16": lambda acc: jnp.max(jnp.abs(acc.astype("float16"))).astype("float32"),
    }
    for dtype, function in kept.items():
        program = traced(function)
        assert program.outputs[0].reduction is not None
        assert program.instructions[program.outputs[0].value].dtype == dtype


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_trace(name):
    function = ACTIVATIONS[name]
    for derivative in (vjp(function), jvp(function), vjp(lambda x: vjp(function)(x, x))):
        program = traced(derivative, F32)
        # JAX 0.11 writes sinc as a polynomial near zero.
        assert len(program.operations) <= (150 if name == "sinc" else 60)


def test_transformed_function():
    def function(acc, b):
        return jax.vmap(jax.jit(jax.vmap(jax.grad(lambda x, y: jnp.tanh(x) ** 2 * y))), (0, None))(acc, b)

    assert traced(function, ROW).operations.count("tanh") == 1


# ---- Batch, row and column -------------------------------------------------------------------------------------------

DEEP = (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("function", "operand", "groups", "reason"),
    [
        (lambda acc, b: acc + b, (3, 1, 1), (1, 2, 1), None),
        (lambda acc, b: acc + b.T[:, None, :, None], (4, 2), (0, 3, 1), None),
        (lambda acc, b: acc + b[..., None], (2, 3, 4), (2, 1, 1), None),
        (lambda acc, b: acc + b.transpose(1, 0, 2)[..., None], (3, 2, 4), (0, 3, 1), None),
        (lambda acc, b: jnp.sum(acc * b, axis=1), (5,), (1, 2, 1), "a sum is over only some of the output's row"),
        (lambda acc, b: jnp.sum(acc * b, axis=(1, 2)), (5,), (1, 2, 1), None),
    ],
)
def test_collapse(function, operand, groups, reason):
    program = traced(function, jax.ShapeDtypeStruct(operand, "float32"), shape=DEEP)
    result = collapse(program, DEEP, [operand], groups)
    if reason is None:
        assert isinstance(result, Program)
    else:
        assert isinstance(result, str)
        assert reason in result


def test_collapse_checks_its_arguments():
    with pytest.raises(ValueError, match=r"groups \(1, 1, 1\) of shape \(4, 6\), for a program of 2 dimensions"):
        collapse(traced(jax.nn.relu), SHAPE, [], (1, 1, 1))


def test_program_is_frozen_data():
    program = traced(jax.nn.relu)
    assert replace(program, title="other") == program
    assert {program: 1}[replace(program, title="other")] == 1
