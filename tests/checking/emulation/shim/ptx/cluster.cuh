// ptx/cluster.cuh on the CPU.
#pragma once

#include "launch.h"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace jaxdnn::ptx {

inline unsigned cluster_ctarank() { return emulation::machine.current->block->rank; }

inline void barrier_cluster_arrive() {
  emulation::Thread& thread = *emulation::machine.current;
  emulation::Cluster& cluster = thread.block->cluster;
  thread.generation = cluster.generation;
  if (++cluster.arrived < cluster.threads) return;
  cluster.arrived = 0;
  ++cluster.generation;
  cluster.barrier.release();
}

inline void barrier_cluster_wait() {
  emulation::Thread& thread = *emulation::machine.current;
  emulation::Cluster& cluster = thread.block->cluster;
  if (thread.generation != cluster.generation) return;
  cluster.barrier.waiting.push_back(&thread);
  emulation::yield();
}

inline unsigned mapa(unsigned address, unsigned rank) { return address % kSharedWindow + (rank + 1) * kSharedWindow; }

template <class T>
void st_async(unsigned address, T value, unsigned barrier) {
  std::memcpy(shared_bytes<sizeof(value)>(address), &value, sizeof(value));
  emulation::Block& block = block_of(barrier);
  mbarrier(block, barrier % kSharedWindow).bytes -= sizeof(value);
  complete(block, barrier % kSharedWindow);
}

}  // namespace jaxdnn::ptx
