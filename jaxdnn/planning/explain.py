"""`explain`: what will run, before it runs."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdnn.api_boundary import api_boundary
from jaxdnn.config import current_options
from jaxdnn.device import Target, find_target
from jaxdnn.planning.cache import recall
from jaxdnn.planning.calls import Call, NoDerivative, default_platform, find_calls, find_differentiated_calls
from jaxdnn.planning.candidates import knobs_of
from jaxdnn.planning.outline import Outline, Outlined
from jaxdnn.planning.select import NoEngineError, Selection, select


@dataclass(frozen=True)
class Work:
    """What calls must do; of symbolic shapes, as symbolic numbers.

    Attributes:
      flops: the floating-point operations.
      bytes: what reading every operand and writing every result once moves.
    """

    flops: int
    bytes: int

    @classmethod
    def of(cls, calls: Iterable[Call]) -> "Work":
        """That of all calls, each as often as it occurs."""
        calls = tuple(calls)
        flops = sum(call.count * call.spec.flops(call.signature) for call in calls)
        return cls(flops, sum(call.count * call.signature.bytes for call in calls))

    def __str__(self) -> str:
        if not isinstance(self.bytes, int):
            return f"{self.bytes} B moved, {self.flops} flops"
        return f"{_size(self.bytes)} moved, {self.flops:.3g} flops"


@dataclass(frozen=True)
class ExplainedCall:
    """One call of an `Explanation`.

    Attributes:
      call: the call and how often it occurs.
      selection: what runs; None if `options(fallback=False)` leaves nothing.
      reason: why nothing runs, else empty.
      limit: seconds in which the device's memory could move the call's bytes; None where its bandwidth is not known.
      seconds: what the selection takes, if `autotune` has measured that on this device; else None.
    """

    call: Call
    selection: Selection | None
    reason: str
    limit: float | None
    seconds: float | None

    @property
    def engine(self) -> str:
        """The engine's name, or "none"."""
        return self.selection.engine if self.selection else "none"

    @property
    def native(self) -> bool:
        """Whether a kernel of ours runs, and not XLA or nothing."""
        return self.selection is not None and self.selection.plan is not None

    @property
    def key(self) -> Hashable:
        """What tells it from other calls, but for where it stands and how often it occurs."""
        return self.call.spec, tuple(self.call.arrays)

    @property
    def fuses(self) -> bool:
        """Whether the kernel does something besides what the op is named for."""
        return self.native and bool(self.call.spec.fused)

    @property
    def share(self) -> float | None:
        """The measured share of the speed of the device's memory, where that is known."""
        return self.limit / self.seconds if self.limit and self.seconds else None

    @property
    def source(self) -> str:
        """The translation unit that is compiled for this call, as CUDA C++; empty if there is none."""
        return self.selection.plan.unit if self.selection and self.selection.plan else ""

    @property
    def title(self) -> str:
        """The call, and how often it occurs."""
        return self.call.spec.title + (f" x{self.call.count}" if self.call.count > 1 else "")

    def lines(self) -> list[str]:
        """What there is to say of this call alone."""
        spec, signature = self.call.spec, self.call.signature
        config, plan = (self.selection.config, self.selection.plan) if self.selection else (None, None)
        knobs = (f"{name}={value}" for name, value in knobs_of(config)) if config else ()
        cost = [str(Work(spec.flops(signature), signature.bytes))]
        cost += [f"{_size(plan.workspace)} of workspace"] if plan and plan.workspace else []
        cost += [f"{self.limit * 1e6:.1f} us at the speed of memory"] if self.limit is not None else []
        cost += [f"{self.seconds * 1e6:.1f} us measured"] if self.seconds is not None else []
        lines = [", ".join(self.call.arrays), ", ".join(cost), ", ".join(knobs), self.reason]
        return [line for line in lines if line]


