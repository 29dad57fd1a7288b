"""Convolutions on Hopper's tensor cores (cpp/kernels/convolution/sm90.cuh)."""

from collections.abc import Iterator

from jaxdnn.device import Target
from jaxdnn.engines.base import ProblemEngine
from jaxdnn.engines.convolution.cudnn import in_cudnn
from jaxdnn.engines.convolution.image_blocks import image_blocks
from jaxdnn.engines.convolution.implicit_gemm import ImplicitGemm, implicit_gemm
from jaxdnn.engines.convolution.problem import Convolution
from jaxdnn.engines.convolution.sm90.few_channels.heuristic import candidates as few_channels_candidates
from jaxdnn.engines.convolution.sm90.few_channels.knobs import knobs_reason as few_channels_knobs_reason
from jaxdnn.engines.convolution.sm90.few_channels.knobs import lines_reason
from jaxdnn.engines.convolution.sm90.few_channels.unit import FewChannelsUnit
from jaxdnn.engines.convolution.sm90.halo.knobs import Patches, patches_reason
from jaxdnn.engines.convolution.sm90.halo.knobs import knobs_reason as patches_knobs_reason
from jaxdnn.engines.convolution.sm90.halo.unit import HaloUnit
from jaxdnn.engines.convolution.sm90.halo_wgrad.knobs import WgradKnobs, WgradPatches, wgrad_patches_reason
from jaxdnn.engines.convolution.sm90.halo_wgrad.knobs import knobs_reason as wgrad_knobs_reason
from jaxdnn.engines.convolution.sm90.halo_wgrad.unit import plan as wgrad_plan
from jaxdnn.engines.convolution.sm90.heuristic import FEW_COLUMNS, candidates
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs, image_reason, knobs_reason, operands_reason
from jaxdnn.engines.convolution.sm90.tiled_image.heuristic import candidates as tiled_image_candidates
from jaxdnn.engines.convolution.sm90.tiled_image.knobs import knobs_reason as tiled_image_knobs_reason
from jaxdnn.engines.convolution.sm90.tiled_image.knobs import tiled_image_reason
from jaxdnn.engines.convolution.sm90.tiled_image.unit import TiledImageUnit
from jaxdnn.engines.convolution.sm90.unit import ConvolutionUnit
from jaxdnn.engines.convolution.tiled_image import TiledImage, tiled_image
from jaxdnn.engines.convolution.window_lines import WindowLines, window_lines
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.tma import DEPTH_BYTES
from jaxdnn.engines.product.unaligned import copies_reason
from jaxdnn.plan import Plan

_LINE, _HALF_LINE = 64, 32  # channels, which are 128 bytes of 16-bit floats, or 64
_FEWEST = 4  # channels of a group, the fewest that filters by patches were timed with
_FEW = 8  # channels, of which less are no 16 bytes
_FAR = 2  # strides; of more, places of few channels are no blocks, and phases have too few taps each
_HALVES = {"bfloat16", "float16"}
_Form = ImplicitGemm | WindowLines | TiledImage


class ConvolutionSm90(ProblemEngine[Convolution, Sm90Knobs | WgradKnobs]):
    """Implicit GEMM: a product's tiles, of which one operand is read by places of an image."""

    name = "sm90"
    platform = "cuda"
    problem = Convolution
    notes = Sm90.notes

    def reason(self, problem: Convolution, target: Target) -> str | None:
        form = _form(problem)
        if isinstance(form, str):
            return form
        if reason := Sm90().reason(form.product, target) or _form_reason(form):
            return reason
        # To few channels cuDNN's kernels take longer than copies do.
        if not isinstance(form, WindowLines) and (reason := copies_reason(form.product, target)):
            return reason
        first = next(self.configurations(problem, target), None)
        if first is None:
            return f"no tile fits the {problem.columns // problem.groups} columns of a group"
        # To a filter's gradient by patches cuDNN takes longer, but for one dimension [Filters by patches, 10], and for
        # few channels whose images are copied.
        by_patches = isinstance(first, WgradKnobs) and problem.c >= _FEWEST and len(problem.windows) > 1
        copied = packed(form.product)[1]
        if not isinstance(form, ImplicitGemm) or (by_patches and not copied) or not in_cudnn(problem):
            return None
        return _cudnn_reason(problem, form, first)

    def configurations(self, problem: Convolution, target: Target) -> Iterator[Sm90Knobs | WgradKnobs]:
        form = _form(problem)
        if isinstance(form, str):
            return iter(())
        if isinstance(form, TiledImage):
            return tiled_image_candidates(form, target)
        return few_channels_candidates(form, target) if isinstance(form, WindowLines) else candidates(form, target)

    def build(self, config: Sm90Knobs | WgradKnobs, problem: Convolution, target: Target) -> Plan:
        form = _form(problem)
        found = form if isinstance(form, str) else _plan(form, config, target)
        if isinstance(found, str):
            raise ValueError(f"{self.name}: {config} does not fit: {found}")
        return found


