"""Plans that the launchers must refuse: an error that names the op and the fault, never a crash."""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxdnn import _native, custom_call
from jaxdnn.plan import Constant, Launch, Operand, Plan, Result, Scalar, Scratch, TensorMap

KERNEL = "norm_forward_float32"
GOOD = Launch(KERNEL, (Operand(0), Result(0)), (0, 1, 1))


def host_plan(*launches: Launch, arch: str = "") -> Plan:
    return Plan("", arch, launches, op="probe")


def call_host(attributes: dict[str, Any]) -> jax.Array:
    # A primitive for this one call: `ffi_call` itself takes no arrays inside nested attributes.
    primitive = Primitive("probe")
    primitive.def_abstract_eval(lambda x: x)
    call = jax.ffi.ffi_lowering("jaxdnn_host")
    mlir.register_lowering(primitive, lambda ctx, x: call(ctx, x, **attributes))
    x = jax.device_put(np.zeros((4, 8), np.float32), jax.devices("cpu")[0])
    return jax.block_until_ready(jax.jit(primitive.bind)(x))


def test_plan_without_tasks_runs():
    before = _native.counters()
    call_host(custom_call.attributes(host_plan(GOOD, GOOD), results=1))
    after = _native.counters()
    assert after["instantiates"] == before["instantiates"] + 1
    assert after["executes"] == before["executes"] + 1


def test_constants_are_stored_once():
    one, other = Constant((1, -(2**63), 2**63 - 1)), Constant(())
    launch = replace(GOOD, arguments=(one, other, one))
    attributes = custom_call.attributes(host_plan(launch, launch), results=1)
    assert {name: list(words) for name, words in attributes["constants"].items()} == {
        "0": [1, -(2**63), 2**63 - 1],
        "1": [],
    }
    for encoded in attributes["launches"].values():
        assert encoded["arguments"].tolist() == [4, 0, 0, 4, 1, 0, 4, 0, 0]
    call_host(attributes)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *(("int32", value) for value in (0, 1, -1, 2**31 - 1, -(2**31))),
        *(("int64", value) for value in (0, -1, 2**32, 2**63 - 1, -(2**63), 0x0123_4567_89AB_CDEF)),
        *((dtype, value) for dtype in ("float32", "float64") for value in (0.1, -0.0, -1e30, float("inf"))),
    ],
)
def test_a_scalar_is_its_bytes(dtype, value):
    scalar = Scalar(dtype, value)
    words = custom_call.attributes(host_plan(replace(GOOD, arguments=(scalar,))), results=1)["launches"]["0"]
    kind, size, bits = words["arguments"]
    raw = bits.tobytes()
    assert (kind, size) == (2, np.dtype(dtype).itemsize)
    assert raw[:size] == np.array(value, dtype).tobytes()
    assert not any(raw[size:])


def test_a_tensor_map_is_its_words():
    """In the order of `cuTensorMapEncodeTiled`, after the buffer."""
    tensor = TensorMap(Result(1, 16), 3, (4, 5, 6), (7, 8), (9, 10, 11), (12, 13, 14), 15, 16, 17, 18)
    attributes = custom_call.attributes(host_plan(replace(GOOD, arguments=(Operand(0), tensor))), results=2)
    assert attributes["launches"]["0"]["arguments"].tolist() == [0, 0, 0, 3, 0, 0]
    assert attributes["tensor_maps"]["0"].tolist() == [1, 1, 16, 3, 3, 0, *range(4, 19)]


def test_an_im2col_tensor_map_is_its_words():
    """Lower corners, then upper ones, as `cuTensorMapEncodeIm2col` takes them."""
    corners = ((-1, 2), (-3, 4))
    tensor = TensorMap(
        Operand(0), 9, (4, 5, 6, 7), (8, 9, 10), (11, 12), (13, 14, 15, 16), 17, 18, 19, 20, corners=corners
    )
    attributes = custom_call.attributes(host_plan(replace(GOOD, arguments=(tensor,))), results=2)
    assert attributes["tensor_maps"]["0"].tolist() == [0, 0, 0, 9, 4, 2, *range(4, 21), -1, -3, 2, 4]