@dataclass(frozen=True, repr=False)
class Explanation(Outlined):
    """What will run: text in the terminal, HTML in a notebook, and data.

    Attributes:
      device: its name.
      sections: title and calls of the function, then of the function with its derivative.
    """

    device: str
    sections: tuple[tuple[str, tuple[ExplainedCall, ...]], ...]

    @property
    def forward(self) -> Work:
        """The work of all jaxdnn calls of the function, whichever engine runs them, but for its backward pass."""
        return self._work(backward=False)

    @property
    def backward(self) -> Work:
        """That of its backward pass, in which what is recomputed counts again."""
        return self._work(backward=True)

    def source(self) -> str:
        """The CUDA C++ of the kernels, each translation unit once; of calls that have none, what runs instead."""
        units: dict[str, list[str]] = {}
        for one in self._numbered().values():
            rejected = () if one.native or one.selection is None else one.selection.rejected
            why = "".join(f"; not {name}: {reason}" for name, reason in rejected)
            units.setdefault(one.source, []).append(f"// {one.call.spec.title}, on {one.engine}{why}{one.reason}")
        return "\n".join("\n".join([*dict.fromkeys(titles), unit]) for unit, titles in units.items())

    def outline(self) -> Outline:
        """A summary, then each section. A call that two of them have is described once, and has one number."""
        numbered = self._numbered()
        numbers = {one.key: number for number, one in numbered.items()}
        described: set[int] = set()

        def entry(one: ExplainedCall) -> Outline:
            number = numbers[one.key]
            lines = () if number in described else tuple(one.lines())
            described.add(number)
            where = ", in the backward pass" if one.call.backward else ""
            return Outline(f"{number}  {one.title}: {one.engine}{where}", lines, folded=True)

        sections = [Outline(f"{title}{_engines(calls)}", tuple(map(entry, calls))) for title, calls in self.sections]
        passes = {"forward": self.forward, "backward": self.backward}
        work = "; ".join(f"{name} {work}" for name, work in passes.items() if work != Work(0, 0))
        total = [Outline(f"In total: {work}")] if work else []
        return Outline(f"jaxdnn on {self.device}", (*_summary(numbered), *total, *sections))

    def _work(self, backward: bool) -> Work:
        # The last section that has calls has those of all others.
        calls = next((calls for _, calls in reversed(self.sections) if calls), ())
        return Work.of(one.call for one in calls if one.call.backward == backward)

    def _numbered(self) -> dict[int, ExplainedCall]:
        """The distinct calls of all sections, numbered from 1."""
        distinct: dict[Hashable, ExplainedCall] = {}
        for _, calls in self.sections:
            for one in calls:
                distinct.setdefault(one.key, one)
        return dict(enumerate(distinct.values(), 1))


def _summary(calls: Mapping[int, ExplainedCall]) -> list[Outline]:
    """What was fused, what XLA runs, why engines were passed over, and how near to the limit calls are."""
    fallen = {number: one for number, one in calls.items() if not one.native}
    rejected = [
        (number, name, reason)
        for number, one in calls.items()
        for name, reason in (one.selection.rejected if one.selection else ())
    ]
    engines: dict[str, dict[str, None]] = {}
    for _, name, reason in rejected:
        engines.setdefault(reason, {})[name] = None
    why_fallen = {reason for number, _, reason in rejected if number in fallen}

    def grouped(pairs: Iterable[tuple[int, str]]) -> tuple[str, ...]:
        """Each text once, with the numbers of the calls that it is about."""
        groups: dict[str, dict[int, None]] = {}
        for number, text in pairs:
            groups.setdefault(text, {})[number] = None
        return tuple(f"{text} ({_listed(numbers, len(calls))})" for text, numbers in groups.items())

    def reasons(of_fallen: bool) -> tuple[str, ...]:
        return grouped(
            (number, f"{', '.join(engines[reason])}: {reason}")
            for number, _, reason in rejected
            if (reason in why_fallen) == of_fallen
        )

    names = ", ".join(f"{one.title} ({number})" for number, one in fallen.items())
    shares = ", ".join(f"{one.share:.0%} ({number})" for number, one in calls.items() if one.share is not None)
    summary = (
        Outline(f"Without a kernel of ours: {names or 'none'}", reasons(of_fallen=True)),
        Outline("Fused", grouped((n, ", ".join(_counted(c.call.spec.fused))) for n, c in calls.items() if c.fuses)),
        Outline("Not fused", grouped((n, c.call.spec.unfused) for n, c in calls.items() if c.call.spec.unfused)),
        Outline("Passed over", reasons(of_fallen=False)),
        Outline("Measured share of the speed of memory", (shares,) if shares else ()),
    )
    return [outline for outline in summary if outline.parts or outline is summary[0]] if calls else []


