"""Calls for the tests of the Hopper engine of convolutions: small and large ones, and operands that tell all."""

from checking.cases.convolution import FIRST, convolution
from checking.cases.dtypes import BF16, E4M3, F16, F32, I8, I32
from checking.convolution.exact import calls
from checking.convolution.plans import ENGINE
from checking.targets import H100
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs


def row(n, dtype=BF16):
    return ((n,), dtype)


# Edges in each direction: places of several images in a tile, channels that end in a stage, taps outside of the image.
SMALL = {
    "same": convolution((3, 9, 8, 72), (3, 3, 72, 40), BF16, padding="SAME"),
    "stride": convolution((2, 11, 10, 64), (3, 2, 64, 24), F16, strides=(2, 3), padding=((1, 0), (2, 1))),
    "flipped": convolution((2, 9, 7, 16), (3, 2, 16, 72), BF16, padding=((1, 1), (0, 1)), flip=True),
    "one dimension": convolution((3, 70, 64), (4, 64, 48), BF16, rhs_dilation=(3,), padding=((-2, 5),)),
    "three dimensions": convolution((2, 4, 5, 6, 64), (3, 2, 3, 64, 32), BF16, padding="SAME"),
    "wider than the image": convolution((2, 3, 3, 64), (5, 5, 64, 16), BF16, padding=((3, 4), (2, 3))),
    "single places": convolution((2, 7, 6, 64), (1, 1, 64, 32), BF16, strides=(2, 3)),
    "stride and dilation": convolution(
        (2, 17, 13, 64), (3, 2, 64, 32), BF16, strides=(2, 4), rhs_dilation=(3, 2), padding=((2, 3), (-1, 1)), flip=True
    ),
    "dilated image": convolution((2, 6, 5, 64), (3, 4, 64, 32), F16, lhs_dilation=(3, 2), padding=((2, 1), (0, 4))),
    "dilated image, stride": convolution(
        (2, 9, 7, 64), (3, 2, 64, 32), BF16, lhs_dilation=(3, 4), strides=(2, 6), padding=((2, 1), (3, 0))
    ),
    "transposed": convolution((1, 3, 4, 3, 64), (2, 2, 2, 64, 32), BF16, kind="conv_transpose", strides=(2, 2, 2)),
    "lines of 64 bytes": convolution((2, 9, 8, 96), (3, 3, 96, 32), BF16, padding="SAME"),
    "lines of 64 bytes, flipped": convolution((2, 9, 8, 32), (3, 3, 32, 96), BF16, padding="SAME", flip=True),
    "lines of 32 bytes": convolution((2, 9, 8, 16), (3, 3, 16, 48), BF16, strides=(2, 1), padding="SAME"),
    "groups of 32": convolution((2, 6, 7, 64), (3, 3, 32, 128), BF16, padding="SAME", groups=2),
    "groups of 16": convolution((2, 6, 7, 32), (3, 3, 16, 32), BF16, rhs_dilation=(2, 2), padding="SAME", groups=2),
    "groups of 16, the last alone": convolution(
        (2, 11, 12, 80), (3, 2, 16, 160), F16, strides=(2, 1), padding=((1, 1), (0, 1)), flip=True, groups=5
    ),
    "groups of 32 to 32": convolution((2, 6, 7, 192), (2, 2, 32, 192), BF16, padding="SAME", groups=6),
    "groups of 8": convolution((2, 9, 8, 72), (3, 3, 8, 72), BF16, padding="SAME", groups=9),
    "groups of 8, 16 channels": convolution((2, 6, 5, 48), (2, 3, 16, 24), BF16, padding="SAME", groups=3),
    "groups of 8 to 16": convolution((2, 13, 9, 88), (2, 3, 8, 176), F16, strides=(2, 1), padding="SAME", groups=11),
    "groups of 3": convolution((3, 60, 51), (3, 3, 68), BF16, strides=(2,), rhs_dilation=(2,), groups=17),
    "groups of 24": convolution((2, 7, 6, 72), (3, 2, 24, 48), BF16, padding="SAME", groups=3),
    "groups of 48 to 48": convolution((2, 7, 6, 144), (3, 3, 48, 144), BF16, padding="SAME", groups=3),
    "groups of 48": convolution((2, 5, 4, 96), (2, 3, 48, 64), BF16, padding="SAME", groups=2),
    "odd channels": convolution((2, 11, 10, 21), (3, 2, 21, 35), BF16, strides=(2, 3), padding="SAME"),
    "channels in pairs": convolution((2, 6, 7, 42), (3, 3, 42, 70), F16, padding="SAME"),
    "few channels": convolution((2, 12, 11, 8), (3, 3, 8, 16), BF16, padding="SAME"),
    "groups": convolution((2, 6, 7, 128), (3, 3, 64, 128), BF16, padding="SAME", groups=2),
    "groups of 80": convolution((2, 5, 4, 160), (2, 3, 80, 64), BF16, padding="SAME", groups=2),
    "epilogue": convolution(
        (2, 6, 7, 64), (3, 3, 64, 64), BF16, padding="SAME", epilogue="bias gelu", extras=(row(64),)
    ),
    "bias": convolution((2, 6, 7, 64), (3, 3, 64, 64), BF16, padding="SAME", epilogue="bias", extras=(row(64),)),
    "residual": convolution(
        (2, 9, 8, 64), (3, 3, 64, 72), BF16, padding="SAME", epilogue="residual",
        extras=(row(72), ((2, 9, 8, 72), BF16)),
    ),
    "shortcut": convolution(
        (2, 9, 8, 64), (3, 3, 64, 72), BF16, padding="SAME", epilogue="shortcut",
        extras=(row(72), ((2, 9, 8, 72), BF16)),
    ),
    "residual, phases": convolution(
        (2, 6, 5, 64), (3, 4, 64, 32), F16, lhs_dilation=(3, 2), padding=((2, 1), (0, 4)), epilogue="residual",
        extras=(row(32, F16), ((2, 17, 10, 32), F16)),
    ),
    "reductions": convolution((2, 6, 7, 64), (3, 3, 64, 40), BF16, padding="SAME", epilogue="sums of channels"),
    "stored elsewhere": convolution((2, 64, 6, 7), (36, 64, 3, 3), BF16, layout=FIRST, padding="SAME"),
}  # fmt: skip
MAPPED = {
    "images, mapped": (SMALL["few channels"], (0, None)),
    "both, mapped": (convolution((2, 4, 8, 64), (3, 2, 64, 40), BF16, padding="SAME"), (0, 0)),
    "filters, mapped": (SMALL["stride"], (None, 0)),
    "residuals, mapped": (SMALL["residual"], (0, 0, None, 0)),
    "residual, both mapped": (SMALL["residual"], (0, 0, None, None)),
    "groups, mapped": (convolution((2, 8, 16, 96), (3, 2, 32, 96), BF16, padding="SAME", groups=3), (0, 0)),
}
PROBLEMS = {
    f"{name}, {direction}": call
    for name, (case, axes) in ({name: (case, None) for name, case in SMALL.items()} | MAPPED).items()
    for direction, call in calls(case, axes).items()
    if not ENGINE.reason(call.problem, H100)
}
# What no heuristic would choose for so few places.
FORCED = {
    "same, output": [
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=2),
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=1, split_k=5),
    ],
    "same, image": [Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=1, cluster_n=2, consumers=1)],
    "flipped, image": [
        Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=2, cluster_n=2, consumers=1),
        Sm90Knobs(tile_m=128, tile_n=80, stages=3, cluster_m=1, swapped=True),
    ],
    "bias, output": [
        Sm90Knobs(tile_m=64, tile_n=96, stages=3, cluster_m=1, consumers=1, epilogue_stages=1, swapped=True)
    ],
    "three dimensions, output": [
        Sm90Knobs(tile_m=64, tile_n=112, stages=3, cluster_m=1, schedule="pingpong", swapped=True)
    ],
    "both, mapped, output": [Sm90Knobs(tile_m=128, tile_n=48, stages=3, cluster_m=1, epilogue_stages=1, swapped=True)],
    "residual, output": [
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=1, schedule="pingpong", epilogue_stages=1, fetch="tma"),
        Sm90Knobs(tile_m=256, tile_n=64, stages=2, cluster_m=1, fetch="tma"),
        Sm90Knobs(tile_m=64, tile_n=96, stages=2, cluster_m=1, consumers=1, epilogue_stages=3, fetch="tma"),
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=2),
    ],
    "shortcut, output": [
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=1, schedule="pingpong", fetch="tma", swapped=True),
        Sm90Knobs(tile_m=128, tile_n=112, stages=2, cluster_m=1, epilogue_stages=1, fetch="tma", swapped=True),
    ],
    "reductions, output": [Sm90Knobs(tile_m=64, tile_n=48, stages=3, cluster_m=1, consumers=1, swapped=True)],
    "stride, filter": [
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=2),
    ],
    "three dimensions, filter": [Sm90Knobs(tile_m=256, tile_n=64, stages=3, cluster_m=1, split_k=3)],
    "groups of 32 to 32, output": [
        Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=2, consumers=1, groups=2),
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=1, schedule="pingpong", groups=2),
        Sm90Knobs(tile_m=128, tile_n=64, stages=3, cluster_m=1, split_k=2, groups=2),
    ],
    "groups of 16, the last alone, image": [
        Sm90Knobs(tile_m=256, tile_n=32, stages=3, cluster_m=1, groups=2, store="rows"),
    ],
    "groups of 16, the last alone, filter": [
        Sm90Knobs(tile_m=192, tile_n=64, stages=3, cluster_m=1, consumers=3, split_k=2),
    ],
    "groups, filter": [Sm90Knobs(tile_m=64, tile_n=64, stages=3, cluster_m=2, consumers=1)],
}
RUNS = [(name, None) for name in PROBLEMS] + [(name, knobs) for name, several in FORCED.items() for knobs in several]
LARGE = {
    "56": convolution((256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME"),
    "28": convolution((256, 28, 28, 128), (3, 3, 128, 128), F16, padding="SAME"),
    "7": convolution((256, 7, 7, 512), (3, 3, 512, 512), BF16, padding="SAME"),
    "down": convolution((256, 56, 56, 256), (1, 1, 256, 512), BF16, strides=(2, 2)),
    "strided": convolution((64, 56, 56, 128), (3, 3, 128, 256), BF16, strides=(2, 2), padding="SAME"),
    "dilated": convolution((16, 65, 65, 256), (3, 3, 256, 256), BF16, padding="SAME", rhs_dilation=(12, 12)),
    "volume": convolution((4, 16, 56, 56, 64), (3, 3, 3, 64, 64), BF16, padding="SAME"),
    "volume of few channels": convolution((1, 64, 64, 64, 32), (3, 3, 3, 32, 32), BF16, padding="SAME"),
    "16 groups": convolution((32, 56, 56, 256), (3, 3, 16, 256), BF16, padding="SAME", groups=16, rhs_dilation=(2, 2)),
    "groups of 8": convolution((128, 28, 28, 256), (3, 3, 8, 256), BF16, padding="SAME", groups=32),
    "groups of 8 to 32": convolution((64, 28, 28, 256), (3, 3, 8, 1024), F16, padding="SAME", groups=32),
    "groups of 48": convolution((128, 14, 14, 432), (3, 3, 48, 432), BF16, padding="SAME", groups=9),
    "groups, float32": convolution((64, 28, 28, 256), (3, 3, 16, 256), F32, padding="SAME", groups=16),
    "32 groups": convolution((128, 14, 14, 1024), (3, 3, 32, 1024), BF16, padding="SAME", groups=32),
    "16 groups, stride": convolution((9, 56, 56, 256), (3, 3, 16, 512), F16, padding="SAME", groups=16, strides=(2, 2)),
    "sound": convolution((64, 3000, 80), (3, 80, 512), BF16, padding="SAME"),
    "gelu": convolution(
        (64, 28, 28, 128), (3, 3, 128, 256), BF16, padding="SAME", epilogue="bias gelu", extras=(row(256),)
    ),
    "residual": convolution(
        (64, 128, 28, 28), (128, 128, 3, 3), BF16, layout=FIRST, padding="SAME", epilogue="residual",
        extras=(((128, 1, 1), BF16), ((64, 128, 28, 28), BF16)),
    ),
    "reductions": convolution((64, 28, 28, 128), (3, 3, 128, 128), BF16, padding="SAME", epilogue="sums of channels"),
    "float8": convolution((64, 28, 28, 128), (3, 3, 128, 256), E4M3, padding="SAME", out_dtype=BF16),
    "float32": convolution((64, 28, 28, 64), (3, 3, 64, 64), F32, padding="SAME"),
    "int8": convolution((64, 28, 28, 128), (3, 3, 128, 256), I8, padding="SAME", out_dtype=I32),
}  # fmt: skip


# On a GPU, dtypes that are not multiplied elsewhere too.
COMPUTED = PROBLEMS | {
    f"{dtype} {size}, {direction}": call
    for dtype in (E4M3, F32, I8)
    for size in (9, 30)
    for direction, call in calls(
        convolution(
            (3, size, size + 1, 32), (3, 2, 32, 64), dtype, padding="SAME", out_dtype=I32 if dtype == I8 else F32
        )
    ).items()
    if not ENGINE.reason(call.problem, H100)
}
COMPUTED |= {
    f"float32, groups of {channels}": calls(
        convolution((3, 9, 10, 5 * channels), (3, 2, channels, 5 * channels), F32, padding="SAME", groups=5)
    )["image"]
    for channels in (8, 16)
}
