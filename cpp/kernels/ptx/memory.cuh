// Loads and stores of global and shared memory, `kBytes` of them at once, in words.
#pragma once

namespace jaxdnn::ptx {

// ----------------------------------------------------------------------------------------------------- global memory
// Without cache hints: keeping rows out of the L1 cache (L1::no_allocate, L1::evict_first) cost norms 3 to 5%
// (benchmarks/results/norm_kernels.md).

template <int kBytes>
__device__ __forceinline__ void ld_global(unsigned* words, const void* address) {
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address));
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(words[0]) : "l"(address));
  } else if constexpr (kBytes == 2) {
    unsigned short bits;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(address));
    words[0] = bits;
  } else {
    static_assert(kBytes == 1, "16, 8, 4, 2 or 1 byte at once");
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(words[0]) : "l"(address));
  }
}

template <int kBytes>
__device__ __forceinline__ void st_global(void* address, const unsigned* words) {
  if constexpr (kBytes == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(words[0]), "r"(words[1]) : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(words[0]) : "memory");
  } else if constexpr (kBytes == 2) {
    asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(static_cast<unsigned short>(words[0])) : "memory");
  } else {
    static_assert(kBytes == 1, "16, 8, 4, 2 or 1 byte at once");
    asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(words[0]) : "memory");
  }
}

/// Adds to a word, and returns what it was.
__device__ __forceinline__ unsigned atomic_add(unsigned* address, unsigned value) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

/// What other blocks have added by `red_release_add`, and with it what they wrote before.
__device__ __forceinline__ unsigned ld_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void red_release_add(unsigned* address, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void prefetch_global_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

__device__ __forceinline__ void prefetch_global_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ----------------------------------------------------------------------------------------------------- shared memory

__device__ __forceinline__ unsigned cvta_to_shared(const void* pointer) {
  unsigned long long address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return static_cast<unsigned>(address);
}

template <int kBytes>
__device__ __forceinline__ void ld_shared(unsigned* words, unsigned address) {
  if constexpr (kBytes == 16) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
  } else {
    static_assert(kBytes == 2, "16, 8, 4 or 2 bytes at once");
    unsigned short half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
    words[0] = half;
  }
}

__device__ __forceinline__ void ld_shared(unsigned short& value, unsigned address) {
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
}

__device__ __forceinline__ void ld_shared(float& value, unsigned address) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
}

__device__ __forceinline__ void ld_shared(double& value, unsigned address) {
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(address) : "memory");
}

template <int kBytes>
__device__ __forceinline__ void st_shared(unsigned address, const unsigned* words) {
  if constexpr (kBytes == 16) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
    static_assert(kBytes == 2, "16, 8 or 2 bytes at once");
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(words[0])) : "memory");
  }
}

__device__ __forceinline__ void st_shared(unsigned address, unsigned value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared(unsigned address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void st_shared(unsigned address, double value) {
  asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}

}  // namespace jaxdnn::ptx
