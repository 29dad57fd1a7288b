"""Times the configurations of a call on the device."""

import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxdnn.device import Target
from jaxdnn.engines.base import Engine
from jaxdnn.plan import Plan
from jaxdnn.planning.candidates import Request, engines_for, knobs_of, prepare, reason_against
from jaxdnn.spec import Signature, Spec

K = TypeVar("K", bound=Hashable)
_MOST_SETS, _MOST_ROUNDS = 32, 16  # of operands, in one program
_BYTES, _FLOPS = 2**29, 2**38  # that a program moves or computes at least, if these do
_SAMPLES, _SECONDS = 9, 0.002  # of each configuration


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

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self.knobs]
        said += [f"{self.workspace} B of workspace"] if self.workspace else []
        return f"{self.seconds * 1e6:.1f} us: {self.engine} {', '.join(said)}".rstrip()


def configurations(
    spec: Spec, signature: Signature, platform: str, target: Target, *, outdone: bool = True
) -> list[Measurement]:
    """Every configuration of every engine that serves the call, the fastest first; without those that are `outdone`."""
    device = jax.local_devices(backend="gpu" if platform == "cuda" else platform)[0]
    lowered: dict[tuple[str, tuple[tuple[str, object], ...], int, int], jax.stages.Lowered] = {}
    # Lowering may be what asks for this, in the midst of somebody else's tracing.
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        operands = _operand_sets(signature, target)
        rounds = _rounds(len(operands) * signature.bytes, platform, len(operands) * spec.flops(signature))
        for engine, config, plan in _prepared(Request(spec, signature, platform, target), outdone):
            knobs = knobs_of(config)
            alone = replace(spec.options, engine=engine.name, knobs=knobs, autotune="off")
            # Operands are used again, so that results in their place would be timed with a copy.
            run = partial(in_rounds, spec.unaliased.replace(options=alone).bind)
            results = jax.eval_shape(partial(run, 1, None), operands)
            program = jax.jit(partial(run, rounds), donate_argnums=0, keep_unused=True).lower(results, operands)
            lowered[engine.name, knobs, plan.workspace if plan else 0, len(lowered)] = program
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            compiled = threads.map(jax.stages.Lowered.compile, lowered.values())
            programs = dict(zip(lowered, _calls(compiled, operands, platform), strict=True))
        taken = interleaved_medians(programs, samples=_SAMPLES, seconds=_SECONDS)
    measured = [
        Measurement(engine, knobs, seconds / (rounds * len(operands)), workspace, rank)
        for (engine, knobs, workspace, rank), seconds in taken.items()
    ]
    return sorted(measured, key=lambda measurement: measurement.seconds)


def _prepared(request: Request, outdone: bool) -> list[tuple[Engine, Any, Plan | None]]:
    """Every configuration that works, with its plan, in the heuristic's order; engines that are outdone are the last.
    As many are compiled at a time as there are processors.
    """

    def plan(offer: tuple[Engine, Any]) -> tuple[Engine, Any, Plan | None] | None:
        engine, config = offer
        prepared = prepare(engine, [config], request)
        return None if isinstance(prepared, str) else (engine, *prepared)

    engines = engines_for(request.spec, request.problem)
    serving = dict.fromkeys(
        engine
        for left_out in ((True,) if outdone else (True, False))
        for engine in engines
        if not reason_against(engine, request, outdone=left_out)
    )
    offers = [
        (engine, config) for engine in serving for config in engine.configurations(request.problem, request.device)
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        return [planned for planned in threads.map(plan, offers) if planned]


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


def _rounds(bytes_of_sets: int, platform: str, flops_of_sets: int = 0) -> int:
    return 1 if platform == "cpu" else rounds_of(bytes_of_sets, flops_of_sets, _BYTES)


def rounds_of(bytes_of_sets: int, flops_of_sets: int, worth: int) -> int:
    """How often one program goes through all sets of operands: until it has moved `worth` bytes or computed long."""
    return min(_MOST_ROUNDS, max(1, min(worth // max(1, bytes_of_sets), _FLOPS // max(1, flops_of_sets))))


def _calls(
    programs: Iterable[jax.stages.Compiled], operands: Sequence[Sequence[jax.Array]], platform: str
) -> Iterator[Callable[[], Any]]:
    """What runs each program, all of which give the next one the memory of their results; on the CPU it waits."""
    results: Any = None

    def call(program: jax.stages.Compiled) -> Any:
        nonlocal results
        if results is None:
            results = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), program.args_info[0][0])
        results = program(results, operands)
        return jax.block_until_ready(results) if platform == "cpu" else results

    return (partial(call, program) for program in programs)


def in_rounds(run: Callable[..., Any], rounds: int, before: Any, sets: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of each set of operands, computed so many times in one program: what the host does for each array of
    a program takes longer than a small kernel. They are where other such results were `before`, of a call that donates
    these.
    """

    def once(sets: Sequence[Sequence[Any]]) -> list[Any]:
        return [run(*operands) for operands in sets]

    def again(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        # The compiler does not see that they are the same in each round.
        sets = jax.lax.optimization_barrier(state[0])
        return sets, once(sets)

    # The first round in front of the loop would be left out, for no other reads its results.
    return once(sets) if rounds == 1 else jax.lax.fori_loop(0, rounds, again, (sets, before))[1]


def interleaved_medians(
    calls: Mapping[K, Callable[[], Any]], *, samples: int = 15, seconds: float = 0.02, most: float = 15.0
) -> dict[K, float]:
    """Median seconds a call; a sample lasts for `seconds` at least, and takes its turn with the others' samples. There
    are fewer, but three, where all of them would take longer than `most` seconds.

    Each round is in another order, and the first of several calls is not timed: a call takes up to a third longer after
    one that draws more power, or that takes long, and in one order this would always be the same one.
    """

    def sample(call: Callable[[], Any], count: int) -> float:
        results = jax.block_until_ready(call()) if count > 1 else None
        start = time.perf_counter()
        for _ in range(count):
            results = call()
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / count

    for call in calls.values():
        sample(call, 1)  # loads code, and fills caches
    once = {name: sample(call, 1) for name, call in calls.items()}
    # The least of two, so that none is called fewer times than others that take as long: what starts a sample counts.
    expected = {
        name: min(sample(call, 3), sample(call, 3)) if once[name] < most / samples else once[name]
        for name, call in calls.items()
    }
    counts = {name: max(1, ceil(seconds / one)) for name, one in expected.items()}
    round_of_all = sum(one * counts[name] for name, one in expected.items())
    taken: dict[K, list[float]] = {name: [] for name in calls}
    order, shuffled = list(calls), random.Random(0)
    for _ in range(max(3, min(samples, int(most / round_of_all)))):
        shuffled.shuffle(order)
        for name in order:
            taken[name].append(sample(calls[name], counts[name]))
    return {name: statistics.median(times) for name, times in taken.items()}
