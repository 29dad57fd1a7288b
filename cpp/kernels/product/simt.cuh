// D[b] = epilogue(A[b] * B[b]) exactly in float32, float64 or int32, for operands of any layout, dtype and alignment;
// or in float32 of 16-bit floats, on the tensor cores that compute capability 8.0 brought.
//
//   grid             one block a tile of kTileM x kTileN; x splits of K. With kDimensions = 1 in the order of
//                    core/scheduler.cuh; with 2, rows x columns of tiles of one matrix, and with 3, x matrices: small
//                    tiles would wait for its divisions before their first copy
//   block            threads of kThreadM x kThreadN accumulators each (on tensor cores: warps of as many, as often as
//                    a stage has kSliceK slices of K, of which each multiplies one: of few accumulators a lane, whose
//                    multiplies wait for each other). Two accumulators (A * B, A * B') share a tile: the left half of
//                    its columns is of the first
//   loop over K      kDepth at a time, through a ring of kStages tiles in shared memory:
//                        copies   | 0 | 1 | 2 | 3 | ...        (product/simt/tile.cuh)
//                        multiply             | 0 | 1 | ...    (product/simt/multiply.cuh, tensor.cuh)
//                    copies are started a few at a time, between the multiplies. Factors are loaded one step ahead, so
//                    the one __syncthreads of a stage comes before its last step: after it the next stage's copies are
//                    there, and this stage is free
//   epilogue         of few accumulators a lane of tensor cores, straight from registers, of all of them at once; its
//                    operands are loaded after the first copies. Slices add theirs through shared memory, and each has
//                    the epilogue of a part of them. Others go through shared memory in subtiles of some rows
//                    (product/simt/epilogue.cuh)
//   shared memory    | stages of (tile of A | tiles of B) |, then the subtiles, or the slices' accumulators, in their
//                    place
//
// Bytes: A once for each kTileN columns of the result and B once for each kTileM rows, mostly from L2; of a split, 4
// (float64: 8) an accumulator. Flops: 2 m n k, at one fused multiply-add a lane and cycle. Arithmetic bounds it. Of 128
// x 128 accumulators and 8 x 16 a thread, one row of K takes 128 FFMA and 6 16-byte loads from shared memory.
#pragma once

#include "core/scheduler.cuh"
#include "product/simt/epilogue.cuh"
#include "product/simt/multiply.cuh"
#include "product/simt/tensor.cuh"
#include "product/simt/tile.cuh"

namespace jaxdnn {

template <class Config>
struct ProductSimt {
  using Accumulator = typename Config::Accumulator;
  static constexpr int kAccumulators = Config::kAccumulators;
  static constexpr bool kDouble = is_same<Accumulator, double>, kHalf = Config::kHalf;
  using TensorTile = Select<kDouble, DoubleTile<Config>, HalfTile<Config>>;
  using Multiply = Select<kDouble || kHalf, TensorTile, FmaTile<Config>>;
  using Element = Select<kHalf, typename Config::A, Accumulator>;  // of the tiles in shared memory
  using Offset = Select<Config::kFar, long long, unsigned>;

  const typename Config::A* a = nullptr;
  const typename Config::B* b[kAccumulators] = {};
  long long a_stride = 0, a_batch = 0;  // elements between memory's rows, and between matrices
  long long b_stride[kAccumulators] = {}, b_batch[kAccumulators] = {};
  OperandAddress operands[Config::Operands::kArray];
  ResultAddress results[Config::Results::kCount];
  int m = 0, n = 0, k = 0, batches = 1;
  int swizzle = 8;                  // rows of tiles in a band (core/scheduler.cuh)
  int splits = 1, split_depth = 0;  // of K; each split's accumulators are a matrix of their own (product/split.cuh)

