"""A convolution, or one of its gradients, with its epilogue, as engines see it.

Three arrays meet in a convolution, and each of its directions computes one from the other two. They are

    image   n,                 spatial,  groups * c        the input of the forward pass, or its gradient
    filter                     window,   c, groups * k     the weights
    output  n,                 spatial,  groups * k        the result of the forward pass, or its gradient

and a direction is a sum of products over everything that its result lacks, and over the places where the three meet:
`Window` says which. So no direction pads, flips or dilates an array of its own: the equation of the forward pass is
also that of the gradients.

It is a product of matrices only after an engine has chosen how to walk through it: by the places of an output or of an
image, in phases of the stride, or channel by channel. So it is a problem of its own, with a product's epilogue. Where
every window is a single place there is nothing to choose, and a `Product` is stated instead.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from jaxdnn.engines.base import Problem
from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Reduced
from jaxdnn.plan import Operand
from jaxdnn.pointwise import Program

Role = Literal["image", "filter", "output"]
ROLES: tuple[Role, ...] = ("image", "filter", "output")


@dataclass(frozen=True, repr=False)
class Window:
    """One spatial dimension. Place i of the image, r of the filter and o of the output meet where

        i * base_dilation + low == o * stride + tap * dilation,

    in which tap is r, or filter - 1 - r if the filter is flipped. Padding is what meets no place of the image.

    Attributes:
      image, filter, output: how many places each has.
      stride: of the output.
      dilation: of the filter.
      base_dilation: of the image. It is one unless the stride, here or in another dimension, is not.
      low: the padding in front; negative where places are cut off.
    """

    image: int
    filter: int
    output: int
    stride: int = 1
    dilation: int = 1
    base_dilation: int = 1
    low: int = 0
    flipped: bool = False

    @property
    def transposed(self) -> "Window":
        """The same meetings, with image and output exchanged."""
        return Window(
            image=self.output,
            filter=self.filter,
            output=self.image,
            stride=self.base_dilation,
            dilation=self.dilation,
            base_dilation=self.stride,
            low=(self.filter - 1) * self.dilation - self.low,
            flipped=not self.flipped,
        )

    @property
    def exchanged(self) -> "Window":
        """The same meetings, with filter and output exchanged, of a filter that is not flipped."""
        return replace(
            self, filter=self.output, output=self.filter, stride=self.dilation, dilation=self.stride, flipped=False
        )

    @property
    def pointwise(self) -> bool:
        """Whether each place of the image meets that of the output, and no other."""
        trivial = (self.filter, self.stride, self.base_dilation, self.low) == (1, 1, 1, 0)
        return trivial and self.image == self.output

    @property
    def tiles(self) -> bool:
        """Whether the output's windows lie side by side and fill the image: each place of the image meets one tap."""
        steps = (self.stride, self.dilation, self.base_dilation, self.low)
        return steps == (self.filter, 1, 1, 0) and self.image == self.filter * self.output

    @property
    def meetings(self) -> np.ndarray:
        """The place of the image for each place of the output (rows) and of the filter (columns); -1 for none."""
        taps = np.arange(self.filter)
        taps = taps[::-1] if self.flipped else taps
        at = np.arange(self.output)[:, None] * self.stride + taps * self.dilation - self.low
        place = at // self.base_dilation
        there = (at % self.base_dilation == 0) & (place >= 0) & (place < self.image)
        return np.where(there, place, -1)

    def __repr__(self) -> str:
        steps = [f for f in fields(self)[3:] if getattr(self, f.name) != f.default]
        shown = [str(self.image), str(self.filter), str(self.output)]
        return f"Window({', '.join([*shown, *(f'{f.name}={getattr(self, f.name)!r}' for f in steps)])})"


@dataclass(frozen=True)
class Tensor:
    """One of the arrays in memory: the offset of an element is a sum of coordinates times strides, in elements.

    A stride is 0 along what the array has not, and along a batch that it does not carry.
    """

    buffer: Operand
    dtype: str
    batch_stride: int
    n_stride: int
    spatial_strides: tuple[int, ...]
    group_stride: int
    c_stride: int
    k_stride: int


@dataclass(frozen=True)
class Convolution(Problem):
    """results = epilogue(the array `result` of the two others, operands...), for each convolution of a batch.

    The epilogue's rows are n and the spatial places, or of a filter the window and c; its columns are the channels.

    Attributes:
      result: which array is computed; a and b are the others, in the order of `ROLES`.
      batch: how many convolutions.
      n, groups, c, k: images of one, groups of its channels, channels of the image and of the output in a group.
      windows: the spatial dimensions.
      program, operands, results: the epilogue, over (batch, row, column), as a `Product` has it.
      exact: whether float32 operands may not be rounded to tf32.
    """

    family = "convolution"

    result: Role
    batch: int
    n: int
    groups: int
    c: int
    k: int
    windows: tuple[Window, ...]
    a: Tensor
    b: Tensor
    program: Program
    results: tuple[Matrix | Reduced, ...]
    operands: tuple[EpilogueOperand, ...] = ()
    exact: bool = False

    @property
    def rows(self) -> int:
        """The rows of the epilogue."""
        places = [getattr(window, self.result) for window in self.windows]
        return int(np.prod([self.c if self.result == "filter" else self.n, *places]))

    @property
    def columns(self) -> int:
        """The columns of the epilogue."""
        return self.groups * (self.c if self.result == "image" else self.k)

    @property
    def accumulator(self) -> str:
        """The dtype of the accumulators."""
        return self.program.accumulators[0].dtype
