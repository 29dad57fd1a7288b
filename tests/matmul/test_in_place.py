"""Results that take the place of an epilogue's operand: `input_output_aliases`. Data are small whole numbers, so that
every engine's results are exact."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.calls import native_calls
from checking.cases import BF16, F32
from checking.compare import engines
from jaxdnn.planning.calls import find_calls

ENGINES = engines("matmul")
SHAPES = [((33, 40), (40, 24)), ((5, 7, 9), (9, 11)), ((1, 40), (40, 64)), ((300, 128), (128, 515))]


def accumulate(acc, c):
    return 2 * acc + 0.5 * c


matmul = functools.partial(jaxdnn.matmul, epilogue=accumulate, input_output_aliases={0: 0})


def whole(shape, dtype=F32, seed=0):
    return np.random.default_rng((seed, *shape)).integers(-3, 4, shape).astype(jnp.dtype(dtype))


def given(of_a, of_b, dtype=F32):
    return whole(of_a, dtype), whole(of_b, dtype, 1), 2 * whole((*of_a[:-1], of_b[-1]), dtype, 2)


def exact(a, b, c):
    a, b, wide = (array.astype(np.float32) for array in (a, b, c))
    return accumulate(a @ b, wide).astype(c.dtype)


def copies(text, shape):
    """How many arrays of a shape a compiled program copies."""
    return len(re.findall(rf"\w+\[{','.join(map(str, shape))}\]\S* copy(?:-start)?\(", text))


def in_place(function, *arrays):
    """Operands of the first call in a function, and of its results those that take their place."""
    call, *_ = find_calls(function, *arrays)
    return call.spec.aliases(call.signature)


# ------------------------------------------------------------ memory


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_donated_operand_gives_its_buffer(shapes, dtype, engine):
    a, b, c = given(*shapes, dtype)
    buffer = jnp.array(c)
    with jaxdnn.options(engine=engine):
        compiled = jax.jit(matmul, donate_argnums=2).lower(a, b, buffer).compile()
    address = buffer.unsafe_buffer_pointer()
    y = compiled(a, b, buffer)
    np.testing.assert_array_equal(y, exact(a, b, c))
    text = compiled.as_text()
    if native_calls(text):
        assert y.unsafe_buffer_pointer() == address
        assert copies(text, c.shape) == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_operand_that_lives_on_keeps_its_values(dtype, engine):
    a, b, c = given(*SHAPES[-1], dtype)
    kept = jnp.array(c)

    def both(a, b, c):
        y = matmul(a, b, c)
        return y, y + c

    with jaxdnn.options(engine=engine):
        np.testing.assert_array_equal(matmul(a, b, kept), exact(a, b, c))
        y, after = jax.jit(both)(a, b, kept)
    np.testing.assert_array_equal(kept, c)
    np.testing.assert_array_equal(y, exact(a, b, c))
    np.testing.assert_array_equal(after, y + c)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("donated", [(), (0,)], ids=str)
def test_one_array_in_two_roles(donated, engine):
    """Where a tile of the result is stored, other tiles still read the matrix that is multiplied."""
    a, b = whole((700, 700)), whole((700, 700), seed=1)
    with jaxdnn.options(engine=engine):
        y = jax.jit(lambda a, b: matmul(a, b, a), donate_argnums=donated)(jnp.array(a), b)
    np.testing.assert_array_equal(y, exact(a, b, a))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("m", [1, 70])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_other_results_need_what_is_overwritten(order, m, engine):
    """One is the operand itself, and one a reduction of it; they are stored before the one in its place, or after."""
    a, b, c = given((m, 40), (40, 512))

    def results(acc, c):
        three = (jnp.sum(c, axis=0), c, acc + c)
        return tuple(three[i] for i in order)

    function = functools.partial(jaxdnn.matmul, epilogue=results, input_output_aliases={0: order.index(2)})
    with jaxdnn.options(engine=engine):
        got = jax.jit(function, donate_argnums=2)(a, b, jnp.array(c))
    for one, want in zip(got, results(a @ b, c), strict=True):
        np.testing.assert_array_equal(one, want)


@pytest.mark.parametrize("engine", ENGINES)
def test_several_operands(engine):
    a, b, c = given(*SHAPES[0])
    d = whole(c.shape, seed=3)
    # Of several donated arrays of one type, JAX gives the first to the first result.
    aliases, arrays = {0: 0, 1: 1}, [jnp.array(c), jnp.array(d)]
    function = functools.partial(
        jaxdnn.matmul, epilogue=lambda s, c, d: {"p": s + c, "q": s - d}, input_output_aliases=aliases
    )
    addresses = [array.unsafe_buffer_pointer() for array in arrays]
    with jaxdnn.options(engine=engine):
        compiled = jax.jit(function, donate_argnums=(2, 3)).lower(a, b, *arrays).compile()
    y = compiled(a, b, *arrays)
    np.testing.assert_array_equal(y["p"], a @ b + c)
    np.testing.assert_array_equal(y["q"], a @ b - d)
    if native_calls(compiled.as_text()):
        assert [y["p"].unsafe_buffer_pointer(), y["q"].unsafe_buffer_pointer()] == addresses


@pytest.mark.parametrize("engine", ENGINES)
def test_dot_general(engine):
    a, b, c = whole((2, 5, 9)), whole((2, 7, 9), seed=1), whole((2, 5, 7), seed=2)
    numbers = (((2,), (2,)), ((0,), (0,)))

    def call(c):
        return jaxdnn.dot_general(a, b, numbers, operands=(c,), epilogue=accumulate, input_output_aliases={0: 0})

    with jaxdnn.options(engine=engine):
        y = jax.jit(call, donate_argnums=0)(jnp.array(c))
    np.testing.assert_array_equal(y, exact(a, b.swapaxes(1, 2), c))


# ------------------------------------------------------------ transformations


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_accumulate_in_a_loop(engine):
    xs, ys, total = whole((6, 40, 33)), whole((6, 40, 24), seed=1), whole((33, 24), seed=2)

    def accumulated(total, xs, ys):
        def step(total, pair):
            x, y = pair
            acc = functools.partial(jaxdnn.matmul, epilogue=lambda s, c: c + s, input_output_aliases={0: 0})
            return acc(x.T, y, total), None

        return jax.lax.scan(step, total, (xs, ys))[0]

    with jaxdnn.options(engine=engine):
        compiled = jax.jit(accumulated, donate_argnums=0).lower(total, xs, ys).compile()
    np.testing.assert_array_equal(compiled(jnp.array(total), xs, ys), total + np.einsum("smk,smn->kn", xs, ys))
    if native_calls(compiled.as_text()):
        assert copies(compiled.as_text(), total.shape) == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axes", [(0, None, 0), (0, 0, 1), (None, 0, 0), (0, None, None), (None, None, 0)], ids=str)
def test_vmap(axes, engine):
    shapes = ((33, 40), (40, 24), (33, 24))
    stacked = [whole((3, *shape), seed=i) for i, shape in enumerate(shapes)]
    several = [x[:1] if axis is None else x for x, axis in zip(stacked, axes, strict=True)]
    arrays = [x[0] if axis is None else np.moveaxis(x, 0, axis) for x, axis in zip(stacked, axes, strict=True)]
    function = jax.vmap(matmul, axes)
    assert in_place(function, *arrays) == ({} if axes[2] is None else {2: 0})
    with jaxdnn.options(engine=engine):
        y = jax.jit(function, donate_argnums=() if axes[2] is None else 2)(*arrays[:2], jnp.array(arrays[2]))
    np.testing.assert_array_equal(y, np.broadcast_to(exact(*several), y.shape))


@pytest.mark.parametrize("engine", ENGINES)
def test_derivatives(engine):
    """The forward that saves its sums still has them behind the result that is stored in place."""
    a, b, c = given(*SHAPES[0])

    def epilogue(acc, c):
        return jnp.square(acc / 64) + c * c

    def vjp(aliases, a, b, c):
        function = functools.partial(jaxdnn.matmul, epilogue=epilogue, input_output_aliases=aliases)
        y, pull_back = jax.vjp(function, a, b, c)
        return y, pull_back(jnp.cos(y))

    call, *_ = find_calls(functools.partial(vjp, {0: 0}), a, b, c)
    assert len(call.spec.results) == 2
    assert call.spec.aliases(call.signature) == {2: 0}
    with jaxdnn.options(engine=engine):
        got = jax.jit(functools.partial(vjp, {0: 0}), donate_argnums=2)(a, b, jnp.array(c))
        want = jax.jit(functools.partial(vjp, None))(a, b, c)
        rematerialized = jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(jax.checkpoint(matmul)(*arrays)))))(a, b, c)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)
    np.testing.assert_allclose(rematerialized, 2 * np.cos(exact(a, b, c)) @ b.T, rtol=2e-3, atol=0.1)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "not read"])
@pytest.mark.parametrize("manual", [True, False], ids=["shard_map", "jit"])
def test_many_devices(cpus, manual, reads):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=cpus)
    specs = (P("a"), P(None, "b"), P("a", "b"))
    a, b, c = given((8, 12), (12, 6))
    function = matmul if reads else functools.partial(matmul, epilogue=lambda acc, _: 2 * acc)
    if manual:
        function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[2])
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b, c), specs, strict=True)]
    addresses = [shard.data.unsafe_buffer_pointer() for shard in placed[2].addressable_shards]
    y = jax.jit(function, donate_argnums=2)(*placed)
    np.testing.assert_array_equal(y, exact(a, b, c if reads else 0 * c))
    assert addresses == [shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards]


@pytest.mark.parametrize("engine", ENGINES)
def test_export(engine):
    a, b, c = given(*SHAPES[0])
    with jaxdnn.options(engine=engine):
        (call,) = jaxdnn.explain(matmul, a, b, c).sections[0][1]
        exported = export.export(jax.jit(matmul, donate_argnums=2), disabled_checks=jaxdnn.export_checks())(a, b, c)
    loaded = export.deserialize(exported.serialize())
    assert ("output_operand_alias" in loaded.mlir_module()) == (call.engine != "xla")
    np.testing.assert_array_equal(jax.jit(loaded.call, donate_argnums=2)(a, b, jnp.array(c)), exact(a, b, c))


# ------------------------------------------------------------ what is told, and refused


def test_explained():
    arrays = given(*SHAPES[0])
    (call,) = jaxdnn.explain(matmul, *arrays).sections[0][1]
    assert call.call.spec.fused[-1] == "in place"
    (other,) = jaxdnn.explain(functools.partial(matmul, input_output_aliases=None), *arrays).sections[0][1]
    assert "in place" not in other.call.spec.fused
    assert other.call.spec == call.call.spec.unaliased != call.call.spec


def test_dropped_with_an_epilogue_that_runs_after():
    a, b, c = given(*SHAPES[0])
    function = functools.partial(matmul, epilogue=lambda acc, c: jnp.sort(acc + c, axis=-1))
    assert in_place(function, a, b, c) == {}
    y = jax.jit(function, donate_argnums=2)(a, b, jnp.array(c))
    np.testing.assert_array_equal(y, np.sort(a @ b + c, axis=-1))


A, B, C = given((3, 4), (4, 5))
SQUARE = whole((4, 4))
BAD = {
    "no mapping": (
        (A, B, C),
        {"input_output_aliases": [0]},
        TypeError,
        r"must be a mapping, as in \{0: 0\}; got \[0\]",
    ),
    "names": ((A, B, C), {"input_output_aliases": {"c": 0}}, TypeError, "an operand's number to a result's"),
    "no epilogue": ((A, B), {"epilogue": None}, ValueError, "there is none; pass epilogue="),
    "an operand too many": ((A, B, C), {"input_output_aliases": {1: 0}}, ValueError, "no operand 1;.* there are 1"),
    "a negative number": ((A, B, C), {"input_output_aliases": {-1: 0}}, ValueError, "no operand -1"),
    "a result too many": ((A, B, C), {"input_output_aliases": {0: 1}}, ValueError, "no result 1; .* returns 1"),
    "a result twice": (
        (A, B, C, C),
        {"epilogue": lambda s, c, d: s + c + d, "input_output_aliases": {0: 0, 1: 0}},
        ValueError,
        "name each result once",
    ),
    "another shape": ((A, B, C[0]), {}, ValueError, r"operand 0 is float32\[5\], and result 0 is float32\[3, 5\]"),
    "another dtype": ((A, B, C.astype(BF16)), {}, ValueError, r"is bfloat16\[3, 5\], .* cast the operand"),
    "another out_dtype": ((A, B, C), {"out_dtype": BF16}, ValueError, r"result 0 is bfloat16\[3, 5\]"),
    "a reduction": (
        (A, B, C[0]),
        {"epilogue": lambda s, c: jnp.sum(s + c, axis=0)},
        ValueError,
        "result 0 is a sum; only a result with an element for each sum",
    ),
    "transposed": (
        (SQUARE, SQUARE, SQUARE),
        {"epilogue": lambda s, c: s + c + c.T},
        ValueError,
        "reads operand 0 transposed.*as one more operand",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    arrays, keywords, error, message = BAD[name]
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(matmul, **keywords), *arrays)
