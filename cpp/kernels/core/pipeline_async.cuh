// A ring of stages in shared memory, filled by cp.async while earlier stages are used.
//
// Every thread owns its slots: it reads only what it copied itself. So waiting for its own copies is all the
// synchronisation there is, no barrier and no producer warp, and threads run ahead of each other freely.
//
// Shared memory, for one array, with `kThreads` threads a block:
//
//   stage 0 | stage 1 | ...                         each kStageBytes
//     vector 0 | vector 1 | ...                     kThreads x Vector::kBytes
//       chunk 0 | chunk 1 | ...                     kThreads x up to 16 bytes, thread next to thread: no conflicts
#pragma once

#include "core/vector.cuh"
#include "ptx/async.cuh"

namespace jaxdnn {

template <class T, int kCount, int kVectors, int kThreads, int kStages>
struct Ring {
  using Element = Vector<T, kCount>;
  static constexpr int kVectorBytes = kThreads * Element::kBytes;
  static constexpr int kStageBytes = kVectors * kVectorBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kStages == 0 || Element::kChunkBytes >= 4, "cp.async copies 4, 8 or 16 bytes");

  unsigned slots;  // shared address of this thread's first chunk

  __device__ __forceinline__ explicit Ring(unsigned shared) : slots(shared + threadIdx.x * Element::kChunkBytes) {}

  /// Starts the copy of one vector, or clears its slot. The source is not read when `active` is false.
  __device__ __forceinline__ void fetch(int stage, int vector, const T* source, bool active) const {
    if constexpr (kStages > 0) {
      const unsigned slot = slots + stage * kStageBytes + vector * kVectorBytes;
      const char* address = reinterpret_cast<const char*>(source);
#pragma unroll
      for (int chunk = 0; chunk < Element::kChunks; ++chunk) {
        const unsigned destination = slot + chunk * kThreads * Element::kChunkBytes;
        const char* from = address + chunk * Element::kChunkBytes;
        ptx::cp_async<Element::kChunkBytes>(destination, from, active ? Element::kChunkBytes : 0);
      }
    }
  }

  __device__ __forceinline__ void read(Element& element, int stage, int vector) const {
    if constexpr (kStages > 0) {
      const unsigned slot = slots + stage * kStageBytes + vector * kVectorBytes;
#pragma unroll
      for (int chunk = 0; chunk < Element::kChunks; ++chunk) {
        const unsigned from = slot + chunk * kThreads * Element::kChunkBytes;
        unsigned* words = element.words + chunk * Element::kChunkWords;
        ptx::ld_shared<Element::kChunkBytes>(words, from);
      }
    }
  }
};

}  // namespace jaxdnn
