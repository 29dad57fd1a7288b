// D[b] = epilogue(A[b] * B[b]) over a short K on Hopper's tensor cores, where rows of A lie one behind the other; also
// epilogue(A * B, A * B'). All but how a tile is loaded and multiplied is product/sm90.cuh.
//
// TMA asks for a row's lines of 128 bytes, however few of their bytes a row has: of 80 bytes, or of 144, it asks for
// twice as much as there is, row by row, and results wait for that; and of rows that begin elsewhere than at multiples
// of 16 bytes it takes none. Here a tile's rows are one copy, as they lie, and the tensor cores take them from
// registers. All of K is one stage:
//
//   A        | row 0: kRowElements | row 1 | ...       no swizzle: 8 rows are as many banks apart, unless they are
//                                                      multiples of 32 bytes long
//   B        the filling of a tile along N, with zeros where K is padded to whole steps
//
// A row may end in the middle of a step. Of what is infinite, a product with B's zeros would be no number: those
// registers are zeros too. Rows that are no pieces of 16 bytes are read by pairs of elements, of an odd length one
// element at a time: four loads, or eight, in place of one. The last tile of such a matrix may end within a piece, of
// which the producer stores the few elements that are the matrix's.
//
//   shared memory   a stage is | B's tiles | A's rows |
//
// Where there are many rows, B may stay: a block loads as many tiles of its columns as there is room for, once, and a
// stage is A's rows alone. Each warp group takes 64 of these into registers, lets go of the stage, and multiplies them
// by one tile after the other. Of more columns than that, some blocks have some and others the rest.
//
//   shared memory   stages of | A's rows | ..., | tile 0 of B's columns (of both matrices) | tile 1 | ... | barriers |
//
// Bytes: A, B and D once each from memory, which bounds it; from L2 also B for every tile, and A for every kTileN
// columns; where B stays, B for every block, and A for every part of the columns. Flops: 2 m n k. Loads of pairs take
// 16 clocks of shared memory a warp and step at worst, where rows are 31 or 33 words apart, 1,024 of 64 rows of 254
// elements, which memory delivers to a multiprocessor in 1,850. Those of single elements take 60, where rows are 31.5
// or 32.5 words apart, 960 of 64 rows of 63 elements, which it delivers in 460: unless B stays, such rows are copied.
#pragma once

#include "product/sm90.cuh"

namespace jaxdnn {

/// The stage of a tile: whole rows of both operands. Config has kRowElements, of a row of A's.
template <class Config>
struct WholeRowsStage {
  static constexpr int kElements = Config::kRowElements, kRowBytes = 2 * kElements;
  static constexpr int kSteps = (kElements + 15) / 16, kDepth = 16 * kSteps;
  static constexpr bool kPieces = kElements % 8 == 0;     // begin at multiples of 16 bytes
  static constexpr bool kHalfStep = kElements % 16 != 0;  // is the last one, of whole pieces
  static constexpr int kWidth = Config::kTileN / Config::kAccumulators;
  using BTile = RowsOfB<typename Config::B, kWidth, kDepth>;
  using BTiles = RowsOfB<typename Config::B, Config::kTileN, kDepth>;  // of both matrices, one behind the other
  static constexpr bool kStays = Config::kStationary > 0;
  static constexpr int kRowsAt = kStays ? 0 : Config::kAccumulators * BTile::kBytes;
  static constexpr int kBytes = (kRowsAt + Config::kTileM * kRowBytes + 1023) / 1024 * 1024;
  static_assert(BTile::kBytes % 1024 == 0, "the next matrix begins with a swizzled tile");
  static_assert(BTiles::kBytes == Config::kAccumulators * BTile::kBytes,
                "one multiply reads both matrices, one behind the other");
  using Columns = TmaPipeline<kStays ? Config::kStationary : 1, BTiles::kBytes>;  // of B that stay

