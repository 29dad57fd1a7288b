"""How a benchmark measures: two implementations of one case, interleaved, against the speed of a copy.

A GPU kernel may take less time than the host needs to call it, and its operands may fit in the L2 cache; neither is
what a large program sees. So on a GPU one call of a jitted function applies the implementation to several sets of
operands, which together exceed the cache, in so many rounds that starting the program, which takes about 2 us for each
of its arrays, costs little of their time; and many calls are in flight between two synchronisations. On the CPU each
call is waited for. A call is given the memory of the results before, unless it is a whole program, which is large:
results elsewhere would have XLA write a new graph of the program's kernels, 2 to 4 us each.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn.planning.calls import default_platform, find_calls
from jaxdnn.planning.measure import in_rounds, interleaved_medians, rounds_of
from jaxdnn.planning.select import select

_FEWEST_SETS, _MOST_SETS = 8, 64
_BEYOND_CACHES = 2**27  # bytes: twice the L2 cache of an H100 and more
_WORTH_A_START = 2**30  # bytes: 0.25 ms of an H200 and more


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case.

    Attributes:
      prepare: turns the case's operands into those of `run`, untimed.
      run: what is timed; every array that it returns is kept.
    """

    prepare: Callable[..., Sequence[Any]]
    run: Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One row of a benchmark: jaxdnn and plain JAX on the same operands.

    Attributes:
      call: what is computed ("rms_norm backward").
      shape: of the main operand, for people ("4096 x 1024").
      dtype: of the main operand.
      bytes: the fewest bytes that must move.
      flops: the operations that must be done; 0 for a case that memory alone bounds.
      operands: from a random key, the arrays of one set, or trees of them.
      jaxdnn: the library.
      xla: what one writes without it.
      sample: of one set of operands and an implementation's results, some of these, each with what it is in float64.
      alone: whether it is a whole program, larger than every cache, whose memory is of interest too.
    """

    call: str
    shape: str
    dtype: str
    bytes: int
    flops: int
    operands: Callable[[jax.Array], Sequence[Any]]
    jaxdnn: Implementation
    xla: Implementation
    sample: Callable[[Sequence[Any], Any], Sequence[tuple[np.ndarray, np.ndarray]]] | None = None
    alone: bool = False

    @property
    def sets(self) -> int:
        """Of operands, that one program is applied to."""
        if self.alone:
            return 1
        least, most = (_FEWEST_SETS, _MOST_SETS) if jax.default_backend() == "gpu" else (1, _FEWEST_SETS)
        return min(most, max(least, _BEYOND_CACHES // self.bytes))

    @property
    def rounds(self) -> int:
        """Of all sets, in one program."""
        if self.alone or jax.default_backend() != "gpu":
            return 1
        return rounds_of(self.sets * self.bytes, self.sets * self.flops, _WORTH_A_START)

    def __str__(self) -> str:
        return f"{self.call:<29} {self.shape:>15} {self.dtype:<8}"


@dataclass(frozen=True)
class Measurement:
    """Median seconds of one application of each implementation, and how far their results are from float64.

    Attributes:
      jaxdnn, xla: seconds.
      engines: that served jaxdnn's.
      error, xla_error: the root mean square of the differences, of that of the results; of several arrays, the largest.
        NaN where no results are sampled.
      temporary, xla_temporary: bytes that a program holds beside its arguments and results; NaN where it is no whole
        program.
    """

    jaxdnn: float
    xla: float
    engines: str
    error: float
    xla_error: float
    temporary: float
    xla_temporary: float


@dataclass(frozen=True)
class Compiled:
    """A case's programs.

    Attributes:
      operands: of a random key, a set of them.
      prepare, run: by the name of the implementation.
      engines: that serve jaxdnn's.
    """

    case: Case
    operands: jax.stages.Compiled
    prepare: Mapping[str, jax.stages.Compiled]
    run: Mapping[str, jax.stages.Compiled]
    engines: str

    def measure(self) -> Measurement:
        """Times both implementations, on the same random operands."""
        case = self.case
        operands = [self.operands(key) for key in jax.random.split(jax.random.key(0), case.sets)]
        sets = {name: [prepare(*arrays) for arrays in operands] for name, prepare in self.prepare.items()}
        calls = {name: _over_sets(program, sets[name]) for name, program in self.run.items()}
        seconds = {name: total / (case.sets * case.rounds) for name, total in interleaved_medians(calls).items()}
        errors = {name: _error(case, operands[0], call) for name, call in calls.items()}
        memory = {name: _temporary(program) if case.alone else math.nan for name, program in self.run.items()}
        return Measurement(
            jaxdnn=seconds["jaxdnn"],
            xla=seconds["xla"],
            engines=self.engines,
            error=errors["jaxdnn"],
            xla_error=errors["xla"],
            temporary=memory["jaxdnn"],
            xla_temporary=memory["xla"],
        )


def compiled(case: Case) -> Compiled:
    """Compiles a case's programs; several threads may do so at a time."""

    def program(run: Callable[..., Any], *arrays: Any) -> jax.stages.Compiled:
        return jax.jit(run).lower(*arrays).compile()

    key = jax.eval_shape(jax.random.key, 0)
    implementations = {"jaxdnn": case.jaxdnn, "xla": case.xla}
    operands = jax.eval_shape(case.operands, key)
    arrays = {name: jax.eval_shape(one.prepare, *operands) for name, one in implementations.items()}
    return Compiled(
        case,
        program(case.operands, key),
        {name: program(one.prepare, *operands) for name, one in implementations.items()},
        {
            name: _program_of_sets(one.run, [arrays[name]] * case.sets, rounds=case.rounds, reuses=not case.alone)
            for name, one in implementations.items()
        },
        _engines(case.jaxdnn.run, arrays["jaxdnn"]),
    )


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of the better of a plain copy and a negation of large arrays: the limit."""
    count = (256 if jax.default_backend() == "gpu" else 16) * 2**20 // 4
    arrays = [(jnp.full(count, i, jnp.float32),) for i in range(_FEWEST_SETS)]
    calls = {f.__name__: _over_sets(_program_of_sets(f, arrays), arrays) for f in (jnp.copy, jnp.negative)}
    return len(arrays) * 2 * 4 * count / min(interleaved_medians(calls).values())


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))


def _error(case: Case, operands: Sequence[Any], call: Callable[[], Sequence[Any]]) -> float:
    if case.sample is None:
        return math.nan
    pairs = case.sample(operands, call()[0])
    return max(float(np.linalg.norm(found - exact) / np.linalg.norm(exact)) for found, exact in pairs)


def _engines(run: Callable[..., Any], arrays: Sequence[jax.Array]) -> str:
    selected = (select(call.spec, call.signature, default_platform()) for call in find_calls(run, *arrays))
    return " + ".join(dict.fromkeys(selection.engine for selection in selected))


def _calls(sets: Sequence[Sequence[Any]]) -> Sequence[Sequence[Sequence[Any]]]:
    """The sets of operands that each call of a program takes: all of them on a GPU."""
    return [sets] if jax.default_backend() == "gpu" else [(arrays,) for arrays in sets]


def _program_of_sets(
    run: Callable[..., Any], sets: Sequence[Sequence[Any]], *, rounds: int = 1, reuses: bool = True
) -> jax.stages.Compiled:
    """The implementation, applied to each set of operands of a call, in `rounds`. It `reuses` the memory of its first
    argument, the results of the call before, or has None: where temporary arrays are counted, which would be there too.
    """
    (of_call, *_) = _calls(sets)

    def compute(before: Any, *sets: Sequence[Any]) -> list[Any]:
        return in_rounds(run, rounds, before, sets)

    before = jax.eval_shape(partial(in_rounds, run, 1, None), of_call) if reuses else None
    return jax.jit(compute, donate_argnums=0, keep_unused=True).lower(before, *of_call).compile()


def _over_sets(program: jax.stages.Compiled, sets: Sequence[Sequence[Any]]) -> Callable[[], Sequence[Any]]:
    """The results of each set of operands, until the next call; on the CPU each call is waited for."""
    wait = (lambda results: results) if jax.default_backend() == "gpu" else jax.block_until_ready
    calls, (before, *_) = _calls(sets), program.args_info[0]
    given = [jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), before) for _ in calls]

    def compute() -> Sequence[Any]:
        found = []
        for i, arrays in enumerate(calls):
            results = wait(program(given[i], *arrays))
            found += results
            if before is not None:
                given[i] = results
        return found

    return compute


def _temporary(program: jax.stages.Compiled) -> float:
    """Bytes that it holds beside its arguments and results."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes if analysis else math.nan
