"""Calls of convolutions whose results are exact: small numbers, and the problem in float64."""

import jax.numpy as jnp
import numpy as np

from checking.calls import calls_of
from checking.convolution import problems
from jaxdnn.engines.convolution.problem import Convolution


def calls(case, axes=None):
    """The calls of a case that are convolutions, by their directions."""
    found = [call for call in calls_of(case, axes) if isinstance(call.problem, Convolution)]
    return {call.problem.result: call for call in found}


def only(case, direction="output"):
    return calls(case)[direction].problem


def _operand(type_, random):
    """Small numbers, of which sums and products are exact."""
    values = random.integers(-3, 4, type_.shape)
    return (values if np.issubdtype(type_.dtype, np.integer) else values / 4).astype(type_.dtype)


def arrays(call):
    """What is no number in the image of one convolution of a batch must not reach the one before, nor what is none in a
    group the others.
    """
    random = np.random.default_rng(0)
    found = [_operand(type_, random) for type_ in call.signature.operands.values()]
    image = call.problem.b if call.problem.result == "image" else call.problem.a
    if image.batch_stride:
        found[image.buffer.index][2] = np.nan
    if call.problem.groups > 1:
        channels = call.problem.k if call.problem.result == "image" else call.problem.c
        found[image.buffer.index][..., channels].flat[0] = np.nan
    return found


def check(call, operands, found):
    """Against the problem, in float64: sums are exact, and rounded once."""
    for got, want in zip(found, problems.run(call.problem, operands), strict=True):
        eps = float(jnp.finfo(got.dtype).eps) if jnp.issubdtype(got.dtype, jnp.floating) else 0
        bound = eps * max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
        np.testing.assert_allclose(np.float64(got).ravel(), want, rtol=0, atol=bound)
