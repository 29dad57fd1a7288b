// The epilogue of a tile whose accumulators lie in registers as product/simt/multiply.cuh has them.
//
// They go through shared memory in subtiles of some rows, so that each thread handles a few elements at a time,
// neighbours in neighbouring columns, and the epilogue's code is there a few times at most.
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
  constexpr int kElements = Multiply::kSubtileRows * kWidth, kPasses = (kElements + kThreads - 1) / kThreads;
  // Those of one thread wait for each other's loads and functions; beside accumulators of other types there are no
  // registers for several.
  constexpr int kAtOnce = !Config::kHalf ? 1 : kPasses % 4 == 0 ? 4 : kPasses % 2 == 0 ? 2 : 1;
  Accumulator* const staged = reinterpret_cast<Accumulator*>(shared_memory);
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
        inside[j] = (j == 0 || i < kElements) && coordinates[j].row < rows && coordinates[j].column < columns;
        if (!inside[j]) continue;
#pragma unroll
        for (int s = 0; s < Config::kAccumulators; ++s) {
          accumulators[j][s] = staged[i / kWidth * kPitch + s * kWidth + i % kWidth];
        }
      }
      apply_epilogue<Config>(operands, results, coordinates, inside, accumulators);
    }
  }
}

}  // namespace jaxdnn
