// Convolutions of stride 1 on Hopper's tensor cores, of which the image's part of a tile is loaded once for all taps of
// a window, and not once for each. All but that is product/sm90.cuh.
//
//   an output       rows are blocks of 8 x 8 of its places, or in one dimension of 64, in line after line of blocks
//                   (convolution/halo/blocks.cuh); or places, line after line, where there are fewer of these
//                   (convolution/halo/lines.cuh). Columns are its channels. A stage of K is kLine bytes of channels,
//                   at all taps of a plane of the window:
//                       A            of each block a patch: the places of the image that its windows cover; or one of
//                                    all of a tile's places
//                       B's tiles    the filter's matrix [c, k] of each tap, in a ring of their own
//   an image        likewise: its gradient is an output of the output's gradient
//
//   a patch         lines of places, each kLine bytes of channels, swizzled by the bits of shared addresses.
//                   At a tap the 64 rows of A begin so many places later, and a block's groups of 8 are a line apart:
//
//                       . . . . . . . . . .       a window of 3 x 3: 10 lines of 10 places.
//                       . . 0 0 0 0 0 0 0 0       At tap (1, 2) row 0 of A is place (1, 2) of the patch,
//                       . . 1 1 1 1 1 1 1 1       row 8 is place (2, 2), a line further.
//                       . . 2 2 2 2 2 2 2 2
//
//                   The tensor cores exchange the 16-byte pieces of a line by the address that they read it at, not by
//                   its number in A, and TMA by the address that it writes it at: so A may begin at any line.
//
// A window's dilation makes patches wider, and taps further apart. What lies outside of the image is zero.
//
//   warps           as in product/sm90.cuh: ping-pong where the filter stays, else cooperative. The producer's first
//                   warp loads patches, a lane for each of the blocks, or lines, and a thread of its third warp the
//                   filter, so that neither waits for the other's ring
//   filter          tiles pass through kFilterStages; or all that there are stay in shared memory (kResident), and are
//                   loaded once. A consumer lets go of a tap's when the multiplies of the next one have begun
//   barriers        as in product/sm90.cuh; and of the filter's ring full 1 arrival, empty 4 x kConsumers
//   shared memory   | stages: patch 0, patch 1, ... | what a product has | the filter's stages | their barriers |
//   results         a warp's rows are two lines of a block, or parts of lines, boxes that TMA stores; it leaves out
//                   what is past the end of a line, or of an image. So does what is reduced
//                   (core/epilogue_reductions.cuh)
//
// Bytes: image, filter and output, once each, from memory; from L2 a block's patch is 1.6 times its places at a window
// of 3 x 3, where im2col loads 9 times as many. Flops: 2 a place, tap, c and k; places past the end of a line of
// blocks, and between lines, are multiplied too. Each multiply reads 64 rows and all columns in shared memory: with 64
// columns for as long as it takes, with 128 for three quarters of that.
#pragma once

#include "convolution/halo/blocks.cuh"
#include "convolution/halo/lines.cuh"

namespace jaxdnn {

/// A stage: a tile's patches.
template <class Config>
struct HaloStage {
  using Rows = Select<(Config::kPitch > 0), LinesPatch<Config>, BlockPatches<Config>>;
  static constexpr int kLineElements = Config::kLine / static_cast<int>(sizeof(typename Config::A));
  static constexpr int kLoaded = Config::kNMajorB ? (Config::kTileN + kChunk - 1) / kChunk * kChunk : Config::kTileN;
  using BTile = OperandTile<typename Config::B, kLoaded, Config::kNMajorB, 1, false,
                            Config::kNMajorB ? 128 : Config::kLine, Config::kGroups, kLineElements>;  // of a tap
  using Filters = TmaPipeline<Config::kFilterStages, BTile::kBytes>;
  static constexpr int kDepth = Rows::kTaps * kLineElements;
  static constexpr int kBytes = Rows::kBytes;
  static constexpr int kStride = (kBytes + 1023) / 1024 * 1024;

  Filters filters;
  typename Filters::Position position;  // of the filter's ring, where it passes through
  unsigned long long a, b;
  int previous = -1;  // the place of the tap before, whose multiplies may still read it
  int loaded = 0;     // stages of K whose filter is known to be there, to stay

  template <class Call>
  __device__ __forceinline__ HaloStage(const Call& call, unsigned stages, int first_row)
      : filters(call.filters(stages)),
        a(Rows::descriptor(stages + Rows::rows(first_row / 64))),
        b(BTile::descriptor(filters.stages)) {}

