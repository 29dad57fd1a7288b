// An epilogue, one element at a time: operands and results of any dtype, anywhere in memory.
//
// A kernel that has the accumulators of one element calls
//   apply_epilogue<Config>(operands, results, coordinate, accumulators);
// Config has: Epilogue (the functor), Operands (of `EpilogueOperand`), Results (as they lie in memory), Registers (what
// the functor leaves of each result).
#pragma once

#include "core/epilogue_operands.cuh"

namespace jaxdnn {

/// Where the operands of a batch begin, but tables.
template <class Operands>
struct Begins {
  long long of[Operands::kArray] = {};

  __device__ __forceinline__ Begins(const OperandAddress* addresses, int batch) { find<0>(addresses, batch); }

 private:
  template <int kIndex>
  __device__ __forceinline__ void find(const OperandAddress* addresses, int batch) {
    if constexpr (kIndex < Operands::kCount) {
      using Operand = TypeAt<kIndex, Operands>;
      if constexpr (!Operand::kIsTable) of[kIndex] = addresses[kIndex].template of_batch<Operand::kAffine>(batch);
      find<kIndex + 1>(addresses, batch);
    }
  }
};

/// Loads the operands of one element.
template <int kIndex, class Operands>
__device__ __forceinline__ void load_elements(const OperandAddress* addresses, const Begins<Operands>& begins,
                                              const Coordinate& at, Register* to) {
  if constexpr (kIndex < Operands::kCount) {
    using Operand = TypeAt<kIndex, Operands>;
    if constexpr (!Operand::kIsTable) {
      const OperandAddress& address = addresses[kIndex];
      const auto* const first = static_cast<const typename Operand::Type*>(address.data) + begins.of[kIndex];
      to[kIndex].set(widen(first[address.template of_element<Operand>(at.row, at.column)]));
    }
    load_elements<kIndex + 1, Operands>(addresses, begins, at, to);
  }
}

template <class Operands>
__device__ __forceinline__ void load_elements(const OperandAddress* addresses, const Coordinate& at, Register* to) {
  load_elements<0>(addresses, Begins<Operands>(addresses, at.batch), at, to);
}

/// Rounds and stores the results of one element.
template <int kIndex, class Results, class Registers>
__device__ __forceinline__ void store_elements(const ResultAddress* addresses, const Coordinate& at,
                                               const Register* from) {
  if constexpr (kIndex < Results::kCount) {
    using T = TypeAt<kIndex, Results>;
    using Value = TypeAt<kIndex, Registers>;
    const ResultAddress& address = addresses[kIndex];
    static_cast<T*>(address.data)[address.offset(at)] = narrow<T>(static_cast<Value>(from[kIndex]));
    store_elements<kIndex + 1, Results, Registers>(addresses, at, from);
  }
}

/// The epilogue of `kCount` elements: all operands are loaded before the first result is stored, so that a thread waits
/// for memory once. Elements that are not `inside` the result are passed over.
template <class Config, class Accumulator, int kAccumulators, int kCount>
__device__ __forceinline__ void apply_epilogue(const OperandAddress (&operands)[Config::Operands::kArray],
                                               const ResultAddress (&results)[Config::Results::kCount],
                                               const Coordinate (&coordinates)[kCount], const bool (&inside)[kCount],
                                               const Accumulator (&accumulators)[kCount][kAccumulators]) {
  Register operand[kCount][Config::Operands::kArray], result[kCount][Config::Results::kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (inside[i]) load_elements<typename Config::Operands>(operands, coordinates[i], operand[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (inside[i])
      Config::Epilogue::apply(accumulators[i], operand[i],
                              ElementContext<typename Config::Operands>{coordinates[i], operands}, result[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (inside[i])
      store_elements<0, typename Config::Results, typename Config::Registers>(results, coordinates[i], result[i]);
  }
}

template <class Config, class Accumulator, int kAccumulators>
__device__ __forceinline__ void apply_epilogue(const OperandAddress (&operands)[Config::Operands::kArray],
                                               const ResultAddress (&results)[Config::Results::kCount],
                                               const Coordinate& at, const Accumulator (&accumulators)[kAccumulators]) {
  Register operand[Config::Operands::kArray], result[Config::Results::kCount];
  load_elements<typename Config::Operands>(operands, at, operand);
  Config::Epilogue::apply(accumulators, operand, ElementContext<typename Config::Operands>{at, operands}, result);
  store_elements<0, typename Config::Results, typename Config::Registers>(results, at, result);
}

}  // namespace jaxdnn
