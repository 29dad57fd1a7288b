"""Random norms: shape, axes, dtypes, operands and values."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from checking.cases import BF16, F16, F32, F64, NormCase
from checking.fuzz.analytic import evaluate as evaluate

DTYPES = (F32, BF16, F16, F64)


def draw(random: np.random.Generator) -> NormCase:
    """A random case."""

    def chance(probability: float) -> bool:
        return bool(random.random() < probability)

    def one(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    kind = one(("layer_norm", "rms_norm"))
    shape, axis = _shape(random)
    x = random.choice(DTYPES, p=(0.4, 0.35, 0.15, 0.1)).item()

    def dtype(present: float) -> str | None:
        if not chance(present):
            return None
        return x if chance(0.5) else one(DTYPES)

    case = NormCase(
        kind,
        shape,
        axis=axis,
        x=x,
        residual=dtype(0.35),
        scale=dtype(0.75),
        bias=dtype(0.6) if kind == "layer_norm" else None,
        epsilon=one((1e-6, 1e-6, 1e-5, 1e-3, 0.5)),
        statistics=chance(0.3),
        seed=int(random.integers(2**31)),
    )
    if case.scale and chance(0.25):
        case = case.replace(scale_offset=one((1.0, 0.5, -0.25)))
    if chance(0.2):
        case = case.replace(data="large_mean")
    elif chance(0.2) and F16 not in case.dtypes.values() and case.columns >= 16:
        case = case.replace(data=one(("huge", "tiny")), epsilon=one((0.0, 1e-6)))
    return case


def _shape(random: np.random.Generator) -> tuple[tuple[int, ...], int | tuple[int, ...]]:
    power = 2 ** int(random.integers(13))
    columns = int(
        random.choice(
            [random.integers(1, 9), random.integers(1, 200), power, power + 1, power - 1, random.integers(6000)]
        )
    )
    rows = int(random.choice([1, random.integers(1, 8), random.integers(1, 300), random.integers(1, 3000)]))
    columns = max(columns, 1)
    rows = max(1, min(rows, 200_000 // columns))
    kind = random.random()
    if kind < 0.6:
        return (rows, columns), -1
    if kind < 0.7:
        return (columns,), 0
    if kind < 0.8:
        return (columns, rows), 0
    sizes = tuple(int(size) for size in random.integers(1, 9, random.integers(3, 5)))
    count = int(random.integers(1, len(sizes)))
    axes = random.choice(len(sizes), count, replace=False)
    return sizes, tuple(int(axis) - (len(sizes) if random.random() < 0.5 else 0) for axis in axes)
