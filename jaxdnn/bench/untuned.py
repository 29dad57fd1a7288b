"""Cases of sizes that nobody has tuned for: `bench --untuned SEED` draws them from the seed.

A family has classes of shapes, and each of them draws cases: sizes log-uniform, a third of them even to 64 and a third
to 8, and widths of models that people train. What is larger than the machine cares to time is drawn again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import jax
import numpy as np

from jaxdnn.bench.timing import Case

T = TypeVar("T")
DRAWN = 3  # cases of each class
# Features of GPT-2, ViT, Llama, Gemma, Qwen, Mistral, T5, Whisper, and others.
_WIDTHS = (384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1600, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 6144, 8192)
_LIMITS = {"gpu": (2**30, 2**42), "cpu": (2**28, 2**33)}  # bytes, and operations


@dataclass(frozen=True)
class Sizes:
    """What a class draws from."""

    random: np.random.Generator

    def size(self, low: int, high: int) -> int:
        """Between the two, log-uniform."""
        drawn = int(np.exp(self.random.uniform(np.log(low), np.log(high + 1))))
        multiple = self.one(1, 8, 64)
        return drawn // multiple * multiple or drawn

    def width(self) -> int:
        """Of a model's features."""
        return self.one(*_WIDTHS)

    def one(self, *choices: T) -> T:
        """Any of the choices."""
        return choices[self.random.integers(len(choices))]


Class = Callable[[Sizes], Case]


def draw(classes: Sequence[Class], seed: int) -> Iterator[Case]:
    """DRAWN cases of each class."""
    for number, one in enumerate(classes):
        fitting = filter(_fits, _drawn(one, Sizes(np.random.default_rng([seed, number]))))
        yield from islice(fitting, DRAWN)


def _drawn(one: Class, sizes: Sizes) -> Iterable[Case]:
    while True:
        yield one(sizes)


def _fits(case: Case) -> bool:
    most_bytes, most_flops = _LIMITS[jax.default_backend()]
    return case.bytes <= most_bytes and case.flops <= most_flops
