"""Operands placed on several devices, and what compiled programs send between them."""

import re

import jax
from jax.sharding import NamedSharding

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(text):
    """How often each collective occurs in a compiled program."""
    counts = {name: len(re.findall(rf"= .*\b{name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def make_mesh(devices, kind):
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=devices)


def placed(mesh, specs, arrays):
    return tuple(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True))


def native_calls(text):
    """The custom calls of a program for the CPU."""
    return [line for line in text.splitlines() if 'custom_call_target="jaxdnn_host"' in line]
