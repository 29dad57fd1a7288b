"""The Hopper engine of filter gradients by patches: what it plans and refuses, and that it computes what is right."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, E4M3, F16
from checking.convolution.exact import calls, only
from checking.convolution.plans import ENGINE, FEW, H100, by_patches, check_compiled, check_emulated, check_on_gpu
from checking.emulation.plans import Emulated
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm, implicit_gemm
from jaxdnn.engines.convolution.sm90.halo_wgrad.knobs import WgradKnobs, wgrad_patches_reason
from jaxdnn.plan import TensorMap

GPU = jax.default_backend() == "gpu"

# Edges: lines and images that end in a tile, channels that end in a line, columns that end in a block.
SMALL = {
    "same": convolution((3, 9, 17, 72), (3, 3, 72, 40), BF16, padding="SAME"),
    "windows of 2, flipped": convolution((2, 8, 11, 40), (2, 4, 40, 72), F16, padding=((1, 0), (0, 2)), flip=True),
    "dilated": convolution((2, 17, 13, 64), (3, 2, 64, 32), F16, rhs_dilation=(3, 2), padding=((2, 3), (-1, 1))),
    "cut off": convolution((2, 10, 9, 32), (2, 3, 32, 16), BF16, padding=((-1, -2), (1, -1))),
    "wide windows": convolution((1, 9, 10, 32), (2, 5, 32, 24), BF16, padding="SAME"),
    "one dimension": convolution((2, 37, 64), (3, 64, 136), BF16, padding="SAME"),
    "small images": convolution((5, 7, 7, 64), (3, 3, 64, 64), BF16, padding="SAME"),
    "three dimensions": convolution((2, 3, 9, 6, 64), (3, 2, 3, 64, 32), BF16, padding="SAME"),
    "three dimensions, dilated": convolution(
        (1, 5, 6, 9, 32), (2, 3, 2, 32, 16), BF16, rhs_dilation=(2, 1, 1), padding=((1, 0), (1, 1), (0, 1)), flip=True
    ),
    "groups of 64": convolution((2, 6, 7, 128), (3, 3, 64, 128), BF16, padding="SAME", groups=2),
    "groups of 32": convolution((2, 6, 7, 192), (2, 2, 32, 192), BF16, padding="SAME", groups=6),
    "groups of 16": convolution(
        (2, 11, 12, 128), (3, 2, 16, 128), F16, rhs_dilation=(2, 2), padding=((1, 1), (0, 1)), flip=True, groups=8
    ),
    "epilogue": convolution((2, 6, 9, 64), (3, 3, 64, 64), BF16, padding="SAME", out_dtype=np.float32),
}
MAPPED = {
    "images, mapped": (SMALL["small images"], (0, None)),
    "both, mapped": (convolution((1, 8, 8, 32), (3, 3, 32, 16), BF16, padding="SAME"), (0, 0)),
}
PROBLEMS = {
    name: calls(case, axes)["filter"]
    for name, (case, axes) in ({name: (case, None) for name, case in SMALL.items()} | MAPPED).items()
}
# What no heuristic would choose for so few places.
FORCED = {
    "same": [
        WgradKnobs(patch=64, width=8, height=4, stages=2, split_k=2),
        WgradKnobs(patch=128, width=8, height=2, stages=3, split_k=45),
        WgradKnobs(patch=32, run=2, runs=2, width=24, height=4, stages=2, split_k=3),
        WgradKnobs(patch=128, run=2, runs=1, column_blocks=2, width=16, height=3, stages=2),
    ],
    "windows of 2, flipped": [WgradKnobs(patch=64, run=3, runs=3, width=16, height=2, stages=2)],
    "small images": [
        WgradKnobs(width=8, height=7, images=2, stages=2, split_k=3),
        WgradKnobs(patch=64, width=8, height=7, images=4, stages=2),
    ],
    "one dimension": [WgradKnobs(patch=128, runs=1, column_blocks=3, width=48, height=1, stages=2, split_k=2)],
}
RUNS = {name: (name, by_patches(call.problem, FEW)[0]) for name, call in PROBLEMS.items()}
RUNS |= {f"{name}, forced {i}": (name, knobs) for name, several in FORCED.items() for i, knobs in enumerate(several)}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    plans = [ENGINE.build(knobs, PROBLEMS[name].problem, FEW) for name, knobs in RUNS.values()]
    return Emulated(plans, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("run", RUNS)
def test_its_text_computes_what_is_right(run, emulated):
    check_emulated(PROBLEMS[RUNS[run][0]], emulated, list(RUNS).index(run))


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", PROBLEMS)
def test_results(name):
    check_on_gpu(PROBLEMS[name], FORCED.get(name, ()))
