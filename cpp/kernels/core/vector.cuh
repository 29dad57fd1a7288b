// Element types, and `Vector`: N neighbouring elements in registers, loaded and stored 16 bytes at a time.
//
// A vector stays packed, in its array's own type, until its values are used: a bfloat16 row waits in half the registers
// of a float32 one.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace jaxdnn {

using float64 = double;
using float32 = float;

struct float16 {
  unsigned short bits;
};

struct bfloat16 {
  unsigned short bits;
};

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

/// `value` rounded once, to nearest even, in the low bits of a word; doubles take `Vector::pack`'s own path.
template <class T, class Compute>
__device__ __forceinline__ unsigned round_to_16_bits(Compute value) {
  if constexpr (is_same<T, float16>) {
    if constexpr (is_same<Compute, double>) {
      return ptx::cvt_rn_f16_f64(value);
    } else {
      return ptx::cvt_rn_f16_f32(value);
    }
  } else if constexpr (is_same<Compute, double>) {
    // Rounding to float32 first would round twice. Rounding to odd there (toward zero, with the last bit set when
    // anything was lost) keeps enough for the second rounding to be the right one.
    const float truncated = ptx::cvt_rz_f32_f64(value);
    const unsigned lost = static_cast<double>(truncated) != value ? 1u : 0u;
    return ptx::cvt_rn_bf16_f32(ptx::mov_f32(ptx::mov_b32(truncated) | lost));
  } else {
    return ptx::cvt_rn_bf16_f32(value);
  }
}

template <class T, int kCount>
struct Vector {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static constexpr int kChunkBytes = kBytes < 16 ? kBytes : 16;  // the widest access
  static constexpr int kChunks = kBytes / kChunkBytes;
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  static constexpr int kChunkWords = kWords / kChunks;
  static_assert((kCount & (kCount - 1)) == 0, "the elements of a vector are a power of two");

  unsigned words[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }

  __device__ __forceinline__ void load(const T* source) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const char* address = reinterpret_cast<const char*>(source) + chunk * kChunkBytes;
      ptx::ld_global<kChunkBytes>(words + chunk * kChunkWords, address);
    }
  }

  __device__ __forceinline__ void store(T* destination) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      char* address = reinterpret_cast<char*>(destination) + chunk * kChunkBytes;
      ptx::st_global<kChunkBytes>(address, words + chunk * kChunkWords);
    }
  }

  /// Keeps the compiler from unpacking ahead of this place, or from keeping what was unpacked before it.
  __device__ __forceinline__ void keep_packed() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(words[i]));
  }

  /// Widens exactly.
  template <class Compute>
  __device__ __forceinline__ void unpack(Compute (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (is_same<T, double>) {
        values[i] = ptx::mov_f64(words[2 * i], words[2 * i + 1]);
      } else if constexpr (is_same<T, float>) {
        values[i] = ptx::mov_f32(words[i]);
      } else if constexpr (is_same<T, bfloat16>) {
        values[i] = ptx::mov_f32(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
      } else {
        values[i] = ptx::cvt_f32_f16(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu);
      }
    }
  }

  /// Rounds once.
  template <class Compute>
  __device__ __forceinline__ void pack(const Compute (&values)[kCount]) {
    if constexpr (is_same<T, double>) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) ptx::mov_b64(words[2 * i], words[2 * i + 1], values[i]);
    } else if constexpr (is_same<T, float>) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[i] = ptx::mov_b32(static_cast<float>(values[i]));
    } else if constexpr (kCount == 1) {
      words[0] = round_to_16_bits<T>(values[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        if constexpr (is_same<Compute, double>) {
          words[i / 2] = round_to_16_bits<T>(values[i]) | round_to_16_bits<T>(values[i + 1]) << 16;
        } else if constexpr (is_same<T, bfloat16>) {
          words[i / 2] = ptx::cvt_rn_bf16x2_f32(values[i], values[i + 1]);
        } else {
          words[i / 2] = ptx::cvt_rn_f16x2_f32(values[i], values[i + 1]);
        }
      }
    }
  }
};

/// The sum of a register array, as a balanced tree: short dependence chains, and an error that grows logarithmically.
template <class Compute, int kCount>
__device__ __forceinline__ Compute tree_sum(const Compute (&values)[kCount]) {
  Compute partial[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) partial[i] = values[i];
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kCount; i += 2 * step) partial[i] += partial[i + step];
  }
  return partial[0];
}

}  // namespace jaxdnn
