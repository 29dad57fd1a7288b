"""JAX's policies of `jax.checkpoint` do to products of ours what they do to `dot_general`."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.extend.core import ClosedJaxpr, Jaxpr

import jaxdnn
from jaxdnn.primitives.matmul.dimensions import Dimensions
from jaxdnn.primitives.matmul.spec import MatmulSpec

policies = jax.checkpoint_policies
POLICIES = {
    "nothing": None,
    "everything": policies.everything_saveable,
    "dots": policies.dots_saveable,
    "dots without batch": policies.dots_with_no_batch_dims_saveable,
    "dots or names": policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("hidden")),
    "names": policies.save_only_these_names("hidden"),
    "other names": policies.save_only_these_names("nothing of that name"),
    "offloaded": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}

BATCHED = (((2,), (1,)), ((0,), (0,)))


def random(seed, *shape):
    return (0.5 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def fused(x, w, bias):
    return jaxdnn.matmul(x, w, bias, epilogue=lambda y, bias: jax.nn.silu(y + bias))


def measured(y):
    """A result that is the accumulator, and what is made of it."""
    return y, jnp.sum(y * y, axis=1)


OURS = SimpleNamespace(
    matmul=jaxdnn.matmul,
    dot_general=jaxdnn.dot_general,
    fused=fused,
    gated=jaxdnn.gated_linear_unit,
    measured=lambda x, w: jaxdnn.matmul(x, w, epilogue=measured),
)
PLAIN = SimpleNamespace(
    matmul=jnp.matmul,
    dot_general=jax.lax.dot_general,
    fused=lambda x, w, bias: jax.nn.silu(x @ w + bias),
    gated=lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up),
    measured=lambda x, w: measured(x @ w),
)


def dense(op, x, weights):
    hidden = checkpoint_name(op.fused(x, weights["up"], weights["bias"]), "hidden")
    return x + op.matmul(hidden, weights["down"])


def gated(op, x, weights):
    return x + op.matmul(checkpoint_name(op.gated(x, weights["up"], weights["gate"]), "hidden"), weights["down"])


def heads(op, x, weights):
    split = x.reshape(len(x), 2, -1).swapaxes(0, 1)
    mixed = checkpoint_name(op.dot_general(split, weights["mix"], BATCHED), "hidden")
    return jnp.tanh(mixed).swapaxes(0, 1).reshape(x.shape)


def mapped(op, x, weights):
    """Of rows and weights that are both mapped: a batch."""
    rows, bias = x.reshape(2, -1, 4), np.ones(4, np.float32)
    return jax.vmap(lambda x, w: op.fused(x, w, bias))(rows, weights["mix"]).reshape(x.shape)


def normed(op, x, weights):
    hidden, squares = op.measured(x, weights["up"])
    hidden = checkpoint_name(hidden / jnp.sqrt(1 + squares)[:, None], "hidden")
    return x + op.matmul(hidden, weights["down"])


BLOCKS = {"dense": dense, "gated": gated, "heads": heads, "mapped": mapped, "normed": normed}
X = random(0, 6, 8)
LAYERS = [
    {
        "up": random(i, 8, 12),
        "gate": random(i + 1, 8, 12),
        "down": random(i + 2, 12, 8),
        "bias": random(i + 3, 12),
        "mix": random(i + 4, 2, 4, 4),
    }
    for i in (10, 20, 30)
]


def unrolled(block):
    def loss(x, layers):
        for weights in layers:
            x = block(x, weights)
        return jnp.sum(jnp.sin(x))

    return loss


def scanned(block):
    def loss(x, layers):
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
        return jnp.sum(jnp.sin(jax.lax.scan(lambda x, weights: (block(x, weights), None), x, stacked)[0]))

    return loss


def products(jaxpr):
    """How many products run."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "jaxdnn_matmul":
            count += len(equation.params["spec"].rhs)
        count += equation.primitive is jax.lax.dot_general_p
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, (Jaxpr, ClosedJaxpr)):
                    count += times * products(part)
    return count


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layers", [unrolled, scanned])
@pytest.mark.parametrize("block", BLOCKS)
def test_as_many_products_run_as_of_jax(block, layers, policy):
    def step(op):
        saving = jax.checkpoint(lambda x, weights: BLOCKS[block](op, x, weights), policy=POLICIES[policy])
        return jax.value_and_grad(layers(saving), (0, 1))

    found, expected = (jax.make_jaxpr(step(op))(X, LAYERS) for op in (OURS, PLAIN))
    assert products(found) == products(expected)


def saved(op, block, policy, capsys):
    """What is kept for the backward pass besides arguments: types, and what they are the output of."""
    function = jax.checkpoint(lambda x, weights: BLOCKS[block](op, x, weights), policy=POLICIES[policy])
    print_saved_residuals(function, X, LAYERS[0])
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if "argument" not in line and "constant" not in line]


@pytest.mark.parametrize("batch", [(), ((True, True),), ((True, False), (True, True), (False, True))])
@pytest.mark.parametrize("dimensions", [Dimensions(), Dimensions("kbm", "nbk", ((True, True), (True, False)), 2)])
def test_policies_are_told_the_dimensions(dimensions, batch):
    spec = MatmulSpec(dimensions=dimensions, batch=batch)
    labels = [dimensions.labels(which) for which in ("a", "b")]
    shapes = [(*(2 for flags in batch if flags[side]), *(3 for _ in own)) for side, own in enumerate(labels)]
    (found,) = jax.make_jaxpr(spec.evaluate)(*(jnp.zeros(shape, jnp.float32) for shape in shapes)).eqns[:1]
    assert found.params["dimension_numbers"] == spec.seen[1]["dimension_numbers"]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "everything"])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_same_arrays_are_kept_as_of_jax(block, policy, capsys):
    found, expected = (saved(op, block, policy, capsys) for op in (OURS, PLAIN))
    assert sorted(line.split()[0] for line in found) == sorted(line.split()[0] for line in expected)


def test_residuals_say_where_they_come_from(capsys):
    (line,) = saved(OURS, "dense", "dots", capsys)
    assert line.startswith("f32[6,12] output of jaxdnn_matmul from ")
    assert "test_checkpoint_policies.py" in line


@pytest.mark.parametrize("policy", ["dots", "dots without batch", "names", "dots or names"])
@pytest.mark.parametrize("block", BLOCKS)
def test_gradients(block, policy):
    def step(op, policy):
        saving = jax.checkpoint(lambda x, weights: BLOCKS[block](op, x, weights), policy=policy)
        return jax.jit(jax.value_and_grad(scanned(saving), (0, 1)))(X, LAYERS)

    with jax.default_matmul_precision("highest"):
        found, expected = step(OURS, POLICIES[policy]), step(PLAIN, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)
