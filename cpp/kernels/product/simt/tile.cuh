// Tiles of a product's operands on their way from global memory, any layout and dtype, to shared memory, in the dtype
// that they are multiplied in.
#pragma once

#include "core/vector.cuh"
#include "ptx/async.cuh"

namespace jaxdnn {

/// Where an operand's elements lie in a tile, and which of them a thread copies: kExtent elements along M or N by
/// kDepth along K, kVector neighbours in memory at a time.
///
///   kAlong   memory runs along M or N, and so do the tile's rows. Otherwise it runs along K: what tensor cores take
///            keeps that, float32 and int32 are transposed on their way, so that the tile's rows run along M or N
template <class T, class Element, int kExtent, int kAllExtents, int kDepth, int kThreads, bool kAlong, int kVector>
struct SimtLayout {
  static constexpr bool kAlongExtent = kAlong;
  static constexpr bool kTransposes = !kAlong && sizeof(Element) == 4;
  // 16 bytes (float64: 32) more than a multiple of 64: the rows that a warp reads together lie in different banks.
  static constexpr int kPitch = (kAlong || kTransposes ? kAllExtents : kDepth) + (sizeof(Element) == 2 ? 8 : 4);
  static constexpr int kSize = (kAlong || kTransposes ? kDepth : kAllExtents) * kPitch;
  static constexpr int kRun = (kAlong ? kExtent : kDepth) / kVector;  // copies along memory
  static constexpr int kPasses = kExtent * kDepth / kVector / kThreads;
  static constexpr int kPassRows = kThreads / kRun;  // of memory, that all threads copy in one pass
  // How far apart, in a tile, this thread's copies are.
  static constexpr int kPassStep = kTransposes ? kPassRows : kPassRows * kPitch;
  static_assert(kThreads % kRun == 0 && kPasses * kThreads * kVector == kExtent * kDepth, "all threads copy the same");

  static __device__ __forceinline__ Element convert(T value) {
    if constexpr (is_same<T, Element>) {
      return value;
    } else {
      return static_cast<Element>(widen(value));
    }
  }

  /// Where in memory's row this thread's copies are.
  static __device__ __forceinline__ int run() { return threadIdx.x % kRun * kVector; }

  /// Which of memory's rows this thread's first copy is of.
  static __device__ __forceinline__ int first_row() { return threadIdx.x / kRun; }

  /// Where in a tile an element is: number `along` along M or N, `k` along K.
  static constexpr __device__ __forceinline__ int offset_of(int along, int k) {
    return kAlong || kTransposes ? k * kPitch + along : along * kPitch + k;
  }

  /// Puts copies that waited in registers into a tile, from `offset` on.
  static __device__ __forceinline__ void put(const Vector<T, kVector> (&waiting)[kPasses], Element* tile, int offset) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        tile[offset + i * kPassStep + j * (kTransposes ? kPitch : 1)] = convert(waiting[i].get(j));
      }
    }
  }
};

/// Eight neighbours of 16 bits, wherever they begin: as the two aligned chunks of 16 bytes that they lie in, until they
/// are used. Neighbouring threads share chunks, which the second one finds in the L1 cache.
template <class T>
struct UnalignedVector {
  unsigned words[8];
  unsigned first;  // element of the first chunk

  /// The first `count`. Arrays begin with a chunk, and nothing else lies in their last one.
  __device__ __forceinline__ void load(const char* source, int count) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(source);
    first = address / sizeof(T) % 8;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[4 * chunk + i] = 0;
      if (count > 0 && 8 * chunk < static_cast<int>(first) + count) {
        ptx::ld_global<16>(words + 4 * chunk, reinterpret_cast<const char*>(address / 16 * 16) + 16 * chunk);
      }
    }
  }

  /// What follows the first `count` in the chunks is not zero.
  __device__ __forceinline__ Vector<T, 8> aligned() const {
    unsigned shifted[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) shifted[i] = words[i];
#pragma unroll
    for (int i = 0; i < 6; ++i) shifted[i] = first & 4 ? shifted[i + 2] : shifted[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) shifted[i] = first & 2 ? shifted[i + 1] : shifted[i];
    Vector<T, 8> vector;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      vector.words[i] = __byte_perm(shifted[i], shifted[i + 1], first & 1 ? 0x5432 : 0x3210);
    }
    return vector;
  }
};

/// 16-bit elements whose rows begin anywhere, or with any word, pass through registers eight at a time.
template <class T, class Element, int kVector>
constexpr bool simt_realigns = is_same<T, Element> && sizeof(T) == 2 && kVector <= 2;
template <class T, class Element, int kVector>
constexpr int simt_together = simt_realigns<T, Element, kVector> ? 8 : kVector;

