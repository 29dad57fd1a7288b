"""Cases of `conv_general_dilated` and `conv_transpose`, and the rows of the table."""

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

import jaxdnn
from checking import reference
from checking.cases.base import Rows, Split
from checking.cases.dtypes import BF16, E4M3, F16, F32, F64, I8, I32, SHORT
from checking.cases.matmul import MatmulCase

Pads = tuple[tuple[int, int], ...]
LAST = ("N{}C", "{}IO", "N{}C")
FIRST = ("NC{}", "OI{}", "NC{}")
PLACES = "HWD"


class Geometry(NamedTuple):
    """A convolution in plain numbers. Orders are (batch, features, places), and of the filter (out, in, places)."""

    orders: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    strides: tuple[int, ...]
    padding: Pads
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int
    batch_groups: int
    flip: bool


@dataclass(frozen=True, repr=False)
class ConvolutionCase(MatmulCase):
    """One convolution of a with the filter b.

    Attributes:
      numbers: the letters of the dimensions of a, of b and of the result.
      strides, padding, lhs_dilation, rhs_dilation: as the public function takes them; () for ones.
      groups, batch_groups: of features, and of the batch.
      flip: whether the filter's places are reversed; of a `conv_transpose`, whether it is transposed.
    """

    strides: tuple[int, ...] = ()
    padding: str | Pads = "VALID"
    lhs_dilation: tuple[int, ...] = ()
    rhs_dilation: tuple[int, ...] = ()
    groups: int = 1
    batch_groups: int = 1
    flip: bool = False

    op = "convolution"

    @property
    def geometry(self) -> Geometry:
        """Where and which."""
        ones = (1,) * len(self.a[2:])
        strides, lhs_dilation, rhs_dilation = (
            given or ones for given in (self.strides, self.lhs_dilation, self.rhs_dilation)
        )
        of_a, of_b, of_y = self.numbers
        spatial = [letter for letter in of_b if letter not in "OI"]
        window = [
            (self.b[of_b.index(letter)] - 1) * step + 1 for letter, step in zip(spatial, rhs_dilation, strict=True)
        ]
        places = [self.a[of_a.index(letter)] for letter in spatial]
        if self.kind == "conv_transpose":
            strides, lhs_dilation = ones, strides
        padding = self.padding
        if isinstance(padding, str):
            padding = tuple(map(self._named_padding, places, window, strides, lhs_dilation))
        out, in_ = ("I", "O") if self.kind == "conv_transpose" and self.flip else ("O", "I")
        return Geometry(
            (
                tuple(map(of_a.index, ("N", "C", *spatial))),
                tuple(map(of_b.index, (out, in_, *spatial))),
                tuple(map(of_y.index, ("N", "C", *spatial))),
            ),
            strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            self.groups,
            self.batch_groups,
            self.flip,
        )

    def _named_padding(self, size: int, window: int, stride: int, dilation: int) -> tuple[int, int]:
        if self.kind == "conv_transpose":
            # Of the convolution that it transposes (TensorFlow's).
            if self.padding == "SAME":
                total, low = window + dilation - 2, window - 1 if dilation > window - 1 else None
                low = ceil(total / 2) if low is None else low
                return low, total - low
            return window - 1, dilation - 1 + max(window - dilation, 0)
        total = max(0, (ceil(size / stride) - 1) * stride + window - size) if self.padding != "VALID" else 0
        return (total - total // 2, total // 2) if self.padding == "SAME_LOWER" else (total // 2, total - total // 2)

    @property
    def length(self) -> int:
        of_a, of_b, _ = self.geometry.orders
        window = prod(self.b[d] for d in of_b[2:])
        batch = prod(self.a[d] for d in (of_a[0], *of_a[2:]))
        return max(1, window * max(self.b[of_b[0]], self.b[of_b[1]]), batch)

    @property
    def _contracted(self) -> int:
        of_b = self.geometry.orders[1]
        return prod(self.b[d] for d in of_b[1:])

    def call(self, *arrays: Any, **changes: Any) -> Any:
        a, b, *operands = arrays
        ones = (1,) * len(self.a[2:])
        keywords: dict[str, Any] = {
            "rhs_dilation": self.rhs_dilation or None,
            "dimension_numbers": self.numbers,
            "out_dtype": self.out_dtype,
            "precision": self.precision,
            "operands": operands,
            "epilogue": self.function,
            **changes,
        }
        if self.kind == "conv_transpose":
            return jaxdnn.conv_transpose(
                a, b, self.strides or ones, self.padding, transpose_kernel=self.flip, **keywords
            )
        return jaxdnn.conv_general_dilated(
            a,
            b,
            self.strides or ones,
            self.padding,
            lhs_dilation=self.lhs_dilation or None,
            feature_group_count=self.groups,
            batch_group_count=self.batch_groups,
            flip_kernel=self.flip,
            **keywords,
        )

    def reference(self, rounding: Any, *arrays: Any) -> Any:
        outputs = reference.convolution(self, rounding, *arrays)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def __str__(self) -> str:
        """The id of a test: "conv-2x3x9x8-4x3x3x2-NCHW,OIHW,NCHW-f32-strides:1,2"."""
        parts = ["conv" if self.kind == "conv_general_dilated" else self.kind]
        parts += ["x".join(map(str, shape)) for shape in (self.a, self.b)]
        parts += [",".join(self.numbers), *dict.fromkeys(SHORT[dtype] for dtype in self.dtypes_of)]
        for name in ("strides", "padding", "lhs_dilation", "rhs_dilation", "groups", "batch_groups", "flip"):
            value = getattr(self, name)
            if value not in ((), 1, False, "VALID"):
                parts.append(f"{name}:{value}".replace(" ", "").replace("'", ""))
        parts += [str(value) for value in (self.epilogue, self.precision) if value]
        parts += [f"out:{SHORT[self.out_dtype]}"] if self.out_dtype else []
        return "-".join([*parts, *([] if self.data == "normal" else [self.data])])


def convolution(
    a: Any, b: Any, dtype: str = F32, *, layout: Any = LAST, kind: str = "conv_general_dilated", **fields: Any
) -> ConvolutionCase:
    """A convolution of two shapes; `layout` has the letters of dimensions, with {} for spatial ones."""
    numbers = tuple(letters.format(PLACES[: len(a) - 2]) for letters in layout)
    return ConvolutionCase(kind, a, b, (dtype, dtype), numbers, **fields)


def _row(n: int, dtype: str = F32) -> Any:
    return ((n,), dtype)


SMALL = convolution((2, 5, 4, 2), (3, 2, 2, 3), strides=(2, 1), padding=((1, 1), (0, 1)))
LAYER = SMALL.replace(epilogue="bias gelu", extras=(_row(3),))
GROUPED = convolution((2, 5, 4), (3, 2, 4), padding="SAME", groups=2)
DEPTHWISE = convolution((2, 6, 4), (3, 1, 4), padding=((2, 0),), groups=4)
NCHW = convolution((2, 4, 3, 5), (6, 4, 2, 3), layout=FIRST, padding="SAME")
RESIDUAL = NCHW.replace(epilogue="residual", extras=(((6, 1, 1), F32), ((2, 6, 3, 5), F32)))
DILATED = convolution((2, 4, 3), (2, 3, 2), lhs_dilation=(3,), rhs_dilation=(2,), padding=((1, 2),))
CUBE = convolution((4, 4, 4), (4, 4, 1), layout=FIRST, epilogue="residual", extras=(((4, 1), F32), ((4, 4, 4), F32)))
BATCH_GROUPS = convolution((4, 5, 3), (2, 3, 6), strides=(2,), batch_groups=2)
DOWN = convolution((2, 6, 4), (3, 4, 6))
PATCHES = convolution((4, 8, 4, 3), (4, 2, 3, 2), strides=(4, 2))
POINTWISE = convolution((2, 3, 4, 5), (1, 1, 5, 3), epilogue="bias gelu", extras=(_row(3),))

ROWS = Rows(
    every=[
        # dimensions, and how many
        convolution((5, 3), (3, 4)),
        convolution((2, 9, 3), (4, 3, 5), padding=((2, 1),)),
        convolution((2, 3, 4, 5, 2), (2, 3, 2, 2, 3), strides=(1, 2, 1), padding="SAME"),
        NCHW,
        convolution((7, 2, 3, 6), (4, 2, 2, 3), layout=("{}CN", "O{}I", "C{}N")),
        # windows: strides, paddings that cut off or are longer than the window, dilations, ends that are not met
        SMALL,
        convolution((2, 9, 8, 3), (3, 3, 3, 4), padding="SAME", strides=(2, 3)),
        convolution((2, 8, 7, 3), (2, 4, 3, 4), padding="SAME_LOWER"),
        convolution((2, 7, 3), (3, 3, 4), padding=((-2, 1),), strides=(2,)),
        convolution((2, 3, 3), (2, 3, 4), padding=((4, 5),)),
        convolution((2, 11, 3), (3, 3, 4), rhs_dilation=(3,), strides=(2,), padding=((3, 2),)),
        convolution((2, 6, 3), (3, 3, 4), flip=True, padding="SAME"),
        # images with zeros between places: input gradients, and what is none
        DILATED,
        convolution((2, 4, 3, 3), (2, 3, 3, 2), lhs_dilation=(2, 3), strides=(2, 1), padding=((1, 1), (2, -1))),
        convolution((2, 4, 6), (3, 3, 4), lhs_dilation=(2,), padding=((2, 1),), groups=2),
        convolution((2, 5, 4, 3), (3, 2, 3, 2), kind="conv_transpose", strides=(2, 3), padding="SAME"),
        convolution((2, 5, 3), (4, 2, 3), kind="conv_transpose", strides=(2,), flip=True, rhs_dilation=(2,)),
        # groups
        GROUPED,
        DEPTHWISE,
        convolution((2, 7, 6, 3), (3, 2, 1, 6), strides=(1, 2), padding="SAME", groups=3),
        BATCH_GROUPS,
        convolution((4, 6, 3), (3, 3, 4), batch_groups=4, flip=True, rhs_dilation=(2,), padding=((1, 2),)),
        # matrices: of single places, and of windows that tile the image
        POINTWISE,
        convolution((2, 3, 5, 24), (1, 2, 24, 7), strides=(1, 2), padding=((0, 0), (1, 0))),
        convolution((2, 8, 6, 3), (4, 3, 3, 10), BF16, strides=(4, 3)),
        convolution((2, 3, 9, 6), (10, 3, 4, 3), layout=FIRST, strides=(4, 3), flip=True),
        convolution((2, 3, 9, 20), (1, 3, 20, 10), F16, strides=(1, 3)),
        # dtypes, and what is stored
        convolution((2, 5, 6, 8), (3, 3, 8, 16), BF16, padding="SAME", out_dtype=F32),
        convolution((2, 6, 8), (3, 8, 4), F16, padding="SAME"),
        convolution((2, 6, 8), (3, 8, 4), F64),
        convolution((2, 6, 8), (3, 8, 4), F32, precision="highest"),
        convolution((2, 6, 8), (3, 8, 4), E4M3, out_dtype=BF16),
        convolution((2, 6, 8), (3, 8, 4), I8, out_dtype=I32, epilogue="dequantized", extras=(_row(4),)),
        # epilogues
        LAYER,
        RESIDUAL,
        NCHW.replace(dtypes_of=(BF16, BF16), epilogue="channel sums"),
        convolution((2, 5, 6, 3), (3, 3, 3, 7), padding="SAME", epilogue="sums of channels"),
        DILATED.replace(epilogue="bias", extras=(_row(2),)),
        BATCH_GROUPS.replace(epilogue="two results", extras=(_row(6),)),
        convolution((2, 9, 3), (3, 3, 4), epilogue="softmax"),
    ],
    empty=[
        convolution((0, 5, 3), (2, 3, 4), epilogue="relu"),
        convolution((2, 5, 0), (2, 0, 4), epilogue="bias gelu", extras=(_row(4),)),
        convolution((2, 3, 3), (5, 3, 4)),
        convolution((2, 0, 3), (2, 3, 4), padding=((1, 2),)),
        convolution((2, 5, 4), (2, 2, 0), groups=2),
        convolution((0, 5, 4), (2, 4, 6), batch_groups=2),
    ],
    not_finite=[
        SMALL.replace(data="nan"),
        POINTWISE.replace(data="inf"),
    ],
    # As many channels as XLA's kernels do not serve in less time.
    plain=[convolution((2, 5, 6, 136), (1, 1, 136, 16), BF16, epilogue="bias gelu", extras=(_row(16),))],
    small=[LAYER, RESIDUAL, DILATED, DEPTHWISE, BATCH_GROUPS],
    deep=[LAYER],
    tiny=[convolution((1, 3, 2), (2, 2, 2), epilogue="silu")],
    repeated=[convolution((2, 17, 16, 9), (3, 3, 9, 20), BF16, padding="SAME", epilogue="largest")],
    mapped=[
        *((LAYER, axes) for axes in [(0, None, None), (None, 1, None), (None, None, 0), (2, 3, None), (0, 0, 1)]),
        *((GROUPED, axes) for axes in [(1, None), (None, 0), (0, 2)]),
        *((BATCH_GROUPS, axes) for axes in [(0, None), (None, 1), (1, 0)]),
        *((DILATED, axes) for axes in [(0, None), (0, 0)]),
        (RESIDUAL, (0, None, None, 0)),
    ],
    narrow=[(LAYER.replace(dtypes_of=(BF16, BF16)), (0, None, None))],
    nested=[(LAYER, (0, None, 0), (0, 0, None)), (GROUPED, (None, 0), (0, None))],
    looped=[convolution((2, 5, 4), (3, 4, 4), padding="SAME", epilogue="silu")],
    donated=[],
    unsized=[],
    split=[
        # Images, channels of the result, and channels that are groups, by themselves.
        *(
            Split(case, operands, outputs, sends=set(), gradient_sends={"all-reduce"}, calls=calls)
            for case, operands, outputs, calls in [
                (LAYER.replace(a=(4, 5, 4, 2)), (P("a"), P(), P()), (P("a"),), (0, 0)),
                (
                    DOWN.replace(epilogue="bias", extras=(_row(6),)),
                    (P(), P(None, None, "b"), P("b")),
                    (P(None, None, "b"),),
                    (0, 0),
                ),
                (DEPTHWISE, (P("a", None, "b"), P(None, None, "b")), (P("a", None, "b"),), (1, 3)),
                (PATCHES, (P("a"), P(None, None, None, "b")), (P("a", None, None, "b"),), (1, 3)),
            ]
        ),
        Split(PATCHES, (P("a", "b"), P())),
        # Places and channels of equal sizes, exchanged by transposes.
        Split(CUBE, (P("a"), P("b"), P("b"), P("a", "b"))),
        # Places that are split, of which some are cut off, and then every other one is taken.
        Split(convolution((4, 8, 4), (1, 4, 2), strides=(2,), padding=((0, -1),)), (P("a", "b"), P())),
        # What both have split, and is summed over, is summed over the devices.
        Split(DOWN, (P(None, None, "a"), P(None, "a")), sends={"all-reduce"}, calls=(0, 0), explicit=False),
        # Places, and groups of several channels, are whole on each device.
        Split(SMALL, (P(None, None, "a"), P())),
        Split(GROUPED, (P("a", None, "b"), P(None, None, "b")), explicit=False),
    ],
    manual=[(LAYER.replace(a=(8, 5, 4, 2)), (P("rows"), P(), P()), P("rows"))],
)
