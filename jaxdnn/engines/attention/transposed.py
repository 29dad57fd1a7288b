"""Vectors of float32 by features, as multiplies of tf32 read them whose K are positions.

The kernel is cpp/kernels/attention/transpose.cuh.
"""

from dataclasses import dataclass
from math import ceil, prod

from jaxdnn.engines.attention.problem import Attention, Heads
from jaxdnn.engines.product.tma import DEPTH_BYTES, PROMOTE_128, SWIZZLE, TFLOAT32
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers
from jaxdnn.plan import Launch, Scratch, TensorMap

TILE = 32  # positions and features of a block of attention/transpose.cuh, of so many threads
THREADS = (TILE, 8, 1)
GROUP = 8  # positions whose order changes


def by_feature(problem: Attention) -> bool:
    """Whether what is summed comes by features."""
    return problem.query.dtype == "float32"


def feature_lines(problem: Attention, size: int, block: int) -> int:
    """Of 128 bytes, that the features of so many vectors take."""
    return size * ceil(block * problem.query.itemsize / DEPTH_BYTES)


def lines_reason(problem: Attention, block: int, what: str) -> str | None:
    """Why so many vectors can't be summed at once, or None."""
    if by_feature(problem) and block * problem.query.itemsize % DEPTH_BYTES:
        return f"{block} {what} of float32 are no whole lines of {DEPTH_BYTES} bytes"
    return None


@dataclass(frozen=True)
class Transposed:
    """[batch, head, feature, place] of an array [batch, position, head, feature] with these strides."""

    vectors: Heads
    batch: int
    positions: int
    heads: int
    size: int
    buffer: Scratch
    name: str = ""  # of the kernel, behind its own

    @property
    def places(self) -> int:
        return ceil(self.positions / GROUP) * GROUP

    @property
    def batches(self) -> int:
        """One if an array serves the whole batch."""
        return self.batch if self.vectors.batch_stride else 1

    def stage(self) -> Stage:
        """What writes it."""
        vectors = self.vectors
        found = [
            Parameter("const float*", "vectors", "vectors", vectors.buffer),
            Parameter("float*", "out", "out", self.buffer),
            *numbers("long long", row=vectors.length_stride, head=vectors.head_stride, batch=vectors.batch_stride or 0),
            *numbers(positions=self.positions, size=self.size, heads=self.heads),
        ]
        matrices = self.batches * self.heads
        blocks = ceil(self.positions / TILE) * ceil(self.size / TILE) * matrices
        kernel = "attention_transpose"
        text = entry_text(kernel, "jaxdnn::AttentionTranspose", str(prod(THREADS)), found, kernel + self.name)
        launch = Launch(kernel + self.name, arguments(found), (blocks, 1, 1), THREADS)
        size = vectors.itemsize * matrices * self.size * self.places
        return Stage(("attention/transpose.cuh",), f"\n{text}", (launch,), (size,))

    def map(self, box: int) -> TensorMap:
        """Of lines of places, of so many features."""
        itemsize = self.vectors.itemsize
        line = self.places * itemsize
        return TensorMap(
            buffer=self.buffer,
            dtype=TFLOAT32,
            dimensions=(self.places, self.size, self.heads, self.batches),
            strides=(line, self.size * line, self.heads * self.size * line),
            box=(DEPTH_BYTES // itemsize, box, 1, 1),
            element_strides=(1, 1, 1, 1),
            swizzle=SWIZZLE[DEPTH_BYTES],
            l2_promotion=PROMOTE_128,
        )
