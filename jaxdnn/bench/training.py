"""The training family's cases: steps of whole models, whose memory counts as well as their time."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod, sqrt
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn.bench.models import HEAD_SIZE, Kind, Model, Ops, fused, loss, plain
from jaxdnn.bench.timing import Case, Implementation
from jaxdnn.bench.untuned import Class, Sizes

_SHAPES: dict[str, dict[Kind, tuple[int, int, int, int]]] = {
    "gpu": {"GPT": (8, 1024, 6, 1024), "Llama": (4, 2048, 4, 2048)},
    "cpu": {"GPT": (1, 128, 2, 256), "Llama": (1, 128, 2, 256)},
}
_VOCABULARIES: dict[Kind, int] = {"GPT": 50_257, "Llama": 32_000}  # GPT-2's, and that of Llama 2
_RATE = 1e-2


def cases(shapes: Sequence[tuple[int, int, int, int]] = (), dtypes: Sequence[str] = ()) -> Iterator[Case]:
    """A step of each kind of model, for each dtype and shape (batch, length, layers, width) that is of whole heads."""
    backend = jax.default_backend()
    chosen = list(product(get_args(Kind), shapes)) or list(_SHAPES[backend].items())
    for dtype, (kind, shape) in product(dtypes or ("bfloat16" if backend == "gpu" else "float32",), chosen):
        batch, length, layers, width = shape
        if width % HEAD_SIZE[kind] == 0:
            yield case(Model(kind, length, layers, width, _VOCABULARIES[kind]), batch, dtype)


def _of_kind(kind: Kind) -> Class:
    def one(sizes: Sizes) -> Case:
        width, length = 64 * sizes.one(4, 8, 12, 16, 32), 8 * sizes.size(2, 256)
        model = Model(kind, length, sizes.one(1, 2, 3), max(128, width), sizes.size(256, 65_536))
        return case(model, sizes.size(1, 16), "bfloat16")

    return one


CLASSES: tuple[Class, ...] = tuple(map(_of_kind, get_args(Kind)))


def case(model: Model, batch: int, dtype: str) -> Case:
    """A step of one batch: the loss, its gradients, and the parameters that follow them."""
    shapes = [shape for part in ("layers", "tokens") for shape in _leaves(model.shapes()[part])]
    weights = sum(prod(shape) for shape in shapes if len(shape) == 2)
    tokens, pairs = batch * model.length, batch * model.length * (model.length + 1) // 2
    return Case(
        call=f"{model.kind}'s training step",
        shape=f"{batch} x {model.length} x {model.layers} x {model.width}",
        dtype=dtype,
        # Parameters are read forward, backward and to be changed, and written.
        bytes=4 * weights * jnp.dtype(dtype).itemsize,
        # A product forward and two backward for each parameter, two and five for attention.
        flops=6 * tokens * weights + 14 * model.layers * pairs * model.width,
        operands=partial(_operands, model, batch, dtype),
        jaxdnn=Implementation(lambda *operands: operands, partial(_step, model, fused(model.kind))),
        xla=Implementation(lambda *operands: operands, partial(_step, model, plain(model.kind))),
        sample=partial(_sample, model),
        alone=True,
    )


def _leaves(shapes: Any) -> list[tuple[int, ...]]:
    return jax.tree.leaves(shapes, is_leaf=lambda node: isinstance(node, tuple))


def _operands(model: Model, batch: int, dtype: str, key: jax.Array) -> list[Any]:
    """Parameters, as networks initialise them, and tokens."""
    shapes = model.shapes()
    keys = iter(jax.random.split(key, 1 + len(_leaves(shapes))))

    def array(path: Any, shape: tuple[int, ...]) -> jax.Array:
        values = jax.random.normal(next(keys), shape) / sqrt(model.width)
        # Of norms' parameters, the first is near one, and both are in float32.
        is_norm, first = any("norm" in str(step) for step in path), path[-1].idx == 0
        return values + first if is_norm else values.astype(dtype)

    parameters = jax.tree.map_with_path(array, shapes, is_leaf=lambda node: isinstance(node, tuple))
    return [parameters, jax.random.randint(next(keys), (batch, model.length + 1), 0, model.vocabulary)]


def _step(model: Model, ops: Ops, parameters: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    value, gradients = jax.value_and_grad(partial(loss, model, ops))(parameters, tokens)
    return value, jax.tree.map(lambda p, gradient: p - (_RATE * gradient).astype(p.dtype), parameters, gradients)


def _sample(model: Model, operands: Sequence[Any], results: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The loss, and what it is in float64."""
    parameters, tokens = operands
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: p.astype("float64"), parameters)
        exact = jax.jit(partial(loss, model, plain(model.kind)))(wide, tokens)
    return [(np.asarray(results[0], np.float64), np.asarray(exact))]
