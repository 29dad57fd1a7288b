// Where an operand's element lies, where a coordinate of the result joins dimensions of which the operand has not all:
// the offset is a sum of terms, coordinate / divisor % modulus * stride. Which terms there are is part of the code,
// their numbers are arguments: a kernel is not compiled again because a size changed.
#pragma once

namespace jaxdnn {

/// x / d for 0 <= x < 2^31 and 1 <= d < 2^31, as x * multiplier >> shift; jaxdnn/engines/product/affine.py says why.
struct Divisor {
  long long magic = 0;  // multiplier | shift << 32

  __device__ __forceinline__ unsigned quotient(unsigned x) const {
    const unsigned multiplier = static_cast<unsigned>(magic);
    return static_cast<unsigned>(static_cast<unsigned long long>(x) * multiplier >> static_cast<int>(magic >> 32));
  }
};

/// What one coordinate adds to an offset. Without flags and stride it costs no instruction.
struct AffineTerm {
  bool divides = false, wraps = false;
  int modulus = 0;
  Divisor divisor, modulus_divisor;
  long long stride = 0;

  __device__ __forceinline__ long long offset(long long coordinate) const {
    if (!divides && !wraps) return coordinate * stride;
    unsigned part = static_cast<unsigned>(coordinate);
    if (divides) part = divisor.quotient(part);
    if (wraps) part -= modulus_divisor.quotient(part) * static_cast<unsigned>(modulus);
    return part * stride;
  }
};

/// All that a coordinate adds besides its stride; `MAX_TERMS` in jaxdnn/engines/product/affine.py.
struct AffineTerms {
  static constexpr int kMost = 3;
  AffineTerm terms[kMost];

  __device__ __forceinline__ long long offset(long long coordinate) const {
    return terms[0].offset(coordinate) + terms[1].offset(coordinate) + terms[2].offset(coordinate);
  }
};

}  // namespace jaxdnn
