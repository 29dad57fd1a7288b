"""A `Convolution` problem, run in numpy as its docstring defines it: from the places in memory that it names."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from checking.pointwise.problems import Elements

# Of image, filter and output, without spatial dimensions.
_LETTERS = {"image": "bngc", "filter": "bcgk", "output": "bngk"}


def _tensor(problem: Any, tensor: Any, role: str, flat: np.ndarray) -> np.ndarray:
    """An array with dimensions batch, n unless it is a filter, spatial ones, and the groups and channels it has."""
    sizes = {"b": problem.batch, "n": problem.n, "g": problem.groups, "c": problem.c, "k": problem.k}
    steps = {
        "b": tensor.batch_stride,
        "n": tensor.n_stride,
        "g": tensor.group_stride,
        "c": tensor.c_stride,
        "k": tensor.k_stride,
    }
    first, *rest = _LETTERS[role]
    front = 1 if role == "filter" else 2
    letters = [first, *rest]
    shape = [sizes[letter] for letter in letters]
    strides = [steps[letter] for letter in letters]
    shape[front:front] = [getattr(window, role) for window in problem.windows]
    strides[front:front] = tensor.spatial_strides
    at = np.indices(shape)
    values = flat[sum(coordinate * stride for coordinate, stride in zip(at, strides, strict=True))]
    return values.astype(np.int64 if np.issubdtype(values.dtype, np.integer) else np.float64)


def accumulators(problem: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The array that is computed, as (batch, row, column)."""
    roles = [role for role in _LETTERS if role != problem.result]
    arrays = {
        role: _tensor(problem, tensor, role, flat)
        for role, tensor, flat in zip(roles, (problem.a, problem.b), (a, b), strict=True)
    }
    sizes = {"b": problem.batch, "n": problem.n, "g": problem.groups, "c": problem.c, "k": problem.k}
    shape = [sizes[letter] for letter in _LETTERS[problem.result]]
    front = 1 if problem.result == "filter" else 2
    shape[front:front] = [getattr(window, problem.result) for window in problem.windows]
    arrays[problem.result] = np.zeros(shape, arrays[roles[0]].dtype)
    meetings = [window.meetings for window in problem.windows]
    for tap in itertools.product(*(range(window.filter) for window in problem.windows)):
        outputs = [np.flatnonzero(found[:, place] >= 0) for found, place in zip(meetings, tap, strict=True)]
        images = [found[at, place] for found, at, place in zip(meetings, outputs, tap, strict=True)]
        places = {
            "image": (slice(None), slice(None), *np.ix_(*images)),
            "output": (slice(None), slice(None), *np.ix_(*outputs)),
            "filter": (slice(None), *tap),
        }
        spatial = "xyzw"[: len(tap)]
        letters = {role: own if role == "filter" else f"{own[:2]}{spatial}{own[2:]}" for role, own in _LETTERS.items()}
        terms = ",".join(letters[role] for role in roles)
        seen = [arrays[role][places[role]] for role in roles]
        arrays[problem.result][places[problem.result]] += np.einsum(f"{terms}->{letters[problem.result]}", *seen)
    return arrays[problem.result].reshape(problem.batch, problem.rows, problem.columns)


def run(problem: Any, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a problem's call, flat."""
    elements = Elements((problem.batch, problem.rows, problem.columns), operands)
    a, b = (elements.operands[tensor.buffer.index] for tensor in (problem.a, problem.b))
    values = elements.program(problem.program, problem.operands, [accumulators(problem, a, b)])
    found = []
    for result, value in zip(problem.results, values, strict=True):
        reduction = {"sum": np.sum, "max": np.max, "min": np.min}.get(getattr(result, "reduction", ""))
        found.append(np.ravel(value if reduction is None else reduction(value, result.axes)))
    return found