@api_boundary("explain")
def explain(fn: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Tells which engine each jaxdnn call in a function runs on, forward and backward, and why not on the others.

    Nothing is executed; kernels are compiled, since whether they can be is part of the answer.

    Args:
      fn: a function of arrays. Options in force when `explain` is called apply.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct` for shapes alone.
      platform: "cpu" or "cuda"; the default is the GPU that `options(target=)` names, else JAX's default backend.
      **kwargs: its keyword arguments: arrays likewise, and anything else as it is.

    Returns:
      An `Explanation`, which prints as text and shows as HTML in a notebook; its `source()` is that of the kernels. Its
      first section is `fn` itself, its second `fn` with its reverse-mode derivative, empty and with the reason in its
      title where there is none. Of a function that holds a backward pass already, as `jax.value_and_grad` returns, one
      section says everything.

    Raises:
      ValueError: platform is another one.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> jaxdnn.explain(jaxdnn.rms_norm, jnp.ones((4, 8)), platform="cpu").sections[0][1][0].engine
      'host'
    """
    if platform not in (None, "cpu", "cuda"):
        raise ValueError(f'explain: platform must be "cpu", "cuda" or None; got {platform!r}')
    options = current_options()
    if platform is None:
        platform = "cuda" if options.target is not None else default_platform()
    target = find_target(platform, options)

    def explained(call: Call) -> ExplainedCall:
        bandwidth = target.bandwidth if isinstance(target, Target) else None
        limit = call.signature.bytes / bandwidth if bandwidth and not call.signature.reason else None
        try:
            selection = select(call.spec, call.signature, platform)
        except NoEngineError as error:
            return ExplainedCall(call, None, str(error), limit, None)
        return ExplainedCall(call, selection, "", limit, _measured(call, selection, target))

    calls = find_calls(fn, *args, **kwargs)
    if any(call.backward for call in calls):
        sections = [(_BOTH, calls)]
    else:
        sections = [("Forward", calls)]
        try:
            sections.append((_BOTH, find_differentiated_calls(fn, *args, **kwargs)))
        except NoDerivative as reason:
            sections.append((f"{_BOTH} ({reason})", []))
    explanations = tuple((title, tuple(map(explained, calls))) for title, calls in sections)
    return Explanation(platform if isinstance(target, str) else target.name, explanations)


_BOTH = "Forward and backward"


def _measured(call: Call, selection: Selection, target: Target | str) -> float | None:
    """The seconds that were measured for what is selected, if they were."""
    if isinstance(target, str) or not target.present:
        return None
    for one in recall(call.spec, call.signature, target):
        if (one.engine, one.knobs) == (selection.engine, knobs_of(selection.config)):
            return one.seconds
    return None


def _engines(calls: Sequence[ExplainedCall]) -> str:
    """How many calls each engine serves: ", 30 calls: 27 on host, 3 on xla"."""
    counts: Counter[str] = Counter()
    for one in calls:
        counts[one.engine] += one.call.count
    served = ", ".join(f"{count} on {engine}" for engine, count in counts.items())
    return f", {counts.total()} call{'s' * (counts.total() > 1)}: {served}" if calls else ": no call of jaxdnn"


def _counted(words: Iterable[str]) -> list[str]:
    """Each word once, with how often it occurs."""
    return [word if count == 1 else f"{word} x{count}" for word, count in Counter(words).items()]


def _listed(numbers: Collection[int], of: int) -> str:
    """The numbers of some of the calls, of which there are `of`."""
    return "all" if 1 < of == len(numbers) else ", ".join(map(str, numbers))


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError
