"""Rows, columns and groups of a norm call: what every engine of the op reads off a spec and a signature."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdnn.engines.base import sizes_reason
from jaxdnn.spec import Signature

DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Geometry:
    """A norm call as `groups` independent problems of `rows` rows of `columns` contiguous elements.

    Attributes:
      groups: the product of the mapped sizes (`Spec.batch`); parameters and their gradients belong to one group.
      rows: rows of one group.
      columns: elements of a row, which share one mean and one reciprocal standard deviation.
      group_stride: for each operand and result, by name, the elements between the same place in two neighbouring
        groups; 0 for an operand that all groups share.
      compute_dtype: "float64" if any array is float64, else "float32": the arithmetic's type and the statistics'.
    """

    groups: int
    rows: int
    columns: int
    group_stride: Mapping[str, int]
    compute_dtype: str

    @property
    def elements(self) -> int:
        """Elements of an array that has every group, row and column."""
        return self.groups * self.rows * self.columns


def geometry(spec: Any, signature: Signature) -> Geometry | str:
    """The geometry of a call, or the reason why it has none that a kernel could serve."""
    if reason := sizes_reason(signature):
        return reason
    arrays = {**signature.operands, **signature.results}
    for name, array in arrays.items():
        if np.dtype(array.dtype).name not in DTYPES:
            return f"{name} has dtype {np.dtype(array.dtype).name}, and the kernels take {', '.join(DTYPES)}"

    patterns = {name: tuple(entry[i] for entry in spec.batch) for i, name in enumerate(signature.operands)}
    mixed = [name for name, pattern in patterns.items() if any(pattern) and not all(pattern)]
    if mixed:
        return f"{mixed[0]} carries some of the mapped axes and not others"
    mapped = len(spec.batch)
    groups = math.prod(next(iter(signature.results.values())).shape[:mapped])

    group_stride = {name: math.prod(array.shape[mapped:]) for name, array in signature.results.items()}
    for name, array in signature.operands.items():
        group_stride[name] = math.prod(array.shape[mapped:]) if mapped and all(patterns[name]) else 0

    x = signature.operands["x"]
    shape = x.shape[mapped:] if mapped and all(patterns["x"]) else x.shape
    split = len(shape) - spec.ndim
    return Geometry(
        groups=groups,
        rows=math.prod(shape[:split]),
        columns=math.prod(shape[split:]),
        group_stride=group_stride,
        compute_dtype="float64" if any(np.dtype(a.dtype) == np.float64 for a in arrays.values()) else "float32",
    )
