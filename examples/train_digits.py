"""Trains a small transformer on real handwritten digits, once with jaxdnn's ops and once with plain JAX.

A convolution, `conv_general_dilated`, turns the patches of 2 x 2 pixels of an 8 x 8 image into features, and its kernel
adds what tells where they lie. Each block attends across the patches, `dot_product_attention`, and then mixes the
features. Both halves of a block add their result to a residual stream which the next half
normalizes, so that one call of a norm does both: `y, stream = rms_norm(update, scale, residual=stream)`. The hidden
layer is a matmul whose kernel adds the bias and applies the activation: `matmul(y, weight, bias, epilogue=...)`.

The two trainings start from the same weights and see the same batches, a step of one after a step of the other, so that
their losses and their step times compare. What ran on which engine, the accuracy on held-out digits and the step times
are printed; the loss curves are drawn into examples/train_digits.png.

    python examples/train_digits.py --steps 400
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxdnn

PATCH, GRID, CLASSES, HEADS = 2, 4, 10, 4  # pixels of a patch and patches of an image, along each side


class Layers(NamedTuple):
    """Where the network takes its layers from."""

    name: str
    stem: Callable
    layer_norm: Callable
    rms_norm: Callable
    attention: Callable
    hidden: Callable


_CONVOLUTION = {
    "window_strides": (PATCH, PATCH),
    "padding": "VALID",
    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
}


def stem(images, weight, position):
    """One kernel: each patch's product, and what is added to it."""
    return jaxdnn.conv_general_dilated(images, weight, **_CONVOLUTION, operands=[position], epilogue=jnp.add)


def plain_stem(images, weight, position):
    """What one writes without jaxdnn."""
    return jax.lax.conv_general_dilated(images, weight, **_CONVOLUTION) + position


def hidden(y, weight, bias):
    """One kernel: the activation is applied to the sums before they are stored."""
    return jaxdnn.matmul(y, weight, bias, epilogue=lambda acc, bias: jax.nn.gelu(acc + bias))


def plain_hidden(y, weight, bias):
    """What one writes without jaxdnn."""
    return jax.nn.gelu(y @ weight + bias)


def plain_layer_norm(x, scale, bias, *, residual, epsilon=1e-6):
    """What one writes without jaxdnn."""
    x = x + residual
    centred = x - x.mean(-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return centred * rstd * scale + bias, x


def plain_rms_norm(x, scale, *, residual=None, epsilon=1e-6):
    """What one writes without jaxdnn."""
    x = x if residual is None else x + residual
    y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon) * scale
    return y if residual is None else (y, x)


JAXDNN = Layers("jaxdnn", stem, jaxdnn.layer_norm, jaxdnn.rms_norm, jaxdnn.dot_product_attention, hidden)
PLAIN = Layers("plain JAX", plain_stem, plain_layer_norm, plain_rms_norm, jax.nn.dot_product_attention, plain_hidden)


def initial_parameters(key: jax.Array, features: int, blocks: int) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 4 + 4 * blocks))

    def dense(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    def block():
        return {
            "attention_scale": jnp.ones(features),
            "attention_in": dense(features, 3 * features),
            "attention_out": dense(features, features),
            "feature_scale": jnp.ones(features),
            "feature_in": dense(features, 2 * features),
            "feature_bias": jnp.zeros(2 * features),
            "feature_out": dense(2 * features, features),
        }

    return {
        "stem": dense(PATCH**2, features).reshape(PATCH, PATCH, 1, features),
        "position": jax.random.normal(next(keys), (GRID, GRID, features)),
        "blocks": [block() for _ in range(blocks)],
        "scale": jnp.ones(features),
        "bias": jnp.zeros(features),
        "head": dense(features, CLASSES),
    }


def logits(layers: Layers, parameters: dict[str, Any], images: jax.Array) -> jax.Array:
    """(batch, 8, 8, 1) images -> (batch, 10) logits."""
    patches = layers.stem(images, parameters["stem"], parameters["position"])
    stream = patches.reshape(len(images), GRID**2, -1)
    update = None
    for block in parameters["blocks"]:
        if update is None:
            y = layers.rms_norm(stream, block["attention_scale"])
        else:
            y, stream = layers.rms_norm(update, block["attention_scale"], residual=stream)
        heads = (y @ block["attention_in"]).reshape(*y.shape[:-1], 3 * HEADS, -1)
        update = layers.attention(*jnp.split(heads, 3, -2)).reshape(y.shape) @ block["attention_out"]

        y, stream = layers.rms_norm(update, block["feature_scale"], residual=stream)
        update = layers.hidden(y, block["feature_in"], block["feature_bias"]) @ block["feature_out"]

    y, _ = layers.layer_norm(update, parameters["scale"], parameters["bias"], residual=stream)
    return y.mean(-2) @ parameters["head"]


def loss(layers: Layers, parameters: dict[str, Any], images: jax.Array, labels: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(logits(layers, parameters, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], -1).mean()


class Adam(NamedTuple):
    """Parameters and the running moments of their gradients."""

    parameters: Any
    first: Any
    second: Any


@partial(jax.jit, static_argnums=0)
def step(layers: Layers, state: Adam, number, rate, images, labels) -> tuple[Adam, jax.Array]:
    """One step of Adam (Kingma and Ba, 2015); `number` counts from 1."""
    value, gradient = jax.value_and_grad(partial(loss, layers))(state.parameters, images, labels)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, gradient)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state.second, gradient)

    def updated(parameter, m, v):
        return parameter - rate * (m / (1 - 0.9**number)) / (jnp.sqrt(v / (1 - 0.99**number)) + 1e-8)

    return Adam(jax.tree.map(updated, state.parameters, first, second), first, second), value


