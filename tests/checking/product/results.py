"""Whether an engine's configurations of a product compute what is right, on the default device."""

from itertools import islice
from typing import Any

import pytest

from checking.product.calls import ProductCase, run
from checking.product.tolerance import check
from jaxdnn.device import Target


def check_configurations(engine: Any, case: ProductCase, target: Target, count: int) -> None:
    """Asserts it of the first `count` ones, and that each computes the same bits again."""
    product, arrays = case.product(), case.arrays()
    if reason := engine.reason(product, target):
        pytest.skip(reason)
    offered = list(islice(engine.configurations(product, target), count))
    assert offered
    for knobs in offered:
        plan = engine.build(knobs, product, target)
        results, again = (run(plan, product, arrays) for _ in range(2))
        check(case, results)
        same = all(one.tobytes() == other.tobytes() for one, other in zip(results, again, strict=True))
        assert same, f"{knobs} is not deterministic"
