"""Runs pointwise programs: as bytecode on the host, and as emitted CUDA source, compiled as C++ for the CPU."""

import ctypes
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from checking.emulation.compile import compiled_for_cpu
from jaxdnn import custom_call
from jaxdnn.plan import Launch, Operand, Plan, Result, Scalar
from jaxdnn.pointwise import AffineLoad, Output, Program, bytecode, collapse, functor, trace
from jaxdnn.pointwise.bytecode import register_type


@dataclass(frozen=True)
class Call:
    """A function, the shape of its output, and the arrays that it is applied to: first accumulators, then operands."""

    function: Callable[..., Any]
    shape: tuple[int, ...]
    accumulators: tuple[np.ndarray, ...]
    operands: tuple[np.ndarray, ...] = ()
    groups: tuple[int, int, int] | None = None

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """How many of the output's dimensions are batch, row and column dimensions."""
        rank = len(self.shape)
        return self.groups or (max(0, rank - 2), int(rank > 1), int(rank > 0))

    @property
    def extents(self) -> tuple[int, int, int]:
        """Batches, rows and columns."""
        batch, row, _ = self.dimensions
        return prod(self.shape[:batch]), prod(self.shape[batch : batch + row]), prod(self.shape[batch + row :])

    def program(self) -> Program:
        program = trace(self.function, self.shape, [array.dtype for array in self.accumulators], self.operands)
        collapsed = collapse(program, self.shape, [array.shape for array in self.operands], self.dimensions)
        assert isinstance(collapsed, Program), collapsed
        return collapsed

    def expected(self) -> list[np.ndarray]:
        # On the CPU, whose conversions to float8 are IEEE's: of XLA's on a GPU some saturate.
        with jax.default_device(jax.devices("cpu")[0]):
            return [
                np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(self.function)(*self.accumulators, *self.operands))
            ]


def values(dtype: str, shape: tuple[int, ...], name: str = "") -> np.ndarray:
    """Random numbers, a function of the arguments alone. Integers are small or anything."""
    random = np.random.default_rng(zlib.crc32(f"{dtype} {shape} {name}".encode()))
    if dtype == "bool":
        return random.random(shape) < 0.5
    if "float" in dtype:
        return (random.standard_normal(shape) * random.choice([0.1, 1, 4], shape)).astype(dtype)
    about = np.iinfo(dtype)
    anything = random.integers(about.min, about.max, shape, dtype, endpoint=True)
    small = random.integers(0, 9, shape).astype(dtype) - np.array(3 if about.min else 0, dtype)
    return np.where(random.random(shape) < 0.5, anything, small)


def _strides(output: Output, extents: tuple[int, int, int]) -> tuple[int, ...]:
    """Of a dense array of the dimensions that are not reduced."""
    sizes = [1 if axis in output.axes else size for axis, size in enumerate(extents)]
    return tuple(0 if axis in output.axes else prod(sizes[axis + 1 :]) for axis in range(3))


def _stored_dtype(program: Program, output: Output) -> str:
    """What a result is stored as by the kernel: reductions stay in the type of the interpreter's register."""
    return register_type(program.instructions[output.value].dtype) if output.reduction else output.dtype


