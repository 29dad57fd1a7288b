// The epilogue of a tile whose accumulators lie in registers as product/simt/multiply.cuh has them.
//
// They go through shared memory in subtiles of some rows, so that each thread handles one element at a time, neighbours
// in neighbouring columns, and the epilogue's code is there once.
#pragma once

#include "core/epilogue_element.cuh"

namespace jaxdnn {

template <class Config>
constexpr int simt_subtile_pitch = Config::kTileN + 4;
template <class Config, class Multiply>
constexpr int simt_subtile_bytes =
    Multiply::kSubtileRows * simt_subtile_pitch<Config> * static_cast<int>(sizeof(typename Config::Accumulator));

/// `first` is the tile's first element. Two accumulators share the tile, of which each has kWidth columns.
template <class Config, int kWidth, int kThreads, class Multiply>
__device__ __forceinline__ void simt_epilogue(const Multiply& multiply, unsigned char* shared_memory,
                                              const OperandAddress (&operands)[Config::Operands::kArray],
                                              const ResultAddress (&results)[Config::Results::kCount],
                                              const Coordinate& first, int rows, int columns) {
  using Accumulator = typename Config::Accumulator;
  constexpr int kPitch = simt_subtile_pitch<Config>;
  Accumulator* const staged = reinterpret_cast<Accumulator*>(shared_memory);
#pragma unroll 1
  for (int subtile = 0; subtile < Multiply::kSubtiles; ++subtile) {
    __syncthreads();
    multiply.template put<kPitch>(subtile, staged);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < Multiply::kSubtileRows * kWidth; i += kThreads) {
      const int row = first.row + Multiply::row(subtile, i / kWidth), column = first.column + i % kWidth;
      if (row >= rows || column >= columns) continue;
      Accumulator accumulators[Config::kAccumulators];
#pragma unroll
      for (int s = 0; s < Config::kAccumulators; ++s) {
        accumulators[s] = staged[i / kWidth * kPitch + s * kWidth + i % kWidth];
      }
      apply_epilogue<Config>(operands, results, {row, column, first.batch}, accumulators);
    }
  }
}

}  // namespace jaxdnn
