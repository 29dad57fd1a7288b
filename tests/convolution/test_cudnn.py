"""Which convolutions are cuDNN's: large ones, in which XLA walks through no zeros."""

import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16
from checking.convolution.calls import convolutions
from jaxdnn.engines.convolution.cudnn import in_cudnn

IMAGE, FILTER = (64, 56, 56, 128), (3, 3, 128, 128)
HALF = (3, 3, 64, 128)
PADDING = ((1, 1), (1, 1))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (convolution(IMAGE, FILTER, BF16), {"output", "image", "filter"}),
        (convolution((1, 8, 8, 128), FILTER, BF16), set()),
        (convolution(IMAGE, FILTER, BF16, strides=(2, 2)), {"output", "image", "filter"}),
        (convolution(IMAGE, FILTER, BF16, rhs_dilation=(2, 2)), {"output", "image"}),
        (convolution(IMAGE, HALF, BF16, groups=2), {"output", "image", "filter"}),
        (convolution(IMAGE, HALF, BF16, groups=2, strides=(2, 2)), {"output", "filter"}),
        (convolution(IMAGE, HALF, BF16, groups=2, rhs_dilation=(1, 2)), {"output", "image"}),
        (convolution(IMAGE, FILTER, BF16, lhs_dilation=(2, 2), padding=PADDING), {"output", "image", "filter"}),
        (convolution(IMAGE, FILTER, BF16, lhs_dilation=(2, 2), strides=(3, 3), padding=PADDING), set()),
    ],
)
def test_in_cudnn(case, expected):
    found = [convolutions(case, result).problem for result in ("output", "image", "filter")]
    assert {problem.result for problem in found if in_cudnn(problem)} == expected
