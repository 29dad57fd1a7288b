"""Times the configurations of a call on the device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn.device import Target
from jaxdnn.planning.candidates import Request, engines_for, knobs_of, prepare, reason_against
from jaxdnn.spec import Signature, Spec

_REPEATS = 20
_MOST_SETS = 8


@dataclass(frozen=True)
class Measurement:
    """One configuration of a call.

    Attributes:
      engine: its name.
      knobs: the engine's, by name.
      seconds: a median.
      workspace: bytes of scratch memory.
      rank: its place in the heuristic's order; 0 is what runs where nothing was measured.
    """

    engine: str
    knobs: tuple[tuple[str, object], ...]
    seconds: float
    workspace: int
    rank: int


def configurations(spec: Spec, signature: Signature, platform: str, target: Target) -> list[Measurement]:
    """Every configuration of every engine that serves the call, the fastest first."""
    device = jax.local_devices(backend="gpu" if platform == "cuda" else platform)[0]
    measured = []
    # Lowering may be what asks for this, in the midst of somebody else's tracing.
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        request = Request(spec, signature, platform, target)
        operands = _operand_sets(signature, target)
        for engine in engines_for(spec, request.problem):
            if reason_against(engine, request):
                continue
            for config in engine.configurations(request.problem, target):
                prepared = prepare(engine, [config], request)
                if isinstance(prepared, str):
                    continue
                _, plan = prepared
                knobs = knobs_of(config)
                alone = replace(spec.options, engine=engine.name, knobs=knobs, autotune="off")
                # Operands are used again, so that results in their place would be timed with a copy.
                seconds = _time(spec.unaliased.replace(options=alone).bind, operands)
                measured.append(Measurement(engine.name, knobs, seconds, plan.workspace if plan else 0, len(measured)))
    return sorted(measured, key=lambda measurement: measurement.seconds)


def _operand_sets(signature: Signature, target: Target) -> list[list[jax.Array]]:
    """Random operands, in as many copies as it takes to leave the L2 cache between two uses of one."""
    copies = min(_MOST_SETS, max(1, ceil(3 * target.l2_bytes / max(1, signature.bytes))))
    keys = iter(jax.random.split(jax.random.key(0), copies * len(signature.operands)))

    def random(array: jax.ShapeDtypeStruct) -> jax.Array:
        key = next(keys)
        if jnp.issubdtype(array.dtype, jnp.inexact):
            return jax.random.normal(key, array.shape, array.dtype)
        return jax.random.randint(key, array.shape, 0, 2).astype(array.dtype)

    return [[random(array) for array in signature.operands.values()] for _ in range(copies)]


def _time(function: Callable[..., Any], operands: Sequence[Sequence[jax.Array]]) -> float:
    run = jax.jit(lambda sets: [function(*one) for one in sets]).lower(operands).compile()
    jax.block_until_ready(run(operands))
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run(operands))
        times.append(time.perf_counter() - started)
    return float(np.median(times)) / len(operands)
