// A warp's tensor core instructions, and those that bring its fragments from and to shared memory.
#pragma once

#include "ptx/convert.cuh"

namespace jaxdnn::ptx {

/// 16 x 8 += 16 x 4 times 4 x 8. Lane 4 g + t has a: rows g and g + 8 of column t; b: row t of column g; c: columns 2 t
/// and 2 t + 1 of row g, then of g + 8.
__device__ __forceinline__ void mma_m16n8k4_f64(double (&c)[4], const double (&a)[2], double b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
               : "d"(a[0]), "d"(a[1]), "d"(b));
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[2 * i]), "+d"(c[2 * i + 1])
                 : "d"(a[i]), "d"(b));
  }
#endif
}

/// 16 x 8 += 16 x 8 times 8 x 8, of tf32. Lane 4 g + t has a: rows g and g + 8 of column t, then of column t + 4; b:
/// rows t and t + 4 of column g; c: as above.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(mov_b32(a[0])), "r"(mov_b32(a[1])), "r"(mov_b32(a[2])), "r"(mov_b32(a[3])), "r"(mov_b32(b[0])),
        "r"(mov_b32(b[1])));
}

/// 16 x 8 += 16 x 16 times 16 x 8. Lane 4 g + t has pairs of neighbours along K: of a, columns 2 t of rows g and g + 8,
/// then columns 2 t + 8; of b, rows 2 t and 2 t + 8 of column g.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Four 8 x 8 matrices of 16-bit elements; lane i's `address` is row i % 8 of matrix i / 8. Lane 4 g + t gets columns 2
/// t and 2 t + 1 of row g, or of the transposed matrix.
template <bool kTransposed>
__device__ __forceinline__ void ldmatrix_x4(unsigned (&words)[4], unsigned address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }
}

#if __CUDA_ARCH__ >= 900
/// The other way: lane 4 g + t has columns 2 t and 2 t + 1 of row g of each matrix, or of the transposed matrix.
template <bool kTransposed>
__device__ __forceinline__ void stmatrix_x4(unsigned address, const unsigned (&words)[4]) {
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}
#endif

}  // namespace jaxdnn::ptx
