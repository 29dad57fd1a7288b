// A convolution, or one of its gradients, as a product of matrices for each group: exactly in float32, float64 or
// int32, of operands of any dtype, window and alignment; or in float32 of 16-bit floats, on tensor cores.
//
//   grid             one block a tile of kTileM x kTileN, in the order of core/scheduler.cuh; x splits x groups x batch
//   block, thread    those of product/simt.cuh: what multiplies is product/simt/multiply.cuh
//   loop over K      kDepth at a time: elements of the next stage wait in registers while this one is multiplied
//   matrices         convolution/simt/gather.cuh: an index along K is a place of the filter and a channel, or a place
//                    of the output; what windows reach of padding and of zeros between places is zero
//   shared memory    | 2 stages of (tile of A | tile of B) |, then subtiles of accumulators in their place
//   barriers         one __syncthreads a stage
//
// Bytes: an element for each tap that it meets, mostly from L1 and L2. Flops: 2 m n k of each group; with zeros between
// places, multiplications by those too. Arithmetic bounds it, and the instructions that find elements: a division by a
// multiplication for each dimension of each vector.
#pragma once

#include "convolution/simt/gather.cuh"
#include "core/scheduler.cuh"
#include "product/simt/epilogue.cuh"
#include "product/simt/multiply.cuh"
#include "product/simt/tensor.cuh"

namespace jaxdnn {

/// Config has: A, of the array that windows slide over, and B, of the other one; Accumulator; Depth, Row, Column (of
/// `WindowAxis`); kFilter, if the filter is computed; kRunsA and kRunsB, if memory runs along M and N; kAccumulators,
/// one; kTileM, kTileN, kThreadM, kThreadN, kDepth; kVectorA, kVectorB; kHalf, if tensor cores multiply 16-bit floats;
/// and what `apply_epilogue` wants.
template <class Config>
struct ConvolutionSimt {
  using Accumulator = typename Config::Accumulator;
  static constexpr bool kDouble = is_same<Accumulator, double>, kHalf = Config::kHalf;
  using TensorTile = Select<kDouble, DoubleTile<Config>, HalfTile<Config>>;
  using Multiply = Select<kDouble || kHalf, TensorTile, FmaTile<Config>>;
  using Element = Select<kHalf, typename Config::A, Accumulator>;  // of the tiles in shared memory

  ConvolutionArray<typename Config::A> source;
  ConvolutionArray<typename Config::B> other;
  long long channel_stride = 0, column_stride = 0;  // strides of the filter's channels that are summed, and of columns
  ConvolutionWindow<typename Config::Depth, typename Config::Row, typename Config::Column> window;
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];
  int m = 0, n = 0, k = 0;  // of a group
  int groups = 1, splits = 1, split_depth = 0, swizzle = 8;

  static constexpr int kThreads =
      (kDouble || kHalf ? 32 : 1) * Config::kTileM * Config::kTileN / (Config::kThreadM * Config::kThreadN);
  using TileA = GatheredTile<typename Config::A, Element, Config::kTileM, Config::kDepth, kThreads, Config::kRunsA,
                             Config::kVectorA>;
  using TileB = GatheredTile<typename Config::B, Element, Config::kTileN, Config::kDepth, kThreads, Config::kRunsB,
                             Config::kVectorB>;
  static constexpr int kStage = TileA::kSize + TileB::kSize;
  static constexpr int kStageBytes = 2 * kStage * static_cast<int>(sizeof(Element));
  static constexpr int kSubtileBytes = simt_subtile_bytes<Config, Multiply>;
  static constexpr int kSharedBytes = kStageBytes > kSubtileBytes ? kStageBytes : kSubtileBytes;
  static constexpr int kSteps = Config::kDepth / Multiply::kStep;
};

template <class Config>
__device__ __forceinline__ void convolution_simt(const ConvolutionSimt<Config>& call) {
  using Call = ConvolutionSimt<Config>;
  using Element = typename Call::Element;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  Element* const shared = reinterpret_cast<Element*>(shared_memory);

  const TileOrder order{static_cast<unsigned>((call.m + Config::kTileM - 1) / Config::kTileM),
                        static_cast<unsigned>((call.n + Config::kTileN - 1) / Config::kTileN),
                        static_cast<unsigned>(call.swizzle)};
  const TilePosition tile = order[blockIdx.x];
  const int row0 = tile.row * Config::kTileM, column0 = tile.column * Config::kTileN;
  const int split = tile.batch % call.splits, group = tile.batch / call.splits % call.groups;
  const int batch = tile.batch / call.splits / call.groups;
  const int k0 = split * call.split_depth;
  const int end = call.splits == 1 || call.k - k0 < call.split_depth ? call.k : k0 + call.split_depth;

  auto source = call.source;
  auto other = call.other;
  source.data += batch * source.batch + group * source.group;
  other.data += batch * other.batch + group * other.group;
  typename Call::TileA a;
  typename Call::TileB b;
  const auto start = [&](int first) {
    a.start([&](int along, int depth) -> const typename Config::A* {
      const int row = row0 + along, k = first + depth;
      if (row >= call.m || k >= end) return nullptr;
      return call.window.meeting(source, call.window.place(Config::kFilter ? k : row),
                                 call.window.tap(Config::kFilter ? row : k));
    });
    b.start([&](int along, int depth) -> const typename Config::B* {
      const int column = column0 + along, k = first + depth;
      if (column >= call.n || k >= end) return nullptr;
      const typename Config::B* const from = other.data + column * call.column_stride;
      if constexpr (Config::kFilter) {
        const Place place = call.window.place(k);
        return from +
               (place.n * other.n + place.depth * other.depth + place.row * other.row + place.column * other.column);
      } else {
        const Tap tap = call.window.tap(k);
        return from + (tap.depth * other.depth + tap.row * other.row + tap.column * other.column +
                       tap.channel * call.channel_stride);
      }
    });
  };

  typename Call::Multiply multiply;
  if constexpr (Call::kHalf) multiply.template place<typename Call::TileA, typename Call::TileB>();
  const auto finish = [&](int stage) {
    a.finish(shared + stage * Call::kStage);
    b.finish(shared + stage * Call::kStage + Call::TileA::kSize);
    __syncthreads();
  };
  start(k0);
  finish(0);
  int stage = 0;
#pragma unroll 1
  for (int k = k0; k < end; k += Config::kDepth) {
    const Element* const from = shared + stage * Call::kStage;
    const auto fetch = [&](int step) {
      multiply.template fetch<typename Call::TileA, typename Call::TileB>(from, from + Call::TileA::kSize, step,
                                                                          step % 2);
    };
    const bool more = k + Config::kDepth < end;
    if (more) start(k + Config::kDepth);
    fetch(0);
#pragma unroll
    for (int step = 0; step < Call::kSteps; ++step) {
      if (step + 1 < Call::kSteps) fetch(step + 1);
      multiply.multiply(step % 2);
    }
    stage ^= 1;
    if (more) finish(stage);
  }

  // Each split's accumulators are a matrix of their own (product/split.cuh).
  SimtEpilogue<Config, Config::kTileN, Call::kThreads, typename Call::Multiply> epilogue{
      {call.operands,
       call.results,
       {row0, group * call.n + column0, batch * call.splits + split},
       call.m,
       (group + 1) * call.n}};
  epilogue.start(multiply);
  epilogue.finish(multiply, shared_memory);
}

}  // namespace jaxdnn
