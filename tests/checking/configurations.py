"""Where the times are that configurations took, and what names one there."""

from collections.abc import Callable, Iterable
from pathlib import Path

CONFIGURATIONS = Path(__file__).parents[2] / "benchmarks" / "results" / "configurations"


def named(names: Iterable[str], knob: Callable[[str], str]) -> tuple[str, ...]:
    """The values of these knobs: of transposed products whatever the stages, of which there were more before tiles
    left whole, in up to a third less time than most tables have.
    """
    whole = knob("swapped") == "True"
    return tuple("" if whole and name == "stages" else knob(name) for name in names)
