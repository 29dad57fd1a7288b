// Elements: their types, the registers that functors compute in, and the conversions between the two.
//
// An element is widened exactly to the type `Held` that computing takes it in, and what is computed is rounded once.
#pragma once

#include "core/number.cuh"
#include "ptx/convert.cuh"

namespace jaxdnn {

// ------------------------------------------------------------------------------------------------------------- types

using float64 = double;
using float32 = float;

struct float16 {
  unsigned short bits;
};

struct bfloat16 {
  unsigned short bits;
};

struct float8_e4m3fn {
  unsigned char bits;
};

struct float8_e5m2 {
  unsigned char bits;
};

template <class T>
inline constexpr bool is_float8 = is_same<T, float8_e4m3fn> || is_same<T, float8_e5m2>;
/// A float that is widened before anything is computed of it.
template <class T>
inline constexpr bool is_narrow_float = is_float8<T> || is_same<T, bfloat16> || is_same<T, float16>;
/// A type that floats are computed in.
template <class T>
inline constexpr bool is_floating = is_same<T, float> || is_same<T, double>;

template <bool kFirst, class First, class Second>
struct SelectType {
  using Type = First;
};
template <class First, class Second>
struct SelectType<false, First, Second> {
  using Type = Second;
};
template <bool kFirst, class First, class Second>
using Select = typename SelectType<kFirst, First, Second>::Type;

/// The type that an element is computed in: narrow floats as float, everything else as it is.
template <class T>
using Held = Select<is_narrow_float<T>, float, T>;

template <class... Types>
struct TypeList {
  static constexpr int kCount = sizeof...(Types);
  static constexpr int kArray = kCount > 0 ? kCount : 1;  // elements of an array with one for each type
};

template <int kIndex, class List>
struct TypeOf;
template <class First, class... Rest>
struct TypeOf<0, TypeList<First, Rest...>> {
  using Type = First;
};
template <int kIndex, class First, class... Rest>
struct TypeOf<kIndex, TypeList<First, Rest...>> : TypeOf<kIndex - 1, TypeList<Rest...>> {};
template <int kIndex, class List>
using TypeAt = typename TypeOf<kIndex, List>::Type;

// --------------------------------------------------------------------------------------------------------- registers

/// A value of any type of at most kBytes that functors compute in; whoever takes it knows which.
template <int kBytes>
union RegisterOf;

#define JAXDNN_MEMBER(type, member)                                   \
  type member;                                                        \
  __device__ __forceinline__ operator type() const { return member; } \
  __device__ __forceinline__ operator type&() { return member; }      \
  __device__ __forceinline__ void set(type value) { member = value; }
#define JAXDNN_MEMBERS       \
  JAXDNN_MEMBER(float, f32)  \
  JAXDNN_MEMBER(bool, b)     \
  JAXDNN_MEMBER(int8, s8)    \
  JAXDNN_MEMBER(int16, s16)  \
  JAXDNN_MEMBER(int32, s32)  \
  JAXDNN_MEMBER(uint8, u8)   \
  JAXDNN_MEMBER(uint16, u16) \
  JAXDNN_MEMBER(uint32, u32)

template <>
union RegisterOf<4> {
  JAXDNN_MEMBERS
};

template <>
union RegisterOf<8> {
  JAXDNN_MEMBERS
  JAXDNN_MEMBER(double, f64)
  JAXDNN_MEMBER(int64, s64)
  JAXDNN_MEMBER(uint64, u64)
};

#undef JAXDNN_MEMBERS
#undef JAXDNN_MEMBER

using Register = RegisterOf<8>;

// ---------------------------------------------------------------------------------------- widening, which loses
// nothing

__device__ __forceinline__ float widen(float16 x) { return ptx::cvt_f32_f16(x.bits); }
__device__ __forceinline__ float widen(bfloat16 x) { return ptx::mov_f32(static_cast<unsigned>(x.bits) << 16); }

/// Half of what a float16 is: the same exponent, and two bits of the mantissa.
__device__ __forceinline__ float widen(float8_e5m2 x) { return ptx::cvt_f32_f16(static_cast<unsigned>(x.bits) << 8); }

__device__ __forceinline__ float widen(float8_e4m3fn x) {
#if __CUDA_ARCH__ >= 890
  return ptx::cvt_f32_f16(ptx::cvt_rn_f16x2_e4m3x2(x.bits));
#else
  // As a float16 the bits say 2^-8 of the value; and all of them set are the one NaN.
  const unsigned magnitude = x.bits & 0x7f;
  const float value = 256.0f * ptx::cvt_f32_f16(magnitude << 7 | (x.bits & 0x80u) << 8);
  return magnitude == 0x7f ? math::not_a_number<float>() : value;
#endif
}

template <class T>
__device__ __forceinline__ T widen(T x) {
  return x;
}

// ------------------------------------------------------------------------------------- rounding, to nearest, ties to
// even

/// `value` as the bits of a float16 or a bfloat16, in the low half of a word.
template <class T, class Compute>
__device__ __forceinline__ unsigned round_to_16_bits(Compute value) {
  if constexpr (is_same<T, float16>) {
    if constexpr (is_same<Compute, double>) {
      return ptx::cvt_rn_f16_f64(value);
    } else {
      return ptx::cvt_rn_f16_f32(value);
    }
  } else if constexpr (is_same<Compute, double>) {
    // Rounding to float32 first would round twice. Rounding to odd there (toward zero, with the last bit set when
    // anything was lost) keeps enough for the second rounding to be the right one.
    const float truncated = ptx::cvt_rz_f32_f64(value);
    const unsigned lost = static_cast<double>(truncated) != value ? 1u : 0u;
    return ptx::cvt_rn_bf16_f32(ptx::mov_f32(ptx::mov_b32(truncated) | lost));
  } else {
    return ptx::cvt_rn_bf16_f32(value);
  }
}

/// The nearest value that T, a narrow float, has, in a register.
template <class T, class Float>
__device__ __forceinline__ float round_to(Float value) {
  if constexpr (is_same<T, bfloat16>) {
    return ptx::mov_f32(round_to_16_bits<T>(value) << 16);
  } else if constexpr (is_same<T, float16>) {
    return ptx::cvt_f32_f16(round_to_16_bits<T>(value));
  } else {
    static_assert(is_float8<T>, "a type narrower than float");
    constexpr bool kE4m3 = is_same<T, float8_e4m3fn>;
    constexpr int kMantissa = kE4m3 ? 3 : 2, kLeastExponent = kE4m3 ? -6 : -14;
    constexpr float kGreatest = kE4m3 ? 448.0f : 57344.0f;
    // Next to 1.5 * 2^(23 - kMantissa) times the power of two below it, a float has as many digits as T; `__fadd_rn`
    // keeps the compiler from contracting the sum with the product that `value` may be.
    const float x = static_cast<float>(value);
    const float a = ::fabsf(x) < 0x1p16f ? ::fabsf(x) : 0x1p16f;
    const int exponent = __float_as_int(a) & 0x7f800000, least = (kLeastExponent + 127) << 23;
    const float anchor = __int_as_float(((exponent > least ? exponent : least) + ((23 - kMantissa) << 23)) | 0x400000);
    const float rounded = __fadd_rn(__fadd_rn(a, anchor), -anchor);
    const float overflow = kE4m3 ? math::not_a_number<float>() : math::infinity<float>();
    const float result = x != x ? x : rounded <= kGreatest ? rounded : overflow;
    return ::copysignf(result, x);
  }
}

/// A pair as the bits of two 8-bit floats. As JAX rounds, what is too large becomes a NaN (e4m3fn) or an infinity
/// (e5m2).
template <class T>
__device__ __forceinline__ unsigned round_to_8_bits(float low, float high) {
#if __CUDA_ARCH__ >= 890
  if constexpr (is_same<T, float8_e4m3fn>) {
    // 464 lies between the greatest number, 448, which is even, and the next, which is none.
    const float nan = math::not_a_number<float>();
    return ptx::cvt_rn_satfinite_e4m3x2_f32(::fabsf(low) <= 464.0f ? low : nan, ::fabsf(high) <= 464.0f ? high : nan);
  } else {
    // 61440 lies between 57344, which is odd, and 2^16. The bits of an infinity follow those of the greatest number.
    const unsigned pair = ptx::cvt_rn_satfinite_e5m2x2_f32(low, high);
    return pair + (::fabsf(low) >= 61440.0f ? 1 : 0) + (::fabsf(high) >= 61440.0f ? 0x100 : 0);
  }
#else
  const auto bits = [](float value) {
    const float rounded = round_to<T>(value);
    if constexpr (is_same<T, float8_e5m2>) {
      return ptx::cvt_rn_f16_f32(rounded) >> 8;
    } else {
      const unsigned half = ptx::cvt_rn_f16_f32(rounded * 0x1p-8f);
      return (half >> 7 & 0x7f) | (half >> 8 & 0x80);
    }
  };
  return bits(low) | bits(high) << 8;
#endif
}

/// `value` as an array of T stores it: floats are rounded once, and saturate when they become integers.
template <class T, class Value>
__device__ __forceinline__ T narrow(Value value) {
  if constexpr (is_same<T, Value>) {
    return value;
  } else if constexpr (is_same<T, bool>) {
    return value != 0;
  } else if constexpr (is_float8<T>) {
    return {static_cast<unsigned char>(round_to_8_bits<T>(static_cast<float>(value), 0.0f))};
  } else if constexpr (is_narrow_float<T>) {
    if constexpr (is_floating<Value>) {
      return {static_cast<unsigned short>(round_to_16_bits<T>(value))};
    } else {
      return {static_cast<unsigned short>(round_to_16_bits<T>(static_cast<float>(value)))};
    }
  } else if constexpr (is_floating<Value> && !is_floating<T>) {
    return math::convert<T>(value);
  } else {
    return static_cast<T>(value);
  }
}

}  // namespace jaxdnn
