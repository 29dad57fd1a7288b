"""A `Plan` as an XLA custom call, and the registration of the handlers that execute it."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.core import ShapedArray
from jaxlib import xla_client

from jaxdnn import _native
from jaxdnn.plan import Argument, Constant, Counter, Launch, Operand, Plan, Result, Scalar, Scratch, TensorMap

_ALIGNMENT = 64  # of scratch on the host: a cache line
_CUDA, _HOST = HANDLERS = ("jaxdnn_cuda", "jaxdnn_host")


def register() -> None:
    """Makes the handlers known to XLA."""
    # What is registered before the CPU backend starts waits in jaxlib's queues, and those are emptied handlers first,
    # which XLA refuses while their types are unknown. With the types' own queue open, types go straight to XLA.
    xla_client.register_custom_type_handler("cpu", xla_client._xla.register_custom_type)  # pyright: ignore[reportPrivateImportUsage]
    for platform, registration in _native.registrations().items():
        name = _CUDA if platform == "CUDA" else _HOST
        jax.ffi.register_ffi_type(f"{name}_plan", registration["type"], platform=platform)
        jax.ffi.register_ffi_target(name, registration["handlers"], platform=platform)


def export_checks() -> "list[export.DisabledSafetyCheck]":
    """What `jax.export.export` takes as `disabled_checks` for programs that call jaxdnn.

    JAX vouches for the stability of its own custom calls alone, and wants others to be allowed by name. A program with
    jaxdnn's runs where a version of jaxdnn is imported that knows the custom calls of the one that exported it.

    Returns:
      A `jax.export.DisabledSafetyCheck` for each custom call of jaxdnn.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdnn
      >>> from jax import export
      >>> x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
      >>> exported = export.export(jax.jit(jaxdnn.rms_norm), disabled_checks=jaxdnn.export_checks())(x)
      >>> exported.out_avals
      (ShapedArray(float32[4,8]),)
    """
    return [export.DisabledSafetyCheck.custom_call(name) for name in HANDLERS]


def custom_call(
    ctx: Any, plan: Plan, operands: Sequence[Any], aliases: Mapping[int, int] | None = None
) -> Sequence[Any]:
    """Emits the custom call that executes `plan` in a primitive's lowering, and drops scratch from its results.

    `aliases` are positions of operands, and of the results that take their place in memory. XLA copies an operand that
    something else still needs.
    """
    scratch = [ShapedArray((size,), np.dtype(np.uint8)) for size in plan.scratch] if plan.unit else []
    results = len(ctx.avals_out)
    call = jax.ffi.ffi_lowering(handler(plan), operand_output_aliases=aliases or None)
    with_scratch = ctx.replace(avals_out=[*ctx.avals_out, *scratch])
    return call(with_scratch, *operands, **attributes(plan, results))[:results]


def handler(plan: Plan) -> str:
    """The name of the custom call that executes `plan`."""
    return _CUDA if plan.unit else _HOST


def attributes(plan: Plan, results: int) -> dict[str, object]:
    """The plan as the custom call's attributes; `results` is how many results come before scratch, on a GPU.

    launches: a dictionary "0", "1", ... of launches in order, each
      kernel: the name
      geometry: grid, block and cluster (x, y, z each), then the bytes of dynamic shared memory
      arguments: three numbers each: 0, index, offset for an operand; 1, index, offset for a result; 2, size, bits for a
        scalar; 3, index, 0 for a tensor map; 4, index, 0 for a constant; 5, offset, 0 for scratch of the launcher;
        6, count, 0 for a counter
    tensor_maps: a dictionary "0", "1", ...: the buffer as above, data type, rank, number of corners (0 if tiled),
      dimensions, strides, box, element strides, interleave, swizzle, L2 promotion, fill, lower and upper corners
    constants: a dictionary "0", "1", ... of 64-bit integers, each list once
    scratch: bytes that the launcher provides
    """
    maps: list[TensorMap] = []
    constants: dict[Constant, int] = {}
    *starts, end = itertools.accumulate((math.ceil(size / _ALIGNMENT) * _ALIGNMENT for size in plan.scratch), initial=0)

    def words(argument: Argument) -> tuple[int, int, int]:
        match argument:
            case Operand(index, offset):
                return 0, index, offset
            case Result(index, offset):
                return 1, index, offset
            case Scratch(index, offset) if plan.unit:
                return 1, results + index, offset
            case Scratch(index, offset):
                return 5, starts[index] + offset, 0
            case Scalar():
                return 2, argument.size, argument.bits
            case Constant():
                return 4, constants.setdefault(argument, len(constants)), 0
            case Counter(count):
                return 6, count, 0
            case TensorMap():
                maps.append(argument)
                return 3, len(maps) - 1, 0

    def launch(launch: Launch) -> dict[str, object]:
        return {
            "kernel": launch.kernel,
            "geometry": _int64(*launch.grid, *launch.block, *launch.cluster, launch.shared_memory),
            "arguments": _int64(*(word for argument in launch.arguments for word in words(argument))),
        }

    def encode(tensor: TensorMap) -> np.ndarray:
        return _int64(
            *words(tensor.buffer),
            tensor.dtype,
            len(tensor.dimensions),
            len(tensor.corners),
            *tensor.dimensions,
            *tensor.strides,
            *tensor.box,
            *tensor.element_strides,
            tensor.interleave,
            tensor.swizzle,
            tensor.l2_promotion,
            tensor.fill,
            *(low for low, _ in tensor.corners),
            *(high for _, high in tensor.corners),
        )

    launches = {str(i): launch(one) for i, one in enumerate(plan.launches)}
    encoded = {"op": plan.op, "unit": plan.unit, "arch": plan.arch, "launches": launches}
    if maps:
        encoded["tensor_maps"] = {str(i): encode(tensor) for i, tensor in enumerate(maps)}
    if constants:
        encoded["constants"] = {str(i): _int64(*constant.words) for constant, i in constants.items()}
    if end and not plan.unit:
        encoded["scratch"] = np.int64(end)
    return encoded


def _int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)
