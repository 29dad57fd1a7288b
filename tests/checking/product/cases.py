"""Products that exact engines compute, and epilogues for those of any engine."""

import itertools

import jax
import jax.numpy as jnp

from checking.product.calls import ProductCase


def gelu(acc, bias):
    return jax.nn.gelu(acc + bias)


def several(acc, row, full, column, scalar):
    index = jax.lax.broadcasted_iota(acc.dtype, acc.shape, 2)
    return acc * scalar + row + full * column, (acc + index).astype(jnp.float16), acc > 0


def reductions(acc, bias):
    return (
        acc + bias,
        jnp.max(jnp.abs(acc)),
        jnp.sum(acc, axis=1),
        jnp.min(acc, axis=2),
        jnp.sum(acc, axis=0),
        jnp.sum(acc, axis=(0, 1)),
    )


def gated(gate, up):
    return jax.nn.silu(gate) * up


def gated_and_saved(gate, up, *rows):
    gate, up = (acc + row for acc, row in zip((gate, up), rows, strict=True)) if rows else (gate, up)
    return jax.nn.silu(gate) * up, gate.astype("bfloat16"), up.astype("bfloat16")


def narrow(acc):
    return (
        acc.astype(jnp.float8_e4m3fn),
        acc.astype(jnp.float8_e5m2),
        acc.astype(jnp.int8),
        jnp.abs(acc).astype(jnp.uint16),
    )


def looked_up(acc, of_rows, of_columns, rows, columns):
    """In a table that each row has of its own, and in one of each column."""
    own = jnp.take(of_rows[0], columns[0, 0], axis=1, mode="clip")
    return acc + own + jnp.take(of_columns[0], rows[0, :, 0], axis=0, mode="clip")


def residual(acc, bias, added):
    return jax.nn.silu(acc + bias) + added


def swiglu_backward(acc, gate, up):
    _, vjp = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate.astype(jnp.float32), up.astype(jnp.float32))
    return vjp(acc)


def _exact() -> dict[str, ProductCase]:
    """By name."""
    found = {}
    for dtype in ("float32", "bfloat16", "float16", "float64", "int8", "float8_e4m3fn", "float8_e5m2"):
        out = "float32" if "float8" in dtype else ""
        accumulator = {"float64": "float64", "int8": "int32"}.get(dtype, "float32")
        for a, b in itertools.product((False, True), repeat=2):
            name = f"{dtype} {'nt'[a]}{'nt'[b]}"
            layout = {"a_transposed": a, "b_transposed": b, "out": out}
            found[name] = ProductCase(100, 72, 136, dtype, **layout)
            found[f"{name} odd"] = ProductCase(37, 131, 61, dtype, **layout)
            shared = "a" if a else "b"
            found[f"{name} batch"] = ProductCase(70, 50, 33, dtype, batch=3, padding=3, shared=shared, **layout)
        found[f"{dtype} one"] = ProductCase(1, 1, 1, dtype, out=out)
        found[f"{dtype} deep"] = ProductCase(40, 30, 9000, dtype, out=out)
        bias = ((accumulator, (1, 1, 72)),)
        found[f"{dtype} reductions"] = ProductCase(
            100, 72, 136, dtype, epilogue=reductions, batch=3, operands=bias, out=out
        )
        found[f"{dtype} deep reductions"] = ProductCase(
            40, 72, 9000, dtype, epilogue=reductions, operands=bias, out=out
        )
        if dtype != "int8":
            found[f"{dtype} gelu"] = ProductCase(100, 72, 136, dtype, epilogue=gelu, operands=bias, out=out)
            found[f"{dtype} gated"] = ProductCase(100, 72, 136, dtype, epilogue=gated, accumulators=2, out=out)
            found[f"{dtype} narrow"] = ProductCase(100, 75, 40, dtype, epilogue=narrow, out=out)
            operands = (
                (accumulator, (1, 1, 72)),
                (accumulator, (2, 100, 72)),
                ("int8", (1, 100, 1)),
                ("bool", (1, 1, 1)),
            )
            found[f"{dtype} several"] = ProductCase(
                100, 72, 136, dtype, epilogue=several, batch=2, operands=operands, out=out
            )
    found["mixed float8"] = ProductCase(100, 72, 136, "float8_e4m3fn", b_dtype="float8_e5m2", out="bfloat16")
    for dtype in ("float32", "float64", "bfloat16"):
        found[f"{dtype} large"] = ProductCase(1024, 1024, 1008, dtype)
        found[f"{dtype} large, two sums"] = ProductCase(1024, 1024, 1008, dtype, accumulators=2, epilogue=gated)
        found[f"{dtype} large tn"] = ProductCase(1024, 1024, 1008, dtype, a_transposed=True)
        found[f"{dtype} large nt"] = ProductCase(1024, 1024, 1008, dtype, b_transposed=True)
        found[f"{dtype} large, not aligned"] = ProductCase(1023, 1025, 1021, dtype)
        found[f"{dtype} large, aligned to pairs"] = ProductCase(1022, 1026, 1018, dtype)
    return found


EXACT = _exact()
