// The epilogue of a tile whose accumulators lie in registers as product/simt/multiply.cuh and tensor.cuh have them.
//
//   few       of 16-bit floats, at most kFewElements a lane: the epilogue is applied to all of them at once, where they
//             are. No thread waits for others, nor one element's loads and functions for another's
//   others    go through shared memory in subtiles of some rows, so that each thread handles a few elements at a time,
//             neighbours in neighbouring columns, and the epilogue's code is there a few times at most
//
// A kernel calls start(multiply) where its first loads are on their way, and finish(multiply, shared_memory) when all
// is multiplied and shared memory is free.
#pragma once

#include "core/epilogue_element.cuh"

namespace jaxdnn {

template <class Config>
constexpr int simt_subtile_pitch = Config::kTileN + 4;
template <class Config, class Multiply>
constexpr int simt_subtile_bytes =
    Multiply::kSubtileRows * simt_subtile_pitch<Config> * static_cast<int>(sizeof(typename Config::Accumulator));

/// What an epilogue is applied to: `first` is the tile's first element, of so many rows and columns.
template <class Config>
struct SimtResult {
  const OperandAddress (&operands)[Config::Operands::kArray];
  const ResultAddress (&results)[Config::Results::kCount];
  Coordinate first;
  int rows, columns;
};

/// Two accumulators share the tile, of which each has kWidth columns.
template <class Config, int kWidth, int kThreads, class Multiply>
struct StagedEpilogue : SimtResult<Config> {
  static constexpr bool kDirect = false;

  __device__ __forceinline__ void start(const Multiply&) {}

  __device__ __forceinline__ void finish(const Multiply& multiply, unsigned char* shared_memory) {
    using Accumulator = typename Config::Accumulator;
    constexpr int kPitch = simt_subtile_pitch<Config>;
    constexpr int kElements = Multiply::kSubtileRows * kWidth, kPasses = (kElements + kThreads - 1) / kThreads;
    // Those of one thread wait for each other's loads and functions; beside accumulators of other types there are no
    // registers for several.
    constexpr int kAtOnce = !Config::kHalf ? 1 : kPasses % 4 == 0 ? 4 : kPasses % 2 == 0 ? 2 : 1;
    Accumulator* const staged = reinterpret_cast<Accumulator*>(shared_memory);
    const Coordinate& first = this->first;
#pragma unroll 1
    for (int subtile = 0; subtile < Multiply::kSubtiles; ++subtile) {
      __syncthreads();
      multiply.template put<kPitch>(subtile, staged);
      __syncthreads();
#pragma unroll 1
      for (int own = threadIdx.x; own < kElements; own += kAtOnce * kThreads) {
        Coordinate coordinates[kAtOnce];
        bool inside[kAtOnce];
        Accumulator accumulators[kAtOnce][Config::kAccumulators];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = own + j * kThreads;
          coordinates[j] = {first.row + Multiply::row(subtile, i / kWidth), first.column + i % kWidth, first.batch};
          inside[j] =
              (j == 0 || i < kElements) && coordinates[j].row < this->rows && coordinates[j].column < this->columns;
          if (!inside[j]) continue;
#pragma unroll
          for (int s = 0; s < Config::kAccumulators; ++s) {
            accumulators[j][s] = staged[i / kWidth * kPitch + s * kWidth + i % kWidth];
          }
        }
        apply_epilogue<Config>(this->operands, this->results, coordinates, inside, accumulators);
      }
    }
  }
};

constexpr int kFewElements = 8;
constexpr int kFewOperands = 4;  // more of them would take registers from what multiplies

/// Warps of kSlices of K have accumulators of the same elements, and each of them the epilogue of a part of these.
template <class Config, class Multiply, int kSlices>
struct DirectEpilogue : SimtResult<Config> {
  using Accumulator = typename Config::Accumulator;
  static constexpr bool kDirect = true;
  static constexpr int kElements = Multiply::kElements / kSlices;
  static_assert(kElements * kSlices == Multiply::kElements, "each slice has as many elements");
  static constexpr bool kEarly = Config::Operands::kCount <= kFewOperands;

