// One instruction per wrapper. Kernels include no header of the CUDA toolkit: whatever has no C++ spelling is here.
#pragma once

namespace jaxdnn::ptx {

// ---------------------------------------------------------------------------------------------- bits and conversions

__device__ __forceinline__ float float_of_bits(unsigned bits) {
  float value;
  asm("mov.b32 %0, %1;" : "=f"(value) : "r"(bits));
  return value;
}

__device__ __forceinline__ unsigned bits_of_float(float value) {
  unsigned bits;
  asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ double double_of_bits(unsigned low, unsigned high) {
  double value;
  asm("mov.b64 %0, {%1, %2};" : "=d"(value) : "r"(low), "r"(high));
  return value;
}

__device__ __forceinline__ void bits_of_double(unsigned& low, unsigned& high, double value) {
  asm("mov.b64 {%0, %1}, %2;" : "=r"(low), "=r"(high) : "d"(value));
}

__device__ __forceinline__ float float_of_half(unsigned bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
}

__device__ __forceinline__ unsigned half_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ unsigned half_of_double(double value) {
  unsigned short bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
  return bits;
}

__device__ __forceinline__ unsigned bfloat_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ unsigned halves_of_floats(float low, float high) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ unsigned bfloats_of_floats(float low, float high) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ float float_toward_zero(double value) {
  float rounded;
  asm("cvt.rz.f32.f64 %0, %1;" : "=f"(rounded) : "d"(value));
  return rounded;
}

// -------------------------------------------------------------------------------------------------------- arithmetic

/// Within 2^-22.9 of the right answer, relatively.
__device__ __forceinline__ float reciprocal_square_root(float value) {
  float root;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}

__device__ __forceinline__ double square_root(double value) {
  double root;
  asm("sqrt.rn.f64 %0, %1;" : "=d"(root) : "d"(value));
  return root;
}

__device__ __forceinline__ double reciprocal(double value) {
  double result;
  asm("rcp.rn.f64 %0, %1;" : "=d"(result) : "d"(value));
  return result;
}

/// A product that is rounded even where a sum follows it, unlike `a * b`, which may become part of a fused one.
__device__ __forceinline__ float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

__device__ __forceinline__ double multiply(double a, double b) {
  double product;
  asm("mul.rn.f64 %0, %1, %2;" : "=d"(product) : "d"(a), "d"(b));
  return product;
}

__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) {
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

__device__ __forceinline__ double fused_multiply_add(double a, double b, double c) {
  double sum;
  asm("fma.rn.f64 %0, %1, %2, %3;" : "=d"(sum) : "d"(a), "d"(b), "d"(c));
  return sum;
}

// ----------------------------------------------------------------------------------------------------- global memory
// Without cache hints: keeping rows out of the L1 cache (L1::no_allocate, L1::evict_first) cost 3 to 5% on an H200.
__device__ __forceinline__ void load_4(unsigned* words, const void* address) {
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(words[0]) : "l"(address));
}

__device__ __forceinline__ void load_2(unsigned* words, const void* address) {
  unsigned short bits;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(address));
  words[0] = bits;
}

__device__ __forceinline__ void load_16(unsigned* words, const void* address) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(address));
}

__device__ __forceinline__ void load_8(unsigned* words, const void* address) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address));
}

__device__ __forceinline__ void store_16(void* address, const unsigned* words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void store_8(void* address, const unsigned* words) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(words[0]), "r"(words[1]) : "memory");
}

__device__ __forceinline__ void store_4(void* address, const unsigned* words) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(words[0]) : "memory");
}

__device__ __forceinline__ void store_2(void* address, const unsigned* words) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(static_cast<unsigned short>(words[0])) : "memory");
}

__device__ __forceinline__ void load_1(unsigned* words, const void* address) {
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(words[0]) : "l"(address));
}

__device__ __forceinline__ void store_1(void* address, const unsigned* words) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(words[0]) : "memory");
}

__device__ __forceinline__ void prefetch_to_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ----------------------------------------------------------------------------------------------------- shared memory

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  unsigned long long address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return static_cast<unsigned>(address);
}

__device__ __forceinline__ void load_shared_16(unsigned* words, unsigned address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared_8(unsigned* words, unsigned address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared_4(unsigned* words, unsigned address) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned address, double value) {
  asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}

template <class T>
__device__ __forceinline__ T load_shared(unsigned address);

template <>
__device__ __forceinline__ float load_shared(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

template <>
__device__ __forceinline__ double load_shared(unsigned address) {
  double value;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(address) : "memory");
  return value;
}

// ---------------------------------------------------------------------- asynchronous copies, global to shared memory
// `bytes` of the source are copied and the rest of the destination is filled with zeros.

__device__ __forceinline__ void copy_async_16(unsigned destination, const void* source, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_8(unsigned destination, const void* source, unsigned bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_4(unsigned destination, const void* source, unsigned bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#if __CUDA_ARCH__ >= 900
/// Asks for memory, `bytes` of it, a multiple of 16, to come into the L2 cache.
__device__ __forceinline__ void prefetch_to_l2(const void* address, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}
#endif

// ------------------------------------------------------------------------------------------ lanes, barriers, clusters

__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  float result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(result) : "f"(value), "r"(mask));
  return result;
}

__device__ __forceinline__ double shuffle_xor(double value, int mask) {
  unsigned low, high;
  bits_of_double(low, high, value);
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(low) : "r"(low), "r"(mask));
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(high) : "r"(high), "r"(mask));
  return double_of_bits(low, high);
}

/// Waits until `threads` threads, whole warps, have come to barrier `index` (0 to 15).
__device__ __forceinline__ void barrier(int index, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

/// The address, in the cluster's window, of `address` in the shared memory of block `rank`.
__device__ __forceinline__ unsigned address_in_block(unsigned address, unsigned rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ void store_cluster(unsigned address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_cluster(unsigned address, double value) {
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}
#endif

}  // namespace jaxdnn::ptx
