"""What tracing makes of a function, and the words of its bytecode."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from checking.pointwise.cases import ACTIVATIONS, INTEGERS, PAIRS, SPECIAL, jvp, vjp
from checking.pointwise.programs import F32, ROW, SHAPE, collapsed, traced
from jaxdnn.pointwise import Index, Program, UnsupportedOperation, bytecode, collapse, evaluate, trace
from jaxdnn.pointwise.bytecode import EXTRA
from jaxdnn.pointwise.operations import DTYPES, OPERATIONS, kind

E4M3 = jnp.float8_e4m3fn


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


NUMBERS = (0, -0.0, 1, -1, 2, -0.5, 3, 2.0**-12, 2.0**13, np.inf, np.nan)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e4m3fn", "int32", "uint8"])
def test_what_is_known_of_arguments_changes_no_bit(dtype):
    """Constants are folded, and operations left out or replaced, where nobody could tell."""
    if kind(dtype) == "f":
        numbers, x, functions = NUMBERS, np.append(SPECIAL, np.linspace(-3, 3, 7)), PAIRS
    else:
        ends = np.iinfo(dtype)
        numbers, x, functions = (0, 1, 2, 3, ends.max, ends.min), np.arange(ends.max - 16, ends.max + 9), INTEGERS
    with np.errstate(all="ignore"):
        known, x = (np.array(array).astype(dtype) for array in (numbers, x))

    def function(x):
        arrays = [jnp.full_like(x, number) for number in known]
        pairs = [pair for one in arrays for pair in ((x, one), (one, x), (one, arrays[0]))]
        return {name: [of_two(*pair) for pair in pairs] for name, of_two in functions.items() if hasattr(lax, name)}

    program = trace(function, x.shape, (dtype,))
    with jax.disable_jit():
        found = jax.tree.unflatten(program.tree, evaluate(program, x.shape, [x], []))
        expected = function(x)
    for (path, got), want in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        got, want = np.asarray(got), np.asarray(want)
        same = got.view(f"V{got.itemsize}") == want.view(f"V{want.itemsize}")
        if path[0].key in ("max", "min"):  # of which of two zeros, nobody says
            same |= got == want
        wrong = ~(same | (got != got) & (want != want))
        assert not wrong.any(), f"{jax.tree_util.keystr(path)}: of {x[wrong]} {got[wrong]} instead of {want[wrong]}"


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
    dequantized = traced(lambda acc: acc * 2, accumulators=("int32",)).with_output_dtype("float32")
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


@pytest.mark.parametrize("reduce", [lax.reduce_sum, lax.reduce_max, lax.reduce_min])
@pytest.mark.parametrize("casts", [*itertools.permutations(("float32", "bfloat16", "float16", "float64"), 3)], ids=str)
def test_of_two_casts_the_first_one_rounds(reduce, casts):
    """A kernel casts what it stores, once."""
    first, *others = casts

    def function(acc):
        found = reduce(acc.astype(first), (0,))
        for dtype in others:
            found = found.astype(dtype)
        return found

    with pytest.raises(UnsupportedOperation, match="it follows `reduce_"):
        traced(function)


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


@pytest.mark.parametrize("groups", [(1, 2, 1), (0, 4, 0), (3, 0, 1), (0, 1, 3), (2, 0, 2)], ids=str)
def test_coordinates_of_joined_dimensions(groups):
    for shape in itertools.product((1, 2, 3), repeat=4):
        program = traced(lambda acc: [lax.broadcasted_iota("int32", acc.shape, d) for d in range(4)], shape=shape)
        joined = collapse(program, shape, [], groups)
        assert isinstance(joined, Program)
        ends = np.cumsum((0, *groups))
        sizes = [int(np.prod(shape[start:end])) for start, end in itertools.pairwise(ends)]
        for output, wanted in zip(joined.outputs, np.indices(shape), strict=True):
            immediate = joined.instructions[output.value].immediate
            found = np.zeros(sizes, int)  # a dimension of size one has no coordinate
            if isinstance(immediate, Index):
                found = np.indices(sizes)[immediate.dimension] // immediate.divisor
                found = found % immediate.modulus if immediate.modulus else found
            np.testing.assert_array_equal(found.reshape(shape), wanted)


@pytest.mark.parametrize("groups", [(1, 2, 1), (0, 3, 1), (2, 0, 2)], ids=str)
def test_reductions_over_joined_dimensions(groups):
    """They reduce whole groups, but for dimensions of size one; what reduces some of a group is refused."""
    every = [axes for count in range(1, 5) for axes in itertools.combinations(range(4), count)]
    ends = np.cumsum((0, *groups))
    for shape in itertools.product((1, 2), repeat=4):
        values = np.arange(np.prod(shape)).reshape(shape)
        members = [[d for d in range(*pair) if shape[d] > 1] for pair in itertools.pairwise(ends)]
        sizes = [int(np.prod(shape[start:end])) for start, end in itertools.pairwise(ends)]
        for axes in every:
            joined = collapse(traced(lambda acc, axes=axes: jnp.sum(acc, axis=axes), shape=shape), shape, [], groups)
            if any(0 < len(set(group) & set(axes)) < len(group) for group in members):
                assert isinstance(joined, str)
                continue
            assert isinstance(joined, Program)
            (output,) = joined.outputs
            got = values.reshape(sizes).sum(output.axes if output.reduction else ())
            np.testing.assert_array_equal(got.reshape(-1), values.sum(axes).reshape(-1))


def test_collapse_checks_its_arguments():
    with pytest.raises(ValueError, match=r"groups \(1, 1, 1\) of shape \(4, 6\), for a program of 2 dimensions"):
        collapse(traced(jax.nn.relu), SHAPE, [], (1, 1, 1))


def test_program_is_frozen_data():
    program = traced(jax.nn.relu)
    assert replace(program, title="other") == program
    assert {program: 1}[replace(program, title="other")] == 1
