"""The loop over tasks, on a thread pool whose threads come when the test says."""

import ctypes
import shutil
import subprocess
import threading
import time
from pathlib import Path

import jax
import pytest

SOURCES = Path(__file__).parents[2] / "cpp" / "runtime"
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
HELPER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
SCHEDULE = ctypes.CFUNCTYPE(None, HELPER, ctypes.c_void_p)
WAIT = 10  # seconds for what comes at once unless it is wrong

POOL = """
#include "parallel.h"

namespace ffi = xla::ffi;

using Schedule = void (*)(XLA_FFI_Task*, void*);

struct Pool {
  int64_t threads;
  Schedule schedule;
};

// The context's type is ours to define until JAX 0.10, and XLA's later.
template <typename Context>
const Pool& pool(const Context* context) {
  return *reinterpret_cast<const Pool*>(context);
}

extern "C" void loop(int64_t threads, int64_t tasks, jaxdnn::HostKernel kernel, Schedule schedule) {
  XLA_FFI_Api api{};
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
    *args->num_threads = pool(args->ctx).threads;
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
    pool(args->ctx).schedule(args->task, args->data);
    return nullptr;
  };
  Pool pool{threads, schedule};
  auto* context = reinterpret_cast<XLA_FFI_ExecutionContext*>(&pool);
  ffi::DiagnosticEngine diagnostic;
  jaxdnn::run_tasks(*ffi::CtxDecoding<ffi::ThreadPool>::Decode(&api, context, diagnostic), kernel, nullptr, tasks);
}
"""


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """`loop(threads, tasks, kernel, schedule)`: the pool of so many threads calls `schedule(helper, its data)`."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing")
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "pool.cc").write_text(POOL)
    command = ["g++", "-std=c++17", "-w", "-shared", "-fPIC", "-pthread", f"-I{SOURCES}", f"-I{jax.ffi.include_dir()}"]
    command += [str(folder / "pool.cc"), str(SOURCES / "parallel.cc"), "-o", str(folder / "pool.so")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[:4000]
    library = ctypes.CDLL(str(folder / "pool.so"))
    library.loop.argtypes = (ctypes.c_int64, ctypes.c_int64, KERNEL, SCHEDULE)

    def call(threads, tasks, kernel, schedule):
        arguments = (threads, tasks, KERNEL(lambda _, task: kernel(task)), SCHEDULE(schedule))
        caller = threading.Thread(target=library.loop, args=arguments, daemon=True)
        caller.start()
        caller.join(WAIT)
        assert not caller.is_alive(), "the loop does not end"

    return call


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 5, 6, 40])
def test_helpers_that_never_come_are_not_waited_for(tasks, threads, loop):
    ran, helpers = [], []
    loop(threads, tasks, ran.append, lambda helper, data: helpers.append((helper, data)))
    assert ran == list(range(tasks))
    assert len(helpers) == max(0, min(tasks, threads) - 1)
    for helper, data in helpers:  # the loop has ended
        helper(data)
    assert len(ran) == tasks


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("tasks", [2, 4, 5, 40])
def test_as_many_tasks_run_at_once_as_there_are_threads(tasks, threads, loop):
    at_once = min(tasks, threads)
    all_run, helpers, ended = threading.Barrier(at_once, timeout=WAIT), [], []

    def kernel(task):
        if task < at_once:
            all_run.wait()
        if threading.current_thread() in helpers:
            time.sleep(0.002)  # the last to end is a helper, for which the caller waits
        ended.append(task)

    def schedule(helper, data):
        helpers.append(threading.Thread(target=helper, args=(data,)))
        helpers[-1].start()

    loop(threads, tasks, kernel, schedule)
    assert sorted(ended) == list(range(tasks))
    for helper in helpers:
        helper.join(WAIT)