def test_scratch_lies_on_cache_lines_of_its_own():
    launch = replace(GOOD, arguments=(Scratch(0), Scratch(1, 8), Scratch(2)))
    plan = replace(host_plan(launch), scratch=(65, 64, 1))
    attributes = custom_call.attributes(plan, results=1)
    assert attributes["launches"]["0"]["arguments"].tolist() == [5, 0, 0, 5, 136, 0, 5, 192, 0]
    assert attributes["scratch"] == 256
    on_gpu = custom_call.attributes(replace(plan, unit="// CUDA"), results=1)
    assert on_gpu["launches"]["0"]["arguments"].tolist() == [1, 1, 0, 1, 2, 8, 1, 3, 0]
    assert "scratch" not in on_gpu


def test_scratch_is_kept_between_calls():
    def allocations(mebibytes):
        size = np.int64((mebibytes << 20) + 1)  # no whole number of cache lines
        before = _native.counters()["scratch_allocations"]
        call_host({**custom_call.attributes(host_plan(GOOD), results=1), "scratch": size})
        return _native.counters()["scratch_allocations"] - before

    allocations(1)
    assert allocations(1) == 0
    assert allocations(200) == allocations(200) == 1  # too much to keep, and it takes nothing from what is kept
    assert allocations(1) == 0
    # One that is too small makes room for one that serves both.
    assert allocations(100) == 1
    assert allocations(100) == allocations(1) == 0


