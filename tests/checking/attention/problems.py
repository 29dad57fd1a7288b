"""An `Attention` problem, run in numpy as its docstring defines it: from the places in memory that it names."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from checking.cases.attention import philox
from checking.pointwise.problems import Elements


class Run(Elements):
    """One call: what `Attention`'s docstring says, for all scores at once."""

    def __init__(self, problem: Any, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        super().__init__((problem.batch * problem.query_heads, problem.query_length, problem.key_length), operands)
        self.problem = problem
        self.results = [np.zeros(array.size, np.float64) for array in results]

    def forward(self) -> list[np.ndarray]:
        p = self.problem
        scores = self.scores()
        sums = np.log(np.sum(np.exp(scores - self.largest(scores)), -1, keepdims=True) + self.of_sinks(scores))
        log_sum_exp = np.squeeze(sums + self.largest(scores), -1)
        out = np.einsum(
            "bts,bsd->btd", self.probabilities(scores, log_sum_exp) * self.kept(), self.heads(p.value, "key")
        )
        self.store_heads(p.out, "query", out)
        if p.log_sum_exp is not None:
            self.store(p.log_sum_exp, log_sum_exp[..., None])
        return self.results

    def backward(self) -> list[np.ndarray]:
        p, b = self.problem, self.problem.backward
        log_sum_exp = self.load(p.log_sum_exp)[..., 0].astype(np.float64)
        weights, kept = self.probabilities(self.scores(), log_sum_exp), self.kept()
        query, key, value = self.heads(p.query, "query"), self.heads(p.key, "key"), self.heads(p.value, "key")
        out = self.heads(p.out, "query")
        d_out = np.zeros_like(out) if b.d_out is None else self.heads(b.d_out, "query")
        d_sum = 0.0 if b.d_log_sum_exp is None else self.load(b.d_log_sum_exp)[..., 0]
        delta = np.where(log_sum_exp == -np.inf, 0, np.sum(out * d_out, -1) - d_sum)
        d_scores = weights * (kept * np.einsum("btd,bsd->bts", d_out, value) - delta[..., None])
        d_product = d_scores
        if b.gradient is not None:
            d_product, *added = self.program(b.gradient, b.operands, [self.products(), d_scores])
            for gradient in b.load_gradients:
                self.store(gradient.place, added[gradient.output - 1], add=True)
        for place, side, found in (
            (b.d_query, "query", p.scale * np.einsum("bts,bsh->bth", d_product, key)),
            (b.d_key, "key", p.scale * np.einsum("bts,bth->bsh", d_product, query)),
            (b.d_value, "key", np.einsum("bts,btd->bsd", weights * kept, d_out)),
        ):
            if place is not None:
                self.store_heads(place, side, found, add=True)
        if b.d_sinks is not None:
            base = np.where(log_sum_exp == -np.inf, 0, log_sum_exp)
            found = -np.exp(self.load(p.sinks)[..., 0] - base) * delta
            self.store(b.d_sinks, found[..., None], add=True)
        return self.results

    # ---- Scores ------------------------------------------------------------------------------------------------------

    def products(self) -> np.ndarray:
        p = self.problem
        return p.scale * np.einsum("bth,bsh->bts", self.heads(p.query, "query"), self.heads(p.key, "key"))

    def scores(self) -> np.ndarray:
        p = self.problem
        scores = self.products()
        if p.score is not None:
            (scores,) = self.program(p.score, p.operands, [scores])
        return np.where(self.visible(), scores, -np.inf)

    def visible(self) -> np.ndarray:
        mask = self.problem.mask
        _, row, column = self.at
        given = {name: getattr(mask, name) for name in mask.__dataclass_fields__}
        loaded = {
            name: self.load(place)
            for name, place in given.items()
            if place is not None and name not in ("band", "program", "operands")
        }
        query, key = (loaded.get(f"{side}_positions", at) for side, at in (("query", row), ("key", column)))
        distance = key - (query + loaded.get("query_offset", 0))
        visible = np.ones(self.extents, bool)
        if mask.band.left is not None:
            visible &= distance >= -mask.band.left
        if mask.band.right is not None:
            visible &= distance <= mask.band.right
        visible &= row < loaded.get("query_lengths", self.extents[1])
        visible &= column < loaded.get("key_lengths", self.extents[2])
        if "query_segments" in loaded:
            visible &= (loaded["query_segments"] == loaded["key_segments"]) & (loaded["query_segments"] >= 0)
        if mask.program is not None:
            visible &= self.program(mask.program, mask.operands, [])[0]
        return visible

    def largest(self, scores: np.ndarray) -> np.ndarray:
        largest = np.max(scores, -1, keepdims=True)
        if self.problem.sinks is not None:
            largest = np.maximum(largest, self.load(self.problem.sinks)[..., :1])
        return np.where(largest == -np.inf, 0, largest)

    def of_sinks(self, scores: np.ndarray) -> Any:
        if self.problem.sinks is None:
            return 0.0
        return np.exp(self.load(self.problem.sinks)[..., :1] - self.largest(scores))

    def probabilities(self, scores: np.ndarray, log_sum_exp: np.ndarray) -> np.ndarray:
        return np.exp(scores - np.where(log_sum_exp == -np.inf, 0, log_sum_exp)[..., None])

    def kept(self) -> Any:
        dropout = self.problem.dropout
        if dropout is None:
            return 1.0
        flat = self.operands[dropout.seeds.buffer.index]
        first = self.offsets(dropout.seeds)[:, 0, 0]
        seeds = np.stack([flat[first], flat[first + 1]], -1)
        groups = np.arange(-(-self.extents[2] // 4))
        words = philox(seeds[:, None, None], np.arange(self.extents[1])[:, None], groups)
        bits = words.reshape(*self.extents[:2], -1)[..., : self.extents[2]]
        return (bits >= dropout.threshold) * dropout.factor

    # ---- Programs and places -----------------------------------------------------------------------------------------

    def store(self, place: Any, values: np.ndarray, *, add: bool = False) -> None:
        self._put(self.results[place.buffer.index], self.offsets(place)[..., : values.shape[-1]], values, add)

    def of_heads(self, place: Any, side: str) -> np.ndarray:
        """The offset of each element, for every query head."""
        p, backward = self.problem, self.problem.backward
        gradients = () if backward is None else (backward.d_query, backward.d_key)
        size = p.head_size if place in (p.query, p.key, *gradients) else p.value_head_size
        length = p.query_length if side == "query" else p.key_length
        n, t, d = np.indices((p.batch * p.query_heads, length, size))
        b, head = n // p.query_heads, n % p.query_heads
        head = head if side == "query" else head // p.group
        found = t * place.length_stride + head * place.head_stride + d * place.feature_stride
        for term in place.batch:
            coordinate = b // term.divisor
            found = found + (coordinate % term.modulus if term.modulus else coordinate) * term.stride
        return found

    def heads(self, place: Any, side: str) -> np.ndarray:
        return self.operands[place.buffer.index][self.of_heads(place, side)].astype(np.float64)

    def store_heads(self, place: Any, side: str, values: np.ndarray, *, add: bool = False) -> None:
        self._put(self.results[place.buffer.index], self.of_heads(place, side), values, add)

    def _put(self, flat: np.ndarray, offsets: np.ndarray, values: np.ndarray, add: bool) -> None:
        if add:
            np.add.at(flat, offsets, values)
        else:
            flat[offsets] = values


def run(problem: Any, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a problem's call, given what has their shapes."""
    with np.errstate(all="ignore"):
        call = Run(problem, operands, results)
        found = call.backward() if problem.backward is not None else call.forward()
    return [one.reshape(array.shape) for one, array in zip(found, results, strict=True)]
