// Bits as numbers (mov) and numbers as others (cvt).
#pragma once

namespace jaxdnn::ptx {

// ---------------------------------------------------------------------------------------------------------- the bits

__device__ __forceinline__ float mov_f32(unsigned bits) {
  float value;
  asm("mov.b32 %0, %1;" : "=f"(value) : "r"(bits));
  return value;
}

__device__ __forceinline__ unsigned mov_b32(float value) {
  unsigned bits;
  asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ double mov_f64(unsigned low, unsigned high) {
  double value;
  asm("mov.b64 %0, {%1, %2};" : "=d"(value) : "r"(low), "r"(high));
  return value;
}

__device__ __forceinline__ void mov_b64(unsigned& low, unsigned& high, double value) {
  asm("mov.b64 {%0, %1}, %2;" : "=r"(low), "=r"(high) : "d"(value));
}

// ------------------------------------------------------------------------------------------- 16-bit floats and others

__device__ __forceinline__ float cvt_f32_f16(unsigned bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
}

__device__ __forceinline__ unsigned cvt_rn_f16_f32(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ unsigned cvt_rn_f16_f64(double value) {
  unsigned short bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
  return bits;
}

__device__ __forceinline__ unsigned cvt_rn_bf16_f32(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

/// A float whose last 13 bits are zero: rounded to nearest, ties away from zero.
__device__ __forceinline__ float cvt_rna_tf32_f32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return mov_f32(bits);
}

__device__ __forceinline__ unsigned cvt_rn_f16x2_f32(float low, float high) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ unsigned cvt_rn_bf16x2_f32(float low, float high) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ float cvt_rz_f32_f64(double value) {
  float rounded;
  asm("cvt.rz.f32.f64 %0, %1;" : "=f"(rounded) : "d"(value));
  return rounded;
}

// ----------------------------------------------------------------- pairs of 8-bit floats, since compute capability 8.9

__device__ __forceinline__ unsigned cvt_rn_f16x2_e4m3x2(unsigned pair) {
  unsigned bits;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(static_cast<unsigned short>(pair)));
  return bits;
}

/// To nearest even; too large becomes the greatest number.
__device__ __forceinline__ unsigned cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ unsigned cvt_rn_satfinite_e5m2x2_f32(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace jaxdnn::ptx
