// Convolutions of stride 1 on Hopper's tensor cores, of which the image's part of a tile is loaded once for all taps of
// a window, and not once for each. All but that is product/sm90.cuh.
//
//   an output       rows are blocks of 8 x 8 of its places, in line after line of blocks; columns are its channels. A
//                   stage of K is kLine bytes of channels, at all taps of a plane of the window:
//                       A            of each block a patch: the places of the image that its windows cover
//                       B's tile     the filter's matrices [c, k] at those taps, one after the other
//   an image        likewise: its gradient is an output of the output's gradient
//
//   a patch         lines of kWidth places, each kLine bytes of channels, swizzled by the bits of shared addresses.
//                   At a tap the 64 rows of A begin so many places later, and their groups of 8 are a line apart:
//
//                       . . . . . . . . . .       a window of 3 x 3: 10 lines of 10 places.
//                       . . 0 0 0 0 0 0 0 0       At tap (1, 2) row 0 of A is place (1, 2) of the patch,
//                       . . 1 1 1 1 1 1 1 1       row 8 is place (2, 2), a line further.
//                       . . 2 2 2 2 2 2 2 2
//
//                   The tensor cores exchange the 16-byte pieces of a line by the address that they read it at, not by
//                   its number in A, and TMA by the address that it writes it at: so A may begin anywhere.
//
// A window's dilation makes patches wider, and taps further apart. What lies outside of the image is zero.
//
//   shared memory   a stage is | B's tile | patch 0 | patch 1 | ...
//                   A filter of kResident stages stays in shared memory instead, behind all else, where one consumer's
//                   thread has TMA put it at the start.
//
// Bytes: image, filter and output, once each, from memory; from L2 a block's patch is 1.6 times its places at a window
// of 3 x 3, where im2col loads 9 times as many. Flops: 2 a place, tap, c and k; places past the end of a line of blocks
// are multiplied too. With 64 columns multiplies read shared memory all the time, at the rate that bounds them both.
#pragma once

#include "convolution/sm90.cuh"

namespace jaxdnn {

constexpr int kBlockSide = 8, kBlockRows = kBlockSide * kBlockSide;

/// What the windows of a block cover. Config has kTapsX and kTapsY of a plane of the window, and kStepX and kStepY,
/// places from one tap to the next.
template <class Config>
struct Patch {
  static constexpr int kTaps = Config::kTapsX * Config::kTapsY;
  static constexpr int kEven = 128 / Config::kLine;  // boxes begin at multiples of 128 bytes
  static constexpr int kWidth = (kBlockSide + (Config::kTapsX - 1) * Config::kStepX + kEven - 1) / kEven * kEven;
  static constexpr int kHeight = kBlockSide + (Config::kTapsY - 1) * Config::kStepY;
  static constexpr int kBytes = kWidth * kHeight * Config::kLine;

  /// Where the first place meets the filter's tap number `tap`, from the patch's beginning on.
  static constexpr int shift(int tap) {
    const int x = tap % Config::kTapsX, y = tap / Config::kTapsX;
    const int column = (Config::kFlippedX ? Config::kTapsX - 1 - x : x) * Config::kStepX;
    const int line = (Config::kFlippedY ? Config::kTapsY - 1 - y : y) * Config::kStepY;
    return (line * kWidth + column) * Config::kLine;
  }

  /// The descriptor of a block's rows at shared address `patch`; fields as in core/tile.cuh.
  static __device__ __forceinline__ unsigned long long descriptor(unsigned patch) {
    constexpr unsigned long long kSwizzle = Config::kLine == 128 ? 1 : 2;
    return kSwizzle << 62 | static_cast<unsigned long long>(kWidth * Config::kLine / 16) << 32 | 1ull << 16 |
           (patch & 0x3ffff) >> 4;
  }
};

/// Where a block is.
struct BlockPlace {
  int first[3], image;  // the first place of each dimension

  template <class Axis>
  __device__ __forceinline__ BlockPlace(const Axis (&axes)[3], int index) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int quotient = static_cast<int>(axes[i].divisor.quotient(index));
      first[i] = (index - quotient * axes[i].places) * axes[i].period;
      index = quotient;
    }
    image = index;
  }
};

