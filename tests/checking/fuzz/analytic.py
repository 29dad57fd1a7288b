"""Norms and their first derivatives with the formulas written out, in numpy, each with a bound on its rounding error.

The fuzzer checks thousands of calls against these, since they compile nothing. `test_fuzz` shows that they are what JAX
derives from the definition in reference.py.

Every quantity is a pair (value, error). Errors are propagated to first order; u is the unit roundoff of the arithmetic,
and a sum of n terms errs by u * sqrt(n) times the sum of their sizes (see tolerance.py).
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

# How many times its bound an error may be: steps that are taken in another way or order add a few roundings.
MARGIN = 4.0

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class _Rows:
    """What the forward pass and both derivatives share. Statistics keep the normalized axes, with size one."""

    total: np.ndarray
    weight: np.ndarray
    mean: Pair
    rstd: Pair
    relative: np.ndarray  # error of rstd over rstd
    normalized: Pair


def evaluate(case: Any, check: str, primals: Any, directions: Any = ()) -> list[Pair]:
    """The results of a "forward", "jvp" or "vjp" check, flat, with the error that each element may have."""
    with np.errstate(all="ignore"):
        named = {name: _wide(array) for name, array in zip(case.operands, primals, strict=True)}
        directions = [_wide(array) for array in directions]
        rows = _rows(case, named)
        outputs = _outputs(case, rows, named)
        match check:
            case "forward":
                pairs = outputs
            case "jvp":
                pairs = outputs + _tangents(case, rows, dict(zip(case.operands, directions, strict=True)))
            case "vjp":
                pairs = outputs + _gradients(case, rows, dict(zip(case.outputs, directions, strict=True)))
        return [(value, MARGIN * error) for value, error in pairs]


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _unit(dtype: str) -> float:
    return float(jnp.finfo(dtype).eps) / 2


def _of_rows(case: Any, value: np.ndarray) -> np.ndarray:
    return np.mean(value, case.axes, keepdims=True)


def _of_columns(case: Any, value: np.ndarray) -> np.ndarray:
    """The sum over rows."""
    kept = tuple(axis for axis in range(len(case.shape)) if axis not in case.axes)
    return np.sum(np.broadcast_to(value, case.shape), kept)


def _per_column(case: Any, parameter: np.ndarray) -> np.ndarray:
    return parameter.reshape([size if axis in case.axes else 1 for axis, size in enumerate(case.shape)])


def _rows(case: Any, named: dict[str, np.ndarray]) -> _Rows:
    u, growth = case.unit, case.unit * np.sqrt(case.columns)
    total = named["x"]
    if case.residual:
        total = _wide((total + named["residual"]).astype(jnp.dtype(case.sum_dtype)))
    mean = d_mean = np.zeros_like(_of_rows(case, total))
    d_element = np.zeros_like(total)
    if case.kind == "layer_norm":
        mean = _of_rows(case, total)
        d_mean = growth * _of_rows(case, np.abs(total))
        d_element = growth * np.abs(total)
    centered = total - mean
    d_centered = d_mean + d_element + u * np.abs(centered)
    variance = _of_rows(case, centered**2)
    d_variance = (3 * u + growth) * variance + d_mean**2 + 2 * u * np.sqrt(_of_rows(case, (centered * total) ** 2))
    rstd = 1 / np.sqrt(variance + case.epsilon)
    relative = d_variance / (variance + case.epsilon) / 2 + 2 * u
    normalized = centered * rstd
    d_normalized = np.abs(normalized) * (relative + u) + rstd * d_centered
    weight = np.ones(()) if not case.scale else _per_column(case, named["scale"]) + case.scale_offset
    return _Rows(total, weight, (mean, d_mean), (rstd, relative * rstd), relative, (normalized, d_normalized))


def _outputs(case: Any, rows: _Rows, named: dict[str, np.ndarray]) -> list[Pair]:
    normalized, d_normalized = rows.normalized
    scaled = normalized * rows.weight
    d_y = np.abs(rows.weight) * d_normalized + 3 * case.unit * np.abs(scaled)
    y = scaled if not case.bias else scaled + _per_column(case, named["bias"])
    pairs = [(y, d_y + case.unit * np.abs(y))]
    if case.residual:
        pairs.append((rows.total, np.zeros_like(rows.total)))
    return pairs + _statistics(case, rows.mean, rows.rstd)


def _statistics(case: Any, mean: Pair, rstd: Pair) -> list[Pair]:
    if not case.statistics:
        return []
    kept = [mean, rstd] if case.kind == "layer_norm" else [rstd]
    return [(value.reshape(case.shape_of("rstd")), error.reshape(case.shape_of("rstd"))) for value, error in kept]


def _projected(case: Any, rows: _Rows, vector: Pair, first: Pair, second: Pair) -> Pair:
    """rstd * (v - m1 - xhat * m2), which is what both derivatives come to."""
    (v, d_v), (m1, d_m1), (m2, d_m2) = vector, first, second
    normalized, d_normalized = rows.normalized
    rstd, u = rows.rstd[0], case.unit
    value = rstd * (v - m1 - normalized * m2)
    rounding = u * (np.abs(v) + np.abs(m1) + 2 * np.abs(normalized * m2))
    inner = d_v + d_m1 + np.abs(normalized) * d_m2 + np.abs(m2) * d_normalized + rounding
    return value, rstd * inner + (rows.relative + u) * np.abs(value)


def _moments(case: Any, rows: _Rows, vector: Pair) -> tuple[Pair, Pair]:
    """The means of v (of layer_norm) and of v * xhat over a row."""
    (v, d_v), (normalized, d_normalized) = vector, rows.normalized
    growth = case.unit * np.sqrt(case.columns)
    first = np.zeros_like(rows.rstd[0]), np.zeros_like(rows.rstd[0])
    if case.kind == "layer_norm":
        first = _of_rows(case, v), growth * _of_rows(case, np.abs(v)) + _of_rows(case, d_v)
    size = np.abs(v * normalized)
    error = (growth + case.unit) * _of_rows(case, size)
    error = error + _of_rows(case, np.abs(v) * d_normalized + np.abs(normalized) * d_v)
    return first, (_of_rows(case, v * normalized), error)


def _tangents(case: Any, rows: _Rows, d: dict[str, np.ndarray]) -> list[Pair]:
    u = case.unit
    moving = d["x"] if not case.residual else d["x"] + d["residual"]
    vector = moving, 2 * (_unit(case.sum_dtype) if case.residual else 0) * np.abs(moving)
    first, second = _moments(case, rows, vector)
    value, error = _projected(case, rows, vector, first, second)
    y, d_y = value * rows.weight, np.abs(rows.weight) * error + 2 * u * np.abs(value * rows.weight)
    if case.scale:
        moved = _per_column(case, d["scale"])
        normalized, d_normalized = rows.normalized
        y = y + normalized * moved
        d_y = d_y + np.abs(moved) * d_normalized + 2 * u * np.abs(normalized * moved)
    if case.bias:
        y = y + _per_column(case, d["bias"])
    pairs = [(y, d_y + 2 * u * np.abs(y))]
    if case.residual:
        pairs.append((moving, vector[1] / 2))
    rstd = rows.rstd[0]
    of_rstd = -(rstd**2) * second[0], rstd**2 * (second[1] + (2 * rows.relative + 3 * u) * np.abs(second[0]))
    return pairs + _statistics(case, first, of_rstd)


def _gradients(case: Any, rows: _Rows, d: dict[str, np.ndarray]) -> list[Pair]:
    u, n, rstd = case.unit, case.columns, rows.rstd[0]
    g = d["y"] * rows.weight
    vector = g, 2 * u * np.abs(g)
    (m1, d_m1), (m2, d_m2) = _moments(case, rows, vector)
    kept = tuple(1 if axis in case.axes else size for axis, size in enumerate(case.shape))
    if "mean" in d:
        part = d["mean"].reshape(kept) / (n * rstd)
        m1, d_m1 = m1 - part, d_m1 + (rows.relative + 3 * u) * np.abs(part)
    if "rstd" in d:
        part = d["rstd"].reshape(kept) * rstd / n
        m2, d_m2 = m2 + part, d_m2 + (rows.relative + 3 * u) * np.abs(part)
    value, error = _projected(case, rows, vector, (m1, d_m1), (m2, d_m2))
    if case.residual:
        # XLA rounds the norm's own gradient to the sum's dtype before it adds the sum's cotangent.
        stored = _unit(case.sum_dtype)
        error = error + stored * np.abs(value)
        value = value + d["sum"]
        error = error + stored * np.abs(value)
    growth = u * (1 + np.sqrt(case.rows))
    normalized, d_normalized = rows.normalized
    scale = (
        _of_columns(case, d["y"] * normalized),
        _of_columns(case, np.abs(d["y"]) * (d_normalized + growth * np.abs(normalized))),
    )
    bias = _of_columns(case, d["y"]), growth * _of_columns(case, np.abs(d["y"]))
    found = {"x": (value, error), "residual": (value, error), "scale": scale, "bias": bias}
    return [found[name] for name in case.operands]
