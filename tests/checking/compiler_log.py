"""What the compiler says of kernels, and what all of them have to keep to."""

import math
import re
import time

from jaxdnn import _native

REGISTERS = 65_536  # of a multiprocessor; the same from compute capability 8.0 to 12.0
SLOWEST = 30  # seconds of a processor that a unit may take: what is slow without a reason takes a minute


def kernels(log):
    """Registers and bytes of spills, by kernel, from what ptxas says."""
    assert "warning" not in log, log
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part[: part.index("'")]
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        found[name] = registers, stores + loads
    return found


def stack_frames(log):
    """Bytes of local memory, besides spills, by kernel: what is there by its address, and not in registers."""
    found = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame", log, re.DOTALL)
    return {name: int(size) for name, size in found}


def launch_bounds(unit):
    """Threads of a block, and blocks that a multiprocessor must be able to hold, by kernel."""
    found = re.findall(r"__launch_bounds__\((\d+)(?:, (\d+))?\)\s+(\w+)\(", unit)
    return {name: (int(threads), int(blocks or 1)) for threads, blocks, name in found}


def compile_checked(plan, knobs, most_spilled=0):
    """Compiles a plan's unit, in no time, whose kernels may spill so many bytes, and have the registers to start."""
    start = time.process_time()
    unit, bounds = _native.compile(plan.unit, plan.arch), launch_bounds(plan.unit)
    assert time.process_time() - start < SLOWEST, f"too much to compile under {knobs}"
    assert "serialized" not in unit.log, "the compiler has the tensor cores wait for each multiply"
    for launch in plan.launches:
        assert math.prod(launch.block) <= bounds[launch.kernel][0], f"{launch.kernel} is not made for so many threads"
    for kernel, (registers, spilled) in kernels(unit.log).items():
        threads, blocks = bounds[kernel]
        assert spilled <= most_spilled, f"{kernel} spills {spilled} bytes under {knobs}"
        assert registers * threads * blocks <= REGISTERS, f"{kernel} needs {registers} registers under {knobs}"
    return unit
