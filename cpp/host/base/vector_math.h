// Elementary functions of float vectors, each within 5 units in the last place, most within 2, with the limits and NaNs
// of <cmath>.
//
// The polynomials are weighted minimax fits over the intervals that their comments name, with coefficients rounded to
// float one after the other, from the lowest order on.
#pragma once

#include <limits>

#include "vector.h"

JAXDNN_ISA_BEGIN

using Floats = Vector<float>;
using Ints = Vector<int32_t>;
using Bits = Vector<uint32_t>;

inline Floats all(float value) { return value - Floats{}; }
inline Floats float_of_bits(Ints bits) { return bit_cast<Floats>(bits); }
inline Ints bits_of_float(Floats values) { return bit_cast<Ints>(values); }
inline Floats magnitude(Floats x) { return float_of_bits(bits_of_float(x) & 0x7fffffff); }
inline Floats with_sign(Floats x, Floats sign) {
  return float_of_bits((bits_of_float(x) & 0x7fffffff) | (bits_of_float(sign) & int32_t(0x80000000)));
}

// Horner's rule, the highest coefficient first.
template <typename... Coefficients>
inline Floats polynomial(Floats x, float highest, Coefficients... coefficients) {
  Floats sum = all(highest);
  ((sum = sum * x + coefficients), ...);
  return sum;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
constexpr float kLog2E = 1.44269504f;
// ln 2 in two parts; multiples of the first up to 2^11 are exact.
constexpr float kLn2High = 0x1.63p-1f;
constexpr float kLn2Low = -2.12194440e-4f;
// Adding and subtracting this rounds a float of up to 2^22 to an integer.
constexpr float kRounder = 0x1.8p23f;

// 2^k for -252 <= k <= 254, in two steps, so that results may be subnormal.
inline Floats scale(Floats x, Ints k) {
  const Ints half = k >> 1;
  return x * float_of_bits((half + 127) << 23) * float_of_bits((k - half + 127) << 23);
}

// A NaN stays one.
inline Floats clamped(Floats x, float low, float high) { return smaller(all(high), larger(all(low), x)); }

// 2^r for |r| <= 1/2.
inline Floats root_of_two(Floats r) {
  // (2^r - 1) / r
  const Floats p = polynomial(r, 0.00015196734f, 0.0013391309f, 0.009619002f, 0.05550359f, 0.24022643f, 0.6931472f);
  return p * r + 1.0f;
}

// exp(high + low) for |low| < 1.
inline Floats exp(Floats high, Floats low) {
  const Floats x = clamped(high, -104.0f, 89.0f);
  const Floats shifted = (x + low) * kLog2E + kRounder;
  const Floats k = shifted - kRounder;
  const Floats r = (x - k * kLn2High) - k * kLn2Low + low;
  // (exp(r) - 1 - r) / r^2, |r| <= ln(2) / 2
  const Floats p = polynomial(r, 0.0013821697f, 0.00836867f, 0.041668255f, 0.16666521f, 0.49999994f);
  return scale(p * (r * r) + r + 1.0f, bits_of_float(shifted) - bits_of_float(all(kRounder)));
}

inline Floats exp(Floats x) { return exp(x, Floats{}); }

// exp(x) in half of its instructions, for weights of a sum: zero below 2^-126, infinite from 2^127 on, and between them
// within |x| 2^-26 of itself, where multiplies and additions are not fused |x| 2^-23.
inline Floats weight(Floats x) {
  constexpr float kBiasedRounder = kRounder + 127.0f;  // its last bits are an exponent's
  x = clamped(x, -88.0f, 89.0f);
  const Floats shifted = x * kLog2E + kBiasedRounder;
  const Floats r = x * kLog2E - (shifted - kBiasedRounder);
  return root_of_two(r) * float_of_bits(bits_of_float(shifted) << 23);
}

inline Floats exp2(Floats x) {
  x = clamped(x, -151.0f, 129.0f);
  const Floats shifted = x + kRounder;
  const Floats power = root_of_two(x - (shifted - kRounder));
  return scale(power, bits_of_float(shifted) - bits_of_float(all(kRounder)));
}

inline Floats expm1(Floats argument) {
  const Floats x = clamped(argument, -40.0f, 89.0f);
  const Floats shifted = x * kLog2E + kRounder;
  const Floats k = shifted - kRounder;
  const Floats r = (x - k * kLn2High) - k * kLn2Low;
  // (exp(r) - 1 - r) / r^2, |r| <= ln(2) / 2
  const Floats p = polynomial(r, 0.0013864527f, 0.008366534f, 0.041667502f, 0.16666543f, 0.49999997f);
  // exp(x) - 1 = 2^k (exp(r) - 1) + (2^k - 1), at half its size, so that 2^128 does not overflow.
  const Floats half = float_of_bits((bits_of_float(shifted) - bits_of_float(all(kRounder)) + 126) << 23);
  const Floats result = 2.0f * (half * (p * (r * r) + r) + (half - 0.5f));
  return x == 0.0f ? argument : result;
}

// log(x (1 + correction)) for a correction much smaller than one.
inline Floats log(Floats x, Floats correction) {
  const auto subnormal = x < 0x1p-126f;
  const Floats normal = subnormal ? x * 0x1p25f : x;
  // normal = 2^k (1 + f), with 1 + f between the roots of 1/2 and 2
  // Unsigned, for those of negative x wrap.
  const Ints shifted = (Ints)(bit_cast<Bits>(normal) - bit_cast<Bits>(all(0.70710678f)));
  const Floats k = __builtin_convertvector((shifted >> 23) - (subnormal & 25), Floats);
  const Floats f = float_of_bits((shifted & 0x007fffff) + bits_of_float(all(0.70710678f))) - 1.0f;
  const Floats square = f * f;
  // (log(1 + f) - f + f^2 / 2) / f^3
  const Floats p = polynomial(f, 0.06733011f, -0.11660661f, 0.11886204f, -0.12408197f, 0.14220233f, -0.16667855f,
                              0.20002073f, -0.25000012f, 0.33333313f);
  const Floats tail = p * f * square + (k * kLn2Low + correction) - 0.5f * square;
  Floats result = f + tail + k * kLn2High;
  result = x == kInfinity ? x : result;
  result = x == 0.0f ? all(-kInfinity) : result;
  return x >= 0.0f ? result : all(kNotANumber);
}

inline Floats log(Floats x) { return log(x, Floats{}); }

inline Floats log1p(Floats x) {
  const Floats u = 1.0f + x;
  // What rounding took from u, relative to it.
  const Floats correction = (x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f)) / u;
  const Floats result = log(u, u > 0.0f && u < kInfinity ? correction : Floats{});
  return x == 0.0f ? x : result;
}

