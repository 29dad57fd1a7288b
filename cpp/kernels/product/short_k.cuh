// D[b] = epilogue(A[b] * B[b]) over a short K on Hopper's tensor cores, where rows of A lie one behind the other. All
// but how a tile is loaded and multiplied is product/sm90.cuh.
//
// TMA asks for a row's lines of 128 bytes, however few of their bytes a row has: of 80 bytes, or of 144, it asks for
// twice as much as there is, row by row, and results wait for that. Here a tile's rows are one copy, as they lie, and
// the tensor cores take them from registers. All of K is one stage:
//
//   A        | row 0: kRowElements | row 1 | ...       no swizzle: 8 rows are as many banks apart, unless they are
//                                                      multiples of 32 bytes long
//   B        the filling of a tile along N, with zeros where K is padded to whole steps
//
// A row may end in the middle of a step. Of what is infinite, a product with B's zeros would be no number: those
// registers are zeros too.
//
//   shared memory   a stage is | B's tile | A's rows |
//
// Bytes: A, B and D once each from memory, which bounds it; from L2 also B for every tile, and A for every kTileN
// columns. Flops: 2 m n k.
#pragma once

#include "product/sm90.cuh"

namespace jaxdnn {

/// The stage of a tile: whole rows of both operands. Config has kRowElements, of a row of A's.
template <class Config>
struct WholeRowsStage {
  static constexpr int kElements = Config::kRowElements, kRowBytes = 2 * kElements;
  static constexpr int kSteps = (kElements + 15) / 16, kDepth = 16 * kSteps;
  static constexpr bool kHalfStep = kElements % 16 != 0;  // is the last one
  using BTile = RowsOfB<typename Config::B, Config::kTileN, kDepth>;
  static constexpr int kBytes = BTile::kBytes + Config::kTileM * kRowBytes;
  static_assert(kElements % 8 == 0, "a row is pieces of 16 bytes");
  static_assert(kBytes % 1024 == 0, "the next stage begins with a swizzled tile");

  unsigned long long b;
  unsigned rows, pieces;  // where the lane's row of the warp's first 16 is; and from it to its piece of a step

  template <class Call>
  __device__ __forceinline__ WholeRowsStage(const Call&, unsigned stages, int first_row)
      : b(BTile::descriptor(stages)),
        rows(stages + BTile::kBytes + (first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16) * kRowBytes),
        pieces(threadIdx.x % 32 / 16 * 16) {}

  template <class Accumulator, int kBlocks, int kRegisters>
  __device__ __forceinline__ void multiply(Accumulator (&accumulators)[kBlocks][kRegisters], int stage, int,
                                           bool) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const unsigned row = rows + stage * kBytes + block * 64 * kRowBytes;
      unsigned a[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const bool half = kHalfStep && step == kSteps - 1;
        ptx::ldmatrix_x4<false>(a[step], row + step * 32 + (half ? 0 : pieces));
        if (half) a[step][2] = a[step][3] = 0;
      }
      multiply_registers<BTile>(accumulators[block], a, b + stage_offset(stage, kBytes), false);
    }
    ptx::wgmma_commit_group();
  }
};

/// The copies of a tile: of A's rows what the matrix has, which is one piece of memory.
template <class Call>
struct WholeRowsLoads {
  using BTile = typename Call::Stage::BTile;

  const Call& call;
  int row, column, batch;

  __device__ __forceinline__ WholeRowsLoads(const Call& call, const typename Call::Cluster&, int row, int column,
                                            int batch, int)
      : call(call), row(row), column(column), batch(batch) {}

  __device__ __forceinline__ void load(int, unsigned stage, unsigned full) const {
    const auto* const from = call.rows + batch * call.rows_batch + static_cast<long long>(row) * Call::Stage::kElements;
    ptx::cp_async_bulk_load(stage + BTile::kBytes, from, call.stage_bytes(row) - BTile::kBytes, full);
    BTile::load(call.b[0], stage, full, 0, 0, 0, column, batch * call.b_batched);
  }
};

template <class Config>
struct ProductShortK : ProductSm90<Config, WholeRowsStage<Config>> {
  using Stage = WholeRowsStage<Config>;
  using Loads = WholeRowsLoads<ProductShortK>;
  static constexpr int kProducerRegisters = 40;  // as of convolutions: it reckons addresses
  static_assert(Config::kClusterM * Config::kClusterN == 1 && Config::kAccumulators == 1, "blocks work alone");

  const typename Config::A* rows = nullptr;
  long long rows_batch = 0;  // elements from a matrix to the next

  __device__ __forceinline__ unsigned stage_bytes(int row) const {
    const int left = this->m - row;
    return Stage::BTile::kBytes + Stage::kRowBytes * (left < Config::kTileM ? left : Config::kTileM);
  }
  __device__ __forceinline__ void prefetch_maps() const { ptx::prefetch_tensormap(this->b[0]); }
};

template <class Config>
__device__ __forceinline__ void product_short_k(const ProductShortK<Config>& call) {
  product_sm90(call);
}

}  // namespace jaxdnn
