// The stages of shared memory that a producer fills by TMA and consumers read.
//
// Each stage has two barriers: `full` completes when the bytes that its producer announced have arrived, `empty` when
// all of its consumers have let go of it. A barrier's phase flips on each completion, and a waiter names the phase it
// waits for.
#pragma once

#include "ptx/barrier.cuh"

namespace jaxdnn {

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

/// A place in the ring: the stage, and the parity of the phase that its `full` barrier is in.
template <int kStages>
struct StagePosition {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void advance(unsigned count) {
    const unsigned next = stage + count;
    parity ^= next / kStages & 1;
    stage = static_cast<int>(next % kStages);
  }
};

/// The barriers of a ring: `full` and `empty` of each stage, side by side in shared memory.
template <int kStages>
struct StageBarriers {
  static constexpr int kSharedBytes = kStages * 16;

  unsigned base;

  __device__ __forceinline__ unsigned full(int stage) const { return base + stage * 16; }
  __device__ __forceinline__ unsigned empty(int stage) const { return base + stage * 16 + 8; }

  /// By one thread; `consumers` arrive at each `empty`.
  __device__ __forceinline__ void init(unsigned consumers) const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), consumers);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace jaxdnn
