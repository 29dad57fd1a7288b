"""Kernels of the pointwise engine as C++ for the CPU, whose threads are those of a block."""

import ctypes

import numpy as np

from checking.pointwise.runs import compiled_for_cpu
from jaxdnn.plan import Operand, Result, Scalar, Scratch

# Before and after each buffer: as many bytes as a kernel may well be off by, and NaN if they are read as floats.
GUARD, PATTERN = 4096, 0xFF


class Guarded:
    """A buffer between guards, which no kernel may write to, and whose own bytes are the pattern until it is filled."""

    def __init__(self, size, name):
        self.name, self.size = name, size
        held = np.full(size + 2 * GUARD + 256, PATTERN, np.uint8)
        start = -held.ctypes.data % 256
        self.whole = held[start : start + size + 2 * GUARD]
        self.bytes = self.whole[GUARD : GUARD + size]

    @classmethod
    def of(cls, array, name):
        guarded = cls(array.nbytes, name)
        guarded.bytes[:] = np.frombuffer(array.tobytes(), np.uint8)
        return guarded

    def address(self, offset):
        return self.bytes.ctypes.data + offset

    def check(self):
        for where, guard in (("before", self.whole[:GUARD]), ("after", self.whole[GUARD + self.size :])):
            written = np.flatnonzero(guard != PATTERN)
            assert not written.size, f"{written.size} bytes {where} {self.name} were written to"


def _place(sizes):
    return "{" + ", ".join(map(str, sizes)) + "}"


def run_with_threads(plan, arrays, folder):
    """Runs a plan's kernels, as C++ for the CPU; `arrays` are operands and results, which are overwritten."""
    launches = "".join(
        f'extern "C" void run{i}(void* const* arguments) {{\n'
        f"launch({_place(one.grid)}, {_place(one.block)}, {one.kernel}, arguments);\n}}\n"
        for i, one in enumerate(plan.launches)
    )
    library = compiled_for_cpu(f'#include "launch.h"\n{plan.unit}\n{launches}', folder)
    operands, results = arrays
    buffers = {
        Operand: [Guarded.of(array, f"operand {i}") for i, array in enumerate(operands)],
        Result: [Guarded(array.nbytes, f"result {i}") for i, array in enumerate(results)],
        Scratch: [Guarded(size, f"scratch buffer {i}") for i, size in enumerate(plan.scratch)],
    }
    for i, one in enumerate(plan.launches):
        held = []
        for argument in one.arguments:
            if isinstance(argument, Scalar):
                held.append(ctypes.c_int64(argument.bits))
            else:
                buffer = buffers[type(argument)][argument.index]
                held.append(ctypes.c_void_p(buffer.address(argument.offset)))
        getattr(library, f"run{i}")((ctypes.c_void_p * len(held))(*map(ctypes.addressof, held)))
    for buffer in (one for kind in buffers.values() for one in kind):
        buffer.check()
    for array, buffer in zip(operands, buffers[Operand], strict=True):
        assert buffer.bytes.tobytes() == array.tobytes(), f"{buffer.name} was written to"
    for array, buffer in zip(results, buffers[Result], strict=True):
        array[...] = np.frombuffer(buffer.bytes.tobytes(), array.dtype).reshape(array.shape)
