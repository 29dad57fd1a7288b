// The bytecode of pointwise programs, as jaxdnn/pointwise/bytecode.py writes it.
#pragma once

#include <cstdint>

#include "../base/kernel.h"

JAXDNN_ISA_BEGIN

namespace pointwise {

// In the order of `DTYPES` in jaxdnn/pointwise/operations.py. Registers hold the first six.
enum class Dtype : uint8_t {
  float32,
  float64,
  int32,
  int64,
  uint32,
  uint64,
  bool_,
  int8,
  int16,
  uint8,
  uint16,
  bfloat16,
  float16,
  float8_e4m3fn,
  float8_e5m2,
};

// In the order of `OPERATIONS` there, then of `EXTRA` in bytecode.py.
enum class Operation : uint16_t {
  add,
  sub,
  mul,
  div,
  rem,
  max,
  min,
  neg,
  abs,
  sign,
  floor,
  ceil,
  round_half_even,
  round_half_away,
  sqrt,
  rsqrt,
  cbrt,
  pow,
  atan2,
  exp,
  exp2,
  expm1,
  log,
  log1p,
  logistic,
  tanh,
  sin,
  cos,
  tan,
  asin,
  acos,
  atan,
  sinh,
  cosh,
  asinh,
  acosh,
  atanh,
  erf,
  erfc,
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  is_finite,
  and_,
  or_,
  xor_,
  not_,
  shift_left,
  shift_right_logical,
  shift_right_arithmetic,
  population_count,
  clz,
  select,
  convert,
  narrow,
  logical_not,
  literal,
  accumulator,
  operand,
  index,
  gather,
};

enum class Reduction : uint8_t { none, sum, max, min };

struct Instruction {
  Operation operation;
  Dtype type;   // of the arguments' registers
  Dtype dtype;  // of the result
  uint16_t result;
  uint16_t arguments[3];
  int64_t immediate;

  explicit Instruction(const int64_t* words)
      : operation(Operation(words[0] & 0xffff)),
        type(Dtype(words[0] >> 16 & 0xff)),
        dtype(Dtype(words[0] >> 48 & 0xff)),
        result(uint16_t(words[0] >> 32)),
        arguments{uint16_t(words[1]), uint16_t(words[1] >> 16), uint16_t(words[1] >> 32)},
        immediate(words[1]) {}
};

constexpr int kMaxIndices = 3;  // of a gather

// What a coordinate adds to an offset: coordinate // divisor % modulus * stride, without a modulus where that is 0.
struct Term {
  int64_t stride, divisor, modulus;

  int64_t operator()(int64_t coordinate) const {
    const int64_t quotient = coordinate / divisor;
    return (modulus == 0 ? quotient : quotient % modulus) * stride;
  }
};

// What an integer adds to an offset: it is brought to 0 .. bound, so that nothing is read out of bounds.
struct IndexTerm {
  int64_t stride, bound;
};

// Where an operand's element lies, besides what its strides say.
class Terms {
 public:
  explicit Terms(const int64_t* words) : words_(words) {}

  int64_t count(int axis) const { return words_[axis]; }
  int64_t indices() const { return words_[3]; }
  const Term* of(int axis) const {
    const int64_t before = (axis > 0 ? words_[0] : 0) + (axis > 1 ? words_[1] : 0);
    return reinterpret_cast<const Term*>(words_ + 4) + before;
  }
  const IndexTerm* of_indices() const { return reinterpret_cast<const IndexTerm*>(of(2) + count(2)); }

  // What all terms of batch (0), row (1) or column (2) add.
  int64_t offset(int axis, int64_t coordinate) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < count(axis); ++i) sum += of(axis)[i](coordinate);
    return sum;
  }

 private:
  const int64_t* words_;
};

struct OutputInstruction {
  uint16_t result;
  Dtype type;   // of the register
  Dtype dtype;  // of the array
  Reduction reduction;

  explicit OutputInstruction(int64_t word)
      : result(uint16_t(word)),
        type(Dtype(word >> 16 & 0xff)),
        dtype(Dtype(word >> 24 & 0xff)),
        reduction(Reduction(word >> 32 & 0xff)) {}
};

}  // namespace pointwise

JAXDNN_ISA_END
