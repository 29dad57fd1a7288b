"""Where the times are that configurations took."""

from pathlib import Path

CONFIGURATIONS = Path(__file__).parents[2] / "benchmarks" / "results" / "configurations"
