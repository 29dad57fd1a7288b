// One instruction of a pointwise program on a block of elements. The meaning is XLA's: NaNs pass through, integers
// wrap, integer division by zero has a value, floats saturate when they become integers.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "../base/float8.h"
#include "../base/vector_math.h"
#include "interpreter.h"

JAXDNN_ISA_BEGIN

namespace pointwise {

// Elements of a block, which a register holds: what an instruction costs beyond its arithmetic is shared by all of
// them, and a program's registers stay in the L1 cache.
constexpr int64_t kBlock = 512;
constexpr int64_t kRun = 64;

// Calls body(T()) with the type of a register.
template <typename Body>
inline void with_register(Dtype type, Body body) {
  switch (type) {
    case Dtype::float32:
      return body(float());
    case Dtype::float64:
      return body(double());
    case Dtype::int32:
      return body(int32_t());
    case Dtype::int64:
      return body(int64_t());
    case Dtype::uint32:
      return body(uint32_t());
    default:
      return body(uint64_t());
  }
}

// Calls body(S(), R()) with the type of an array's elements and of the register that holds them.
template <typename Body>
inline void with_element(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::bool_:
      return body(bool(), int32_t());
    case Dtype::int8:
      return body(int8_t(), int32_t());
    case Dtype::int16:
      return body(int16_t(), int32_t());
    case Dtype::uint8:
      return body(uint8_t(), uint32_t());
    case Dtype::uint16:
      return body(uint16_t(), uint32_t());
    case Dtype::bfloat16:
      return body(bfloat16(), float());
    case Dtype::float16:
      return body(float16(), float());
    case Dtype::float8_e4m3fn:
      return body(float8_e4m3fn(), float());
    case Dtype::float8_e5m2:
      return body(float8_e5m2(), float());
    default:
      return with_register(dtype, [&](auto type) { body(type, type); });
  }
}

// Of an array's element.
inline int64_t element_bytes(Dtype dtype) {
  int64_t bytes = 0;
  with_element(dtype, [&](auto element, auto) { bytes = sizeof(element); });
  return bytes;
}

template <typename T>
constexpr bool kFloating = std::is_floating_point_v<T>;

// ---- Rows of elements, as arrays and as registers have them ---------------------------------------------------------

template <typename R, typename S>
inline R widened(S element) {
  if constexpr (std::is_arithmetic_v<S>) {
    return R(element);
  } else {
    return widen(element);
  }
}

template <typename S, typename R>
inline S narrowed(R value) {
  if constexpr (std::is_same_v<S, bool>) {
    return value != 0;
  } else if constexpr (std::is_arithmetic_v<S>) {
    return S(value);
  } else if constexpr (std::is_same_v<R, double>) {
    return narrow<S>(rounded_to_odd(value));
  } else {
    return narrow<S>(float(value));
  }
}

// float16 has vector instructions of its own, which compilers don't find.
template <typename R, typename S>
inline void widen_row(const S* from, R* to, int64_t count) {
  int64_t i = 0;
  if constexpr (std::is_same_v<S, float16> && std::is_same_v<R, float>) {
    for (; i + kLanes<float> <= count; i += kLanes<float>) store(to + i, load(from + i));
  }
  for (; i < count; ++i) to[i] = widened<R>(from[i]);
}

template <typename S, typename R>
inline void narrow_row(const R* from, S* to, int64_t count) {
  int64_t i = 0;
  if constexpr (std::is_same_v<R, float> && (std::is_same_v<S, float16> || std::is_same_v<S, bfloat16>)) {
    for (; i + kLanes<float> <= count; i += kLanes<float>) store(to + i, load(from + i));
  }
  for (; i < count; ++i) to[i] = narrowed<S>(from[i]);
}

// ---- Scalar functions -----------------------------------------------------------------------------------------------

// The type that T is added and multiplied in: unsigned integers wrap.
template <typename T>
using Wrapping = typename std::conditional_t<kFloating<T>, std::enable_if<true, T>, std::make_unsigned<T>>::type;

template <typename T>
inline T sum(T a, T b) {
  return T(Wrapping<T>(a) + Wrapping<T>(b));
}

template <typename T>
inline T maximum(T a, T b) {
  return ((a > b) | (a != a)) ? a : b;
}

