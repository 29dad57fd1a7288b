// ptx/warp.cuh on the CPU.
#pragma once

#include "launch.h"
#include "ptx/convert.cuh"

namespace jaxdnn::ptx {

inline void bar_warp_sync() { emulation::exchange(0); }

inline int shfl_sync_idx(int value) { return emulation::exchange(value)[0]; }

template <class T>
T shfl_sync_bfly(T value, int mask) {
  return emulation::exchange(value)[emulation::machine.current->number % 32 ^ mask];
}

}  // namespace jaxdnn::ptx
