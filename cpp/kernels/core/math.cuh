// The scalar functions that emitted pointwise programs are made of, with the meaning that XLA gives them: NaNs pass
// through, integers wrap, integer division by zero has a value, floats saturate when they become integers.
//
// CUDA's own functions are built into NVRTC, without any header. Float functions are within 4 units in the last place.
#pragma once

#include "core/number.cuh"
#include "ptx/math.cuh"

namespace jaxdnn {

namespace math {

// ------------------------------------------------------------------------------------------------- floating functions

#define JAXDNN_UNARY(name, single, both)                               \
  __device__ __forceinline__ float name(float x) { return single(x); } \
  __device__ __forceinline__ double name(double x) { return both(x); }
#define JAXDNN_BINARY(name, single, both)                                          \
  __device__ __forceinline__ float name(float x, float y) { return single(x, y); } \
  __device__ __forceinline__ double name(double x, double y) { return both(x, y); }

JAXDNN_UNARY(abs, ::fabsf, ::fabs)
JAXDNN_UNARY(floor, ::floorf, ::floor)
JAXDNN_UNARY(ceil, ::ceilf, ::ceil)
JAXDNN_UNARY(round_half_even, ::rintf, ::rint)
JAXDNN_UNARY(round_half_away, ::roundf, ::round)
JAXDNN_UNARY(sqrt, ::sqrtf, ::sqrt)
JAXDNN_UNARY(rsqrt, ::rsqrtf, ::rsqrt)
JAXDNN_UNARY(cbrt, ::cbrtf, ::cbrt)
JAXDNN_UNARY(exp, ::expf, ::exp)
JAXDNN_UNARY(exp2, ::exp2f, ::exp2)
JAXDNN_UNARY(log, ::logf, ::log)
JAXDNN_UNARY(log1p, ::log1pf, ::log1p)
JAXDNN_UNARY(tanh, ::tanhf, ::tanh)
JAXDNN_UNARY(sin, ::sinf, ::sin)
JAXDNN_UNARY(cos, ::cosf, ::cos)
JAXDNN_UNARY(tan, ::tanf, ::tan)
JAXDNN_UNARY(asin, ::asinf, ::asin)
JAXDNN_UNARY(acos, ::acosf, ::acos)
JAXDNN_UNARY(atan, ::atanf, ::atan)
JAXDNN_UNARY(sinh, ::sinhf, ::sinh)
JAXDNN_UNARY(cosh, ::coshf, ::cosh)
JAXDNN_UNARY(asinh, ::asinhf, ::asinh)
JAXDNN_UNARY(acosh, ::acoshf, ::acosh)
JAXDNN_UNARY(atanh, ::atanhf, ::atanh)
JAXDNN_UNARY(erf, ::erff, ::erf)
JAXDNN_BINARY(remainder, ::fmodf, ::fmod)
JAXDNN_BINARY(pow, ::powf, ::pow)
JAXDNN_BINARY(atan2, ::atan2f, ::atan2)

#undef JAXDNN_UNARY
#undef JAXDNN_BINARY

/// NaN if either argument is.
__device__ __forceinline__ float maximum(float x, float y) { return ptx::max_nan(x, y); }
__device__ __forceinline__ double maximum(double x, double y) { return x > y || x != x ? x : y; }
__device__ __forceinline__ float minimum(float x, float y) { return ptx::min_nan(x, y); }
__device__ __forceinline__ double minimum(double x, double y) { return x < y || x != x ? x : y; }

__device__ __forceinline__ float divide(float x, float y) { return x / y; }
__device__ __forceinline__ double divide(double x, double y) { return x / y; }

/// -1, 0 or 1; zeros keep their sign.
__device__ __forceinline__ float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
__device__ __forceinline__ double sign(double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : x; }

__device__ __forceinline__ bool is_finite(float x) { return abs(x) < infinity<float>(); }
__device__ __forceinline__ bool is_finite(double x) { return abs(x) < infinity<double>(); }

__device__ __forceinline__ float logistic(float x) { return ptx::rcp_approx_ftz(1.0f + exp(-x)); }
__device__ __forceinline__ double logistic(double x) { return 1.0 / (1.0 + exp(-x)); }

/// CUDA's own in half the instructions, of which ptxas would begin those of all elements before it ends the first: 1 KB
/// of spills. Near zero the series, to the eighth power; elsewhere the difference is 2^-23 off, of at least 0.39.
__device__ __forceinline__ float expm1(float x) {
  float series = 1.0f / 40320;
  series = 1.0f / 5040 + x * series;
  series = 1.0f / 720 + x * series;
  series = 1.0f / 120 + x * series;
  series = 1.0f / 24 + x * series;
  series = 1.0f / 6 + x * series;
  series = 0.5f + x * series;
  return abs(x) < 0.5f ? x * (1.0f + x * series) : exp(x) - 1.0f;
}
__device__ __forceinline__ double expm1(double x) { return ::expm1(x); }

/// 1 + tanh(x), without the cancellation near zero, in a third of the instructions. gelu is made of this.
__device__ __forceinline__ float one_plus_tanh(float x) { return ptx::rcp_approx_ftz(0.5f + 0.5f * exp(-2.0f * x)); }
__device__ __forceinline__ double one_plus_tanh(double x) { return 2.0 / (1.0 + exp(-2.0 * x)); }

/// For results of 16 bits or fewer, a third of the instructions: the right values for x (1 + e), |e| <= 2^-24, which is
/// 2^-17 off at most.
__device__ __forceinline__ float approximate_logistic(float x) {
  return ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-1.442695041f * x));
}
__device__ __forceinline__ float approximate_one_plus_tanh(float x) {
  return ptx::rcp_approx_ftz(0.5f + 0.5f * ptx::ex2_approx_ftz(-2.885390082f * x));
}
__device__ __forceinline__ float approximate_tanh(float x) {
  // Near zero the series, to the seventh power; elsewhere the difference is 2^-22 off, of at least 2^-3.
  const float square = x * x;
  const float series = x + x * square * (-0.33333334f + square * (0.13333334f - 0.05396825f * square));
  return abs(x) < 0.125f ? series : approximate_one_plus_tanh(x) - 1.0f;
}

