"""What the tests of the Hopper engine of convolutions do with its plans."""

from dataclasses import replace

import numpy as np

from checking.compiler_log import compile_checked, stack_frames
from checking.convolution import problems
from checking.convolution.exact import arrays, check
from checking.product.calls import run_plan
from checking.targets import H100
from jaxdnn import device
from jaxdnn.engines.convolution.sm90.engine import ConvolutionSm90
from jaxdnn.engines.convolution.sm90.knobs import ConvolutionKnobs

ENGINE = ConvolutionSm90()
FEW = replace(H100, sm_count=3)  # multiprocessors, so that each works through several tiles


def by_patches(problem, target):
    """The configurations that load patches of the image."""
    return [knobs for knobs in ENGINE.configurations(problem, target) if getattr(knobs, "patch", 0)]


def by_places(problem, target):
    """The others."""
    return [knobs for knobs in ENGINE.configurations(problem, target) if not getattr(knobs, "patch", 0)]


def emulated_plan(problem, knobs=None):
    """Of these knobs, or of those that come first without patches."""
    return ENGINE.build(knobs or by_places(problem, FEW)[0], problem, FEW)


def check_emulated(call, machine, number):
    """The plan of that number of an `Emulated`."""
    operands, types = arrays(call), call.signature.results.values()
    results = [np.zeros(type_.shape, type_.dtype) for type_ in types]
    machine.run(number, operands, results)
    check(call, operands, results)


def check_where_finite(call, operands, machine, number):
    """Some results of that plan are no numbers, and these are the ones that have to be."""
    results = [np.zeros(type_.shape, type_.dtype) for type_ in call.signature.results.values()]
    machine.run(number, operands, results)
    for found, want in zip(results, problems.run(call.problem, operands), strict=True):
        finite = np.isfinite(want)
        assert finite.any()
        assert not finite.all()
        np.testing.assert_array_equal(np.isfinite(np.float64(found)).ravel(), finite)


def patches(tile_m=128, patch=128, filter_stages=6, **knobs):
    """Knobs of patches, in blocks by themselves."""
    return ConvolutionKnobs(tile_m=tile_m, patch=patch, filter_stages=filter_stages, **{"cluster_m": 1} | knobs)


def check_compiled(problem, most, offered=by_places):
    """The first `most` of those `offered`, for Hopper: their code does not spill, or wait for each multiply."""
    # What differs in numbers alone is the same code.
    offered = [replace(knobs, split_k=min(knobs.split_k, 2)) for knobs in offered(problem, H100)]
    for knobs in list(dict.fromkeys(offered))[:most]:
        log = compile_checked(ENGINE.build(knobs, problem, H100), knobs).log
        assert not any(stack_frames(log).values()), f"{knobs} keeps in local memory what multiplies wait for"


def check_on_gpu(call, forced, *, chosen=True):
    """Every configuration, unless only those that are forced are of interest, on the GPU; each twice, with the same
    bits.
    """
    operands = arrays(call)
    for target in (device.gpus()[0], replace(device.gpus()[0], sm_count=3)):
        for knobs in (*(ENGINE.configurations(call.problem, target) if chosen else ()), *forced):
            plan = ENGINE.build(knobs, call.problem, target)
            results, again = (run_plan(plan, call.signature.results.values(), operands) for _ in range(2))
            check(call, operands, results)
            same = [one.tobytes() == other.tobytes() for one, other in zip(results, again, strict=True)]
            assert all(same), f"{knobs} is not deterministic"
