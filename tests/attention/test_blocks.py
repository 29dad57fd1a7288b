"""Long calls are computed block by block: with the same results, and in linear memory."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.cases import AttentionCase
from checking.cases.dtypes import BF16, F64
from checking.compare import assert_close, check
from checking.sharding import make_mesh, placed
from checking.transforms import jvp, vjp, with_cotangents, with_tangents
from jaxdnn.primitives.attention import blocks

# Lengths that are no multiple of a block's, and each axis in several blocks.
CASES = [
    AttentionCase(queries=13, keys=22, heads=4, size=8, value_size=6, bias="1nts", sinks=True, residual=True),
    AttentionCase(queries=22, keys=13, causal=True, alignment="bottom_right", mask="b1ts", residual=True, dropout=0.3),
    AttentionCase(queries=21, keys=19, heads=4, score_mod="slopes", segments="both", window=(7, 3), residual=True),
    AttentionCase(batch=3, queries=17, keys=18, lengths="query key", soft_cap=2.0, positions="key", mask_mod="stripes"),
    AttentionCase(queries=16, keys=9, heads=4, bias="b11s", dtype=BF16, score_mod="table"),
    AttentionCase(queries=11, keys=12, bias="ts", causal=True, residual=True, dtype=F64),
]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(blocks, "_MOST_SCORES", 1)
    monkeypatch.setattr(blocks, "_LEAST_SIDE", 5)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("transform", "arguments"), [(jvp, with_tangents), (vjp, with_cotangents)], ids=["jvp", "vjp"])
@pytest.mark.usefixtures("small")
def test_blocks_are_joined(transform, arguments, case):
    text = check(transform, case, arguments, "xla")
    assert "while" in text


@pytest.mark.parametrize(
    ("band", "seen"), [({"is_causal": True}, slice(0, 5)), ({"local_window_size": 2}, slice(4, 8))]
)
@pytest.mark.usefixtures("small")
def test_blocks_out_of_the_band_are_not_computed(band, seen):
    """A block that is computed would hand its values' NaN on, multiplied by zero."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 30, 1, 4), "float32")
    value = value.at[:, 15:].set(jnp.nan)

    def loss(query, key, value):
        return jnp.sum(jaxdnn.dot_product_attention(query, key, value, **band)[:, seen] ** 2)

    with jaxdnn.options(engine="xla"):
        found, (d_query, _) = jax.jit(jax.value_and_grad(loss, (0, 1)))(query, key, value)
        tangent = jax.jvp(lambda query: loss(query, key, value), (query,), (query,))[1]
    assert jnp.isfinite(found)
    assert jnp.all(jnp.isfinite(d_query[:, seen]))
    assert jnp.isfinite(tangent)


def reverse_over_reverse(function, primals, cotangents):
    def gradient(*primals):
        return jax.vjp(function, *primals)[1](cotangents)

    return jax.vjp(gradient, *primals)[1](primals)


@pytest.mark.usefixtures("small")
def test_second_derivatives_of_blocks():
    case = AttentionCase(batch=1, queries=7, keys=9, bias="1nts", causal=True, residual=True)
    check(reverse_over_reverse, case, with_cotangents, "xla", surroundings=True)


@pytest.mark.parametrize(
    ("queries", "keys", "heads"),
    [(10**5, 10**5, 8), (1, 10**6, 64), (10**6, 3, 64), (4097, 4096, 1), (9000, 300, 4096)],
)
def test_blocks_are_not_too_large(queries, keys, heads):
    rows, columns = blocks.spans_of(heads, queries, keys)
    assert rows.size * columns.size * heads <= max(2**24, 64 * 64 * heads)
    assert rows.size * columns.size * heads >= min(2**22, queries * keys * heads)
    assert (rows.count - 1) * rows.size < queries <= rows.count * rows.size
    assert (columns.count - 1) * columns.size < keys <= columns.count * columns.size


def temporary_bytes(length, gradient):
    types = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1)]
    function = functools.partial(jaxdnn.dot_product_attention, is_causal=True)
    if gradient:
        function = jax.grad(lambda *arrays: jnp.sum(jaxdnn.dot_product_attention(*arrays, is_causal=True)), (0, 1, 2))
    with jaxdnn.options(engine="xla"):
        return jax.jit(function).lower(*types).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_memory_is_linear(gradient):
    """A score matrix of the shorter call has 4 GiB: what is there besides arrays of the length is one block's."""
    short, long, longest = (temporary_bytes(length * 2**14, gradient) for length in (1, 2, 3))
    assert longest < 2**30
    assert longest - long <= 1.5 * (long - short) + 2**20
    assert longest - short < 2**25


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.usefixtures("small")
def test_blocks_on_several_devices(cpus, kind):
    """Loops have carries of one type, whichever axes of the mesh these lie on."""
    case = AttentionCase(
        queries=13, keys=11, heads=4, bias="1nts", score_mod="slopes", causal=True, residual=True, dropout=0.2
    )
    mesh = make_mesh(cpus, kind)
    split = P("a", None, "b")
    specs = (split, split, split, P(None, "b"), P())
    with jax.set_mesh(mesh):
        given = placed(mesh, specs, case.primals()), placed(mesh, (split, split), case.cotangents())
        found = jax.jit(functools.partial(vjp, case.call))(*given)
    assert_close(found, vjp, case, with_cotangents)


@pytest.mark.usefixtures("small")
def test_blocks_in_a_manual_region(cpus):
    case = AttentionCase(batch=4, queries=13, keys=11, bias="1nts", causal=True, residual=True)
    rows = P("rows")
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=cpus)
    function = jax.shard_map(case.call, mesh=mesh, in_specs=(rows, rows, rows, P()), out_specs=rows)
    assert_close(jax.jit(functools.partial(vjp, function))(*with_cotangents(case)), vjp, case, with_cotangents)
