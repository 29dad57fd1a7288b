"""Random attention calls: sizes, dtypes, and any masks and functions of scores together."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from checking.cases import BF16, F16, F32, F64, AttentionCase
from checking.cases.modifiers import MASK_MODS, SCORE_MODS
from checking.tolerance import exact_and_tolerance

_HEAD_SIZES = (32, 40, 64, 80, 96, 128, 160, 192, 256)  # that models have
_LONG = (40, 700)  # positions, of which kernels have several tiles


def draw(random: np.random.Generator) -> AttentionCase:
    """A random case: most are smaller than a kernel's tile, where edges are; some have several."""

    def chance(probability: float) -> bool:
        return bool(random.random() < probability)

    def one(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    several = chance(0.15)

    def length() -> int:
        if several and chance(0.8):
            return int(np.exp(random.uniform(*np.log(_LONG))))
        return int(random.integers(1, 40 if chance(0.2) else 9))

    def bound() -> int | None:
        return int(random.integers(_LONG[1] // 2 if several and chance(0.5) else 6)) if chance(0.7) else None

    def size() -> int:
        return one(_HEAD_SIZES) if chance(0.25) else int(random.integers(1, 20))

    def over_scores() -> str:
        return "".join(letter if chance(0.6) else "1" for letter in "bnts")[int(random.integers(3)) :]

    most = 2 if several else 3  # of batch, heads and groups: what the reference takes is their product
    key_heads, group = int(random.integers(1, most + 1)), int(random.integers(1, most + 1))
    batch = None if chance(0.15) else int(random.integers(1, most + 1))
    queries, keys = length(), length()
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
        size=(query_size := size()),
        value_size=query_size if chance(0.4) else size(),
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
