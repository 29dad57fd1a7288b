// Arithmetic that C++ has no spelling for.
#pragma once

namespace jaxdnn::ptx {

/// Within 2^-22.9 of the right answer, relatively.
__device__ __forceinline__ float rsqrt_approx(float value) {
  float root;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}

__device__ __forceinline__ double sqrt_rn(double value) {
  double root;
  asm("sqrt.rn.f64 %0, %1;" : "=d"(root) : "d"(value));
  return root;
}

__device__ __forceinline__ double rcp_rn(double value) {
  double result;
  asm("rcp.rn.f64 %0, %1;" : "=d"(result) : "d"(value));
  return result;
}

/// Within one unit in the last place; zero where the result would be subnormal.
__device__ __forceinline__ float rcp_approx_ftz(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

/// Within two units in the last place; zero where the result would be subnormal.
__device__ __forceinline__ float ex2_approx_ftz(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

/// Within 2^-11 of the right answer, relatively, in one instruction of the special function units.
__device__ __forceinline__ float tanh_approx(float value) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

/// Zero where `count` is 32 or more, unlike `value << count`, which then is anything.
__device__ __forceinline__ unsigned shl_clamped(unsigned value, unsigned count) {
  unsigned shifted;
  asm("shl.b32 %0, %1, %2;" : "=r"(shifted) : "r"(value), "r"(count));
  return shifted;
}

/// A product that is rounded even where a sum follows it, unlike `a * b`, which may become part of a fused one.
__device__ __forceinline__ float mul_rn(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

__device__ __forceinline__ double mul_rn(double a, double b) {
  double product;
  asm("mul.rn.f64 %0, %1, %2;" : "=d"(product) : "d"(a), "d"(b));
  return product;
}

__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

__device__ __forceinline__ double fma_rn(double a, double b, double c) {
  double sum;
  asm("fma.rn.f64 %0, %1, %2, %3;" : "=d"(sum) : "d"(a), "d"(b), "d"(c));
  return sum;
}

/// A NaN if either is one, where fmaxf returns the other argument.
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace jaxdnn::ptx