template <typename T>
inline T minimum(T a, T b) {
  return ((a < b) | (a != a)) ? a : b;
}

template <typename T>
inline T sign(T x) {
  if constexpr (kFloating<T>) return x > 0 ? T(1) : x < 0 ? T(-1) : x;
  return T((x > 0) - (x < 0));
}

// Ties away from zero: just less than a half is added, and the fraction is cut.
template <typename T>
inline T round_half_away(T x) {
  return std::trunc(x + std::copysign(T(0.5) - std::numeric_limits<T>::epsilon() / 4, x));
}

template <typename T>
inline T divided(T a, T b) {
  if constexpr (kFloating<T>) {
    return a / b;
  } else {
    if (b == 0) return T(-1);
    if (std::is_signed_v<T> && b == T(-1)) return T(0 - std::make_unsigned_t<T>(a));
    return a / b;
  }
}

template <typename T>
inline T remainder(T a, T b) {
  if constexpr (kFloating<T>) {
    return std::fmod(a, b);
  } else {
    if (b == 0) return a;
    return std::is_signed_v<T> && b == T(-1) ? T(0) : a % b;
  }
}

template <typename To, typename From>
inline To converted(From x) {
  if constexpr (kFloating<From> && !kFloating<To>) {
    constexpr From low = From(std::numeric_limits<To>::min()), high = From(std::numeric_limits<To>::max());
    if (x != x) return 0;
    return x <= low ? std::numeric_limits<To>::min() : x >= high ? std::numeric_limits<To>::max() : To(x);
  } else {
    return To(x);
  }
}

// ---- Instructions ---------------------------------------------------------------------------------------------------

// A program's arithmetic on the first `count` elements of its registers.
class Processor {
 public:
  explicit Processor(const Registers& registers) : registers_(registers) {}

  // What lies beyond `count` elements may be computed too.
  void execute(const Instruction& code, int64_t count) const {
    count = (count + kRun - 1) / kRun * kRun;
    with_register(code.type, [&](auto type) {
      using T = decltype(type);
      if constexpr (kFloating<T>) {
        floating<T>(code, count);
      } else {
        integer<T>(code, count);
      }
    });
  }

 private:
  template <typename T>
  void floating(const Instruction& code, int64_t count) const {
    switch (code.operation) {
      case Operation::floor:
        return unary<T>(code, count, [](T x) { return std::floor(x); });
      case Operation::ceil:
        return unary<T>(code, count, [](T x) { return std::ceil(x); });
      case Operation::round_half_even:
        return unary<T>(code, count, [](T x) { return std::rint(x); });
      case Operation::round_half_away:
        return unary<T>(code, count, [](T x) { return round_half_away(x); });
      case Operation::sqrt:
        return unary<T>(code, count, [](T x) { return std::sqrt(x); });
      case Operation::rsqrt:
        return unary<T>(code, count, [](T x) { return 1 / std::sqrt(x); });
      case Operation::cbrt:
        return unary<T>(code, count, [](T x) { return std::cbrt(x); });
      case Operation::pow:
        return binary<T>(code, count, [](T x, T y) { return std::pow(x, y); });
      case Operation::atan2:
        return binary<T>(code, count, [](T x, T y) { return std::atan2(x, y); });
      case Operation::exp:
        return vector<T>(code, count, [](Floats x) { return exp(x); }, [](double x) { return std::exp(x); });
      case Operation::exp2:
        return vector<T>(code, count, [](Floats x) { return exp2(x); }, [](double x) { return std::exp2(x); });
      case Operation::expm1:
        return vector<T>(code, count, [](Floats x) { return expm1(x); }, [](double x) { return std::expm1(x); });
      case Operation::log:
        return vector<T>(code, count, [](Floats x) { return log(x); }, [](double x) { return std::log(x); });
      case Operation::log1p:
        return vector<T>(code, count, [](Floats x) { return log1p(x); }, [](double x) { return std::log1p(x); });
      case Operation::logistic:
        return vector<T>(
            code, count, [](Floats x) { return logistic(x); }, [](double x) { return 1 / (1 + std::exp(-x)); });
      case Operation::tanh:
        return vector<T>(code, count, [](Floats x) { return tanh(x); }, [](double x) { return std::tanh(x); });
      case Operation::erf:
        return vector<T>(code, count, [](Floats x) { return erf(x); }, [](double x) { return std::erf(x); });
      case Operation::erfc:
        return vector<T>(code, count, [](Floats x) { return erfc(x); }, [](double x) { return std::erfc(x); });
      case Operation::sin:
        return unary<T>(code, count, [](T x) { return std::sin(x); });
      case Operation::cos:
        return unary<T>(code, count, [](T x) { return std::cos(x); });
      case Operation::tan:
        return unary<T>(code, count, [](T x) { return std::tan(x); });
      case Operation::asin:
        return unary<T>(code, count, [](T x) { return std::asin(x); });
      case Operation::acos:
        return unary<T>(code, count, [](T x) { return std::acos(x); });
      case Operation::atan:
        return unary<T>(code, count, [](T x) { return std::atan(x); });
      case Operation::sinh:
        return unary<T>(code, count, [](T x) { return std::sinh(x); });
      case Operation::cosh:
        return unary<T>(code, count, [](T x) { return std::cosh(x); });
      case Operation::asinh:
        return unary<T>(code, count, [](T x) { return std::asinh(x); });
      case Operation::acosh:
        return unary<T>(code, count, [](T x) { return std::acosh(x); });
      case Operation::atanh:
        return unary<T>(code, count, [](T x) { return std::atanh(x); });
      case Operation::is_finite:
        return unary<T, int32_t>(code, count,
                                 [](T x) { return int32_t(std::fabs(x) <= std::numeric_limits<T>::max()); });
      case Operation::narrow:
        return with_element(code.dtype, [&](auto element, auto) { narrow_to<decltype(element), T>(code, count); });
      default:
        return common<T>(code, count);
    }
  }

