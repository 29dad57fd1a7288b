// A loop over tasks, on XLA's own thread pool.
#pragma once

#include <cstdint>

#include "../host/base/kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxdnn {

// Runs tasks 0 to `tasks` - 1 and returns when all are done.
//
// The calling thread takes part, and waits only for tasks that another thread has begun. So the loop ends even when no
// other thread of the pool ever comes to help, as when all of them are inside such loops.
void run_tasks(const xla::ffi::ThreadPool& pool, HostKernel kernel, const void* const* arguments, int64_t tasks);

}  // namespace jaxdnn