  Columns columns;
  unsigned long long b;
  unsigned rows, pieces;  // where the lane's row of the warp's first 16 is; and from it to its part of a step
  unsigned taken[kStays ? kSteps : 1][4];

  template <class Call>
  __device__ __forceinline__ WholeRowsStage(const Call& call, unsigned stages, int first_row)
      : columns(call.columns(stages)), b(BTiles::descriptor(kStays ? columns.stages : stages)) {
    const int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 % 4 * 16 + (kPieces ? lane % 16 : lane / 4);
    rows = stages + kRowsAt + row * kRowBytes;
    pieces = kPieces ? lane / 16 * 16 : lane % 4 * 4;
  }

  template <class Accumulator, int kBlocks, int kRegisters>
  __device__ __forceinline__ void multiply(Accumulator (&accumulators)[kBlocks][kRegisters], int stage, int,
                                           bool) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      unsigned a[kSteps][4];
      load(a, rows + stage * kBytes + block * 64 * kRowBytes);
      multiply_registers<BTiles>(accumulators[block], a, b + stage_offset(stage, kBytes), false);
    }
    ptx::wgmma_commit_group();
  }

  /// Takes the warp group's rows of a stage into registers.
  __device__ __forceinline__ void take(int stage) { load(taken, rows + stage * kBytes); }

  /// Starts the multiplies of these by tile `i` of the columns that stay.
  template <class Accumulator, int kBlocks, int kRegisters>
  __device__ __forceinline__ void multiply_columns(Accumulator (&accumulators)[kBlocks][kRegisters], int i) const {
    static_assert(kBlocks == 1, "a warp group has 64 rows in registers");
    mbarrier_wait(columns.full(i), 0);
    multiply_registers<BTiles>(accumulators[0], taken, b + stage_offset(i, Columns::kStageStride), false);
    ptx::wgmma_commit_group();
  }

 private:
  __device__ __forceinline__ void load(unsigned (&a)[kSteps][4], unsigned row) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kPieces) {
        load_pieces(a[step], row, step);
      } else {
        load_pairs(a[step], row, step);
      }
    }
  }

  __device__ __forceinline__ void load_pieces(unsigned (&a)[4], unsigned row, int step) const {
    const bool half = kHalfStep && step == kSteps - 1;
    ptx::ldmatrix_x4<false>(a, row + step * 32 + (half ? 0 : pieces));
    if (half) a[2] = a[3] = 0;
  }

  /// A lane's pairs of a row and of the eighth after it, in each half of a step.
  __device__ __forceinline__ void load_pairs(unsigned (&a)[4], unsigned row, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = step * 16 + i / 2 * 8;  // element of the first lane
      const unsigned from = row + i % 2 * 8 * kRowBytes + first * 2 + pieces;
      if constexpr (kElements % 2 == 0) {
        ptx::ld_shared<4>(&a[i], from);
      } else {
        unsigned short pair[2];
        ptx::ld_shared(pair[0], from);
        ptx::ld_shared(pair[1], from + 2);
        a[i] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
      }
      if (first + 8 > kElements) {
        const int left = kElements - first - static_cast<int>(pieces / 2);
        a[i] = left > 1 ? a[i] : left == 1 ? a[i] & 0xffff : 0;
      }
    }
  }
};

/// The copies of a tile: of A's rows what the matrix has, which is one piece of memory.
template <class Call>
struct WholeRowsLoads {
  const Call& call;
  int row, column, batch;

  __device__ __forceinline__ WholeRowsLoads(const Call& call, const typename Call::Cluster&, int row, int column,
                                            int batch, int)
      : call(call), row(row), column(column), batch(batch) {}

  __device__ __forceinline__ void load(int, unsigned stage, unsigned full) const {
    constexpr int kRowsAt = Call::Stage::kRowsAt;
    const unsigned bytes = call.stage_bytes(row) - kRowsAt;
    if (Call::Stage::kPieces || bytes > 0) {
      ptx::cp_async_bulk_load(stage + kRowsAt, call.first_element(row, batch), bytes, full);
    }
    if constexpr (!Call::Stage::kStays) call.load_columns(stage, full, column, batch);
  }
};

