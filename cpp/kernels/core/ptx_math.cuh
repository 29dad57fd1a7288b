// One instruction per wrapper: arithmetic that C++ has no spelling for.
#pragma once

namespace jaxdnn::ptx {

/// A NaN if either is one, where fmaxf returns the other argument.
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// Within one unit in the last place; zero where the result would be subnormal.
__device__ __forceinline__ float approximate_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

/// Within two units in the last place; zero where the result would be subnormal.
__device__ __forceinline__ float approximate_exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

}  // namespace jaxdnn::ptx