  template <typename T>
  void integer(const Instruction& code, int64_t count) const {
    using U = std::make_unsigned_t<T>;
    using I = std::make_signed_t<T>;
    constexpr int kBits = 8 * int(sizeof(T));
    switch (code.operation) {
      case Operation::and_:
        return binary<T>(code, count, [](T x, T y) { return x & y; });
      case Operation::or_:
        return binary<T>(code, count, [](T x, T y) { return x | y; });
      case Operation::xor_:
        return binary<T>(code, count, [](T x, T y) { return x ^ y; });
      case Operation::not_:
        return unary<T>(code, count, [](T x) { return ~x; });
      case Operation::logical_not:
        return unary<T>(code, count, [](T x) { return T(x == 0); });
      case Operation::shift_left:
        return binary<T>(code, count, [](T x, T y) { return U(y) < kBits ? T(U(x) << U(y)) : T(0); });
      case Operation::shift_right_logical:
        return binary<T>(code, count, [](T x, T y) { return U(y) < kBits ? T(U(x) >> U(y)) : T(0); });
      case Operation::shift_right_arithmetic:
        return binary<T>(code, count, [](T x, T y) { return T(I(x) >> (U(y) < kBits ? U(y) : U(kBits - 1))); });
      case Operation::population_count:
        return unary<T>(code, count, [](T x) { return T(__builtin_popcountll(U(x))); });
      case Operation::clz:
        return unary<T>(code, count, [](T x) { return x == 0 ? T(kBits) : T(__builtin_clzll(U(x)) - (64 - kBits)); });
      case Operation::narrow:
        return with_element(code.dtype, [&](auto element, auto) {
          using S = decltype(element);
          if constexpr (std::is_integral_v<S>) unary<T>(code, count, [](T x) { return T(S(x)); });
        });
      default:
        return common<T>(code, count);
    }
  }

