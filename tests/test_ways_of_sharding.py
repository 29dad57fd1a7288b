"""Every way in which arrays get their shardings: values as without a mesh, and the types that plain JAX has."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
DATA, COLUMNS, WHOLE = P("a"), P(None, "b"), P()


def biased_gelu(acc, bias):
    return jax.nn.gelu(acc + bias)


def probabilities(acc, bias):
    """Which is no pointwise function, after one whose derivative selects."""
    return jax.nn.softmax(jax.nn.elu(acc + bias), axis=1)


def layer_norm(x, scale, bias):
    centered = x - jnp.mean(x, -1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6) * scale + bias


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def attention(query, key, value):
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / 2), value)


X, W, BIAS = ((8, 12), DATA), ((12, 16), COLUMNS), ((16,), P("b"))
NUMBERS = {"dimension_numbers": (((2,), (2,)), ((0,), (0,)))}

# Ours, plain JAX's, and the operands.
OPS = {
    "matmul": (jaxdnn.matmul, jnp.matmul, [X, W]),
    "epilogue": (
        functools.partial(jaxdnn.matmul, epilogue=biased_gelu),
        lambda a, b, bias: biased_gelu(a @ b, bias),
        [X, W, BIAS],
    ),
    "unfused epilogue": (
        functools.partial(jaxdnn.matmul, epilogue=probabilities),
        lambda a, b, bias: probabilities(a @ b, bias),
        [X, ((12, 16), WHOLE), ((16,), WHOLE)],
    ),
    "gated_linear_unit": (
        jaxdnn.gated_linear_unit,
        lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up),
        [X, W, W],
    ),
    "dot_general": (
        functools.partial(jaxdnn.dot_general, **NUMBERS),
        functools.partial(jax.lax.dot_general, **NUMBERS),
        [((4, 6, 8), DATA), ((4, 10, 8), P("a", "b"))],
    ),
    "dot_product_attention": (
        jaxdnn.dot_product_attention,
        attention,
        [((4, 3, 2, 4), DATA), ((4, 5, 2, 4), DATA), ((4, 5, 2, 4), DATA)],
    ),
    "rms_norm": (jaxdnn.rms_norm, rms_norm, [X, ((12,), WHOLE)]),
    "layer_norm": (jaxdnn.layer_norm, layer_norm, [X, ((12,), WHOLE), ((12,), WHOLE)]),
}


def gradient(function, *arrays):
    y, pull_back = jax.vjp(function, *arrays)
    return y, pull_back(jnp.cos(y))


def forward_over_reverse(function, *arrays):
    return jax.jvp(lambda *arrays: gradient(function, *arrays)[1], arrays, tuple(map(jnp.cos, arrays)))[1]


def scanned(function, *arrays):
    """Layers of several weights, recomputed for the gradient."""

    def loss(x, *weights):
        layers = [jnp.stack([weight, weight / 2]) for weight in weights]

        @jax.checkpoint
        def layer(total, weights):
            return total + jnp.sum(jnp.sin(function(x, *weights))), ()

        return jax.lax.scan(layer, 0.0, layers)[0]

    return jax.grad(loss, tuple(range(len(arrays))))(*arrays)


def mapped(function, x, *rest):
    """Gradients of each element of the first operand, which is stacked."""
    return jax.vmap(functools.partial(gradient, function), (0, *(None for _ in rest)))(x, *rest)


def all_mapped(function, *arrays):
    return jax.vmap(functools.partial(gradient, function))(*arrays)


# The transformation, the kinds of the mesh's axes, whether it is set, and how arrays come to lie on it.
WAYS = {
    "placed, Auto": (gradient, (AUTO, AUTO), False, "placed"),
    "placed, Explicit": (gradient, (EXPLICIT, EXPLICIT), False, "placed"),
    "placed, Auto and Explicit, set": (gradient, (AUTO, EXPLICIT), True, "placed"),
    "in_shardings": (gradient, (EXPLICIT, EXPLICIT), False, "in_shardings"),
    "donated": (gradient, (EXPLICIT, EXPLICIT), False, "donated"),
    "first closed over": (gradient, (EXPLICIT, EXPLICIT), False, 1),
    "all closed over, Auto, set": (gradient, (AUTO, AUTO), True, None),
    "all closed over, Explicit, set": (gradient, (EXPLICIT, EXPLICIT), True, None),
    "forward over reverse": (forward_over_reverse, (EXPLICIT, EXPLICIT), False, "placed"),
    "scan": (scanned, (EXPLICIT, EXPLICIT), False, "placed"),
    "vmap of the first": (mapped, (EXPLICIT, EXPLICIT), False, "mapped"),
    "vmap of all": (all_mapped, (EXPLICIT, EXPLICIT), True, "mapped"),
    "Manual": (gradient, (EXPLICIT, EXPLICIT), True, "manual"),
    "partly manual, Auto": (gradient, (AUTO, AUTO), True, "partly manual"),
    "partly manual, Explicit": (gradient, (EXPLICIT, EXPLICIT), False, "partly manual"),
}


def only(spec, names):
    """A spec of these axes of the mesh."""
    return P(*(axis if axis in names else None for axis in spec))


def in_this_way(cpus, way, function, arrays, specs):
    """The jitted call, and its arguments, with the types that its results had in it."""
    transform, kinds, _, place = WAYS[way]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=cpus)
    types = []

    def call(*arrays):
        results = transform(function, *arrays)
        types.extend(str(jax.typeof(result)) for result in jax.tree.leaves(results))
        return results

    if place == "mapped":
        stacks = [i == 0 or transform is all_mapped for i, _ in enumerate(specs)]
        inner = [only(spec, {"b"}) for spec in specs]
        specs = [P("a", *spec) if stacked else spec for spec, stacked in zip(inner, stacks, strict=True)]
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    placed = tuple(map(jax.device_put, arrays, shardings))
    match place:
        case "in_shardings":
            return mesh, jax.jit(call, in_shardings=shardings), arrays, types
        case "donated":
            return mesh, jax.jit(call, donate_argnums=tuple(range(len(arrays)))), placed, types
        case "manual" | "partly manual":
            names = {"a", "b"} if place == "manual" else {"a"}
            manual = tuple(only(spec, names) for spec in specs)
            y = P(
                *specs[0][:1],
                *(None for _ in arrays[0].shape[2:]),
                only(specs[1], names)[1] if len(specs[1]) > 1 else None,
            )
            call = jax.shard_map(call, mesh=mesh, in_specs=manual, out_specs=(y, manual), axis_names=names)
        case 1:
            return mesh, jax.jit(functools.partial(call, placed[0])), placed[1:], types
        case None:
            return mesh, jax.jit(lambda: call(*placed)), (), types
    return mesh, jax.jit(call), placed, types


@functools.cache
def without_mesh(name, transform):
    """The arrays, and what plain JAX returns for them."""
    _, plain, operands = OPS[name]
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape, _ in operands]
    for i in {mapped: [0], all_mapped: range(len(arrays))}.get(transform, []):
        arrays[i] = np.stack([arrays[i] * factor for factor in (1, -1, 0.5, 2)])
    return arrays, jax.tree.leaves(jax.jit(functools.partial(transform, plain))(*arrays))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("way", WAYS)
@jax.default_matmul_precision("highest")
def test_as_plain_jax(cpus, way, name):
    ours, plain, operands = OPS[name]
    transform, _, is_set, _ = WAYS[way]
    arrays, expected = without_mesh(name, transform)
    specs = [spec for _, spec in operands]
    mesh, call, arguments, types = in_this_way(cpus, way, ours, arrays, specs)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        got = jax.tree.leaves(call(*arguments))
        _, plain_call, plain_arguments, plain_types = in_this_way(cpus, way, plain, arrays, specs)
        plain_call.trace(*plain_arguments)
    assert types == plain_types
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.max(np.abs(other)))
