"""What an attention call is: `AttentionSpec`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxdnn.engines.attention.problem import Attention, Band
from jaxdnn.planning.transposes import inverse
from jaxdnn.primitives._define import Op
from jaxdnn.primitives.attention.arrays import DIMENSIONS, dimensions
from jaxdnn.primitives.attention.modifier import Modifier
from jaxdnn.primitives.attention.reference import backward, forward, tangent
from jaxdnn.primitives.attention.statement import stated
from jaxdnn.spec import DirectedSpec, Signature

_HEADS = ("query", "key", "value", "out")  # arrays of vectors, which kernels read and write however they lie
# Whose order a gradient has, which goes back to where that came from. What comes of attention goes on to a product of
# all heads of a position, wherever queries lie.
_ALIKE = {"d_query": "query", "d_key": "key", "d_value": "value"}
_SPLIT = "bkg"  # the dimensions that can be split over devices; the others are of one attention


@dataclass(frozen=True, repr=False)
class AttentionSpec(DirectedSpec):
    """softmax(score(scale * query . key)) . value, over the keys that each query sees, for each head.

    Attributes:
      optional: the inputs that there are besides query, key and value, and the modifiers' operands.
      scale: of query . key.
      soft_cap: scores become cap * tanh(score / cap), after the bias; None for no cap.
      score_mod: what then becomes of them.
      band: which keys a query sees, by position.
      mask_mod: likewise, a function of where they are.
      dropped: of 2^32 probabilities, how many are dropped.
      algorithm: what JAX calls precision, in its canonical form.
      statistics: whether the log-sum-exps are among the outputs.
      orders: of operands and gradients that lie otherwise than their dimensions say, these as they lie.
    """

    op = "attention"
    problems = (Attention,)

    optional: tuple[str, ...] = ()
    scale: float = 1.0
    soft_cap: float | None = None
    score_mod: Modifier | None = None
    band: Band = Band()
    mask_mod: Modifier | None = None
    dropped: int = 0
    algorithm: Any = None
    statistics: bool = False
    orders: tuple[tuple[str, str], ...] = ()

    @property
    def score_operands(self) -> tuple[str, ...]:
        """Names of what `score_mod` takes besides the coordinates."""
        return () if self.score_mod is None else tuple(f"score_operand{i}" for i in range(self.score_mod.operands))

    @property
    def mask_operands(self) -> tuple[str, ...]:
        """Likewise of `mask_mod`."""
        return () if self.mask_mod is None else tuple(f"mask_operand{i}" for i in range(self.mask_mod.operands))

    @property
    def inputs(self) -> tuple[str, ...]:
        own = tuple(name for name in DIMENSIONS if name in self.optional)
        return ("query", "key", "value", *own, *self.score_operands, *self.mask_operands)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("out", "log_sum_exp") if self.statistics else ("out",)

    @property
    def saved(self) -> tuple[str, ...]:
        return self.outputs if self.statistics else ()

    def saving(self) -> Self:
        return self.replace(statistics=True)

    def evaluate_unbatched(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        arrays = dict(zip(self.operands, operands, strict=True))
        turned = [name for name, _ in self.orders]
        for name in filter(arrays.__contains__, turned):
            arrays[name] = jnp.transpose(arrays[name], self.order(name))
        rest = {name.removeprefix("d_"): array for name, array in arrays.items() if name.startswith("d_")}
        match self.direction:
            case "forward":
                results = forward(self, arrays)[: len(self.outputs)]
            case "tangent":
                results = tangent(self, arrays, rest)
            case "backward":
                results = backward(self, arrays, rest, self.active)
        found = dict(zip(self.results, results, strict=True))
        for name in filter(found.__contains__, turned):
            found[name] = jnp.transpose(found[name], inverse(self.order(name)))
        return tuple(found.values())

    def factors(self, signature: Signature) -> tuple[Mapping[str, tuple[str, ...]], frozenset[str]]:
        found, whole = {}, set[str]()
        sizes = self.sizes(signature)
        for name, array in signature.arrays.items():
            shape = array.shape[self.mapped_count(name) :]
            labels = self.dimensions(name) or "." * len(shape)
            pairs = zip(labels, shape, strict=True)
            named = [
                label if label in _SPLIT and size == sizes[label] else f"{name}_{place}"
                for place, (label, size) in enumerate(pairs)
            ]
            found[name] = tuple(named)
            whole |= {factor for factor in named if factor not in _SPLIT}
        return found, frozenset(whole)

    def dimensions(self, name: str) -> str:
        """Those of an operand or result, as it lies."""
        return dict(self.orders).get(name) or dimensions(name)

    def order(self, name: str) -> Sequence[int]:
        """For each dimension of an operand or result, the number of the array's, as it lies."""
        return [self.dimensions(name).index(label) for label in dimensions(name)]

    def untransposed(self, orders: Mapping[str, Sequence[int]]) -> tuple[Self, tuple[str, ...]]:
        taken = {}
        for name, order in orders.items():
            mapped, labels = self.mapped_count(name), self.dimensions(name)
            if name.removeprefix("d_") not in _HEADS or tuple(order[:mapped]) != tuple(range(mapped)):
                continue
            lying = dict(zip(order[mapped:], labels, strict=True))
            found = "".join(lying[number] for number in sorted(lying))
            # Vectors stay in one piece, and query heads next to those that share their key head.
            if found[-1] == labels[-1] and ("kg" in found) == ("kg" in labels):
                taken[name] = found
        lie = {**dict(self.orders), **taken}
        for name, like in _ALIKE.items():
            if name in self.results and like in taken:
                lie.setdefault(name, "".join(dimensions(name)[dimensions(like).index(label)] for label in lie[like]))
        return self.replace(orders=tuple(lie.items())), tuple(taken)

    @property
    def result_orders(self) -> Mapping[str, Sequence[int]]:
        mapped = range(len(self.batch))
        there = (name for name in self.results if name in dict(self.orders))
        return {name: (*mapped, *(len(mapped) + place for place in self.order(name))) for name in there}

    def mapped_count(self, name: str) -> int:
        """How many mapped axes an operand or result has, in front."""
        return sum(self.carries[name]) if name in self.operands else len(self.batch)

    def sizes(self, signature: Signature) -> dict[str, int]:
        """Of the dimensions of query, key and value."""
        found: dict[str, int] = {}
        for name in ("query", "key", "value"):
            shape = signature.operands[name].shape[self.mapped_count(name) :]
            found |= dict(zip(self.dimensions(name), shape, strict=True))
        return found

    def problem(self, signature: Signature) -> Attention | str:
        return stated(self, signature)

    @property
    def fused(self) -> tuple[str, ...]:
        words = [name for name in ("bias", "mask", "sinks") if name in self.optional]
        words += ["soft cap"] * (self.soft_cap is not None) + ["dropout"] * bool(self.dropped)
        words += [modifier.title for modifier in (self.score_mod, self.mask_mod) if modifier is not None]
        return tuple(words)

    def flops(self, signature: Signature) -> int:
        """Of products alone, as if every query saw every key: two of them forward, five in the backward pass."""
        sizes = self.sizes(signature)
        mapped = next(iter(signature.results.values())).shape[: len(self.batch)]
        of_head, of_value = {"forward": (1, 1), "tangent": (3, 2), "backward": (3, 2)}[self.direction]
        wide = of_head * sizes["h"] + of_value * sizes["d"]
        return 2 * wide * prod((*mapped, *(sizes[label] for label in "bkgts")))


attention = Op(AttentionSpec)
