"""Random attention calls: sizes, dtypes, and any masks and functions of scores together."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from checking.cases import BF16, F16, F32, F64, AttentionCase
from checking.cases.modifiers import MASK_MODS, SCORE_MODS
from checking.tolerance import exact_and_tolerance


def draw(random: np.random.Generator) -> AttentionCase:
    """A random case."""

    def chance(probability: float) -> bool:
        return bool(random.random() < probability)

    def one(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    def bound() -> int | None:
        return int(random.integers(6)) if chance(0.7) else None

    def over_scores() -> str:
        return "".join(letter if chance(0.6) else "1" for letter in "bnts")[int(random.integers(3)) :]

    key_heads, group = int(random.integers(1, 4)), int(random.integers(1, 4))
    batch = None if chance(0.15) else int(random.integers(1, 4))
    queries, keys = (int(random.integers(1, 40 if chance(0.2) else 9)) for _ in range(2))
    window = (bound(), bound()) if chance(0.3) else None
    causal = chance(0.4)
    banded = causal or window not in (None, (None, None))
    positions = " ".join(which for which in ("query", "key") if chance(0.2))
    aligned = banded and not positions and chance(0.4)
    return AttentionCase(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=key_heads * group,
        key_heads=key_heads,
        size=int(random.integers(1, 20)),
        value_size=int(random.integers(1, 20)),
        dtype=random.choice((F32, BF16, F16, F64), p=(0.45, 0.3, 0.1, 0.15)).item(),
        bias=over_scores() if chance(0.4) else None,
        mask=over_scores() if chance(0.3) else None,
        sinks=chance(0.3),
        causal=causal,
        window=window,
        alignment="bottom_right" if aligned else "top_left",
        lengths=" ".join(which for which in ("query", "key") if chance(0.25)),
        segments="both" if chance(0.25) else "",
        positions=positions,
        soft_cap=one((1.0, 5.0)) if chance(0.25) else None,
        score_mod=one(list(SCORE_MODS)) if chance(0.3) else None,
        mask_mod=one(list(MASK_MODS)) if chance(0.2) else None,
        dropout=one((0.1, 0.5)) if chance(0.2) else 0.0,
        residual=chance(0.4),
        seed=int(random.integers(2**31)),
    )


def evaluate(case: AttentionCase, check: str, primals: Sequence[Any], directions: Sequence[Any]) -> list[Any]:
    """What the call should return, and how far from it results may be."""

    def transform(function: Any, primals: Any, directions: Any) -> Any:
        if check == "forward":
            return function(*primals)
        if check == "jvp":
            return jax.jvp(function, primals, directions)
        outputs, pull_back = jax.vjp(function, *primals)
        return outputs, pull_back(directions)

    exact, deviation = exact_and_tolerance(transform, case, (tuple(primals), tuple(directions)))
    return list(zip(jax.tree.leaves(exact), jax.tree.leaves(deviation), strict=True))
