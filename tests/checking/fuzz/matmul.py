"""Random products with random epilogues, and what they return in exact arithmetic, with a bound on rounding errors."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from checking.cases import BF16, F16, F32, F64, MatmulCase
from checking.cases.dtypes import E4M3, E5M2, I8, I32
from checking.fuzz import bounded, epilogues
from checking.fuzz.bounded import Bounded
from checking.fuzz.contraction import Contraction
from checking.fuzz.epilogues import BOUNDED, JAX, Program

# The most products of elements in a case; most have far fewer.
LARGEST = 1 << 22

_DTYPES = (
    *((F32, F32), (F32, F32), (F32, F32), (BF16, BF16), (BF16, BF16), (BF16, BF16), (F16, F16), (F64, F64)),
    *((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (I8, I8), (BF16, F32), (F32, BF16), (BF16, F16)),
)
D = TypeVar("D", bound="Drawn")
_ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "elu", "softplus", "mish", "hard_swish")


@dataclass(frozen=True, repr=False)
class Drawn(MatmulCase):
    """A product of any kind whose epilogue is a program."""

    program: Program | None = field(default=None, kw_only=True)
    preferred: str | None = field(default=None, kw_only=True)

    @property
    def contraction(self) -> Contraction:
        """Which elements are multiplied, and where the products are added."""
        raise NotImplementedError

    def call(self, *arrays: Any, **changes: Any) -> Any:
        return super().call(*arrays, preferred_element_type=self.preferred, **changes)

    @property
    def function(self) -> Callable[..., Any] | None:
        return self.program and self.program.function(JAX)

    @property
    def differentiable(self) -> bool:
        """Whether a, b and every result are floating point; operands need not be."""
        return all(jnp.issubdtype(dtype, jnp.floating) for dtype in (*self.dtypes_of, *self.outputs.values()))

    @property
    def accumulator(self) -> str:
        """The dtype of the sums."""
        if I8 in self.dtypes_of:
            return I32
        return F64 if F64 in (*self.dtypes_of, self.preferred) else F32

    @property
    def compute_dtype(self) -> str:
        return F64 if self.accumulator == F64 else F32

    @property
    def result_dtype(self) -> str:
        """The dtype of results that the epilogue leaves as they are."""
        named = self.out_dtype or self.preferred
        if named or not {E4M3, E5M2} & set(self.dtypes_of):
            return named or jnp.promote_types(*self.dtypes_of).name
        return self.dtypes_of[0] if len(set(self.dtypes_of)) == 1 else F32

    def _array(self, role: str, name: str) -> np.ndarray:
        array = super()._array(role, name)
        return np.sin(np.arange(array.size)).reshape(array.shape) > 0 if array.dtype == bool else array


@dataclass(frozen=True, repr=False)
class DrawnCase(Drawn):
    """A product of arrays whose epilogue is a program."""

    @property
    def contraction(self) -> Contraction:
        return _contractions(self)


def draw(random: np.random.Generator) -> DrawnCase:
    """A random case."""
    case = _shapes(random)
    dtypes = _DTYPES[random.integers(len(_DTYPES))]
    if case.kind == "gated_linear_unit" and dtypes[0] == I8:
        dtypes = (BF16, BF16)
    return described(random, case, dtypes)


def described(random: np.random.Generator, case: D, dtypes: tuple[str, str]) -> D:
    """A case of these shapes with dtypes, an epilogue and a seed."""

    def one(options: Sequence[Any]) -> Any:
        return options[random.integers(len(options))]

    case = case.replace(seed=int(random.integers(2**31)))
    case = case.replace(dtypes_of=dtypes)
    if dtypes[0] == I8:
        case = case.replace(preferred=I32)
    elif {E4M3, E5M2} & set(dtypes):
        case = case.replace(out_dtype=one((BF16, F32, F16)))
    elif random.random() < 0.3:
        case = case.replace(out_dtype=one((F32, BF16, F16, F64, E4M3)))
    elif random.random() < 0.15:
        case = case.replace(preferred=one((F32, F64)))
    if F32 in dtypes:
        case = case.replace(precision=one((None, None, "default", "high", "highest")))
    if case.kind == "gated_linear_unit":
        n, biases = case.b[-1:], int(random.integers(3))
        case = case.replace(extras=tuple((n, one((F32, dtypes[0]))) for _ in range(biases)))
        return case.replace(epilogue=one(_ACTIVATIONS))
    if random.random() < 0.8:
        shape = case.contraction.shape
        program, extras = epilogues.draw(random, shape, (case.accumulator,))
        case = case.replace(program=program, extras=extras)
    return case


def _shapes(random: np.random.Generator) -> DrawnCase:
    """A case with its kind, shapes and dimension numbers."""

    def size() -> int:
        kind = random.random()
        if kind < 0.03:
            return 0
        if kind < 0.55:
            return int(random.integers(1, 10))
        if kind < 0.85:
            return int(random.integers(1, 140))
        power = 2 ** int(random.integers(3, 11))
        return int(power + random.integers(-1, 2))

    def small(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(random.choice((1, 2, 2, 3, 4))) for _ in range(random.integers(low, high)))

    kind = random.choice(("matmul", "dot_general", "gated_linear_unit"), p=(0.45, 0.4, 0.15)).item()
    if kind == "dot_general":
        case = _general(random, size, small)
    else:
        m, n, k = (size() for _ in range(3))
        batch = small(0, 3) if random.random() < 0.5 else ()
        a, b = [*batch, m, k], [*batch, k, n]
        if kind == "gated_linear_unit":
            b = [k, n]
        elif batch:
            for shape in (a, b):
                for i in range(len(batch)):
                    if random.random() < 0.2:
                        shape[i] = 1
                if random.random() < 0.25:
                    del shape[: random.integers(1, len(batch) + 1)]
        a = a[-1:] if random.random() < 0.06 else a
        b = b[-2:-1] if random.random() < 0.06 and kind == "matmul" else b
        case = DrawnCase(kind, tuple(a), tuple(b))
    sizes = _contractions(case).sizes
    return case if np.prod(list(sizes.values())) <= LARGEST else _shapes(random)


def _general(random: np.random.Generator, size: Any, small: Any) -> DrawnCase:
    """Dimension numbers in any order: the batch and all but one dimension of each group are small."""
    groups = []
    for probability in (0.5, 0.85, 0.85, 0.9):  # batch, of lhs, of rhs, contracted
        group = list(small(0, 3)) if random.random() < 0.3 else []
        groups.append(group + ([size()] if random.random() < probability else []))
    batch, left, right, contracted = groups
    orders = [random.permutation(len(batch) + len(own) + len(contracted)) for own in (left, right)]

    def place(side: int, own: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        sizes, order = [*batch, *contracted, *own], orders[side].tolist()
        places = [order.index(i) for i in range(len(sizes))]
        shape = tuple(sizes[i] for i in order)
        return shape, tuple(places[: len(batch)]), tuple(places[len(batch) : len(batch) + len(contracted)])

    (a, a_batch, a_contracted), (b, b_batch, b_contracted) = place(0, left), place(1, right)
    return DrawnCase("dot_general", a, b, numbers=((a_contracted, b_contracted), (a_batch, b_batch)))


@dataclass(frozen=True)
class _Letters(Contraction):
    """The letters of the dimensions of a, b and their product, for numpy's `einsum`, and the letters' sizes.

    Dimensions of size one that stretch have no letter.
    """

    a: str
    b: str
    y: str
    sizes: dict[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in self.y)

    def terms(self, of: str, left: str, right: str) -> int:
        return int(np.prod([self.sizes[letter] for letter in {*left, *right} - {*of}]))

    def summed(self, of: str, left: tuple[str, np.ndarray], right: tuple[str, np.ndarray]) -> np.ndarray:
        letters, arrays = zip(left, right, strict=True)
        pairs = zip(letters, arrays, strict=True)
        shaped = [array.reshape(tuple(self.sizes[letter] for letter in own)) for own, array in pairs]
        return np.einsum(f"{letters[0]},{letters[1]}->{of}", *shaped, optimize=True)


@functools.lru_cache(maxsize=8)
def _contractions(case: DrawnCase) -> _Letters:
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    if case.numbers is not None:
        (a_contracted, b_contracted), (a_batch, b_batch) = case.numbers
        of_a = [next(letters) for _ in case.a]
        shared = dict(zip((*b_batch, *b_contracted), (of_a[i] for i in (*a_batch, *a_contracted)), strict=True))
        of_b = [shared.get(i) or next(letters) for i in range(len(case.b))]
        y = [of_a[i] for i in a_batch]
        y += [x for i, x in enumerate(of_a) if i not in (*a_batch, *a_contracted)]
        y += [x for i, x in enumerate(of_b) if i not in (*b_batch, *b_contracted)]
    else:
        k = next(letters)
        rows, columns = next(letters), next(letters)
        count = max(len(case.a), len(case.b), 2) - 2
        batch = [next(letters) for _ in range(count)]
        of_a = [k] if len(case.a) == 1 else [*batch[count - len(case.a) + 2 :], rows, k]
        of_b = [k] if len(case.b) == 1 else [*batch[count - len(case.b) + 2 :], k, columns]
        y = [x for x in (*batch, rows, columns) if x in of_a or x in of_b]
        sizes = [dict(zip(of, shape, strict=True)) for of, shape in ((of_a, case.a), (of_b, case.b))]
        of_a = [x for x in of_a if sizes[0][x] != 1 or sizes[1].get(x, 1) == 1]
        of_b = [x for x in of_b if sizes[1][x] != 1 or sizes[0].get(x, 1) == 1]
        known = {x: sizes[0][x] for x in of_a} | {x: sizes[1][x] for x in of_b}
        return _Letters("".join(of_a), "".join(of_b), "".join(y), known)
    known = dict(zip(of_a, case.a, strict=True)) | dict(zip(of_b, case.b, strict=True))
    return _Letters("".join(of_a), "".join(of_b), "".join(y), known)


def evaluate(case: Drawn, check: str, primals: Any, directions: Any = ()) -> list[tuple[np.ndarray, np.ndarray]]:
    """The results of a "forward", "jvp" or "vjp" check, flat, with the error that each element may have.

    `directions` are those of the floating operands, or of the results.
    """
    c, count = case.contraction, 2 if case.kind == "gated_linear_unit" else 1
    wide = [array.astype(np.int64) if array.dtype == np.int8 else array for array in primals[: 1 + count]]
    arrays = [bounded.exact(array) for array in (*wide, *primals[1 + count :])]
    a, rights, extras = arrays[0], arrays[1 : 1 + count], arrays[1 + count :]

    def roundoff(dtype: str, terms: int) -> float:
        if dtype == I32:
            return 0.0
        return 4 * bounded.unit(dtype) * np.sqrt(max(1, terms)) + 4 * case.input_unit

    def forward(x: Bounded, y: Bounded) -> Bounded:
        product = c.product(c.y, (c.a, x), (c.b, y), functools.partial(roundoff, case.accumulator))
        value = product.value.astype(np.int32) if case.accumulator == I32 else product.value
        return Bounded(value, product.error, case.accumulator)

    acc = [forward(a, b) for b in rights]
    outputs = _epilogue(case, acc, extras)
    pairs = [(output.value, output.error) for output in outputs]
    if check == "forward":
        return pairs

    # Derivatives see the sums in the dtype that they are multiplied in.
    multiplied = case.multiplied

    def seen(x: Bounded) -> Bounded:
        return Bounded(x.value, x.error + multiplied * np.abs(x.value), x.dtype)

    if case.program or count == 2:
        acc = [seen(x) for x in acc]
        outputs = _epilogue(case, acc, extras)
    sources = [*acc, *extras]
    if check == "jvp":
        moved = dict(zip([i for i, x in enumerate(arrays) if x.floating], map(bounded.exact, directions), strict=True))
        d_a = moved[0]
        d_sums = [forward(d_a, b) + forward(a, moved[1 + i]) for i, b in enumerate(rights)]
        tangents = {x: d_x.alone for x, d_x in zip(acc, d_sums, strict=True)}
        tangents |= {x: moved.get(1 + count + i, _zero(x)) for i, x in enumerate(extras)}
        return pairs + [(t.value, t.error) for t in bounded.push_forward(outputs, tangents)]
    cotangents = [bounded.exact(array, output.dtype) for array, output in zip(directions, outputs, strict=True)]
    gradients = bounded.pull_back(outputs, cotangents, sources)
    seeds = [seen(gradient) for gradient in gradients[:count]]
    # A gradient is no wider than the arrays are.
    of_gradient = functools.partial(roundoff, F64 if case.dtypes_of == (F64, F64) else F32)
    of_a = [c.product(c.a, (c.y, seed), (c.b, b), of_gradient) for seed, b in zip(seeds, rights, strict=True)]
    of_b = [c.product(c.b, (c.y, seed), (c.a, a), of_gradient) for seed in seeds]
    d_a = of_a[0] if count == 1 else _rounded_sum(case, of_a)
    found = [d_a, *of_b, *(g for x, g in zip(extras, gradients[count:], strict=True) if x.floating)]
    shapes = [array.shape for array, x in zip(primals, arrays, strict=True) if x.floating]
    reshaped = [(x.value.reshape(shape), x.error.reshape(shape)) for x, shape in zip(found, shapes, strict=True)]
    return pairs + reshaped


def _zero(x: Bounded) -> Bounded:
    return Bounded(np.zeros(x.shape), np.zeros(x.shape), F32)


def _rounded_sum(case: Drawn, terms: Sequence[Bounded]) -> Bounded:
    """The sum of gradients that are rounded to the dtype of a before they are added."""
    unit = bounded.unit(case.dtypes_of[0])
    value = sum(term.value for term in terms)
    error = np.asarray(sum(term.error + unit * np.abs(term.value) for term in terms))
    return Bounded(np.asarray(value), error, terms[0].dtype)


def _epilogue(case: Drawn, acc: Sequence[Bounded], extras: Sequence[Bounded]) -> list[Bounded]:
    """The results, of which those in the sums' dtype are rounded to the case's."""
    if case.kind == "gated_linear_unit":
        dtype = acc[0].dtype
        gate, up = (
            (x + bias.astype(dtype) for x, bias in zip(acc, extras, strict=False))
            if len(extras) == 2
            else ((acc[0] + extras[0].astype(dtype), acc[1]) if extras else acc)
        )
        return [(getattr(BOUNDED, case.epilogue or "silu")(gate) * up).astype(case.result_dtype)]
    if case.program is None:
        return [acc[0].astype(case.result_dtype)]
    returned = case.program.function(BOUNDED)(*acc, *extras)
    leaves = returned if isinstance(returned, tuple) else (returned,)
    return [
        leaf if reduced or leaf.dtype != case.accumulator else leaf.astype(case.result_dtype)
        for leaf, (_, reduced) in zip(leaves, case.program.returned, strict=True)
    ]
