"""What a compiled kernel consists of, without a disassembler: pip's NVRTC brings none."""

import struct

import numpy as np


def opcodes(cubin, kernel):
    """The instructions' lowest 12 bits, from the kernel's section of the ELF file that a cubin is."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    strings = sections[names][4]
    for name, _, _, _, start, length in sections:
        if cubin[strings + name :].split(b"\0", 1)[0] == f".text.{kernel}".encode():
            return np.frombuffer(cubin[start : start + length], np.uint64)[::2] & 0xFFF
    raise AssertionError(f"the cubin has no {kernel}")