/// One thread's share of the copies of a matrix's tiles. Elements that need no conversion are copied without passing
/// through registers, if they stay neighbours or are copied one by one; the others wait there while the tile before
/// them is multiplied.
///
/// Rows past the end of M or N repeat the last one, or are anything: their accumulators are never stored. Past the end
/// of K there are zeros.
template <class T, class Element, int kExtent, int kAllExtents, int kDepth, int kThreads, bool kAlong, int kVector,
          class Offset>
struct SimtTile
    : SimtLayout<T, Element, kExtent, kAllExtents, kDepth, kThreads, kAlong, simt_together<T, Element, kVector>> {
  static constexpr bool kRealigns = simt_realigns<T, Element, kVector>;
  static constexpr int kTogether = simt_together<T, Element, kVector>;
  using Layout = SimtLayout<T, Element, kExtent, kAllExtents, kDepth, kThreads, kAlong, kTogether>;
  using Layout::kPasses, Layout::kPassRows, Layout::kPassStep, Layout::kTransposes, Layout::offset_of, Layout::run;
  static constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
  static constexpr bool kAsync = is_same<T, Element> && !kRealigns && kBytes >= 4 && !(kTransposes && kVector > 1);
  const char* source;  // the tile in memory, the same for all threads of a block
  Offset offsets[kPasses];
  long long step;  // bytes from one tile to the next
  int first_row;   // in memory's order, of this thread's first copy
  int offset;      // of it in a tile
  int inside;      // neighbours of a copy that are in the matrix

  Select<kRealigns, UnalignedVector<T>, Vector<T, kVector>> waiting[kAsync ? 1 : kPasses];

  /// `matrix` is the first element; memory's rows lie `stride` apart. The tile starts at `first` of `extent`, `k` of K.
  __device__ __forceinline__ SimtTile(const T* matrix, long long stride, int first, int extent, int k) {
    first_row = Layout::first_row();
    source = reinterpret_cast<const char*>(matrix + (kAlong ? k * stride + first : first * stride + k));
    step = static_cast<long long>(sizeof(T)) * kDepth * (kAlong ? stride : 1);
    const int last = extent - first - (kAlong && !kRealigns ? kVector : 1);
    inside = extent - first - run();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first_row + i * kPassRows;
      const int along = kAlong ? (run() < last ? run() : last) : run();
      const int across = kAlong ? row : (row < last ? row : last);
      offsets[i] =
          static_cast<Offset>((static_cast<long long>(across) * stride + along) * static_cast<long long>(sizeof(T)));
      keep(offsets[i]);
    }
    offset = kAlong ? offset_of(run(), first_row) : offset_of(first_row, run());
    keep(offset);
  }

  /// Makes the compiler hold a value rather than compute it again in each stage.
  static __device__ __forceinline__ void keep(int& value) { asm volatile("" : "+r"(value)); }
  static __device__ __forceinline__ void keep(unsigned& value) { asm volatile("" : "+r"(value)); }
  static __device__ __forceinline__ void keep(long long& value) { asm volatile("" : "+l"(value)); }

  /// Starts part `part` of `parts` of copying the next tile, of which `depth` rows are inside of K.
  __device__ __forceinline__ void start(Element* tile, int depth, int part = 0, int parts = 1) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (i * parts / kPasses != part) continue;
      const int row = kAlong ? first_row + i * kPassRows : run();
      const char* const from = source + offsets[i];
      if constexpr (kRealigns) {
        if constexpr (!kAlong) inside = depth - run();
        waiting[i].load(from, row < depth ? (inside < kTogether ? inside : kTogether) : 0);
      } else if constexpr (kAsync) {
        const unsigned to = ptx::cvta_to_shared(tile + offset) + i * kPassStep * static_cast<int>(sizeof(Element));
        const unsigned bytes = row < depth ? kBytes : 0;
        ptx::cp_async<kBytes>(to, from, bytes);
      } else {
        waiting[i].clear();
        if (row < depth) {
          if constexpr (kBytes >= 4) {
            waiting[i] = *reinterpret_cast<const Vector<T, kVector>*>(from);
          } else {
            waiting[i].load(reinterpret_cast<const T*>(from));
          }
        }
      }
    }
    if (part == parts - 1) source += step;
  }

  /// Puts what waits in registers into the tile.
  __device__ __forceinline__ void finish(Element* tile) const {
    if constexpr (kRealigns) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        Vector<T, kTogether> aligned = waiting[i].aligned();
        if constexpr (!kAlong) aligned.trim(0, inside);
        *reinterpret_cast<Vector<T, kTogether>*>(tile + offset + i * kPassStep) = aligned;
      }
    } else if constexpr (!kAsync) {
      Layout::put(waiting, tile, offset);
    }
  }
};

}  // namespace jaxdnn
