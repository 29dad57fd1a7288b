// ptx/warp.cuh on the CPU.
#pragma once

#include <algorithm>

#include "launch.h"
#include "ptx/convert.cuh"

namespace jaxdnn::ptx {

inline void bar_warp_sync() { emulation::exchange(0); }

inline int shfl_sync_idx(int value) { return emulation::exchange(value)[0]; }

inline int shfl_sync_idx(int value, int lane) { return emulation::exchange(value)[lane]; }

inline float shfl_sync_idx(float value, int lane) { return emulation::exchange(value)[lane]; }

inline unsigned vote_sync_ballot(bool predicate) {
  const bool* const all = emulation::exchange(predicate);
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= static_cast<unsigned>(all[lane]) << lane;
  return lanes;
}

template <class T>
T shfl_sync_bfly(T value, int mask) {
  return emulation::exchange(value)[emulation::machine.current->number % 32 ^ mask];
}

inline bool vote_sync_any(bool value) {
  const bool* const lanes = emulation::exchange(value);
  return std::any_of(lanes, lanes + 32, [](bool lane) { return lane; });
}

}  // namespace jaxdnn::ptx
