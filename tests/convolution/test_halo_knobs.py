"""Which convolutions the Hopper engine has by patches, and with which knobs."""

from dataclasses import replace

import pytest

from checking.cases.convolution import convolution
from checking.cases.dtypes import BF16, E4M3
from checking.convolution import edges
from checking.convolution.exact import only
from checking.convolution.plans import ENGINE, by_patches, patches
from checking.targets import H100
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm, implicit_gemm
from jaxdnn.engines.convolution.sm90.halo.knobs import patches_reason
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs

PADDED = ((1, 1), (1, 1))
SMALL = edges.SMALL | edges.GROUPS


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (only(SMALL["same"], "filter"), "sums over the places that patches have"),
        (only(convolution((2, 9, 9, 64), (3, 3, 64, 64), E4M3, padding="SAME", out_dtype=BF16)), "of 16-bit floats"),
        (only(convolution((2, 9, 9, 64), (3, 3, 64, 64), BF16, strides=(1, 2))), "with a stride"),
        (
            only(convolution((2, 9, 9, 64), (3, 3, 64, 64), BF16, lhs_dilation=(2, 1), padding=PADDED)),
            "with a stride",
        ),
        (
            only(convolution((2, 9, 9, 64), (3, 3, 64, 64), BF16, strides=(2, 2), lhs_dilation=(2, 2), padding=PADDED)),
            "windows meet some of the filter's taps",
        ),
        (
            only(
                convolution(
                    (2, 9, 9, 64),
                    (3, 3, 64, 64),
                    BF16,
                    strides=(2, 1),
                    lhs_dilation=(2, 1),
                    rhs_dilation=(2, 1),
                    padding=PADDED,
                )
            ),
            "windows meet some of the filter's taps",
        ),
        (only(convolution((2**25, 1, 1, 64), (3, 3, 64, 8), BF16, padding=PADDED)), "more places than its 32-bit"),
        (only(convolution((2, 900, 64), (3, 64, 64), BF16, rhs_dilation=(97,))), "of TMA's boxes"),
        (
            only(convolution((2, 9, 9, 72), (3, 3, 8, 72), BF16, groups=9)),
            "8 channels, which are less than a multiply's",
        ),
        (
            only(convolution((2, 9, 9, 48), (3, 3, 24, 48), BF16, groups=2)),
            "24 channels, which are no multiple of 32 bytes",
        ),
        (
            only(convolution((2, 90, 9, 64), (3, 3, 64, 64), BF16, rhs_dilation=(130, 1), padding="SAME")),
            "of TMA's boxes",
        ),
    ],
)
def test_reasons(problem, said):
    gemm = implicit_gemm(problem)
    assert isinstance(gemm, ImplicitGemm)
    assert said in (patches_reason(gemm) or "")
    assert not any(isinstance(knobs, ConvolutionKnobs) for knobs in by_patches(problem, H100))


def test_there_are_no_patches_of_four_dimensions():
    gemm = implicit_gemm(only(SMALL["one dimension"]))
    assert isinstance(gemm, ImplicitGemm)
    assert "1 to 3 dimensions, and the convolution's 4" in (patches_reason(replace(gemm, axes=4 * gemm.axes)) or "")


def test_patches_that_are_larger_than_shared_memory_are_not_offered():
    case = convolution((2, 90, 90, 64), (3, 3, 64, 64), BF16, rhs_dilation=(40, 40), padding="SAME")
    assert not by_patches(only(case), H100)
    assert ENGINE.reason(only(case), H100) is None


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("same", patches(tile_n=48, patch=16), "patch is 16; expected one of"),
        ("same", patches(tile_n=48, patch=64, cluster_m=2), "expected no cluster"),
        ("same", patches(tile_n=48, patch=64, split_k=2), "one split"),
        ("same", patches(tile_n=48, patch=64, schedule="pingpong"), "a filter that passes by is for all"),
        ("same", patches(tile_n=48, patch=64, resident=True), "filter_stages is 6; expected 27, all that stay"),
        ("same", patches(tile_n=32, patch=64, filter_stages=27, resident=True), "filters of their own"),
        ("same", patches(tile_n=48, stages=9), "bytes of shared memory, and a block has"),
        ("same", patches(tile_n=48, patch=64, stages=2, store="rows"), "store is 'rows'; expected store = 'tma'"),
        (
            "groups of 64",
            patches(tile_n=128, stages=2, patch=64),
            "the 96 columns of a group must be a multiple of it",
        ),
        ("groups of 32", patches(tile_n=64, stages=2), "groups is 1; expected 2"),
        ("groups of 32", patches(tile_n=32, stages=2, groups=2), "tiles of 64 columns and patches of 128"),
    ],
)
def test_knobs_that_do_not_fit(name, knobs, said):
    with pytest.raises(ValueError, match="does not fit") as caught:
        ENGINE.build(knobs, only(SMALL[name]), H100)
    assert said in str(caught.value)