/// Half the instructions of CUDA's own. The exact gelu is made of this.
__device__ __forceinline__ float erfc(float x) {
  const float a = abs(x) > 11.0f ? 11.0f : abs(x);
  const float s = ptx::rcp_approx_ftz(1.0f + 0.5f * a), t = s - 0.5f;
  // exp(a^2) erfc(a) / s in t, 0 <= a <= 10.2: a minimax fit, weighted for the relative error
  float p = -0.059170138f;
  p = p * t + 0.04830111f;
  p = p * t + 0.09538462f;
  p = p * t - 0.10299775f;
  p = p * t - 0.17187835f;
  p = p * t + 0.14574091f;
  p = p * t + 0.5589399f;
  p = p * t + 0.68716097f;
  p = p * t + 0.51079136f;
  // The exponential magnifies the rounding of a^2, so that is put back.
  const float square = a * a, lost = ::fmaf(a, a, -square);
  const float e = exp(-square);
  const float result = (e - e * lost) * (s * p);
  return x < 0 ? 2.0f - result : result;
}
__device__ __forceinline__ double erfc(double x) { return ::erfc(x); }

// -------------------------------------------------------------------------------------------------- integer functions
// Arithmetic is done in 64 unsigned bits, which wrap; the compiler keeps as many as are needed.

/// The bits of `x`, followed by zeros.
template <class T>
__device__ __forceinline__ uint64 bits(T x) {
  return static_cast<uint64>(x) & (~0ull >> (64 - kBits<T>));
}

template <class T>
__device__ __forceinline__ T add(T x, T y) {
  return static_cast<T>(static_cast<uint64>(x) + static_cast<uint64>(y));
}

template <class T>
__device__ __forceinline__ T subtract(T x, T y) {
  return static_cast<T>(static_cast<uint64>(x) - static_cast<uint64>(y));
}

template <class T>
__device__ __forceinline__ T multiply(T x, T y) {
  return static_cast<T>(static_cast<uint64>(x) * static_cast<uint64>(y));
}

template <class T>
__device__ __forceinline__ T negate(T x) {
  return subtract(static_cast<T>(0), x);
}

/// -1 (all bits) for a zero divisor; the lowest number stays what it is when it is divided by -1.
template <class T>
__device__ __forceinline__ T divide(T x, T y) {
  if (y == 0) return static_cast<T>(-1);
  if (kSigned<T> && y == static_cast<T>(-1)) return negate(x);
  return static_cast<T>(x / y);
}

/// The dividend for a zero divisor.
template <class T>
__device__ __forceinline__ T remainder(T x, T y) {
  if (y == 0) return x;
  if (kSigned<T> && y == static_cast<T>(-1)) return 0;
  return static_cast<T>(x % y);
}

template <class T>
__device__ __forceinline__ T maximum(T x, T y) {
  return x > y ? x : y;
}

template <class T>
__device__ __forceinline__ T minimum(T x, T y) {
  return x < y ? x : y;
}

template <class T>
__device__ __forceinline__ T abs(T x) {
  return x < 0 ? negate(x) : x;
}

template <class T>
__device__ __forceinline__ T sign(T x) {
  return static_cast<T>((x > 0) - (x < 0));
}

template <class T>
__device__ __forceinline__ T invert(T x) {
  return static_cast<T>(~x);
}
__device__ __forceinline__ bool invert(bool x) { return !x; }

/// Amounts that are negative or too large shift every bit out.
template <class T>
__device__ __forceinline__ T shift_left(T x, T amount) {
  return bits(amount) < kBits<T> ? static_cast<T>(bits(x) << bits(amount)) : static_cast<T>(0);
}

template <class T>
__device__ __forceinline__ T shift_right_logical(T x, T amount) {
  return bits(amount) < kBits<T> ? static_cast<T>(bits(x) >> bits(amount)) : static_cast<T>(0);
}

template <class T>
__device__ __forceinline__ T shift_right_arithmetic(T x, T amount) {
  const int shift = bits(amount) < kBits<T> ? static_cast<int>(amount) : kBits<T> - 1;
  const int64 extended =
      kSigned<T> ? static_cast<int64>(x) : static_cast<int64>(bits(x) << (64 - kBits<T>)) >> (64 - kBits<T>);
  return static_cast<T>(extended >> shift);
}

template <class T>
__device__ __forceinline__ T population_count(T x) {
  return static_cast<T>(__popcll(bits(x)));
}

template <class T>
__device__ __forceinline__ T count_leading_zeros(T x) {
  return static_cast<T>(__clzll(static_cast<int64>(bits(x))) - (64 - kBits<T>));
}

}  // namespace math

}  // namespace jaxdnn
