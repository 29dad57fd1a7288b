// The tiles that each cluster of a grid works through.
//
// Tiles are dealt out in advance, in turn, or taken: a cluster that is ready for another one counts a counter in global
// memory up. What is computed is the same. A cluster that waits for multiprocessors, or shares the memory's bandwidth,
// as beside a collective's kernel, then takes fewer, where its dealt tiles would hold up the whole call. And neighbours
// in a batch stay neighbours in time, so that what they share stays in the L2 cache. Taking has a latency, which tiles
// of a few stages can't hide. Where a warp adds up what it has of several tiles
// (core/epilogue_reductions.cuh) they are dealt: else sums would be of other tiles on every run.
#pragma once

#include "core/pipeline_tma.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace jaxdnn {

/// How many tiles were taken, of each call that runs: no two calls that can run at once share one. All are zero but
/// while their call runs.
constexpr int kTileCounters = 1024;
__device__ unsigned taken_tiles[kTileCounters];

/// The counter of this number, if it is one.
__device__ __forceinline__ unsigned* tile_counter(int number) { return number < 0 ? nullptr : taken_tiles + number; }

/// The tiles of a cluster of `kBlocks`. One thread of it takes them, the next when it is asked to, and tells all its
/// blocks through a ring in their shared memory, in which an entry is read by all before it comes round again: there
/// are two more than tiles of which stages can be in flight.
template <int kBlocks, unsigned kEntries = 8>
struct TileQueue {
  static constexpr unsigned kEntryBytes = 16;  // a barrier, and the number of a tile
  static constexpr int kSharedBytes = kEntries * kEntryBytes + 8;

  unsigned entries;   // shared address
  unsigned* counter;  // in global memory; null where tiles are dealt
  unsigned tiles;

  static __device__ __forceinline__ unsigned clusters() { return gridDim.x / kBlocks; }
  __device__ __forceinline__ bool taken() const { return counter != nullptr; }
  __device__ __forceinline__ unsigned asked() const { return entries + kEntries * kEntryBytes; }  // a barrier
  __device__ __forceinline__ unsigned entry(unsigned turn) const { return entries + turn % kEntries * kEntryBytes; }

  /// By one thread: makes the ring's barriers.
  __device__ __forceinline__ void init() const {
    for (unsigned turn = 0; turn < kEntries; ++turn) ptx::mbarrier_init(entry(turn), 1);
    ptx::mbarrier_init(asked(), 1);
  }

  /// By the thread that begins tiles, once for each: asks for the next one. Asked for early, it waits for this block,
  /// while another one may have nothing to do.
  __device__ __forceinline__ void ask() const {
    if (taken()) ptx::mbarrier_arrive(asked());
  }

  /// By the thread that takes, as are the next two.
  __device__ __forceinline__ unsigned take() const { return ptx::atomic_add(counter, 1u); }

  /// Takes all tiles but the first, which it has taken.
  __device__ __forceinline__ void take_others(unsigned index) const {
    for (unsigned turn = 0;; ++turn) {
      tell(turn, index);
      if (index >= tiles) return;
      mbarrier_wait(asked(), turn & 1);
      index = take();
    }
  }

  /// Tells the cluster's blocks the number of their tile of a turn.
  __device__ __forceinline__ void tell(unsigned turn, unsigned index) const {
    // Each cluster takes one more than there are. Who takes the last number of all leaves zero behind.
    if (index == tiles + clusters() - 1) *counter = 0;
    if constexpr (kBlocks == 1) {
      ptx::st_shared(entry(turn) + 8, index);
      ptx::mbarrier_arrive(entry(turn));
    } else {
#pragma unroll
      for (unsigned rank = 0; rank < kBlocks; ++rank) {
        const unsigned barrier = ptx::mapa(entry(turn), rank);
        ptx::mbarrier_arrive_expect_tx_cluster(barrier, sizeof(index));
        ptx::st_async(barrier + 8, index, barrier);
      }
    }
  }

  /// By a warp, or by one thread.
  template <bool kWarp>
  __device__ __forceinline__ unsigned told(unsigned turn) const {
    unsigned index = 0;
    mbarrier_wait(entry(turn), turn / kEntries & 1);
    // In a warp by the lane that lets go of stages, and with them of the entry.
    if (!kWarp || threadIdx.x % 32 == 0) ptx::ld_shared<4>(&index, entry(turn) + 8);
    return kWarp ? ptx::shfl_sync_idx(index) : index;
  }
};

/// A walk through a cluster's tiles, of a warp or of one thread.
template <class Queue, bool kWarp>
struct TileWalk {
  const Queue& queue;
  unsigned turn = 0, index;

  __device__ __forceinline__ TileWalk(const Queue& queue, unsigned first)
      : queue(queue), index(queue.taken() ? queue.template told<kWarp>(0) : first) {}

  __device__ __forceinline__ bool on_a_tile() const { return index < queue.tiles; }

  __device__ __forceinline__ void advance() {
    if (!on_a_tile()) return;
    ++turn;
    index = queue.taken() ? queue.template told<kWarp>(turn) : index + queue.clusters();
  }
};

}  // namespace jaxdnn
