// Numbers: the integer types, what is greatest and least of a type, and floats as integers.
#pragma once

namespace jaxdnn {

using int8 = signed char;
using int16 = short;
using int32 = int;
using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned;
using uint64 = unsigned long long;

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

namespace math {

template <class T>
__device__ __forceinline__ T infinity() {
  if constexpr (is_same<T, double>) {
    return __longlong_as_double(0x7ff0000000000000);
  } else {
    return __int_as_float(0x7f800000);
  }
}

template <class T>
__device__ __forceinline__ T not_a_number() {
  if constexpr (is_same<T, double>) {
    return __longlong_as_double(0x7ff8000000000000);
  } else {
    return __int_as_float(0x7fc00000);
  }
}

template <class T>
inline constexpr int kBits = 8 * static_cast<int>(sizeof(T));
template <class T>
inline constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(1);
template <class T>
inline constexpr T kLowest = kSigned<T> ? static_cast<T>(1ull << (kBits<T> - 1)) : static_cast<T>(0);
template <class T>
inline constexpr T kHighest = static_cast<T>(~0ull >> (64 - kBits<T> + (kSigned<T> ? 1 : 0)));

/// A float as an integer, toward zero: saturated, and zero for a NaN.
template <class T, class Float>
__device__ __forceinline__ T convert(Float x) {
  if (x != x) return 0;
  if (x <= static_cast<Float>(kLowest<T>)) return kLowest<T>;
  if (x >= static_cast<Float>(kHighest<T>)) return kHighest<T>;
  return static_cast<T>(x);
}

}  // namespace math

}  // namespace jaxdnn
