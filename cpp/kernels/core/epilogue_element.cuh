// An epilogue, one element at a time: operands and results of any dtype, anywhere in memory.
//
// A kernel that has the sums of one element calls
//   apply_epilogue<Config>(operands, results, place, sums);
// Config has: Epilogue (the functor), Operands and Results (`ElementTypes`, as they lie in memory), Registers
// (`ElementTypes`, what the functor leaves of each result).
#pragma once

#include "core/math.cuh"

namespace jaxdnn {

template <class... Types>
struct ElementTypes {
  static constexpr int kCount = sizeof...(Types);
};

template <int kIndex, class List>
struct ElementTypeAt;
template <class First, class... Rest>
struct ElementTypeAt<0, ElementTypes<First, Rest...>> {
  using Type = First;
};
template <int kIndex, class First, class... Rest>
struct ElementTypeAt<kIndex, ElementTypes<First, Rest...>> : ElementTypeAt<kIndex - 1, ElementTypes<Rest...>> {};

/// An element of the whole result.
struct ElementPlace {
  long long row, column, batch;
};

/// Strides count elements. Those that a plan leaves at zero cost no instruction.
template <class Pointer>
struct ElementAddress {
  Pointer data = nullptr;
  long long row_stride = 0, column_stride = 0, batch_stride = 0;

  __device__ __forceinline__ long long offset(const ElementPlace& place) const {
    return place.row * row_stride + place.column * column_stride + place.batch * batch_stride;
  }
};

using ElementOperand = ElementAddress<const void*>;
using ElementResult = ElementAddress<void*>;

/// A value of any type that functors compute in; whoever takes it knows which.
union ElementRegister {
  float f32;
  double f64;
  bool b;
  int8 s8;
  int16 s16;
  int32 s32;
  int64 s64;
  uint8 u8;
  uint16 u16;
  uint32 u32;
  uint64 u64;