  /// Starts the multiplies of the stage in place `stage` of the ring, which is number `index` of K. Each of groups is
  /// multiplied by its own columns.
  template <class Accumulator, int kBlocks, int kRegisters>
  __device__ __forceinline__ void multiply(Accumulator (&accumulators)[kBlocks][kRegisters], int stage, int index,
                                           bool accumulate) {
    constexpr int kOwn = kRegisters / Config::kGroups;  // of a group
    const unsigned of_stage = stage_offset(stage, kStride);
    if constexpr (Config::kResident) {
      for (; loaded <= index; ++loaded) {
        for (int tap = 0; tap < Rows::kTaps; ++tap) mbarrier_wait(filters.full(loaded * Rows::kTaps + tap), 0);
      }
      ptx::wgmma_fence();
    }
#pragma unroll
    for (int tap = 0; tap < Rows::kTaps; ++tap) {
      const int place = Config::kResident ? index * Rows::kTaps + tap : position.stage;
      if constexpr (!Config::kResident) {
        mbarrier_wait(filters.full(place), position.parity);
        ptx::wgmma_fence();
      }
#pragma unroll
      for (int step = 0; step < BTile::kSteps; ++step) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          auto& own = reinterpret_cast<Accumulator(&)[kOwn]>(accumulators[block][step / BTile::kGroupSteps * kOwn]);
          const unsigned of_a = (Rows::rows(block) + Rows::shift(tap) + step * 32) / 16;
          const unsigned of_b = stage_offset(place, Filters::kStageStride) + BTile::step(step);
          ptx::Wgmma<2 * kOwn>::template mma_async<wgmma_type<typename Config::A>(), BTile::kType, false,
                                                   BTile::kRunsAlongExtent>(
              own, a + (of_stage + of_a), b + of_b, accumulate || tap > 0 || step % BTile::kGroupSteps > 0);
        }
      }
      if constexpr (!Config::kResident) {
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (previous >= 0) filters.release(previous);
        previous = place;
        position.advance();
      }
    }
    if constexpr (Config::kResident) ptx::wgmma_commit_group();
  }
};

/// By one thread: starts the copies of the filter's tiles, tap by tap, that a tile of the result is multiplied by, from
/// `column` on.
template <class Call, class Writer>
__device__ __forceinline__ void load_filter(const Call& call, Writer& tiles, int column, int batch, int depth_blocks) {
  using Stage = typename Call::Stage;
  int first_channel = 0;
  if constexpr (!Call::Config::kNMajorB) {  // channels of all groups run along K
    const int group = column / call.group_columns;
    column -= group * call.group_columns;
    first_channel = group * call.channels;
  }
  const auto& planes = call.axes[2];
  for (int index = 0; index < depth_blocks; ++index) {
    const HaloDepth<Call> depth(call, index);
    const int plane = planes.phases[0].first + depth.plane * planes.filter_step;
    const int matrix = batch * call.filter_batch + plane * Stage::Rows::kTaps;
    for (int tap = 0; tap < Stage::Rows::kTaps; ++tap) {
      tiles.fill([&](unsigned tile, unsigned full) {
        Stage::BTile::load(call.b[0], tile, full, 0, 0, first_channel + depth.channel, column, matrix + tap);
      });
    }
  }
}

/// Config has kResident, whether the filter stays in shared memory, kFilterStages, of its ring, and kPitch, 0 where
/// rows are of blocks, besides what a product's, a `PlaneTaps`, a `BlockShape` and a `LinesPatch` have.
template <class Config>
struct ConvolutionSm90Halo : ProductSm90<Config, HaloStage<Config>> {
  using Self = ConvolutionSm90Halo;
  using Product = ProductSm90<Config, HaloStage<Config>>;
  static constexpr bool kAlongLines = Config::kPitch > 0;
  using Loads = Select<kAlongLines, LineLoads<Self>, BlockLoads<Self>>;
  using Rows = Select<kAlongLines, LineRows<Self>, BlockRows<Self>>;
  using Filters = typename Self::Stage::Filters;
  static constexpr int kSpatial = 3;
  static constexpr int kProducerThreads = 32, kProducerRegisters = 40;  // registers as of ConvolutionSm90
  static constexpr int kFiltersAt = (Product::kSharedBytes + 1023) / 1024 * 1024;
  static constexpr int kFilterBarriersAt = kFiltersAt + Config::kFilterStages * Filters::kStageStride;
  static constexpr int kSharedBytes = kFilterBarriersAt + Filters::kBarrierBytes;
  static_assert(Config::kClusterM * Config::kClusterN == 1, "blocks work alone");
  static_assert(!Config::kPingpong || Config::kResident, "the filter's ring has tiles for all consumers");

  ConvolutionAxis<1> axes[3];  // the innermost first, of blocks or of places
  int rows = 0;                // of tiles
  int channels = 0;            // of the image, in a group
  int group_columns = 0;
  int images = 0;                         // of a convolution
  int image_batch = 0, filter_batch = 0;  // images, and the filter's matrices, from one convolution to the next

  __device__ __forceinline__ int tiled_rows() const { return rows; }
  __device__ __forceinline__ unsigned stage_bytes(int) const { return Self::Stage::Rows::kLoadedBytes; }
  __device__ __forceinline__ Rows result_rows(int) const { return {{}, *this}; }

  /// The filter's ring, in shared memory that begins at `shared`.
  __device__ __forceinline__ Filters filters(unsigned shared) const {
    return {shared + kFiltersAt, shared + kFilterBarriersAt};
  }

  __device__ __forceinline__ void init(unsigned shared) const { filters(shared).init(4 * Config::kConsumers); }

  template <class Block>
  __device__ __forceinline__ void load_others(const Block& block) const {
    const Filters ring = filters(block.pipeline.stages);
    StageWriter<Filters> tiles{ring};
    for (auto walk = block.template tiles<false>(); walk.on_a_tile(); walk.advance()) {
      const TilePosition tile = block.order[walk.index];
      load_filter(*this, tiles, block.column(tile), tile.batch, block.depth_blocks(tile));
      if constexpr (Config::kResident) return;
    }
  }
};

template <class Config>
__device__ __forceinline__ void convolution_sm90_halo(const ConvolutionSm90Halo<Config>& call) {
  product_sm90(call);
}

}  // namespace jaxdnn