def test_scratch_beyond_memory_is_an_error():
    attributes = custom_call.attributes(replace(host_plan(GOOD), scratch=(2**62,)), results=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxdnn: probe: no memory for {2**62} bytes of scratch"):
        call_host(attributes)


TENSOR_MAP = TensorMap(Operand(0), 7, (8, 4), (32,), (8, 4), (1, 1))
IM2COL = TensorMap(Operand(0), 7, (8, 4, 2), (32, 128), (8, 4), (1, 2, 1), corners=((-1, 1),))
BAD_PLANS = {
    "unknown kernel": (
        host_plan(replace(GOOD, kernel="nope")),
        "probe: there is no host kernel nope for .*; there are:",
    ),
    "kernel without a name": (host_plan(replace(GOOD, kernel="")), "probe, launch 0: the kernel has no name"),
    "unknown instruction set": (host_plan(GOOD, arch="mmx"), "probe: instruction set mmx can't run here; .*baseline"),
    "operand beyond the call": (
        host_plan(replace(GOOD, arguments=(Operand(1),))),
        "probe: the plan uses 2 operands and 0 results, but the call has 1 and 1",
    ),
    "result beyond the call": (
        host_plan(GOOD, replace(GOOD, arguments=(Result(5),))),
        "probe: the plan uses 1 operands and 6 results, but the call has 1 and 1",
    ),
    "negative operand": (
        host_plan(replace(GOOD, arguments=(Operand(-1),))),
        "probe, launch 0, argument 0: operand index is -1; it must be 0 to",
    ),
    "negative offset": (
        host_plan(GOOD, replace(GOOD, arguments=(Result(0), Operand(0, -4)))),
        "probe, launch 1, argument 1: offset is -4; it must be 0 to",
    ),
    "offset beyond the buffer": (
        host_plan(replace(GOOD, arguments=(Operand(0, 129),))),
        "probe: offset 129 is beyond the 128 bytes of operand 0",
    ),
    "too many arguments": (
        host_plan(replace(GOOD, arguments=(Scalar("int32", 1),) * 129)),
        "probe, launch 0: number of arguments is 129; it must be 0 to 128",
    ),
    "negative grid": (host_plan(replace(GOOD, grid=(-1, 1, 1))), "probe, launch 0: grid is -1; it must be 0 to"),
    "two-dimensional grid": (
        host_plan(replace(GOOD, grid=(1, 2, 1))),
        r"only grid\[0\], the number of tasks, may be set",
    ),
    "block": (host_plan(replace(GOOD, block=(32, 1, 1))), r"only grid\[0\], the number of tasks, may be set"),
    "tensor map": (host_plan(replace(GOOD, arguments=(TENSOR_MAP,))), "there are no tensor maps on the host"),
    "tensor map of rank 6": (
        host_plan(replace(GOOD, arguments=(replace(TENSOR_MAP, dimensions=(1,) * 6),))),
        "probe, tensor map 0: rank is 6; it must be 1 to 5",
    ),
    "tensor map of unequal ranks": (
        host_plan(replace(GOOD, arguments=(replace(TENSOR_MAP, box=(8,)),))),
        "probe, tensor map 0: has 16 words; rank 2 takes 17",
    ),
    "im2col": (host_plan(replace(GOOD, arguments=(IM2COL,))), "there are no tensor maps on the host"),
    "im2col tensor map whose corners do not fit its rank": (
        host_plan(replace(GOOD, arguments=(replace(IM2COL, corners=((0, 0),) * 2),))),
        "probe, tensor map 0: has 2 corners with rank 3",
    ),
    "im2col tensor map with a long box": (
        host_plan(replace(GOOD, arguments=(replace(IM2COL, box=(8, 4, 1)),))),
        "probe, tensor map 0: has 23 words; rank 3 takes 22",
    ),
}


@pytest.mark.parametrize(("plan", "message"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_bad_plan_is_an_error(plan: Plan, message: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*jaxdnn: .*{message}"):
        call_host(custom_call.attributes(plan, results=1))


def without(name: str) -> dict[str, Any]:
    attributes = custom_call.attributes(host_plan(GOOD), results=1)
    del attributes[name]
    return attributes


def with_launch(**changes: Any) -> dict[str, Any]:
    attributes = custom_call.attributes(host_plan(GOOD), results=1)
    attributes["launches"]["0"].update(changes)
    return attributes


BAD_ATTRIBUTES = {
    "nothing": ({}, 'a plan: attribute "op" is missing'),
    "no unit": (without("unit"), 'the plan of probe: attribute "unit" is missing'),
    "no launches": (without("launches"), 'the plan of probe: attribute "launches" is missing'),
    "op a number": ({**without("op"), "op": 3}, 'attribute "op": Wrong attribute type'),
    "launches a string": ({**without("launches"), "launches": "0"}, 'attribute "launches": Wrong attribute type'),
    "launch misnamed": ({**without("launches"), "launches": {"1": {}}}, 'launch 0: attribute "0" is missing'),
    "geometry of 32 bits": (with_launch(geometry=np.ones(10, np.int32)), 'attribute "geometry": Wrong array data type'),
    "geometry too short": (with_launch(geometry=np.arange(1, 10)), "geometry has 9 numbers; it must have 10"),
    "argument cut off": (with_launch(arguments=np.arange(4)), "arguments have 4 words; each takes 3"),
    "unknown argument kind": (with_launch(arguments=np.array([7, 0, 0])), "argument kind 7; it must be 0 to 6"),
    "counters on the host": (with_launch(arguments=np.array([6, 8, 0])), "counters are for CUDA kernels"),
    "scalar of 2 bytes": (with_launch(arguments=np.array([2, 2, 0])), "scalar of 2 bytes; it must have 4 or 8"),
    "no such tensor map": (with_launch(arguments=np.array([3, 0, 0])), "tensor map 0 of 0"),
    "no such constant": (with_launch(arguments=np.array([4, 0, 0])), "constant 0 of 0"),
    "constant of 32 bits": (
        {**with_launch(), "constants": {"0": np.ones(3, np.int32)}},
        'constant 0: attribute "0": Wrong array data type',
    ),
    "constant on CUDA": (
        {**with_launch(arguments=np.array([4, 0, 0])), "unit": "// CUDA", "constants": {"0": np.ones(3, np.int64)}},
        "constants are for host kernels, and this plan has a CUDA unit",
    ),
    "scratch beyond its end": (
        {**with_launch(arguments=np.array([5, 65, 0])), "scratch": np.int64(64)},
        "launch 0, argument 0: offset into scratch is 65; it must be 0 to 64",
    ),
    "no scratch": (with_launch(arguments=np.array([5, 1, 0])), "offset into scratch is 1; it must be 0 to 0"),
    "negative scratch": ({**with_launch(), "scratch": np.int64(-1)}, "scratch is -1; it must be 0 to"),
    "scratch of 32 bits": ({**with_launch(), "scratch": np.int32(64)}, 'attribute "scratch": Wrong scalar data type'),
    "scratch on CUDA": (
        {**with_launch(arguments=np.array([5, 0, 0])), "unit": "// CUDA", "scratch": np.int64(64)},
        "scratch from the launcher is for host kernels, and this plan has a CUDA unit",
    ),
}


@pytest.mark.parametrize(("attributes", "message"), BAD_ATTRIBUTES.values(), ids=BAD_ATTRIBUTES.keys())
def test_bad_attributes_are_an_error(attributes: dict[str, Any], message: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*jaxdnn: .*{re.escape(message)}"):
        call_host(attributes)
