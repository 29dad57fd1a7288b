// `Vector`: N neighbouring elements in registers, loaded and stored 16 bytes at a time.
//
// A vector stays packed, in its array's own type, until its values are used: a bfloat16 row waits in half the registers
// of a float32 one.
#pragma once

#include "core/element.cuh"
#include "ptx/memory.cuh"

namespace jaxdnn {

template <class T, int kCount>
struct Vector {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static constexpr int kChunkBytes = kBytes < 16 ? kBytes : 16;  // the widest access
  static constexpr int kChunks = kBytes / kChunkBytes;
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  static constexpr int kChunkWords = kWords / kChunks;
  static_assert((kCount & (kCount - 1)) == 0, "the elements of a vector are a power of two");

  alignas(kChunkBytes < 4 ? 4 : kChunkBytes) unsigned words[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }

  __device__ __forceinline__ void load(const T* source) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ptx::ld_global<kChunkBytes>(words + chunk * kChunkWords,
                                  reinterpret_cast<const char*>(source) + chunk * kChunkBytes);
    }
  }

  __device__ __forceinline__ void store(T* destination) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ptx::st_global<kChunkBytes>(reinterpret_cast<char*>(destination) + chunk * kChunkBytes,
                                  words + chunk * kChunkWords);
    }
  }

  /// Elements `first` to `end` alone, one at a time; the others are zeros.
  __device__ __forceinline__ void load(const T* source, int first, int end) {
    clear();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= first && i < end) {
        Vector<T, 1> element;
        element.load(source + i);
        set(i, element.get(0));
      }
    }
  }

  __device__ __forceinline__ void store(T* destination, int first, int end) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= first && i < end) {
        Vector<T, 1> element;
        element.set(0, get(i));
        element.store(destination + i);
      }
    }
  }

  /// Clears all but elements `first` to `end`.
  __device__ __forceinline__ void trim(int first, int end) {
    static_assert(sizeof(T) >= 2, "8-bit elements have no use for it");
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= first && i < end) continue;
      if constexpr (sizeof(T) == 2) {
        words[i / 2] &= i % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
      } else {
#pragma unroll
        for (int word = 0; word < static_cast<int>(sizeof(T)) / 4; ++word) words[i * sizeof(T) / 4 + word] = 0;
      }
    }
  }

  __device__ __forceinline__ T get(int i) const {
    T value;
    if constexpr (sizeof(T) == 2) {
      const unsigned bits = i % 2 == 0 ? words[i / 2] : words[i / 2] >> 16;
      memcpy(&value, &bits, sizeof(T));
    } else {
      memcpy(&value, reinterpret_cast<const char*>(words) + i * sizeof(T), sizeof(T));
    }
    return value;
  }

  /// In order of `i`, the first one first.
  __device__ __forceinline__ void set(int i, T value) {
    if constexpr (sizeof(T) >= 4) {
      memcpy(words + i * (sizeof(T) / 4), &value, sizeof(T));
    } else {
      unsigned bits = 0;
      memcpy(&bits, &value, sizeof(T));
      const unsigned at = i * sizeof(T) % 4 * 8;
      unsigned& word = words[i * sizeof(T) / 4];
      word = at == 0 ? bits : word | bits << at;
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
      // Moves that the compiler can't see through: it would otherwise compute some values twice, in more instructions.
      if constexpr (is_same<T, double>) {
        values[i] = ptx::mov_f64(words[2 * i], words[2 * i + 1]);
      } else if constexpr (is_same<T, float>) {
        values[i] = ptx::mov_f32(words[i]);
      } else if constexpr (is_same<T, bfloat16>) {
        values[i] = ptx::mov_f32(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
      } else if constexpr (is_same<T, float16>) {
        values[i] = ptx::cvt_f32_f16(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu);
      } else {
        values[i] = widen(get(i));
      }
    }
  }

  /// Rounds once.
  template <class Compute>
  __device__ __forceinline__ void pack(const Compute (&values)[kCount]) {
    // What one instruction rounds in pairs.
    constexpr bool kPairs = kCount > 1 && is_same<Compute, float> && is_narrow_float<T>;
#pragma unroll
    for (int i = 0; i < kCount; i += kPairs ? 2 : 1) {
      if constexpr (is_same<T, double>) {
        ptx::mov_b64(words[2 * i], words[2 * i + 1], values[i]);
      } else if constexpr (is_same<T, float>) {
        words[i] = ptx::mov_b32(static_cast<float>(values[i]));
      } else if constexpr (!kPairs) {
        set(i, narrow<T>(values[i]));
      } else if constexpr (is_same<T, bfloat16>) {
        words[i / 2] = ptx::cvt_rn_bf16x2_f32(values[i], values[i + 1]);
      } else if constexpr (is_same<T, float16>) {
        words[i / 2] = ptx::cvt_rn_f16x2_f32(values[i], values[i + 1]);
      } else {
        const unsigned pair = round_to_8_bits<T>(values[i], values[i + 1]);
        words[i / 4] = i % 4 == 0 ? pair : words[i / 4] | pair << 16;
      }
    }
  }
};

}  // namespace jaxdnn
