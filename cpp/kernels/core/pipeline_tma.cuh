// A ring of stages of shared memory that one thread, or a warp, fills by TMA, and that warps read as they arrive.
//
//   full[stage]    1 arrival, the producer's, which announces the bytes of a stage; complete when they are there
//   empty[stage]   an arrival of each consuming warp, of each block that this one's copies write to
//   shared memory  | stages of kStageBytes, each aligned as swizzled tiles are |, and elsewhere | full 0, empty 0, ...
//   |
//
// A kernel says what a stage holds, one tile or several, and how it is loaded. What is loaded once has a ring of one
// stage. Each end walks through the stages on its own:
//
//   producer       StageWriter   fill(load), fill(load), ...
//   consumers      StageReader   wait, use, release, advance, wait, ...
//
// A barrier's phase flips on each completion, and a waiter names the phase that it waits for. Nothing is filled yet at
// the start, so the first wait for `empty` is for the phase before the first, which counts as complete.
#pragma once

#include "core/cluster.cuh"
#include "core/mbarrier.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// A position in the ring: the stage, and the parity of the phase that its `full` barrier is in.
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

/// The ring. `Cluster` is a ClusterCoordinate: which blocks fill each other's stages.
template <int kStages, int kBytes, class Cluster = ClusterCoordinate<1, 1>>
struct TmaPipeline {
  using Position = StagePosition<kStages>;
  static constexpr int kStageBytes = kBytes, kStageStride = (kBytes + 1023) / 1024 * 1024;
  static constexpr int kBarrierBytes = kStages * 16;

  unsigned stages, barriers;  // shared addresses
  Cluster cluster;

  __device__ __forceinline__ TmaPipeline(unsigned stages, unsigned barriers) : stages(stages), barriers(barriers) {}

  __device__ __forceinline__ unsigned stage(int index) const { return stages + index * kStageStride; }
  __device__ __forceinline__ unsigned full(int stage) const { return barriers + stage * 16; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + stage * 16 + 8; }

  /// By one thread: makes the barriers, for so many consuming warps of a block.
  __device__ __forceinline__ void init(int warps) const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), warps * Cluster::kSharers);
    }
    ptx::fence_mbarrier_init();
  }

  /// By all threads, when one has made the barriers: waits until every block of the cluster has them.
  __device__ __forceinline__ void open() const {
    __syncthreads();
    cluster_sync<Cluster::kBlocks>();
  }

  /// By all threads: no block leaves while others of its cluster may still arrive at its barriers.
  __device__ __forceinline__ void close() const { cluster_sync<Cluster::kBlocks>(); }

  /// By a consuming warp: lets go of a stage, in every block that writes to it.
  __device__ __forceinline__ void release(int stage) const {
    const int lane = threadIdx.x % 32;
    if constexpr (Cluster::kBlocks == 1) {
      if (lane == 0) ptx::mbarrier_arrive(empty(stage));
    } else if (lane < Cluster::kSharers) {
      ptx::mbarrier_arrive_cluster(empty(stage), cluster.sharer(lane));
    }
  }
};

/// The producer's end of a ring; one thread's, or a warp's.
template <class Pipeline, int kThreads = 1>
struct StageWriter {
  static_assert(kThreads == 1 || kThreads == 32, "a thread or a warp");
  const Pipeline& pipeline;
  typename Pipeline::Position position = {};

  /// The thread that has to do with barriers.
  static __device__ __forceinline__ bool first() { return kThreads == 1 || threadIdx.x % 32 == 0; }

  /// Waits until the next stage is empty, and has `load(address, barrier)` start copies of its bytes, or so many. What
  /// the first thread itself writes there, `store(address)` does.
  template <class Load, class Store>
  __device__ __forceinline__ void fill(const Load& load, unsigned bytes, const Store& store) {
    const unsigned full = pipeline.full(position.stage);
    if (first()) {
      mbarrier_wait(pipeline.empty(position.stage), position.parity ^ 1);
      store(pipeline.stage(position.stage));
      ptx::mbarrier_arrive_expect_tx(full, bytes);
    }
    if constexpr (kThreads > 1) ptx::bar_warp_sync();
    load(pipeline.stage(position.stage), full);
    position.advance();
  }

  template <class Load>
  __device__ __forceinline__ void fill(const Load& load, unsigned bytes = Pipeline::kStageBytes) {
    fill(load, bytes, [](unsigned) {});
  }
};

/// A consumer's end: the stage that it uses, and the one before, of which multiplies may still read.
template <class Pipeline>
struct StageReader {
  const Pipeline& pipeline;
  typename Pipeline::Position position = {};
  int previous = 0;

  /// Until the stage is full.
  __device__ __forceinline__ void wait() const { mbarrier_wait(pipeline.full(position.stage), position.parity); }

  __device__ __forceinline__ void advance() {
    previous = position.stage;
    position.advance();
  }

  /// By a warp; the stage itself, or the one before.
  __device__ __forceinline__ void release() const { pipeline.release(position.stage); }
  __device__ __forceinline__ void release_previous() const { pipeline.release(previous); }
};

}  // namespace jaxdnn
