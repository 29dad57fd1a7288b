// ptx/barrier.cuh's barriers of a block on the CPU.
#pragma once

#include "launch.h"

namespace jaxdnn::ptx {

inline void barrier_sync(int index, int threads) { emulation::machine.current->block->barriers[index].wait(threads); }

}  // namespace jaxdnn::ptx
