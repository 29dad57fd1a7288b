"""The table of mistakes: a file of this folder for each layer, a section for each mistake."""

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_MOST_BUILT = 2  # of a draw


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
      name, layer: the section's name, and that of its file.
      file: where the mistake is made.
      before, after: the text that stands there, once, and what the mistake makes of it.
      tests: what may notice: files, folders or ids of tests, the likeliest first.
      note: the mistake in words.
      survives: why no test can notice it here; empty if one should.
    """

    name: str
    layer: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    note: str
    survives: str = ""

    @property
    def is_native(self) -> bool:
        """Whether it changes the compiled module. Kernels for the GPU it only holds as text, which tests read here."""
        return self.file.startswith("cpp/") and not self.file.startswith("cpp/kernels/")

    def applied(self, root: Path) -> str:
        """The file's text, with the mistake."""
        text = (root / self.file).read_text()
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.before!r} {count} times; expected it once")
        return text.replace(self.before, self.after)


def load() -> list[Mutant]:
    """The whole table, layer by layer."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for name, row in tomllib.loads(path.read_text()).items():
            found.append(Mutant(**{**row, "name": name, "layer": path.stem, "tests": tuple(row["tests"])}))
    return found


def drawn(mutants: Sequence[Mutant], count: int, seed: str) -> list[Mutant]:
    """So many of them that should be caught, by a hash of their names and the seed.

    At most two of them need a build, which takes longer than all the others.
    """
    order = sorted(mutants, key=lambda one: hashlib.sha256(f"{seed} {one.name}".encode()).digest())
    quick = [one for one in order if not one.survives and not one.is_native]
    built = [one for one in order if not one.survives and one.is_native][:_MOST_BUILT]
    return [one for one in order if one in quick or one in built][:count]
