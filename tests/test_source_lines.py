"""Compiled programs name the line of the user's code that made each call, which is what profiles show."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxdnn
from jaxdnn.custom_call import HANDLERS

PACKAGE = str(Path(jaxdnn.__file__).parent)
X, W, B = jnp.ones((16, 64)), jnp.ones((64, 64)), jnp.ones(64)


def product(x, w, b):
    return jaxdnn.matmul(x, w, b, epilogue=lambda acc, b: jax.nn.gelu(acc + b))


def gated(x, w, b):
    return jaxdnn.gated_linear_unit(x, w, w, b, b)


def normalized(x, w, b):
    return jaxdnn.layer_norm(x, b, w[0], residual=x)[0]


CALLS = (product, gated, normalized)
CALLERS = {f"{function.__name__}:{function.__code__.co_firstlineno + 1}" for function in CALLS}


def block(x, w, b):
    return normalized(gated(product(x, w, b), w, b), w, b)


def in_scan(layer):
    return lambda x, w, b: jax.lax.scan(lambda x, _: (layer(x, w, b), None), x, None, length=3)[0]


SURROUNDINGS = {
    "alone": block,
    "scan": in_scan(block),
    "remat": jax.checkpoint(block),
    "remat in scan": in_scan(jax.checkpoint(block)),
}


def table(text, name):
    """One of the numbered tables that HLO text begins with: `name`, and a line for each entry."""
    rows = text.split(f"\n{name}\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return dict(row.split(" ", 1) for row in rows)


def field(row, name):
    return re.search(rf"\b{name}=(\d+)", row)[1]


def places(compiled):
    """Of each custom call of ours in a compiled program, the pass that it is of, and the caller: "function:line"."""
    text = compiled.as_text()
    names, frames, locations = (table(text, name) for name in ("FunctionNames", "StackFrames", "FileLocations"))
    found = {}
    for line in text.splitlines():
        if any(f'custom_call_target="{handler}"' in line for handler in HANDLERS):
            location = locations[field(frames[field(line, "stack_frame_id")], "file_location_id")]
            function = names[field(location, "function_name_id")].strip('"')
            direction = "backward" if "/transpose(" in line else "forward"
            found.setdefault(direction, set()).add(f"{function}:{field(location, 'line')}")
    return found


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_each_call_is_at_the_users_line(surroundings):
    function = SURROUNDINGS[surroundings]
    compiled = jax.jit(function).lower(X, W, B).compile()
    assert places(compiled) == {"forward": CALLERS}
    gradient = jax.jit(jax.grad(lambda *arrays: jnp.sum(function(*arrays) ** 2), (0, 1, 2))).lower(X, W, B).compile()
    assert places(gradient)["backward"] == CALLERS
    for one in (compiled, gradient):
        assert not [name for name in table(one.as_text(), "FileNames").values() if PACKAGE in name]
