// ptx/memory.cuh on the CPU. A shared address is an offset into the block's memory; an address in the cluster's window
// says whose in front.
#pragma once

#include "launch.h"

namespace jaxdnn::ptx {

template <int kBytes>
void require_aligned(std::uintptr_t address) {
  if (address % kBytes) emulation::fail("accesses %d bytes at once at %zu, which is not aligned", kBytes, address);
}

template <int kBytes>
void ld_global(unsigned* words, const void* address) {
  require_aligned<kBytes>(reinterpret_cast<std::uintptr_t>(address));
  words[0] = 0;
  std::memcpy(words, address, kBytes);
}

template <int kBytes>
void st_global(void* address, const unsigned* words) {
  require_aligned<kBytes>(reinterpret_cast<std::uintptr_t>(address));
  std::memcpy(address, words, kBytes);
}

inline unsigned atomic_add(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address += value;
  return before;
}

/// Lets others run first, who may add to it.
inline unsigned ld_acquire(const unsigned* address) {
  emulation::poll();
  return *address;
}

inline void red_release_add(unsigned* address, unsigned value) {
  *address += value;
  emulation::signal();
}

inline void prefetch_global_l1(const void*) {}
inline void prefetch_global_l2(const void*) {}

constexpr unsigned kSharedWindow = 1 << 24;

inline unsigned cvta_to_shared(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - emulation::dynamic_shared_memory());
}

/// Whose shared memory an address is in.
inline emulation::Block& block_of(unsigned address) {
  const emulation::Thread& thread = *emulation::machine.current;
  const unsigned window = address / kSharedWindow;
  return window == 0 ? *thread.block : *thread.block->cluster.blocks[window - 1];
}

/// Where so many bytes lie.
template <int kBytes>
unsigned char* shared_bytes(unsigned address) {
  const unsigned offset = address % kSharedWindow;
  require_aligned<kBytes>(offset);
  const emulation::Block& block = block_of(address);
  if (!block.started || block.threads == 0) emulation::fail("accesses shared memory of a block that need not run");
  if (offset + kBytes > block.dynamic.size) emulation::fail("accesses byte %u of shared memory", offset);
  return block.dynamic.data() + offset;
}

template <int kBytes>
void ld_shared(unsigned* words, unsigned address) {
  std::memcpy(words, shared_bytes<kBytes>(address), kBytes);
}

template <class T>
void ld_shared(T& value, unsigned address) {
  std::memcpy(&value, shared_bytes<sizeof(T)>(address), sizeof(T));
}

template <int kBytes>
void st_shared(unsigned address, const unsigned* words) {
  std::memcpy(shared_bytes<kBytes>(address), words, kBytes);
}

template <class T>
void st_shared(unsigned address, T value) {
  std::memcpy(shared_bytes<sizeof(T)>(address), &value, sizeof(T));
}

}  // namespace jaxdnn::ptx
