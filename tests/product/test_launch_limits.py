"""Epilogues of more arrays than a launch has room for: which engine serves them, and what it computes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.calls import native, refusal
from checking.cases.dtypes import BF16, F32
from checking.targets import H100
from jaxdnn.engines.base import MAX_ARGUMENTS, MAX_TENSOR_MAPS
from jaxdnn.plan import TensorMap
from jaxdnn.planning.calls import find_calls, find_differentiated_calls

# The launches of norms have as many arguments whatever the call.
ENGINES = [engine for op in ("matmul", "epilogue") for engine in native("cuda", op)]


def call_with(operands, results, rows=256, dtype=F32):
    """A product whose epilogue has so many operands and results, as a function, as JAX's own, and arrays for it."""

    def epilogue(acc, *operands):
        return tuple(jnp.tanh(sum(operands, acc) * i) for i in range(1, 1 + results))

    def function(a, b, *operands):
        return jaxdnn.matmul(a, b, *operands, epilogue=epilogue)

    def plain(a, b, *operands):
        return epilogue(a @ b, *operands)

    random = np.random.default_rng(0)
    shapes = [(2, rows, 64), (2, 64, 128), *[(2, rows, 128)] * operands]
    return function, plain, [jnp.asarray(random.normal(size=shape) / 16, dtype) for shape in shapes]


def test_limits_are_those_of_the_runtime():
    header = (Path(__file__).parents[2] / "cpp/launch_limits.h").read_text()
    limits = dict(re.findall(r"(kMax\w+) = (\d+);", header))
    assert limits == {"kMaxArguments": str(MAX_ARGUMENTS), "kMaxTensorMaps": str(MAX_TENSOR_MAPS)}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_no_launch_has_more_than_it_may(engine):
    product = engine.family == "product"
    most, reasons = 0, set()
    for operands, results in [*((n, 1) for n in (range(34, 40) if product else range(14, 20))), (1, 13), (1, 14)]:
        function, _, arrays = call_with(operands, results, 16 if engine.name == "skinny" else 256, BF16)
        calls = (find_calls if product else find_differentiated_calls)(function, *arrays)
        call = next(call for call in calls if engine.problem in call.spec.problems)
        if reason := refusal(engine, call, H100, slow=True):
            reasons.add(reason)
            continue
        for config in engine.configurations(call.problem, H100):
            for launch in engine.build(config, call.problem, H100).launches:
                most = max(most, len(launch.arguments))
                assert sum(isinstance(one, TensorMap) for one in launch.arguments) <= MAX_TENSOR_MAPS
    assert MAX_ARGUMENTS - 16 <= most <= MAX_ARGUMENTS
    assert reasons
    assert all("and a launch has room for" in reason for reason in reasons)


@pytest.mark.parametrize(("operands", "results", "engine"), [(45, 1, "xla"), (70, 1, "xla"), (1, 16, "simt")])
def test_the_engine_that_has_room(operands, results, engine):
    function, _, arrays = call_with(operands, results)
    with jaxdnn.options(target="sm_90"):
        explanation = jaxdnn.explain(function, *arrays, platform="cuda")
    (call, *_) = explanation.sections[0][1]
    assert call.engine == engine
    if engine == "xla":
        assert "arguments, and a launch has room for" in " ".join(str(explanation).split())


@pytest.mark.parametrize(("operands", "results"), [(45, 1), (1, 16)])
def test_results(operands, results):
    function, plain, arrays = call_with(operands, results)

    def derived(function):
        outputs, pull_back = jax.vjp(function, *arrays)
        return outputs, pull_back(outputs)

    with jax.default_matmul_precision("highest"):
        found, expected = (jax.jit(lambda f=f: derived(f))() for f in (function, plain))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.max(np.abs(y)))