/// The filter's tile of a stage.
template <class Config>
using HaloFilter =
    OperandTile<typename Config::B, Config::kNMajorB ? (Config::kTileN + kChunk - 1) / kChunk * kChunk : Config::kTileN,
                Config::kNMajorB, 1, false, Config::kNMajorB ? 128 : Config::kLine, 1,
                Patch<Config>::kTaps * Config::kLine / static_cast<int>(sizeof(typename Config::B))>;

/// Starts copy `box` of `filter_boxes` of the filter's tile of stage `index` of K.
template <class Call>
__device__ __forceinline__ void load_filter(const Call& call, unsigned destination, unsigned barrier, int column,
                                            int batch, int index, int box) {
  using Config = typename Call::Config;
  const auto& planes = call.axes[2];
  const int channels = index / planes.filter, plane = index - channels * planes.filter;
  const int channel = channels * (Config::kLine / static_cast<int>(sizeof(typename Config::A)));
  const int first = planes.phases[0].first + plane * planes.filter_step;
  const int matrix = batch * call.filter_batch + first * Patch<Config>::kTaps;
  if constexpr (Config::kNMajorB) {
    ptx::cp_async_bulk_tensor_load(destination + box * HaloFilter<Config>::kChunkBytes, call.b[0], barrier,
                                   column + box * kChunk, channel, matrix);
  } else {
    ptx::cp_async_bulk_tensor_load(destination, call.b[0], barrier, channel, column, matrix);
  }
}

template <class Config>
struct HaloStage {
  using Rows = Patch<Config>;
  using BTile = HaloFilter<Config>;
  static constexpr int kDepth = BTile::kDepth, kSteps = Config::kLine / 32;  // multiplies of a tap
  static constexpr int kFilterBytes = Config::kResident ? 0 : BTile::kBytes;
  static constexpr int kFilterBoxes = Config::kNMajorB ? BTile::kBytes / BTile::kChunkBytes : 1;
  static constexpr int kBytes = kFilterBytes + Config::kTileM / kBlockRows * Rows::kBytes;
  static constexpr int kStride = (kBytes + 1023) / 1024 * 1024;

  unsigned long long a, b;

  template <class Call>
  __device__ __forceinline__ HaloStage(const Call& call, unsigned stages, int first_row)
      : a(Rows::descriptor(stages + kFilterBytes + first_row / kBlockRows * Rows::kBytes)),
        b(BTile::descriptor(stages + (Config::kResident ? Call::kFilterAt : 0))) {
    if constexpr (Config::kResident > 0) load_resident(call, stages + Call::kFilterAt);
  }

  /// Starts the multiplies of the stage in place `stage` of the ring, which is number `index` of K.
  template <class Accumulator, int kBlocks, int kRegisters>
  __device__ __forceinline__ void multiply(Accumulator (&accumulators)[kBlocks][kRegisters], int stage, int index,
                                           bool accumulate) const {
    const unsigned of_stage = stage_offset(stage, kStride);
    const unsigned of_filter = Config::kResident ? stage_offset(index, BTile::kBytes) : of_stage;
    ptx::wgmma_fence();
#pragma unroll
    for (int tap = 0; tap < Rows::kTaps; ++tap) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const unsigned place = (block * Rows::kBytes + Rows::shift(tap) + step * 32) / 16;
          ptx::Wgmma<2 * kRegisters>::template mma_async<wgmma_type<typename Config::A>(), BTile::kType, false,
                                                         BTile::kRunsAlongExtent>(
              accumulators[block], a + (of_stage + place), b + (of_filter + BTile::step(tap * kSteps + step)),
              accumulate || tap + step > 0);
        }
      }
    }
    ptx::wgmma_commit_group();
  }

 private:
  /// By all consumers: the whole filter, at shared address `filter`.
  template <class Call>
  static __device__ __forceinline__ void load_resident(const Call& call, unsigned filter) {
    constexpr unsigned kWhole = Config::kResident * BTile::kBytes;
    const unsigned barrier = filter + kWhole;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(barrier, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(barrier, kWhole);
      for (int index = 0; index < Config::kResident; ++index) {
        for (int box = 0; box < kFilterBoxes; ++box) {
          load_filter(call, filter + index * BTile::kBytes, barrier, 0, 0, index, box);
        }
      }
    }
    ptx::barrier_sync(3, 128 * Config::kConsumers);
    mbarrier_wait(barrier, 0);
  }
};

