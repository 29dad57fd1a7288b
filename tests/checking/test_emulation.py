"""What runs kernels on the CPU notices what a GPU would not forgive."""

import numpy as np
import pytest

from checking.emulation.plans import Emulated, run_on_cpu
from jaxdnn.plan import Launch, Operand, Plan, Result, Scalar, Scratch

THREADS = 64
# Each leaves the operand's numbers in the opposite order, and some make a mistake.
KERNELS = {
    "right": ("held[i] = operand[i]; __syncthreads(); result[i] = held[63 - i];", ""),
    "no barrier": ("held[i] = operand[i]; result[i] = held[63 - i];", "depends on the order of threads"),
    "barrier of a warp": (
        "held[i] = operand[i]; ptx::bar_warp_sync(); result[i] = held[63 - i];",
        "depends on the order of threads",
    ),
    "overwritten early": (
        "held[i] = operand[i]; __syncthreads(); result[i] = held[63 - i]; held[i] = 0;",
        "depends on the order of threads",
    ),
    "others never come": ("if (i % 32) ptx::barrier_sync(1, 64); result[i] = operand[63 - i];", "62 threads wait"),
    "read before it": ("result[i] = operand[62 - i];", "4 bytes before operand 0"),
    "read after it": ("result[i] = operand[64 - i];", "0 bytes after operand 0"),
    "written after it": ("result[i + 1] = operand[63 - i];", "0 bytes after result 0"),
    "operand written": ("result[i] = operand[63 - i]; operand[i] = 0;", "operand 0 was written to"),
    "not aligned": (
        "unsigned words[4]; ptx::ld_global<16>(words, operand + i / 8 * 8 + 1); result[i] = words[0];",
        "16 bytes at once",
    ),
    "copied": (
        "ptx::cp_async<4>(to, operand + i, 4); ptx::cp_async_commit_group(); ptx::cp_async_wait_group<0>();"
        "__syncthreads(); result[i] = dynamic[63 - i];",
        "",
    ),
    "still copied": (
        "ptx::cp_async<4>(to, operand + i, 4); ptx::cp_async_commit_group(); ptx::cp_async_wait_group<1>();"
        "__syncthreads(); result[i] = dynamic[63 - i];",
        "depends on the order of threads",
    ),
    "beyond shared memory": ("ptx::st_shared(to + 4, 1.0f);", "byte 256 of shared memory"),
}


def plan_of(body: str) -> Plan:
    unit = f"""#include "core/pipeline_async.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"
using namespace jaxdnn;
extern "C" __global__ void reverse(float* operand, float* result) {{
  extern __shared__ __align__(16) float dynamic[];
  __shared__ float held[{THREADS}];
  const int i = threadIdx.x;
  const unsigned to = ptx::cvta_to_shared(dynamic + i);
  {body}
}}
"""
    shared = 4 * THREADS
    launch = Launch("reverse", (Operand(0), Result(0)), (1, 1, 1), (THREADS, 1, 1), shared_memory=shared)
    return Plan(unit, "sm_90", (launch,))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return Emulated([plan_of(body) for body, _ in KERNELS.values()], tmp_path_factory.mktemp("emulation"))


@pytest.mark.parametrize("name", KERNELS)
def test_mistakes_are_noticed(name, kernels):
    number, said = list(KERNELS).index(name), KERNELS[name][1]
    operand = np.arange(THREADS, dtype=np.float32)
    result = np.zeros_like(operand)
    if said:
        with pytest.raises(AssertionError, match=said):
            kernels.run(number, [operand], [result])
    else:
        kernels.run(number, [operand], [result])
        assert result.tolist() == operand[::-1].tolist()


STRAY = """
extern "C" __global__ void stray(float* operand, float* result, float* scratch, long long i, long long j, long long k) {
  if (threadIdx.x) return;
  for (int at = 0; at < 4; ++at) result[at] = scratch[at] = operand[at];
  result[i] = 1;
  scratch[j] = 1;
  operand[k] = 1;
}
"""


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ((0, 0, None), ""),
        ((-1, 0, None), "before result 0"),
        ((0, 4, None), "after scratch buffer 0"),
        ((0, -3, None), "before scratch buffer 0"),
        ((0, 0, 2), "operand 0 was written to"),
        ((0, 0, 5), "after operand 0"),
    ],
)
def test_a_kernel_that_writes_elsewhere_is_wrong(places, said, tmp_path):
    unit = STRAY if places[2] is not None else STRAY.replace("operand[k] = 1;", "")
    numbers = (Scalar("int64", place or 0) for place in places)
    launch = Launch("stray", (Operand(0), Result(0), Scratch(0), *numbers), (1, 1, 1), (2, 1, 1))
    operand, result = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    plan = Plan(unit, "sm_90", (launch,), scratch=(16,))
    if said:
        with pytest.raises(AssertionError, match=said):
            run_on_cpu(plan, ([operand], [result]), tmp_path)
    else:
        run_on_cpu(plan, ([operand], [result]), tmp_path)
        assert result.tolist() == [1, 1, 2, 3]


def test_a_result_that_is_not_written_is_no_number(tmp_path):
    unit = STRAY.replace("at < 4", "at < 3").replace("operand[k] = 1;", "")
    arguments = (Operand(0), Result(0), Scratch(0), *[Scalar("int64", 0)] * 3)
    plan = Plan(unit, "sm_90", (Launch("stray", arguments, (1, 1, 1), (1, 1, 1)),), scratch=(16,))
    operand, result = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    run_on_cpu(plan, ([operand], [result]), tmp_path)
    assert np.isnan(result).tolist() == [False, False, False, True]