  Register operand[kElements][Config::Operands::kArray];

  /// Operands of few arrays arrive while others wait for what is multiplied.
  __device__ __forceinline__ void start(const Multiply& multiply) {
    if constexpr (kEarly) load(multiply);
  }

  __device__ __forceinline__ void finish(const Multiply& multiply, unsigned char* shared_memory) {
    if constexpr (!kEarly) load(multiply);
    Accumulator* const slices = reinterpret_cast<Accumulator*>(shared_memory) + threadIdx.x % kSliceThreads;
    if constexpr (kSlices > 1) share(multiply, slices);
    Register result[kElements][Config::Results::kCount];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      Accumulator accumulators[Config::kAccumulators];
#pragma unroll
      for (int s = 0; s < Config::kAccumulators; ++s) {
        accumulators[s] = kSlices > 1 ? sum(slices, i, s) : multiply.element(i, s);
      }
      const ElementContext<typename Config::Operands> context{nearest(multiply, i), this->operands};
      Config::Epilogue::apply(accumulators, operand[i], context, result[i]);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const Coordinate at = coordinate(multiply, i);
      if (at.row < this->rows && at.column < this->columns) {
        store_elements<0, typename Config::Results, typename Config::Registers>(this->results, at, result[i]);
      }
    }
  }

 private:
  static constexpr int kSliceThreads = 32 * Multiply::kWarps;

  /// The first element of a lane whose epilogue is this slice's.
  static __device__ __forceinline__ int own() {
    return kSlices > 1 ? static_cast<int>(threadIdx.x) / kSliceThreads * kElements : 0;
  }

  /// Where in shared memory element `i` of a sum lies, of a slice.
  static constexpr __device__ __forceinline__ int place(int slice, int i, int s) {
    return ((slice * Config::kAccumulators + s) * Multiply::kElements + i) * kSliceThreads;
  }

  __device__ __forceinline__ void share(const Multiply& multiply, Accumulator* slices) const {
    __syncthreads();  // others may still fetch factors past the end, which they don't multiply
#pragma unroll
    for (int i = 0; i < Multiply::kElements; ++i) {
#pragma unroll
      for (int s = 0; s < Config::kAccumulators; ++s) {
        slices[place(static_cast<int>(threadIdx.x) / kSliceThreads, i, s)] = multiply.element(i, s);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ Accumulator sum(const Accumulator* slices, int i, int s) const {
    Accumulator total = slices[place(0, own() + i, s)];
#pragma unroll
    for (int slice = 1; slice < kSlices; ++slice) total += slices[place(slice, own() + i, s)];
    return total;
  }

  __device__ __forceinline__ Coordinate coordinate(const Multiply& multiply, int i) const {
    const Coordinate& first = this->first;
    return {first.row + multiply.element_row(own() + i), first.column + multiply.element_column(own() + i),
            first.batch};
  }

  /// Elements outside are taken for the last ones inside, and not stored: so nothing but stores depends on where they
  /// are.
  __device__ __forceinline__ Coordinate nearest(const Multiply& multiply, int i) const {
    Coordinate at = coordinate(multiply, i);
    at.row = at.row < this->rows ? at.row : this->rows - 1;
    at.column = at.column < this->columns ? at.column : this->columns - 1;
    return at;
  }

  __device__ __forceinline__ void load(const Multiply& multiply) {
    const Begins<typename Config::Operands> begins(this->operands, this->first.batch);
#pragma unroll
    for (int i = 0; i < kElements; ++i) load_elements<0>(this->operands, begins, nearest(multiply, i), operand[i]);
  }
};

template <class Config, int kWidth, int kThreads, class Multiply, int kSlices = 1>
using SimtEpilogue =
    Select<Config::kHalf && Config::kThreadM * Config::kThreadN <= 32 * kFewElements,
           DirectEpilogue<Config, Multiply, kSlices>, StagedEpilogue<Config, kWidth, kThreads, Multiply>>;

}  // namespace jaxdnn
