"""Operands placed on several devices, and what compiled programs send between them."""

import re

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(text):
    """How often each collective occurs in a compiled program."""
    counts = {name: len(re.findall(rf"= .*\b{name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}