  __device__ __forceinline__ ElementRegister() {}

#define JAXDNN_REGISTER(type, member)                                 \
  __device__ __forceinline__ operator type() const { return member; } \
  __device__ __forceinline__ operator type&() { return member; }      \
  __device__ __forceinline__ void set(type value) { member = value; }
  JAXDNN_REGISTER(float, f32)
  JAXDNN_REGISTER(double, f64)
  JAXDNN_REGISTER(bool, b)
  JAXDNN_REGISTER(int8, s8)
  JAXDNN_REGISTER(int16, s16)
  JAXDNN_REGISTER(int32, s32)
  JAXDNN_REGISTER(int64, s64)
  JAXDNN_REGISTER(uint8, u8)
  JAXDNN_REGISTER(uint16, u16)
  JAXDNN_REGISTER(uint32, u32)
  JAXDNN_REGISTER(uint64, u64)
#undef JAXDNN_REGISTER
};

/// The exact value of an element, in the register type that functors compute in.
__device__ __forceinline__ float widen(float16 x) { return ptx::cvt_f32_f16(x.bits); }
__device__ __forceinline__ float widen(bfloat16 x) { return ptx::mov_f32(static_cast<unsigned>(x.bits) << 16); }
/// Half of what a float16 is: the same exponent, and two bits of the mantissa.
__device__ __forceinline__ float widen(float8_e5m2 x) { return ptx::cvt_f32_f16(static_cast<unsigned>(x.bits) << 8); }
/// As a float16 the bits say 2^-8 of the value; and all of them set are the one NaN.
__device__ __forceinline__ float widen(float8_e4m3fn x) {
  const unsigned magnitude = x.bits & 0x7f;
  const float value = 256.0f * ptx::cvt_f32_f16(magnitude << 7 | (x.bits & 0x80u) << 8);
  return magnitude == 0x7f ? math::not_a_number<float>() : value;
}
template <class T>
__device__ __forceinline__ T widen(T x) {
  return x;
}

template <class T>
inline constexpr bool kIsFloating = is_same<T, float> || is_same<T, double>;
template <class T>
inline constexpr bool kIsFloat8 = is_same<T, float8_e4m3fn> || is_same<T, float8_e5m2>;
template <class T>
inline constexpr bool kIsNarrow = kIsFloat8<T> || is_same<T, bfloat16> || is_same<T, float16>;

/// `value` as an array of T stores it: floats are rounded once to nearest even, and saturate when they become integers.
template <class T, class Register>
__device__ __forceinline__ T narrow(Register value) {
  if constexpr (is_same<T, Register>) {
    return value;
  } else if constexpr (is_same<T, bool>) {
    return value != 0;
  } else if constexpr (kIsFloat8<T>) {
    const float rounded = round_to<T>(value);
    if constexpr (is_same<T, float8_e5m2>) {
      return {static_cast<unsigned char>(ptx::cvt_rn_f16_f32(rounded) >> 8)};
    } else {
      const unsigned half = ptx::cvt_rn_f16_f32(rounded * 0x1p-8f);
      return {static_cast<unsigned char>((half >> 7 & 0x7f) | (half >> 8 & 0x80))};
    }
  } else if constexpr (kIsNarrow<T>) {
    if constexpr (kIsFloating<Register>) {
      return {static_cast<unsigned short>(round_to_16_bits<T>(value))};
    } else {
      return {static_cast<unsigned short>(round_to_16_bits<T>(static_cast<float>(value)))};
    }
  } else if constexpr (kIsFloating<Register> && !kIsFloating<T>) {
    return math::convert<T>(value);
  } else {
    return static_cast<T>(value);
  }
}

/// Loads the operands of one element.
template <int kIndex, class Operands>
__device__ __forceinline__ void load_elements(const ElementOperand* addresses, const ElementPlace& place,
                                              ElementRegister* to) {
  if constexpr (kIndex < Operands::kCount) {
    using T = typename ElementTypeAt<kIndex, Operands>::Type;
    const ElementOperand& address = addresses[kIndex];
    to[kIndex].set(widen(static_cast<const T*>(address.data)[address.offset(place)]));
    load_elements<kIndex + 1, Operands>(addresses, place, to);
  }
}

/// Rounds and stores the results of one element.
template <int kIndex, class Results, class Registers>
__device__ __forceinline__ void store_elements(const ElementResult* addresses, const ElementPlace& place,
                                               const ElementRegister* from) {
  if constexpr (kIndex < Results::kCount) {
    using T = typename ElementTypeAt<kIndex, Results>::Type;
    using Register = typename ElementTypeAt<kIndex, Registers>::Type;
    const ElementResult& address = addresses[kIndex];
    static_cast<T*>(address.data)[address.offset(place)] = narrow<T>(static_cast<Register>(from[kIndex]));
    store_elements<kIndex + 1, Results, Registers>(addresses, place, from);
  }
}

template <class Config>
inline constexpr int kElementOperands = Config::Operands::kCount > 0 ? Config::Operands::kCount : 1;

/// The epilogue of `kCount` elements: all operands are loaded before the first result is stored, so that a thread waits
/// for memory once. Elements that are not `inside` the result are passed over.
template <class Config, class Sum, int kSums, int kCount>
__device__ __forceinline__ void apply_epilogue(const ElementOperand (&operands)[kElementOperands<Config>],
                                               const ElementResult (&results)[Config::Results::kCount],
                                               const ElementPlace (&places)[kCount], const bool (&inside)[kCount],
                                               const Sum (&sums)[kCount][kSums]) {
  ElementRegister operand[kCount][kElementOperands<Config>], result[kCount][Config::Results::kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (inside[i]) load_elements<0, typename Config::Operands>(operands, places[i], operand[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (inside[i]) Config::Epilogue::apply(sums[i], operand[i], places[i], result[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (inside[i])
      store_elements<0, typename Config::Results, typename Config::Registers>(results, places[i], result[i]);
  }
}

template <class Config, class Sum, int kSums>
__device__ __forceinline__ void apply_epilogue(const ElementOperand (&operands)[kElementOperands<Config>],
                                               const ElementResult (&results)[Config::Results::kCount],
                                               const ElementPlace& place, const Sum (&sums)[kSums]) {
  ElementRegister operand[kElementOperands<Config>], result[Config::Results::kCount];
  load_elements<0, typename Config::Operands>(operands, place, operand);
  Config::Epilogue::apply(sums, operand, place, result);
  store_elements<0, typename Config::Results, typename Config::Registers>(results, place, result);
}

}  // namespace jaxdnn