  static constexpr int kThreads = (kDouble || kHalf ? 32 : 1) * Config::kSliceK * Config::kTileM * Config::kTileN /
                                  (Config::kThreadM * Config::kThreadN);
  static constexpr int kWidth = Config::kTileN / kAccumulators;  // columns of a result's tile
  using Epilogue = SimtEpilogue<Config, kWidth, kThreads, Multiply, Config::kSliceK>;
  using TileA = SimtTile<typename Config::A, Element, Config::kTileM, Config::kTileM, Config::kDepth, kThreads,
                         Config::kMMajorA, Config::kVectorA, Offset>;
  using TileB = SimtTile<typename Config::B, Element, kWidth, Config::kTileN, Config::kDepth, kThreads,
                         Config::kNMajorB, Config::kVectorB, Offset>;
  static constexpr int kStage = TileA::kSize + TileB::kSize;
  static constexpr int kRingBytes = Config::kStages * kStage * static_cast<int>(sizeof(Element));
  static constexpr int kSubtileBytes = simt_subtile_bytes<Config, Multiply>;
  static constexpr int kSharedBytes = kRingBytes > kSubtileBytes ? kRingBytes : kSubtileBytes;
  static constexpr int kSliceDepth = Config::kDepth / Config::kSliceK, kSteps = kSliceDepth / Multiply::kStep;
  // Stages that asynchronous copies are ahead; those that wait in registers are one.
  static constexpr bool kAsync = TileA::kAsync || TileB::kAsync;
  static constexpr int kAhead = kAsync ? Config::kStages - 1 : 1;
  static_assert(Config::kStages >= 2, "one stage is multiplied while another one arrives");
  static_assert(kSteps % 2 == 0, "the first step of each stage uses the first set of registers");
  static_assert(Config::kSliceK == 1 || (kHalf && Epilogue::kDirect), "slices add few accumulators a lane");
  static_assert(Config::kSliceK == 1 || 4 * Config::kSliceK * Config::kTileM * Config::kTileN <= kSharedBytes,
                "the slices' accumulators are where the stages were");
};

/// This block's tile; each split of K is a matrix.
template <class Config>
__device__ __forceinline__ TilePosition simt_tile(const ProductSimt<Config>& call) {
  if constexpr (Config::kDimensions > 1) {
    return {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
            Config::kDimensions > 2 ? static_cast<int>(blockIdx.z) : 0};
  } else {
    using Call = ProductSimt<Config>;
    const TileOrder order{static_cast<unsigned>((call.m + Config::kTileM - 1) / Config::kTileM),
                          static_cast<unsigned>((call.n + Call::kWidth - 1) / Call::kWidth),
                          static_cast<unsigned>(call.swizzle)};
    return order[blockIdx.x];
  }
}

template <class Config>
__device__ __forceinline__ void product_simt(const ProductSimt<Config>& call) {
  using Call = ProductSimt<Config>;
  using Accumulator = typename Call::Accumulator;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  using Element = typename Call::Element;
  Element* const shared = reinterpret_cast<Element*>(shared_memory);

  const TilePosition tile = simt_tile(call);
  const int row0 = tile.row * Config::kTileM, column0 = tile.column * Call::kWidth;
  // Nothing can be copied before the division is done: the first matrix needs none.
  const int batch = Config::kDimensions > 1 && tile.batch < call.splits ? 0 : tile.batch / call.splits;
  const int k0 = (tile.batch - batch * call.splits) * call.split_depth;
  const int depth = call.splits == 1 || call.k - k0 < call.split_depth ? call.k - k0 : call.split_depth;
  const int stages = (depth + Config::kDepth - 1) / Config::kDepth;

  typename Call::TileA a(call.a + batch * call.a_batch, call.a_stride, row0, call.m, k0);
  typename Call::TileB b0(call.b[0] + batch * call.b_batch[0], call.b_stride[0], column0, call.n, k0);
  typename Call::TileB b1(call.b[Call::kAccumulators - 1] + batch * call.b_batch[Call::kAccumulators - 1],
                          call.b_stride[Call::kAccumulators - 1], column0, call.n, k0);
  // Where the tile of B' begins.
  constexpr int kSecondB =
      Call::TileA::kSize + (Config::kAccumulators == 2 ? Call::TileB::offset_of(Call::kWidth, 0) : 0);
  // Part `part` of `parts` of the copies to start while `stage` is multiplied; `next` is the stage of what follows it.
  const auto start_one = [&](auto& tile, int offset, int stage, int next, int last, int part, int parts) {
    const bool async = tile.kAsync;
    const int ahead = async ? Call::kAhead : 1;
    // Copies past the end are zeros, which take few accumulators longer to ask for than to know about.
    if (Call::Epilogue::kDirect && stage + ahead >= stages) return;
    tile.start(shared + (async ? last : next) * Call::kStage + offset, depth - (stage + ahead) * Config::kDepth, part,
               parts);
  };
  const auto start = [&](int stage, int next, int last, int part, int parts) {
    start_one(a, 0, stage, next, last, part, parts);
    start_one(b0, Call::TileA::kSize, stage, next, last, part, parts);
    if constexpr (Call::kAccumulators == 2) start_one(b1, kSecondB, stage, next, last, part, parts);
  };
  // All copies of the stage in `slot` are there, for all threads.
  const auto wait = [&](int slot) {
    Element* const to = shared + slot * Call::kStage;
    a.finish(to);
    b0.finish(to + Call::TileA::kSize);
    if constexpr (Call::kAccumulators == 2) b1.finish(to + kSecondB);
    if constexpr (Call::kAsync) ptx::cp_async_wait_group<Call::kAhead - 1>();
    __syncthreads();
  };

  typename Call::Multiply multiply;
  const auto fetch = [&](int slot, int step, int buffer) {
    const Element* const from = shared + slot * Call::kStage;
    multiply.template fetch<typename Call::TileA, typename Call::TileB>(from, from + Call::TileA::kSize, step, buffer);
  };
  constexpr bool kDirect = Call::Epilogue::kDirect;
  // What waits in registers is loaded last; or first, where the first stage may be the only one to come.
  constexpr int kWaiting = kDirect ? -Call::kAhead : -1;
  const auto begin = [&](int stage) {
    const auto begin_one = [&](auto& tile, int offset) {
      if (tile.kAsync || stage == kWaiting) {
        start_one(tile, offset, tile.kAsync ? stage : -1, 0, stage + Call::kAhead, 0, 1);
      }
    };
    begin_one(a, 0);
    begin_one(b0, Call::TileA::kSize);
    if constexpr (Call::kAccumulators == 2) begin_one(b1, kSecondB);
    if constexpr (Call::kAsync) ptx::cp_async_commit_group();
  };
  typename Call::Epilogue epilogue{{call.operands, call.results, {row0, column0, tile.batch}, call.m, call.n}};
  if constexpr (kDirect) {
    // Were it not for its branch, the compiler would compute where operands lie before the first copies.
    begin(-Call::kAhead);
    epilogue.start(multiply);
  }
  if constexpr (Call::kHalf) {
    const int slice = Config::kSliceK == 1 ? 0 : threadIdx.x / (Call::kThreads / Config::kSliceK);
    multiply.template place<typename Call::TileA, typename Call::TileB>(slice * Call::kSliceDepth);
  }
#pragma unroll
  for (int stage = kDirect - Call::kAhead; stage < 0; ++stage) begin(stage);
  wait(0);
  fetch(0, 0, 0);
  int slot = 0, last = Call::kAhead;  // the stage that is multiplied, and of the last one that is copied
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    const int next = slot + 1 == Config::kStages ? 0 : slot + 1;
#pragma unroll
    for (int step = 0; step < Call::kSteps; ++step) {
      start(stage, next, last, step, Call::kSteps);
      if (step + 1 < Call::kSteps) {
        fetch(slot, step + 1, (step + 1) % 2);
      } else {
        if constexpr (Call::kAsync) ptx::cp_async_commit_group();
        wait(next);
        fetch(next, 0, 0);
      }
      multiply.multiply(step % 2);
    }
    slot = next;
    last = last + 1 == Config::kStages ? 0 : last + 1;
  }

  // What was copied past the end, zeros, may still be on its way to where the subtiles will be.
  if constexpr (Call::kAsync) ptx::cp_async_wait_group<0>();
  epilogue.finish(multiply, shared_memory);
}

}  // namespace jaxdnn