def load_images() -> list[np.ndarray]:
    """Images and labels to train on, then those held out."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return [train_x, train_y, test_x, test_y]


def batches(count: int, size: int, steps: int) -> Iterator[np.ndarray]:
    """Indices of one batch a step, without repetition within an epoch."""
    random = np.random.default_rng(0)
    order = np.empty(0, int)
    for _ in range(steps):
        if len(order) < size:
            order = random.permutation(count)
        yield order[:size]
        order = order[size:]


def draw(path: Path, losses: dict[str, list[float]]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    for (name, values), style in zip(losses.items(), ("-", ":"), strict=True):
        axes.semilogy(values, style, label=name)
    axes.set(xlabel="step", ylabel="training loss (cross-entropy)", title="Handwritten digits: the same network twice")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> float:
    """Trains, prints and draws; returns the held-out accuracy."""
    parser = argparse.ArgumentParser(description="Trains a small transformer on handwritten digits.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--features", type=int, default=64, help=f"a multiple of {HEADS}, the number of heads")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate; it falls to zero along a cosine")
    parser.add_argument("--picture", type=Path, default=Path(__file__).with_suffix(".png"))
    options = parser.parse_args(arguments)

    console = Console()
    train_x, train_y, test_x, test_y = load_images()
    parameters = initial_parameters(jax.random.key(0), options.features, options.blocks)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    states = {layers: Adam(parameters, zeros, zeros) for layers in (JAXDNN, PLAIN)}
    losses: dict[str, list[float]] = {layers.name: [] for layers in states}
    seconds: dict[str, list[float]] = {layers.name: [] for layers in states}

    indices = batches(len(train_x), options.batch, options.steps)
    for number, batch in enumerate(track(indices, "training", total=options.steps, console=console), 1):
        rate = options.rate * 0.5 * (1 + np.cos(np.pi * number / options.steps))
        for layers, state in states.items():
            start = time.perf_counter()
            states[layers], value = step(layers, state, float(number), rate, train_x[batch], train_y[batch])
            losses[layers.name].append(float(value))
            seconds[layers.name].append(time.perf_counter() - start)

    # Rounding differs in the last bits and training amplifies it, so only the first steps can agree closely.
    np.testing.assert_allclose(losses[JAXDNN.name][:10], losses[PLAIN.name][:10], rtol=1e-3)

    trained = states[JAXDNN].parameters
    explanation = jaxdnn.explain(partial(loss, JAXDNN), trained, train_x[batch], train_y[batch])
    console.print(replace(explanation, sections=explanation.sections[1:]))  # without the forward pass alone

    table = Table("network", "held-out accuracy", "last training loss", "first step", "median step")
    accuracies = []
    for layers, state in states.items():
        predictions = jax.jit(partial(logits, layers))(state.parameters, test_x).argmax(-1)
        accuracies.append(float((predictions == test_y).mean()))
        times = seconds[layers.name]
        table.add_row(
            layers.name,
            f"{accuracies[-1]:.2%} of {len(test_y)}",
            f"{losses[layers.name][-1]:.2e}",
            f"{times[0]:.2f} s",
            f"{1e3 * np.median(times):.2f} ms",
        )
    console.print(table)

    draw(options.picture, losses)
    console.print(f"The loss curves are in {options.picture}")
    return accuracies[0]


if __name__ == "__main__":
    main()