  template <typename T>
  void common(const Instruction& code, int64_t count) const {
    using W = Wrapping<T>;
    switch (code.operation) {
      case Operation::add:
        return binary<T>(code, count, [](T x, T y) { return sum(x, y); });
      case Operation::sub:
        return binary<T>(code, count, [](T x, T y) { return T(W(x) - W(y)); });
      case Operation::mul:
        return binary<T>(code, count, [](T x, T y) { return T(W(x) * W(y)); });
      case Operation::div:
        return binary<T>(code, count, [](T x, T y) { return divided(x, y); });
      case Operation::rem:
        return binary<T>(code, count, [](T x, T y) { return remainder(x, y); });
      case Operation::max:
        return binary<T>(code, count, [](T x, T y) { return maximum(x, y); });
      case Operation::min:
        return binary<T>(code, count, [](T x, T y) { return minimum(x, y); });
      case Operation::neg:
        return unary<T>(code, count, [](T x) { return T(-W(x)); });
      case Operation::abs:
        return unary<T>(code, count, [](T x) {
          if constexpr (kFloating<T>) return std::fabs(x);
          return x < 0 ? T(-W(x)) : x;
        });
      case Operation::sign:
        return unary<T>(code, count, [](T x) { return sign(x); });
      case Operation::eq:
        return binary<T, int32_t>(code, count, [](T x, T y) { return int32_t(x == y); });
      case Operation::ne:
        return binary<T, int32_t>(code, count, [](T x, T y) { return int32_t(x != y); });
      case Operation::lt:
        return binary<T, int32_t>(code, count, [](T x, T y) { return int32_t(x < y); });
      case Operation::le:
        return binary<T, int32_t>(code, count, [](T x, T y) { return int32_t(x <= y); });
      case Operation::gt:
        return binary<T, int32_t>(code, count, [](T x, T y) { return int32_t(x > y); });
      case Operation::ge:
        return binary<T, int32_t>(code, count, [](T x, T y) { return int32_t(x >= y); });
      case Operation::select:
        return select<T>(code, count);
      case Operation::convert:
        return with_register(code.dtype, [&](auto to) {
          using To = decltype(to);
          unary<T, To>(code, count, [](T x) { return converted<To>(x); });
        });
      default: {  // literal
        using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
        std::fill_n(registers_.slot<T>(code.result), count, bit_cast<T>(Bits(code.immediate)));
      }
    }
  }

  // In runs of a length that the compiler knows.
  template <typename Body>
  static void for_elements(int64_t count, Body body) {
    for (int64_t start = 0; start < count; start += kRun) {
      for (int64_t i = 0; i < kRun; ++i) body(start + i);
    }
  }

  template <typename T, typename To = T, typename Function>
  void unary(const Instruction& code, int64_t count, Function function) const {
    const T* __restrict x = registers_.at<T>(code.arguments[0]);
    To* __restrict to = registers_.slot<To>(code.result);
    for_elements(count, [&](int64_t i) { to[i] = To(function(x[i])); });
  }

  template <typename T, typename To = T, typename Function>
  void binary(const Instruction& code, int64_t count, Function function) const {
    const T* __restrict x = registers_.at<T>(code.arguments[0]);
    const T* __restrict y = registers_.at<T>(code.arguments[1]);
    To* __restrict to = registers_.slot<To>(code.result);
    for_elements(count, [&](int64_t i) { to[i] = To(function(x[i], y[i])); });
  }

  template <typename T>
  void select(const Instruction& code, int64_t count) const {
    const int32_t* __restrict condition = registers_.at<int32_t>(code.arguments[0]);
    const T* __restrict on_true = registers_.at<T>(code.arguments[1]);
    const T* __restrict on_false = registers_.at<T>(code.arguments[2]);
    T* __restrict to = registers_.slot<T>(code.result);
    for_elements(count, [&](int64_t i) { to[i] = condition[i] != 0 ? on_true[i] : on_false[i]; });
  }

  template <typename T, typename Single, typename Double>
  void vector(const Instruction& code, int64_t count, Single single, Double both) const {
    if constexpr (std::is_same_v<T, float>) {
      const float* x = registers_.at<float>(code.arguments[0]);
      float* to = registers_.slot<float>(code.result);
      for (int64_t i = 0; i < count; i += kLanes<float>) store(to + i, single(load(x + i)));
    } else {
      unary<T>(code, count, both);
    }
  }

  // Rounds to S, and stays in T.
  template <typename S, typename T>
  void narrow_to(const Instruction& code, int64_t count) const {
    if constexpr (!std::is_arithmetic_v<S>) {
      S rounded[kBlock];
      narrow_row<S>(registers_.at<T>(code.arguments[0]), rounded, count);
      widen_row<T>(rounded, registers_.slot<T>(code.result), count);
    }
  }

  const Registers& registers_;
};

}  // namespace pointwise

JAXDNN_ISA_END
