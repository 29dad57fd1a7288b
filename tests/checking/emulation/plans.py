"""Plans of CUDA kernels, run on the CPU."""

import ctypes
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from checking.emulation.compile import compiled_for_cpu
from jaxdnn.engines.product.tma import MAP_DTYPE, SWIZZLE, TFLOAT32
from jaxdnn.plan import Argument, Constant, Counter, Operand, Plan, Result, Scalar, Scratch, TensorMap

PATTERN = 0xFF  # NaN, if it is read as a float
# The orders of threads (shim/launch.h), and whether buffers then begin or end where no memory is.
ORDERS = (("forward", "end"), ("backward", "start"), ("random", "end"))
NO_ALIASES: Mapping[int, int] = MappingProxyType({})
ITEMSIZE = {0: 1, TFLOAT32: 4} | {value: np.dtype(name).itemsize for name, value in MAP_DTYPE.items()}
_ALIGNMENT = 16  # of buffers; what lies between them and the end is the pattern, and nobody may write to it
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """A buffer next to pages that nobody may touch, whose bytes are the pattern until it is filled."""

    def __init__(self, size: int, name: str, edge: str) -> None:
        self.name, self.size = name, size
        page = mmap.PAGESIZE
        inner = -(-max(size, 1) // page) * page
        self._map = mmap.mmap(-1, inner + 2 * page)
        whole = np.frombuffer(self._map, np.uint8)
        for guard in (0, page + inner):
            assert _libc.mprotect(ctypes.c_void_p(whole.ctypes.data + guard), page, 0) == 0
        self._inner = whole[page : page + inner]
        self._inner[:] = PATTERN
        self._start = 0 if edge == "start" else (inner - size) // _ALIGNMENT * _ALIGNMENT
        self.bytes = self._inner[self._start : self._start + size]

    @classmethod
    def of(cls, array: np.ndarray, name: str, edge: str) -> "Guarded":
        guarded = cls(array.nbytes, name, edge)
        guarded.bytes[:] = np.frombuffer(array.tobytes(), np.uint8)
        return guarded

    def address(self, offset: int) -> int:
        return self.bytes.ctypes.data + offset

    def where(self, address: int) -> str:
        """How far an address outside lies from it; empty if it is not near."""
        offset = address - self.address(0)
        if -mmap.PAGESIZE <= offset < 0:
            return f"{-offset} bytes before {self.name}"
        past = offset - self.size
        return f"{past} bytes after {self.name}" if 0 <= past < 2 * mmap.PAGESIZE else ""

    def check(self) -> None:
        around = (("before", self._inner[: self._start]), ("after", self._inner[self._start + self.size :]))
        for where, guard in around:
            written = np.flatnonzero(guard != PATTERN)
            assert not written.size, f"{written.size} bytes {where} {self.name} were written to"


class Emulated:
    """The kernels of some plans of one architecture, compiled together."""

    def __init__(self, plans: Sequence[Plan], folder: Path) -> None:
        self.plans = list(plans)
        (arch,) = {plan.arch for plan in plans}
        lines = [line for plan in plans for line in plan.unit.splitlines(keepends=True)]
        includes = dict.fromkeys(line for line in lines if line.startswith("#include"))
        units = [_unit(k, plan) for k, plan in enumerate(self.plans)]
        self._library = compiled_for_cpu(
            "".join(['#include "launch.h"\nnamespace jaxdnn {}\n', *includes, *units]), folder, arch
        )
        self._library.fault_address.restype = ctypes.c_void_p

    def run(
        self,
        k: int,
        operands: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        aliases: Mapping[int, int] = NO_ALIASES,
    ) -> None:
        """Runs plan `k`, with threads in several orders, which must not matter; overwrites `results`.

        `aliases` maps operands to the results that take their places.
        """
        every = [self._run(k, operands, results, aliases, number) for number in range(len(ORDERS))]
        for (order, _), found in zip(ORDERS, every, strict=True):
            for i, (got, first) in enumerate(zip(found, every[0], strict=True)):
                assert got == first, f"result {i} depends on the order of threads: {ORDERS[0][0]} or {order}"
        for array, found in zip(results, every[0], strict=True):
            array[...] = np.frombuffer(found, array.dtype).reshape(array.shape)

    def _run(
        self,
        k: int,
        operands: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        aliases: Mapping[int, int],
        order: int,
    ) -> list[bytes]:
        plan, edge = self.plans[k], ORDERS[order][1]
        buffers = {
            Operand: [Guarded.of(array, f"operand {i}", edge) for i, array in enumerate(operands)],
            Result: [Guarded(array.nbytes, f"result {i}", edge) for i, array in enumerate(results)],
            Scratch: [Guarded(size, f"scratch buffer {i}", edge) for i, size in enumerate(plan.scratch)],
        }

        for operand, result in aliases.items():
            buffers[Result][result] = buffers[Operand][operand]

        def address(of: Operand | Result | Scratch) -> int:
            return buffers[type(of)][of.index].address(of.offset)

        for i, one in enumerate(plan.launches):
            held = [_held(argument, address) for argument in one.arguments]
            run = getattr(self._library, f"run{k}_{i}")
            run.restype = ctypes.c_char_p
            error = run(order, (ctypes.c_void_p * max(1, len(held)))(*map(ctypes.addressof, held)))
            if error:
                address = self._library.fault_address() or 0
                near = [place for kind in buffers.values() for one in kind if (place := one.where(address))]
                order_name = ORDERS[order][0]
                raise AssertionError(f"{plan.launches[i].kernel}, {order_name}: {error.decode()} {' or '.join(near)}")
        for buffer in (one for kind in buffers.values() for one in kind):
            buffer.check()
        for i, (array, buffer) in enumerate(zip(operands, buffers[Operand], strict=True)):
            assert i in aliases or buffer.bytes.tobytes() == array.tobytes(), f"{buffer.name} was written to"
        return [buffer.bytes.tobytes() for buffer in buffers[Result]]


def _unit(k: int, plan: Plan) -> str:
    """A plan's text in a namespace of its own, in which `jaxdnn` has what the headers and what this unit declares."""
    body = re.sub(r"^#include.*\n", "", plan.unit, flags=re.MULTILINE).replace('extern "C" ', "")
    # An entry point must not hide the kernel that it calls, which may have its name.
    body = re.sub(r"(__global__ void (?:__launch_bounds__\(.*\)\s+)?)(\w+\()", r"\1entry_\2", body)
    text = (
        f"namespace plan{k} {{\nnamespace jaxdnn {{ using namespace ::jaxdnn; }}\nusing namespace jaxdnn;\n{body}}}\n"
    )
    for i, one in enumerate(plan.launches):
        shape = f"{{{_place(one.grid)}, {_place(one.block)}, {one.cluster[0]}, {one.shared_memory}}}"
        assert one.cluster[1:] == (1, 1), "a cluster lies along x"
        text += (
            f'extern "C" const char* run{k}_{i}(int order, void* const* arguments) {{\n'
            f"    return launch({shape}, order, plan{k}::entry_{one.kernel}, arguments);\n}}\n"
        )
    return text


def _held(argument: Argument, address: Callable[[Operand | Result | Scratch], int]) -> Any:
    """What a parameter of the kernel is."""
    match argument:
        case Scalar():
            return ctypes.c_int64(argument.bits)
        case TensorMap():  # as shim/ptx/tma.cuh has it
            itemsize = ITEMSIZE[argument.dtype]
            swizzle = {0: 16} | {value: rows for rows, value in SWIZZLE.items()}
            lower, upper = zip(*argument.corners, strict=True) if argument.corners else ((), ())
            words = [address(argument.buffer), itemsize, swizzle[argument.swizzle], argument.dtype == TFLOAT32]
            for numbers, length, rest in (
                (argument.dimensions, 5, 1),
                ((itemsize, *argument.strides), 5, 0),
                (argument.box, 5, 1),
                ((len(lower),), 1, 0),
                (argument.element_strides[1:-1] if lower else (), 3, 0),
                (lower, 3, 0),
                (upper, 3, 0),
            ):
                words += [*numbers, *((length - len(numbers)) * [rest])]
            return (ctypes.c_int64 * len(words))(*words)
        case Counter():
            return ctypes.c_int32(0)
        case Constant():
            raise ValueError("a constant is of the host's plans alone")
        case _:
            return ctypes.c_void_p(address(argument))


def _place(sizes: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, sizes)) + "}"


def run_on_cpu(plan: Plan, arrays: tuple[Sequence[np.ndarray], Sequence[np.ndarray]], folder: Path) -> None:
    """Runs one plan; `arrays` are operands and results, which are overwritten."""
    Emulated([plan], folder).run(0, *arrays)
