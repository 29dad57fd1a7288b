"""Whether plans of a product, or an engine's configurations, compute what is right."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from checking.emulation.plans import Emulated
from checking.product.calls import ProductCase, result_types, run
from checking.product.tolerance import check
from jaxdnn.device import Target
from jaxdnn.plan import Plan


def check_emulated(emulated: Emulated, number: int, case: ProductCase) -> None:
    """Asserts it of the text of one of some plans, run on the CPU."""
    results = [np.zeros(one.shape, one.dtype) for one in result_types(case.product())]
    emulated.run(number, case.arrays(), results)
    check(case, results)


def check_plan(plan: Plan, case: ProductCase, what: Any = "a plan") -> None:
    """Asserts it of a plan, on the default device, and that it computes the same bits again."""
    product, arrays = case.product(), case.arrays()
    results, again = (run(plan, product, arrays) for _ in range(2))
    check(case, results)
    same = all(one.tobytes() == other.tobytes() for one, other in zip(results, again, strict=True))
    assert same, f"{what} is not deterministic"


def check_configurations(engine: Any, case: ProductCase, target: Target, count: int) -> None:
    """Asserts it of the first `count` ones, as `check_plan` does."""
    product = case.product()
    if reason := engine.reason(product, target):
        pytest.skip(reason)
    offered = list(islice(engine.configurations(product, target), count))
    assert offered
    for knobs in offered:
        check_plan(engine.build(knobs, product, target), case, knobs)
