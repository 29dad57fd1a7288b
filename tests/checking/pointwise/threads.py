"""Kernels of the pointwise engine as C++ for the CPU, whose threads are those of a block."""

import ctypes

import numpy as np

from checking.pointwise.runs import compiled_for_cpu
from jaxdnn.plan import Operand, Result, Scalar, Scratch


def _place(sizes):
    return "{" + ", ".join(map(str, sizes)) + "}"


def run_with_threads(plan, arrays, folder):
    """The results of a plan's kernels, as C++ for the CPU."""
    launches = "".join(
        f'extern "C" void run{i}(void* const* arguments) {{\n'
        f"launch({_place(one.grid)}, {_place(one.block)}, {one.kernel}, arguments);\n}}\n"
        for i, one in enumerate(plan.launches)
    )
    library = compiled_for_cpu(f'#include "launch.h"\n{plan.unit}\n{launches}', folder)
    operands, results = arrays
    scratch = [np.full(size, 0xFF, np.uint8) for size in plan.scratch]
    for i, one in enumerate(plan.launches):
        held = []
        for argument in one.arguments:
            if isinstance(argument, Scalar):
                held.append(ctypes.c_int64(argument.bits))
            else:
                buffers = {Operand: operands, Result: results, Scratch: scratch}[type(argument)]
                held.append(ctypes.c_void_p(buffers[argument.index].ctypes.data + argument.offset))
        getattr(library, f"run{i}")((ctypes.c_void_p * len(held))(*map(ctypes.addressof, held)))