inline Floats logistic(Floats x) {
  // With the exponential of a negative number nothing overflows, and both tails keep their relative accuracy.
  const Floats e = exp(-magnitude(x));
  return (x < 0.0f ? e : all(1.0f)) / (1.0f + e);
}

inline Floats tanh(Floats x) {
  const Floats a = clamped(x, -9.1f, 9.1f), square = a * a;
  // tanh(x) / x = p / q, |x| <= 9.1
  const Floats p = polynomial(square, 1.3177713e-08f, 2.048135e-05f, 0.003487822f, 0.13374485f, 1.0f);
  const Floats q = polynomial(square, 7.704132e-07f, 0.00032729373f, 0.025847431f, 0.467078f, 1.0f);
  return clamped(a * p / q, -1.0f, 1.0f);
}

inline Floats erf(Floats x) {
  const Floats a = magnitude(x), square = x * x;
  // erf(x) / x - 1, |x| <= 1
  const Floats p = polynomial(square, 7.846108e-05f, -0.0008007878f, 0.005188074f, -0.026853692f, 0.11283583f,
                              -0.37612626f, 0.12837917f);
  const Floats b = a > 4.0f ? all(4.0f) : a;
  // log(erfc(x)) / x, 1 <= x <= 4
  const Floats q = polynomial(b, -3.553709e-06f, 2.8398368e-05f, 0.00013892379f, -0.0031824613f, 0.023092313f,
                              -0.105669655f, -0.63540983f, -1.1285996f);
  return a < 1.0f ? p * x + x : with_sign(1.0f - exp(q * b), x);
}

inline Floats erfc(Floats x) {
  const Floats a = magnitude(x);
  const Floats b = a > 11.0f ? all(11.0f) : a;
  const Floats s = 1.0f / (1.0f + 0.5f * b);
  // exp(x^2) erfc(x) / s in s - 1/2, 0 <= x <= 10.2
  const Floats p = polynomial(s - 0.5f, -0.059170138f, 0.04830111f, 0.09538462f, -0.10299775f, -0.17187835f,
                              0.14574091f, 0.5589399f, 0.68716097f, 0.51079136f);
  // x^2 in two parts: the square of its upper 12 bits is exact, and the exponential magnifies what rounding would take.
  const Floats upper = float_of_bits(bits_of_float(b) & int32_t(0xfffff000));
  const Floats square = upper * upper, rest = (b - upper) * (b + upper);
  const Floats e = exp(-square, -rest) * (s * p);
  return x < 0.0f ? 2.0f - e : e;
}

JAXDNN_ISA_END