def run_host(call: Call, isa: str = "", task_rows: int = 3) -> list[np.ndarray]:
    """By the interpreter, through XLA."""
    program, extents = call.program(), call.extents
    words = np.array(bytecode(program), np.int64)
    reduces = any(output.reduction for output in program.outputs)
    _, rows, columns = extents
    if reduces:  # one task does it all
        assert extents[0] == 1
        task_rows = rows
    arguments: list[Any] = [Operand(0)]
    arguments += [
        _int64(n)
        for n in (rows, columns, task_rows, len(call.accumulators), len(program.affine_loads), len(program.outputs))
    ]
    for number, array in enumerate(call.accumulators):
        arguments += [Operand(1 + number), _int64(rows * columns), _int64(columns), _int64(array.dtype.itemsize)]
    for load in program.affine_loads:
        strides = load.strides
        arguments += [Operand(1 + len(call.accumulators) + load.operand), *map(_int64, strides)]
    types = []
    for number, output in enumerate(program.outputs):
        arguments += [Result(number), *map(_int64, _strides(output, extents))]
        types.append(jax.ShapeDtypeStruct(output.shape(call.shape), _stored_dtype(program, output)))
    launch = Launch("pointwise", tuple(arguments), (extents[0] * -(-rows // task_rows), 1, 1))
    plan = Plan("", isa, (launch,), op="pointwise")
    with jax.default_device(jax.devices("cpu")[0]):
        # The words as bytes: without `jax_enable_x64` there is no int64 array.
        results = _execute(plan, tuple(types), words.view(np.uint8), *call.accumulators, *call.operands)
    return [np.asarray(result).astype(output.dtype) for result, output in zip(results, program.outputs, strict=True)]


def _int64(value: int) -> Scalar:
    return Scalar("int64", value)


_plan_p = Primitive("plan")
_plan_p.multiple_results = True
_plan_p.def_abstract_eval(lambda *_, types, **__: [ShapedArray(t.shape, t.dtype) for t in types])
mlir.register_lowering(_plan_p, lambda ctx, *operands, plan, **_: custom_call.custom_call(ctx, plan, operands))


@partial(jax.jit, static_argnums=(0, 1))
def _execute(plan: Plan, types: tuple[jax.ShapeDtypeStruct, ...], *arrays: Any) -> list[jax.Array]:
    return _plan_p.bind(*arrays, plan=plan, types=types)


# ---- Emitted source --------------------------------------------------------------------------------------------------

# An array in the type that a functor takes: operands are spread over the output before.
ADAPTER = """
namespace jaxdnn {
struct Element {
    void* array;
    long long i;
    template <class T> operator T&() const { return static_cast<T*>(array)[i]; }
};
struct Elements {
    void* const* arrays;
    long long i;
    Element operator[](int k) const { return {arrays[k], i}; }
};
// A table comes with the offset of its data, stride and bound of each index, and its own offset for each element.
struct Place {
    long long batch, row, column;
    void* const* operands;
    long long i;
    template <class T, int kIndices> Table<T, kIndices> table(int k) const {
        const long long* words = static_cast<const long long*>(operands[k]);
        Table<T, kIndices> found;
        found.data = reinterpret_cast<const T*>(words + words[0]) + words[1 + 2 * kIndices + i];
        for (int j = 0; j < kIndices; ++j) found.indices[j] = {words[1 + 2 * j], words[2 + 2 * j]};
        return found;
    }
};
template <class Functor>
void run(void* const* acc, void* const* operands, void* const* results, long long rows, long long columns,
         long long i) {
    Elements result{results, i};
    const Place place{i / columns / rows, i / columns % rows, i % columns, operands, i};
    Functor::apply(Elements{acc, i}, Elements{operands, i}, place, result);
}
}
"""

_NUMPY = {"float": "float32", "double": "float64"}


class Functors:
    """The functors of many calls, number k under the name `Functor<k>`."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = list(calls)
        self.programs = [call.program() for call in self.calls]
        self.functors = [functor(program, f"Functor{k}") for k, program in enumerate(self.programs)]
        self.source = "".join(f"namespace jaxdnn {{ {emitted.source} }}\n" for emitted in self.functors)

    def arrays(self, k: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """What call k computes from, and where its results go: sums, operands, results."""
        call, emitted = self.calls[k], self.functors[k]
        acc = [np.ascontiguousarray(array.astype(_register(array.dtype.name))) for array in call.accumulators]
        operands = [
            _table(call, field.load)
            if field.table
            else _spread(call, field.load).astype(_NUMPY.get(field.register, field.register))
            for field in emitted.operands
        ]
        return acc, operands, [np.zeros(call.extents, _NUMPY.get(type_, type_)) for type_ in emitted.results]

    def finished(self, k: int, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reduced and rounded, as a kernel does when it stores."""
        shape = self.calls[k].shape
        return [_finished(*pair, shape) for pair in zip(results, self.programs[k].outputs, strict=True)]


class Emitted(Functors):
    """Functors compiled in one unit as C++ for the CPU."""

    def __init__(self, calls: Sequence[Call], folder: Path) -> None:
        super().__init__(calls)
        entries = "".join(
            f'extern "C" void run{k}(void* const* s, void* const* o, void* const* r, const long long* e) {{\n'
            "for (long long i = 0; i < e[0] * e[1] * e[2]; ++i)\n"
            f"jaxdnn::run<jaxdnn::Functor{k}>(s, o, r, e[1], e[2], i);\n"
            "}\n"
            for k in range(len(self.functors))
        )
        text = f'#include "cuda.h"\n#include "core/epilogue_operands.cuh"\n{ADAPTER}{self.source}{entries}'
        self.library = compiled_for_cpu(text, folder)

    def run(self, k: int) -> list[np.ndarray]:
        """The results of call k."""
        acc, operands, results = self.arrays(k)
        extents = (ctypes.c_longlong * 3)(*self.calls[k].extents)
        getattr(self.library, f"run{k}")(_pointers(acc), _pointers(operands), _pointers(results), extents)
        return self.finished(k, results)


class Compiled(Functors):
    """Functors compiled in one unit for a GPU."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__(calls)
        kernels = "".join(self._kernel(k) for k in range(len(self.functors)))
        self.unit = f'#include "core/epilogue_operands.cuh"\n{ADAPTER}{self.source}{kernels}'

    def _kernel(self, k: int) -> str:
        lists = {"s": self.programs[k].accumulators, "o": self.functors[k].operands, "r": self.functors[k].results}
        names = {letter: [f"{letter}{i}" for i in range(len(list_))] for letter, list_ in lists.items()}
        pointers = ", ".join(f"void* {name}" for group in names.values() for name in group)
        arrays = " ".join(f"void* {letter}[] = {{{', '.join(group) or 'nullptr'}}};" for letter, group in names.items())
        return (
            f'extern "C" __global__ void run{k}({pointers}, long long rows, long long columns, long long count) {{\n'
            f"{arrays}\nlong long i = blockIdx.x * 128ll + threadIdx.x;\n"
            f"if (i < count) jaxdnn::run<jaxdnn::Functor{k}>(s, o, r, rows, columns, i);\n}}\n"
        )

    def run(self, k: int, arch: str) -> list[np.ndarray]:
        """The results of call k, from the default device."""
        acc, operands, results = self.arrays(k)
        _, rows, columns = self.calls[k].extents
        count = results[0].size
        arguments = [Operand(i) for i in range(len(acc) + len(operands))]
        arguments += [Result(i) for i in range(len(results))]
        arguments += [_int64(size) for size in (rows, columns, count)]
        launch = Launch(f"run{k}", tuple(arguments), (-(-count // 128), 1, 1), (128, 1, 1))
        types = tuple(jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results)
        plan = Plan(self.unit, arch, (launch,), op="pointwise")
        return self.finished(k, [np.asarray(result) for result in _execute(plan, types, *acc, *operands)])


def _offsets(call: Call, load: AffineLoad) -> np.ndarray:
    """Of the operand's element for each element of the output, in elements."""
    found = np.zeros(call.extents, np.int64)
    for axis, terms in enumerate(load.terms):
        places = np.arange(call.extents[axis]).reshape([-1 if axis == other else 1 for other in range(3)])
        for term in terms:
            quotient = places // term.divisor
            found += (quotient % term.modulus if term.modulus else quotient) * term.stride
    return found


def _spread(call: Call, load: AffineLoad) -> np.ndarray:
    return np.ascontiguousarray(call.operands[load.operand]).reshape(-1)[_offsets(call, load)]


def _table(call: Call, load: AffineLoad) -> np.ndarray:
    """A table as `Place` has it."""
    numbers = [number for index in load.gathered for number in (index.stride, index.bound)]
    offsets = _offsets(call, load).reshape(-1)
    data = np.ascontiguousarray(call.operands[load.operand]).tobytes()
    words = np.array([1 + len(numbers) + offsets.size, *numbers, *offsets], np.int64)
    return np.frombuffer(words.tobytes() + data, np.uint8)


def _register(dtype: str) -> str:
    return "float32" if "float" in dtype and dtype != "float64" else dtype


def _finished(values: np.ndarray, output: Output, shape: tuple[int, ...]) -> np.ndarray:
    with np.errstate(all="ignore"):
        if output.reduction:
            reduce = {"sum": np.sum, "max": np.max, "min": np.min}[output.reduction]
            values = reduce(values, axis=output.axes).astype(values.dtype)
        return values.astype(output.dtype).reshape(output.shape(shape))


def _pointers(arrays: Sequence[np.ndarray]) -> Any:
    return (ctypes.c_void_p * max(1, len(arrays)))(*(array.ctypes.data for array in arrays))
