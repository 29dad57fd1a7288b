"""Knobs of convolutions on the CPU."""

from dataclasses import dataclass

from jaxdnn.engines.base import check_least
from jaxdnn.engines.product.host.knobs import HostKnobs


@dataclass(frozen=True)
class HostDepthwiseKnobs:
    """Knobs of the depthwise convolution on the CPU.

    Attributes:
      width: places of a tile.
      span: channels of a tile.
    """

    width: int
    span: int

    def __post_init__(self) -> None:
        check_least(self, 1, "width", "span")


@dataclass(frozen=True)
class HostWindowKnobs:
    """Knobs of a convolution on the CPU that is a product of matrices: those of `HostKnobs` that it has.

    Attributes:
      rows, columns: of the result's tile that is summed and finished in cache; no tile has columns of two groups.
      depth: elements along k that are packed and multiplied together; a multiple of 64.
      splits: parts of k that are summed apart, by different tasks.
      tiles_per_task: consecutive tiles that one task works on.
    """

    rows: int
    columns: int
    depth: int
    splits: int = 1
    tiles_per_task: int = 1

    def __post_init__(self) -> None:
        self.of_product()

    def of_product(self) -> HostKnobs:
        """The same, as a product has them."""
        return HostKnobs(self.rows, self.columns, self.depth, self.splits, self.tiles_per_task)


HostConvolutionKnobs = HostDepthwiseKnobs | HostWindowKnobs
