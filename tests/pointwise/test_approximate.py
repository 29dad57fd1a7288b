"""The functions of core/math.cuh that are its own, of instructions that are as far off as they may be."""

import ctypes
import math

import numpy as np
import pytest

from checking.emulation.compile import compiled_for_cpu

FUNCTIONS = {
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "one_plus_tanh": lambda x: 2 / (1 + np.exp(-2 * x)),
    "expm1": np.expm1,
    "erfc": np.vectorize(math.erfc, [np.float64]),
}
# The bits that are right at least.
BITS = {
    "approximate_logistic": 17,
    "approximate_tanh": 17,
    "approximate_one_plus_tanh": 17,
    "logistic": 22,
    "one_plus_tanh": 22,
    "expm1": 22.5,
    "erfc": 21,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    entries = "".join(
        f'extern "C" void run_{name}(const float* x, float* y, int count) {{\n'
        f"for (int i = 0; i < count; ++i) y[i] = jaxdnn::math::{name}(x[i]);\n}}\n"
        for name in BITS
    )
    text = f'#include "cuda.h"\n#include "core/math.cuh"\n{entries}'
    return compiled_for_cpu(text, tmp_path_factory.mktemp("approximate"), "sm_90")


@pytest.mark.parametrize("name", BITS)
def test_relative_error(name, library):
    """Wherever the result is a normal number."""
    sizes = np.concatenate(
        [np.geomspace(1e-30, 80, 200_000), np.linspace(0.1, 0.2, 50_001), np.linspace(0.4, 0.6, 50_001)]
    )
    x = np.concatenate([-sizes, sizes]).astype(np.float32)
    y = np.zeros_like(x)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (x, y))
    getattr(library, f"run_{name}")(*pointers, len(x))
    want = FUNCTIONS[name.removeprefix("approximate_")](x.astype(np.float64))
    normal = np.abs(want) > np.finfo(np.float32).tiny
    error = np.abs(y - want)[normal] / np.abs(want[normal])
    worst = np.argmax(error)
    assert error[worst] <= 2.0 ** -BITS[name], f"{name}({x[normal][worst]}) is off by 2^{np.log2(error[worst]):.2f}"
