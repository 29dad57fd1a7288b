// Barriers in shared memory (mbarrier) and the ring of stages that producers and consumers share through them.
//
// Each stage has two: `full` completes when the bytes that its producer announced have arrived, `empty` when all of its
// consumers have let go of it. A barrier's phase flips on each completion, and a waiter names the phase it waits for.
#pragma once

#include "core/ptx.cuh"

namespace jaxdnn {
namespace ptx {

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to the other blocks of the cluster and to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives, and announces `bytes` that the copy engine will write before the phase can complete.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives at the barrier that lies at `barrier` in the shared memory of block `rank` of the cluster. It orders nothing
/// but what its warp has already waited for: releasing at the cluster's scope would wait for all memory traffic
/// (measured: a third of a matmul's speed).
__device__ __forceinline__ void mbarrier_arrive_at(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Whether the phase of parity `parity` has completed; may sleep for a while before it answers no.
__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
  unsigned completed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}"
      : "=r"(completed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return completed != 0;
}

/// Counts this warp as come to barrier `index` (0 to 15) of `threads` threads without waiting there.
__device__ __forceinline__ void barrier_arrive(int index, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

__device__ __forceinline__ void warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

/// A value that is the same in all lanes, in a form that lets the compiler know it.
__device__ __forceinline__ int uniform(int value) {
  int result;
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}

/// Gives registers of this warp group back, or takes them: `kCount` a thread from here on.
template <int kCount>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace ptx

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
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
    ptx::mbarrier_init_fence();
  }
};

}  // namespace jaxdnn
