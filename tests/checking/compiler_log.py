"""What the compiler says of kernels."""

import re

REGISTERS = 65_536  # of a multiprocessor; the same from compute capability 8.0 to 12.0


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
