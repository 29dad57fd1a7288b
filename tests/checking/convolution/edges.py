"""Convolutions with the edges that patches have: blocks end in lines of places, tiles in images, stages in channels."""

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, F16

SMALL = {
    "same": convolution((3, 9, 17, 72), (3, 3, 72, 40), BF16, padding="SAME"),
    "dilated": convolution((2, 17, 13, 64), (3, 2, 64, 32), F16, rhs_dilation=(3, 2), padding=((2, 3), (-1, 1))),
    "three dimensions, dilated": convolution(
        (1, 5, 6, 9, 32), (2, 3, 2, 32, 16), BF16, rhs_dilation=(2, 1, 1), padding=((1, 0), (1, 1), (0, 1)), flip=True
    ),
    "groups of 16": convolution(
        (2, 11, 12, 128), (3, 2, 16, 128), F16, rhs_dilation=(2, 2), padding=((1, 1), (0, 1)), flip=True, groups=8
    ),
    "one dimension": convolution((3, 93, 72), (3, 72, 40), BF16, padding="SAME"),
    "one dimension, dilated": convolution((2, 150, 32), (4, 32, 72), F16, rhs_dilation=(3,), padding=((9, -2),)),
}
# Of which a tile has one, or two.
GROUPS = {
    "groups of 64": convolution((2, 6, 7, 128), (3, 3, 64, 192), BF16, padding="SAME", groups=2),
    "groups of 32": convolution((2, 6, 7, 192), (2, 2, 32, 192), BF16, padding="SAME", groups=6),
}
