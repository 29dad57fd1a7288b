// ptx/barrier.cuh on the CPU.
#pragma once

#include "launch.h"
#include "ptx/memory.cuh"

namespace jaxdnn::ptx {

inline void barrier_sync(int index, int threads) { emulation::machine.current->block->barriers[index].wait(threads); }
inline void barrier_arrive(int index, int threads) {
  emulation::machine.current->block->barriers[index].arrive(threads);
}

/// What an mbarrier's 8 bytes are: the parity of its phase, and what that waits for.
struct MBarrier {
  unsigned short arrivals, parity : 1, pending : 15;
  int bytes;
};
static_assert(sizeof(MBarrier) == 8);

inline MBarrier& mbarrier(emulation::Block& block, unsigned address) {
  return *reinterpret_cast<MBarrier*>(block.dynamic.data() + address);
}

/// Ends the phase if nothing is missing.
inline void complete(emulation::Block& block, unsigned address) {
  MBarrier& barrier = mbarrier(block, address);
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.parity ^= 1;
  barrier.pending = barrier.arrivals;
  block.mbarriers[address].release();
}

inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
  shared_bytes<8>(barrier);
  mbarrier(*emulation::machine.current->block, barrier) = {static_cast<unsigned short>(arrivals), 0,
                                                           static_cast<unsigned short>(arrivals), 0};
}

inline void fence_mbarrier_init() {}

inline void arrive(emulation::Block& block, unsigned barrier, unsigned bytes) {
  MBarrier& its = mbarrier(block, barrier);
  if (its.pending == 0) emulation::fail("arrives once too often at barrier %u", barrier);
  --its.pending;
  its.bytes += bytes;
  complete(block, barrier);
}

inline void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  arrive(*emulation::machine.current->block, barrier, bytes);
}

inline void mbarrier_arrive_expect_tx_cluster(unsigned barrier, unsigned bytes) {
  arrive(block_of(barrier), barrier % kSharedWindow, bytes);
}

inline void mbarrier_complete_tx(unsigned barrier, unsigned bytes) {
  emulation::Block& block = *emulation::machine.current->block;
  mbarrier(block, barrier).bytes -= static_cast<int>(bytes);
  complete(block, barrier);
}

inline void mbarrier_arrive(unsigned barrier) { mbarrier_arrive_expect_tx(barrier, 0); }

inline void mbarrier_arrive_cluster(unsigned barrier, unsigned rank) {
  arrive(*emulation::machine.current->block->cluster.blocks[rank], barrier, 0);
}

/// Waits, instead of being asked again and again.
inline bool mbarrier_try_wait_parity(unsigned barrier, unsigned parity) {
  emulation::Block& block = *emulation::machine.current->block;
  if (mbarrier(block, barrier).parity != parity) return true;
  block.mbarriers[barrier].waiting.push_back(emulation::machine.current);
  emulation::yield();
  return false;
}

}  // namespace jaxdnn::ptx
