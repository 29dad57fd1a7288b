// ptx/math.cuh on the CPU. Approximate instructions are off by as much as the wrappers say, if an architecture is
// named: without one, what is emitted is compared with functions that are right.
#pragma once

#include "cuda.h"

namespace jaxdnn::ptx {

/// `exact`, off by anything up to `most` units in the last place, which depends on nothing but the argument; and right
/// where that is a float, as powers of two are. Zero if it is subnormal and `kFlushes`.
template <bool kFlushes>
float approximate(double exact, double most, float argument) {
  const float nearest = static_cast<float>(exact);
  if (kFlushes && std::fabs(nearest) < 0x1p-126f) return std::copysign(0.0f, nearest);
#ifdef __CUDA_ARCH__
  if (nearest != exact && std::isfinite(nearest)) {
    const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
    const unsigned hash = static_cast<unsigned>(__float_as_int(argument)) * 2654435761u;
    return static_cast<float>(exact + most * unit * (hash / 0x1p31 - 1));
  }
#endif
  return nearest;
}

inline float rsqrt_approx(float value) {
  return approximate<false>(1 / std::sqrt(static_cast<double>(value)), 1, value);
}
inline double sqrt_rn(double value) { return std::sqrt(value); }
inline double rcp_rn(double value) { return 1 / value; }
inline float rcp_approx_ftz(float value) { return approximate<true>(1 / static_cast<double>(value), 1, value); }
inline float ex2_approx_ftz(float value) { return approximate<true>(std::exp2(static_cast<double>(value)), 2, value); }
/// 2^12 units are 2^-11, or less.
inline float tanh_approx(float value) { return approximate<false>(std::tanh(static_cast<double>(value)), 4096, value); }

inline unsigned shl_clamped(unsigned value, unsigned count) { return count < 32 ? value << count : 0; }
inline float mul_rn(float a, float b) { return a * b; }
inline double mul_rn(double a, double b) { return a * b; }
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

inline float max_nan(float a, float b) { return a > b || a != a ? a : b; }
inline float min_nan(float a, float b) { return a < b || a != a ? a : b; }

}  // namespace jaxdnn::ptx
