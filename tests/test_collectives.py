"""Bytes that a step of training sends between devices: no more than XLA's partitioning of the plain program sends."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.sharding import COLLECTIVES

BATCH, LENGTH, MODEL, HIDDEN = 8, 16, 32, 96
SHAPES = {
    **dict.fromkeys(("query", "key", "value", "out"), (MODEL, MODEL)),
    **dict.fromkeys(("gate", "up"), (MODEL, HIDDEN)),
    "down": (HIDDEN, MODEL),
    **dict.fromkeys(("attention_norm", "norm"), (MODEL,)),
}
ROWS = dict.fromkeys(("out", "down"), P("i"))
COLUMNS = dict.fromkeys(("query", "key", "value", "gate", "up"), P(None, "i"))

# How the weights lie, where they are not whole, and the batch.
LAYOUTS = {
    "data": ({}, P("i")),
    "tensor": ({**ROWS, **COLUMNS}, P()),
    "fully sharded": (dict.fromkeys(SHAPES, P("i")), P("i")),
    "fully sharded by columns": ({**dict.fromkeys(SHAPES, P(None, "i")), "norm": P(), "attention_norm": P()}, P("i")),
}


def step(matmul, gated_linear_unit, rms_norm):
    """Loss and gradient of two blocks, as Llama has them."""

    def block(x, weights):
        normalized = rms_norm(x, weights["attention_norm"])
        query, key, value = (matmul(normalized, weights[name]) for name in ("query", "key", "value"))
        mixed = jax.nn.softmax(query @ jnp.swapaxes(key, 1, 2), axis=-1) @ value
        x = x + matmul(mixed, weights["out"])
        hidden = gated_linear_unit(rms_norm(x, weights["norm"]), weights["gate"], weights["up"])
        return x + matmul(hidden, weights["down"])

    def loss(layers, x):
        for weights in layers:
            x = block(x, weights)
        return jnp.sum(jnp.sin(x))

    return jax.value_and_grad(loss)


def plain_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def sent(function, layers, x, out_shardings):
    """Bytes of the largest array of each collective: what a device ends up with of a gather, and has before a sum."""
    text = jax.jit(function, out_shardings=out_shardings).lower(layers, x).compile().as_text()
    found = re.findall(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    assert found, "devices that share a step have something to say to one another"

    def size(types):
        dimensions = re.findall(r"f32\[([\d,]*)\]", types)
        return sum(4 * math.prod(map(int, filter(None, sizes.split(",")))) for sizes in dimensions)

    devices = x.sharding.mesh.size
    return sum(size(types) * (devices if name == "reduce-scatter" else 1) for types, name in found)


@pytest.mark.parametrize("told", [True, False], ids=["gradients lie as weights", "gradients lie anywhere"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("devices", [2, 4])
def test_no_more_bytes_than_plain_jax(cpus, devices, name, told):
    mesh = jax.make_mesh((devices,), ("i",), axis_types=(AxisType.Auto,), devices=cpus[:devices])
    of_weights, of_batch = LAYOUTS[name]

    def placed(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    layers = [{key: placed(shape, of_weights.get(key, P())) for key, shape in SHAPES.items()}] * 2
    x = placed((BATCH, LENGTH, MODEL), of_batch)
    out_shardings = (NamedSharding(mesh, P()), jax.tree.map(lambda weight: weight.sharding, layers)) if told else None
    plain = step(jnp.matmul, lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up), plain_norm)
    ours = step(jaxdnn.matmul, jaxdnn.gated_linear_unit, jaxdnn.rms_norm)
    assert sent(ours, layers, x, out_shardings) <= 1.02 * sent(plain, layers, x, out_shardings)