def _form_reason(form: _Form) -> str | None:
    """Why the form's kernel can't have it, or None."""
    if isinstance(form, TiledImage):
        return tiled_image_reason(form)
    return lines_reason(form) if isinstance(form, WindowLines) else image_reason(form) or operands_reason(form)


def _plan(form: _Form, config: Sm90Knobs | WgradKnobs, target: Target) -> Plan | str:
    """What one call does, or why the knobs don't fit."""
    limit = target.shared_memory
    if isinstance(config, WgradKnobs):
        if not isinstance(form, ImplicitGemm):
            return "patches are of an image that is loaded by places"
        patches = WgradPatches.of(form, config.lines)
        reason = wgrad_patches_reason(form) or wgrad_knobs_reason(patches, config, limit)
        return reason or wgrad_plan(patches, config)
    if isinstance(form, WindowLines):
        if reason := few_channels_knobs_reason(form, config, limit):
            return reason
        unit = FewChannelsUnit(form, config, target.sm_count)
    elif isinstance(form, TiledImage):
        if reason := tiled_image_knobs_reason(form, config, limit):
            return reason
        unit = TiledImageUnit(form, config, target.sm_count)
    elif isinstance(config, ConvolutionKnobs) and config.patch:
        patches = Patches.of(form, config)
        if reason := patches_reason(form) or patches_knobs_reason(patches, config, limit):
            return reason
        unit = HaloUnit(patches, config, target.sm_count)
    else:
        if reason := knobs_reason(form, config, limit):
            return reason
        unit = ConvolutionUnit(form, config, target.sm_count)
    return Plan(unit.text, "sm_90a", tuple(unit.launches), tuple(unit.scratch))


def _form(problem: Convolution) -> _Form | str:
    """The product that the convolution is, by channels of an image; where these are few, by lines of its windows, or an
    image's gradient by blocks of places; and where windows tile the image, its gradient by windows.
    """
    if tiled := tiled_image(problem):
        return tiled
    few = problem.c < _FEW and problem.groups == 1 and {problem.a.dtype, problem.b.dtype} <= _HALVES
    if few and problem.result != "image":
        return window_lines(problem)
    return (few and image_blocks(problem)) or implicit_gemm(problem)


def _cudnn_reason(problem: Convolution, gemm: ImplicitGemm, first: Sm90Knobs | WgradKnobs) -> str | None:
    """Why cuDNN, which has it too, is faster; measured in the notes of benchmarks/results/convolution_kernels.md."""
    whole_groups = problem.groups == 1 or gemm.line == DEPTH_BYTES
    if problem.result == "filter" and whole_groups and all(window.tiles for window in problem.windows):
        return None  # each place is loaded once [Tiled images, 5]
    if problem.result == "filter":
        whole = problem.c % (_LINE if wgrad_patches_reason(gemm) else _HALF_LINE) == 0
    else:
        whole = whole_groups or gemm.channels >= _LINE
    if not whole:
        return "XLA's convolutions by cuDNN are faster for so few channels in a group"
    # Each tap loads places for few multiplies, and patches of places that are far apart load more [Patches, 22].
    by_places = isinstance(first, ConvolutionKnobs) and not first.patch and problem.result != "filter"
    dilated = any(window.dilation > 1 for window in problem.windows)
    if by_places and dilated and gemm.merged == 1 and gemm.group_columns <= FEW_COLUMNS:
        return "XLA's convolutions by cuDNN are faster for so few features, of dilated windows"
    if problem.result == "image" and any(window.filter < window.stride for window in problem.windows):
        return "XLA's convolutions by cuDNN are faster where most places of the image meet no window"
    if problem.result == "image" and problem.c < _FEW and any(window.stride > _FAR for window in problem.windows):
        return "XLA's convolutions by cuDNN are faster for so few channels, strides apart"
    return None