/// The copies of one tile; by the lanes of a warp.
template <class Call>
struct HaloLoads {
  using Config = typename Call::Config;
  using Stage = typename Call::Stage;
  static constexpr int kBlocks = Config::kTileM / kBlockRows;
  static constexpr int kBoxes = Config::kResident ? 0 : Stage::kFilterBoxes;
  static_assert(kBlocks + kBoxes <= 32, "each lane starts one copy");

  const Call& call;
  int column, batch;
  BlockPlace block;  // the lane's own

  __device__ __forceinline__ HaloLoads(const Call& call, const typename Call::Cluster&, int row, int column, int batch,
                                       int)
      : call(call), column(column), batch(batch), block(call.axes, row / kBlockRows + threadIdx.x % 32) {}

  __device__ __forceinline__ void load(int index, unsigned stage, unsigned full) const {
    const int lane = threadIdx.x % 32, box = lane - kBlocks;
    if (lane < kBlocks) {
      const auto& planes = call.axes[2];
      const int channels = index / planes.filter, plane = index - channels * planes.filter;
      ptx::cp_async_bulk_tensor_load(
          stage + Stage::kFilterBytes + lane * Stage::Rows::kBytes, call.a, full,
          channels * (Config::kLine / static_cast<int>(sizeof(typename Config::A))),
          block.first[0] + call.axes[0].start, block.first[1] + call.axes[1].start,
          block.first[2] + planes.start + plane * planes.step, batch * call.image_batch + block.image);
    } else if (box < kBoxes) {
      load_filter(call, stage, full, column, batch, index, box);
    }
  }
};

/// Rows of tiles are places of blocks.
template <class Call>
struct BlockRows {
  static constexpr bool kStraight = false;

  const Call& call;

  __device__ __forceinline__ int operator()(int row) const {
    const BlockPlace block(call.axes, row / kBlockRows);
    const int x = block.first[0] + row % kBlockSide, y = block.first[1] + row % kBlockRows / kBlockSide;
    if (x >= call.axes[0].result || y >= call.axes[1].result) return PhaseRows<Call>::kNoRow;
    return ((block.image * call.axes[2].result + block.first[2]) * call.axes[1].result + y) * call.axes[0].result + x;
  }
};

/// Config has kResident, the stages of a filter that stays in shared memory, and kFlippedX and kFlippedY, whether
/// windows meet the filter from its end on, besides what a product's and a `Patch`'s have.
template <class Config>
struct ConvolutionSm90Halo : ProductSm90<Config, HaloStage<Config>> {
  using Self = ConvolutionSm90Halo;
  using Product = ProductSm90<Config, HaloStage<Config>>;
  using Loads = HaloLoads<Self>;
  static constexpr int kSpatial = 3;
  static constexpr int kProducerThreads = 32, kProducerRegisters = 40;  // registers as of ConvolutionSm90
  static constexpr int kConsumerRegisters =
      ((Config::kConsumers + 1) * Self::kShare - kProducerRegisters) / Config::kConsumers / 8 * 8;
  static constexpr int kFilterAt = (Product::kSharedBytes + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes =
      Config::kResident ? kFilterAt + Config::kResident * HaloFilter<Config>::kBytes + 8 : Product::kSharedBytes;
  static_assert(Config::kClusterM * Config::kClusterN == 1, "blocks work alone");

  ConvolutionAxis<1> axes[3];  // the innermost first, by blocks
  int rows = 0;                // of tiles
  int image_batch = 0, filter_batch = 0;

  __device__ __forceinline__ int tiled_rows() const { return rows; }
  __device__ __forceinline__ BlockRows<Self> result_rows(int) const { return {*this}; }
};

template <class Config>
__device__ __forceinline__ void convolution_sm90_halo(const ConvolutionSm90Halo<Config>& call) {
  product_sm90(call);
}

}  // namespace jaxdnn