template <class Config>
struct ProductShortK : ProductSm90<Config, WholeRowsStage<Config>> {
  using Stage = WholeRowsStage<Config>;
  using Product = ProductSm90<Config, Stage>;
  using Loads = WholeRowsLoads<ProductShortK>;
  using Columns = typename Stage::Columns;
  static constexpr int kApart = Product::kWidth * (Stage::kStays ? Config::kStationary : 1);
  static constexpr int kColumnsAt = (Product::kSharedBytes + 1023) / 1024 * 1024;
  static constexpr int kColumnBarriersAt = kColumnsAt + Config::kStationary * Columns::kStageStride;
  static constexpr int kSharedBytes =
      Stage::kStays ? kColumnBarriersAt + Columns::kBarrierBytes : Product::kSharedBytes;
  // As of convolutions: it reckons addresses, and may store elements.
  static constexpr int kProducerRegisters = Stage::kPieces ? 40 : 56;
  static_assert(Config::kClusterM * Config::kClusterN == 1, "blocks work alone");

  const typename Config::A* rows = nullptr;
  long long rows_batch = 0;  // elements from a matrix to the next

  __device__ __forceinline__ const typename Config::A* first_element(int row, int batch) const {
    return rows + batch * rows_batch + static_cast<long long>(row) * Stage::kElements;
  }

  /// Of A's, in the tile that begins at this row.
  __device__ __forceinline__ unsigned row_bytes(int row) const {
    const int left = this->m - row;
    return Stage::kRowBytes * (left < Config::kTileM ? left : Config::kTileM);
  }

  __device__ __forceinline__ unsigned stage_bytes(int row) const { return Stage::kRowsAt + row_bytes(row) / 16 * 16; }

  __device__ __forceinline__ void store_rest(unsigned stage, int row, int batch) const {
    if constexpr (!Stage::kPieces) {
      const unsigned bytes = row_bytes(row);
      const auto* const from = reinterpret_cast<const unsigned short*>(first_element(row, batch));
      for (unsigned at = bytes / 16 * 16; at < bytes; at += 2) {
        const unsigned element = from[at / 2];
        ptx::st_shared<2>(stage + Stage::kRowsAt + at, &element);
      }
    }
  }

  __device__ __forceinline__ void prefetch_maps() const {
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) ptx::prefetch_tensormap(this->b[i]);
  }

  /// Starts the copies of a tile's columns of B, or of both matrices.
  __device__ __forceinline__ void load_columns(unsigned tile, unsigned full, int column, int batch) const {
    using BTile = typename Stage::BTile;
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) {
      BTile::load(this->b[i], tile + i * BTile::kBytes, full, 0, 0, 0, column, batch * this->b_batched);
    }
  }

  /// What stays of B, in shared memory that begins at `shared`.
  __device__ __forceinline__ Columns columns(unsigned shared) const {
    return {shared + kColumnsAt, shared + kColumnBarriersAt};
  }

  __device__ __forceinline__ void init(unsigned shared) const {
    if constexpr (Stage::kStays) columns(shared).init(1);
  }

  template <class Block>
  __device__ __forceinline__ void load_others(const Block& block) const {
    if constexpr (Stage::kStays) {
      const Columns staying = columns(block.pipeline.stages);
      StageWriter<Columns> tiles{staying};
      // All of a block's tiles are of the same columns.
      int column = block.column(block.order[blockIdx.x]);
      for (int i = 0; i < Config::kStationary && column < this->n; ++i, column += Product::kWidth) {
        tiles.fill([&](unsigned tile, unsigned full) { load_columns(tile, full, column, 0); });
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void product_short_k(const ProductShortK<Config>& call) {
  product_sm90(call);
}

}  // namespace jaxdnn
