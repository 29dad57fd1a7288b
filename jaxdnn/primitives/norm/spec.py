"""What a normalization over the trailing axes of an array is: `NormSpec`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxdnn.engines.norm.problem import Rows, row_arrays
from jaxdnn.primitives._define import Op
from jaxdnn.spec import Arrays, DirectedSpec, Signature

DTYPES = ("bfloat16", "float16", "float32", "float64")
_PARAMETERS = frozenset({"scale", "bias", "d_scale", "d_bias"})


@dataclass(frozen=True, repr=False)
class NormSpec(DirectedSpec):
    """A normalization over the last `ndim` axes of x.

    Attributes:
      kind: the public function.
      ndim: how many trailing axes are normalized.
      epsilon: added to the variance, or to the mean square.
      scale_offset: added to the scale.
      has_scale: whether there is a scale.
      has_bias: whether there is a bias.
      residual: "add" forms the sum x + residual and normalizes that; in "added" x already is that sum, and is returned
        as such: the form in which the derivatives see it, so that neither addend has to be kept.
      statistics: whether the mean (of layer_norm) and the reciprocal standard deviation are among the outputs.
      dtype: the dtype of y.
    """

    op = "norm"
    problems = (Rows,)

    kind: Literal["layer_norm", "rms_norm"] = "layer_norm"
    ndim: int = 1
    epsilon: float = 1e-6
    scale_offset: float = 0.0
    has_scale: bool = False
    has_bias: bool = False
    residual: Literal["absent", "add", "added"] = "absent"
    statistics: bool = False
    dtype: str = "float32"

    @property
    def title(self) -> str:
        return f"{self.kind} {self.direction}"

    @property
    def inputs(self) -> tuple[str, ...]:
        names = ("x", "residual" * (self.residual == "add"), "scale" * self.has_scale, "bias" * self.has_bias)
        return tuple(name for name in names if name)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("y", *(() if self.residual == "absent" else ("sum",)), *self.saved)

    @property
    def saved(self) -> tuple[str, ...]:
        if not self.statistics:
            return ()
        return ("mean", "rstd") if self.kind == "layer_norm" else ("rstd",)

    def saving(self) -> Self:
        return self.replace(statistics=True)

    def reference(self, inputs: Arrays) -> tuple[jax.Array, ...]:
        compute = jnp.float64 if any(array.dtype == jnp.float64 for array in inputs.values()) else jnp.float32
        total = inputs["x"]
        if self.residual == "add":
            total = total + inputs["residual"]
            # What is normalized is the sum as it is returned; XLA would otherwise skip this rounding on the way there.
            kind = jnp.finfo(total.dtype)
            total = lax.reduce_precision(total, kind.nexp, kind.nmant)
        axes = tuple(range(total.ndim - self.ndim, total.ndim))
        centered = total.astype(compute)
        outputs = []
        if self.kind == "layer_norm":
            mean = jnp.mean(centered, axes, keepdims=True)
            centered = centered - mean
            outputs.append(jnp.squeeze(mean, axes))
        rstd = lax.rsqrt(jnp.mean(jnp.square(centered), axes, keepdims=True) + self.epsilon)
        outputs.append(jnp.squeeze(rstd, axes))
        y = centered * rstd
        if self.has_scale:
            y = y * jnp.broadcast_to(inputs["scale"].astype(compute) + self.scale_offset, y.shape)
        if self.has_bias:
            y = y + jnp.broadcast_to(inputs["bias"].astype(compute), y.shape)
        sums = () if self.residual == "absent" else (total,)
        return (y.astype(self.dtype), *sums, *(outputs if self.statistics else ()))

    def derivative_form(self, inputs: Arrays, outputs: Arrays, tangents: Arrays) -> tuple[Self, Arrays, Arrays]:
        if self.residual != "add":
            return self, inputs, tangents
        # y is a function of the sum alone, and the sum's tangent is the sum of the tangents.
        total = outputs["sum"]
        addends = [
            jnp.broadcast_to(self.aligned(name, tangents[name]), total.shape).astype(total.dtype)
            for name in ("x", "residual")
            if name in tangents
        ]
        parameters = {name: tangent for name, tangent in tangents.items() if name in _PARAMETERS}
        moving = {"x": sum(addends[1:], addends[0])} if addends else {}
        kept = {name: array for name, array in inputs.items() if name in _PARAMETERS}
        return self.replace(residual="added"), {"x": total, **kept}, {**moving, **parameters}

    def mapped(self, operands: Arrays, axes: Mapping[str, int | None]) -> tuple[Self, Mapping[str, int], Sequence[int]]:
        # Rows of x mapped and the parameters not: more rows. A gradient of a parameter, however, is wanted for each
        # element of the mapped axis by itself.
        per_element = self.direction == "backward" and not _PARAMETERS.isdisjoint(self.results)
        if per_element or any((axis is None) != (name in _PARAMETERS) for name, axis in axes.items()):
            return super().mapped(operands, axes)
        places = {name: sum(self.carries[name]) for name, axis in axes.items() if axis is not None}
        return self, places, (len(self.batch),) * len(self.results)

    def factors(self, signature: Signature) -> tuple[Mapping[str, tuple[str, ...]], frozenset[str]]:
        x = signature.operands["x"]
        rows = tuple(f"r{i}" for i in range(len(x.shape) - sum(self.carries["x"]) - self.ndim))
        columns = tuple(f"c{i}" for i in range(self.ndim))

        def dimensions(name: str) -> tuple[str, ...]:
            if name in _PARAMETERS:
                return columns
            return rows if name.removeprefix("d_") in ("mean", "rstd") else (*rows, *columns)

        return {name: dimensions(name) for name in (*self.operands, *self.results)}, frozenset(columns)

    def problem(self, signature: Signature) -> Rows | str:
        if self.direction == "tangent":
            return "it has no kernel for the tangent"
        if self.direction == "backward" and "y" not in self.seeded:
            return "its backward kernel starts from the cotangent of y, which is zero here"
        found = row_arrays(signature, self.carries, self.ndim)
        if isinstance(found, str):
            return found
        sizes, operands, results = found
        centered, backward = self.kind == "layer_norm", self.direction == "backward"
        factors = () if backward else (("epsilon", self.epsilon),)
        return Rows(*sizes, centered, backward, (*factors, ("scale_offset", self.scale_offset)), operands, results)

    @property
    def fused(self) -> tuple[str, ...]:
        if self.direction == "forward":
            return ("residual add",) * (self.residual == "add") + self.inputs[self.inputs.index("x") + 1 :]
        return tuple(f"gradient of {name}" for name in self.active) + ("residual gradient",) * ("sum" in self.seeded)

    def flops(self, signature: Signature) -> int:
        per_element = {"forward": 5, "tangent": 12, "backward": 12}[self.direction]
        wide = (*signature.operands.values(), *signature.results.values())
        return per_element * max((math.prod(array.shape) for array in wide), default=0)


norm = Op(NormSpec)
