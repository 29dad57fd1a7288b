// ptx/async.cuh on the CPU.
#pragma once

#include "launch.h"
#include "ptx/memory.cuh"

namespace jaxdnn::ptx {

template <int kBytes>
void cp_async(unsigned destination, const void* source, unsigned bytes) {
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4, "16, 8 or 4 bytes at once");
  require_aligned<kBytes>(reinterpret_cast<std::uintptr_t>(source));
  unsigned char* const to = shared_bytes<kBytes>(destination);
  emulation::machine.current->loads.start([=] {
    std::memcpy(to, source, bytes);
    std::memset(to + bytes, 0, kBytes - bytes);
  });
}

inline void cp_async_commit_group() { emulation::machine.current->loads.commit(); }

template <int kPending>
void cp_async_wait_group() {
  emulation::machine.current->loads.wait(kPending);
}

inline void cp_async_bulk_prefetch_l2(const void*, unsigned bytes) {
  if (bytes % 16) emulation::fail("prefetches %u bytes", bytes);
}

}  // namespace jaxdnn::ptx
