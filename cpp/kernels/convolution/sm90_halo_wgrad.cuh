// Filter gradients of convolutions of stride 1 on Hopper's tensor cores, of which a place of the image, and of the
// output's gradient, is loaded once for all taps of a plane of the window. The patches are those of sm90_halo.cuh.
//
//   a block         has kLine bytes of the image's channels, 64 columns (the output's channels) for each of
//                   kColumnBlocks, and kRuns runs of taps: up to kRun neighbours of one line of the window. It sums
//                   over its split of the places, tile by tile of kWidth x kHeight places of kImages images:
//                       output    the tile's places in a row, 64 columns each
//                       patch     the places of the image that the windows of these meet
//                   and leaves float32 accumulators [tap, channel, column], which product/split.cuh adds up
//   a warp group    multiplies one run by 64 columns, 16 places at a time: M are columns, K places, and N taps by
//                   channels. Both operands run along M and N in memory, a line a place. Of the patch a chunk of N, one
//                   tap's, lies as far behind the one before as the taps do: one multiply reads what overlaps
//
//                       . 0 0 0 0 0 0 0 0 .       a tile of 8 x 4 places, a window of 3 x 3. The first multiply of the
//                       . 1 1 1 1 1 1 1 1 .       second line of taps has K of two groups of 8 places, 0 and 1, each in
//                                                 lines of the patch from the first, second and third place on
//
//                   Groups of 8 need not be equally far apart, each multiply states how far its two are: from line to
//                   line of a patch, or to the next image's.
//   lines           of a group of 32 columns or fewer a multiply has several lines of places in its 64 rows of M. Its
//                   chunks of N are then lines of the patch, those of all taps of a column of the window and as many
//                   more as M has lines beyond the first; a tap's sum is one of them for each line of M
//
//                                     chunk 0   1   2   3
//                       line 0            0   1   2   -     windows of 3 x 3: 6 of 8 parts of an accumulator are
//                       line 1            -   0   1   2     those of a tap, where 8 of 16 would be of one line of M
//
//                   Lines of M are neighbours, or as far from each other as lines of the window. Its warps leave what
//                   they have for the first line's in shared memory, when all have multiplied
//   grid            tiles of a filter are neighbours, of all that reads the same places; then splits, then convolutions
//   warps           as in product/sm90.cuh: kRuns * kColumnBlocks warp groups multiply, and a thread of another one
//                   starts the copies
//   shared memory   | stages: output's columns 0 .. 63, 64 .. 127, ... | patch | spare | barriers |
//
// The last tile of a line ends where the line does, and so does the last one of an image: it begins with places of the
// tile before. These are zeros in the output, of which the last tiles have a map that begins behind them:
//
//                       a line of 13 places     0 1 2 3 4 5 6 7
//                                                         5 6 7 8 9 a b c       5, 6 and 7 lie before its map
//
// So a place of the image is multiplied by places of the output alone that it meets, and zeros in their stead: where it
// holds no number, no other taps' sums are none.
//
// Bytes: image and output, once for each tile of the filter and plane of the window, and 4 an accumulator and split.
// Flops: 2 a place, tap, c and k; places of two tiles are multiplied twice. With 64 channels and a line of three taps a
// multiply takes 96 clocks and reads 2 KiB of the output and 6 of the patch, 85 bytes of the 128 that shared memory
// moves a clock, where one tap alone would take all of them.
#pragma once

#include "convolution/sm90.cuh"
#include "ptx/barrier.cuh"

namespace jaxdnn {

/// A stage: the output's places of a tile, and their patch. Config has kTapsX, kTapsY, kStepX and kStepY of a plane of
/// the window, places from one tap to the next, besides what the sketch names.
template <class Config>
struct WgradStage {
  static constexpr int kLines = Config::kLines;  // of the tile, in the 64 rows of a multiply
  static constexpr bool kDown = kLines > 1;      // a run has the taps of a column of the window, not of a line
  static constexpr int kOutputLine = 128 / kLines, kOutputColumns = 64 / kLines;  // a place's
  static constexpr int kChunks = Config::kRun + kLines - 1;                       // of a multiply
  static constexpr int kLineElements = Config::kLine / 2, kColumns = kChunks * kLineElements;
  static constexpr int kRunX = kDown ? 1 : Config::kRun;
  static constexpr int kRunsX = (Config::kTapsX + kRunX - 1) / kRunX;  // of a line of the window
  static constexpr int kRuns = kRunsX * (kDown ? 1 : Config::kTapsY);  // of a plane
  static constexpr int kWidth = Config::kWidth + (kRunsX * kRunX - 1) * Config::kStepX;
  static constexpr int kHeight = Config::kHeight + (Config::kTapsY - 1) * Config::kStepY;
  static constexpr int kPlaces = Config::kWidth * Config::kHeight * Config::kImages;
  static constexpr int kSteps = kPlaces / (16 * kLines);     // multiplies
  static constexpr int kBlockBytes = kPlaces * kOutputLine;  // of a block of columns of the output
  // From a line of M, and from a chunk, to the next.
  static constexpr int kLineBytes = Config::kStepY * Config::kWidth * kOutputLine;
  static constexpr int kChunkBytes = (kDown ? Config::kStepY * kWidth : Config::kStepX) * Config::kLine;
  static constexpr int kPatchAt = Config::kColumnBlocks * kBlockBytes;
  static constexpr int kBytes = kPatchAt + kWidth * kHeight * Config::kImages * Config::kLine;
  static_assert(kPlaces % (16 * kLines) == 0 && Config::kWidth % 8 == 0,
                "a multiply has two groups of 8 places of a line");
  static_assert(!kDown || (Config::kRun == Config::kTapsY && Config::kHeight % (kLines * Config::kStepY) == 0),
                "a run has a column of the window, and an image whole lines of M");

  /// The line of the tile, of all images, that a group of 8 places is of: in the first line of M.
  static constexpr int line(int group) {
    const int line = group / (Config::kWidth / 8);
    return line / Config::kStepY * Config::kStepY * kLines + line % Config::kStepY;
  }

  /// Where a group of 8 places begins: in the output, and in the patch at the window's first tap.
  static constexpr int output(int group) {
    return (line(group) * Config::kWidth + group % (Config::kWidth / 8) * 8) * kOutputLine;
  }

  static constexpr int patch(int group) {
    const int line = WgradStage::line(group), image = line / Config::kHeight;
    return ((line + image * (kHeight - Config::kHeight)) * kWidth + group % (Config::kWidth / 8) * 8) * Config::kLine;
  }

  /// What to add to a descriptor, of groups that are no bytes apart, for two that begin at `first` and `second`.
  static constexpr unsigned long long groups(int first, int second) {
    return static_cast<unsigned long long>((second - first) / 16) << 32 | first / 16;
  }

  static constexpr unsigned long long output_step(int step) { return groups(output(2 * step), output(2 * step + 1)); }
  static constexpr unsigned long long patch_step(int step) { return groups(patch(2 * step), patch(2 * step + 1)); }
};

/// Where a tile of places is.
struct WgradPlace {
  int first[3], image;
  int output[2];  // the first place, from where the output's map begins
  int map = 0;    // bits: whether the tile is the last one of a line, and of an image

  template <class Axis>
  __device__ __forceinline__ WgradPlace(const Axis (&axes)[3], int index) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int quotient = static_cast<int>(axes[i].divisor.quotient(index)), tile = index - quotient * axes[i].places;
      const bool last = tile == axes[i].places - 1;
      first[i] = last ? axes[i].result - axes[i].period : tile * axes[i].period;
      if (i < 2) {
        output[i] = last ? first[i] - tile * axes[i].period : first[i];
        map |= last << i;
      }
      index = quotient;
    }
    image = index;
  }
};

/// Which part of the sum a block has, and where in the filter.
template <class Call>
struct WgradBlock {
  int plane, first_run;  // of the window
  int channel, column;   // the first of its own; channels count from the group's first
  int split, batch;

  __device__ __forceinline__ explicit WgradBlock(const Call& call) {
    using Stage = typename Call::Stage;
    int rest = static_cast<int>(blockIdx.x);
    const auto next = [&rest](int count) {
      const int index = rest % count;
      rest /= count;
      return index;
    };
    first_run = next((Stage::kRuns + Call::Config::kRuns - 1) / Call::Config::kRuns) * Call::Config::kRuns;
    plane = next(call.axes[2].filter);
    channel = next((call.channels + Stage::kLineElements - 1) / Stage::kLineElements) * Stage::kLineElements;
    column = next((call.columns + Call::kBlockColumns - 1) / Call::kBlockColumns) * Call::kBlockColumns;
    split = next(call.splits);
    batch = next(call.batches);
  }
};

template <class ConfigOf>
struct ConvolutionSm90HaloWgrad {
  using Config = ConfigOf;
  using Stage = WgradStage<Config>;
  using Pipeline = TmaPipeline<Config::kStages, Stage::kBytes>;
  static constexpr int kConsumers = Config::kRuns * Config::kColumnBlocks, kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlockColumns = Stage::kOutputColumns * Config::kColumnBlocks;
  // Each multiply counts as reading its operand's bytes one after the other, for those who watch over the bounds.
  static constexpr int kSpare = 16 * (Stage::kChunks - 1) * Config::kLine;
  // What lines of M beyond the first leave there in the end, floats of a warp group: [line, tap, channel, column].
  static constexpr int kLeft = (Stage::kLines - 1) * Config::kRun * Stage::kLineElements * Stage::kOutputColumns;
  static constexpr int kStagesBytes = Config::kStages * Pipeline::kStageStride + kSpare;
  static constexpr int kBarriersAt = kStagesBytes > kConsumers * kLeft * 4 ? kStagesBytes : kConsumers * kLeft * 4;
  static constexpr int kSharedBytes = kBarriersAt + Pipeline::kBarrierBytes;
  // Registers as of product/sm90.cuh.
  static constexpr int kShare = 65536 / kThreads / 8 * 8, kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = ((kConsumers + 1) * kShare - kProducerRegisters) / kConsumers / 8 * 8;

  const TensorMap* image = nullptr;
  const TensorMap* output[4] = {};  // of all tiles but the last ones, the last of a line, of an image, and of both
  float* accumulators = nullptr;    // [batch, split, tap, channel, column]
  ConvolutionAxis<1> axes[3];       // the innermost first, by tiles
  int tiles = 0;                    // of places
  int channels = 0;                 // of the image, in a group
  int columns = 0, group_columns = 0;
  int splits = 1, batches = 1;
  int image_batch = 0, output_batch = 0;  // images from one convolution to the next

  __device__ __forceinline__ int split_tiles() const { return (tiles + splits - 1) / splits; }

  /// How many tiles of places a split has: the last one has what is left.
  __device__ __forceinline__ int tiles_of(int split) const {
    const int most = split_tiles(), left = tiles - split * most;
    return left < most ? left : most;
  }
};

/// By one thread: starts the copies of all tiles of a block.
template <class Call>
__device__ __forceinline__ void load_places(const Call& call, const WgradBlock<Call>& block,
                                            const typename Call::Pipeline& pipeline) {
  using Config = typename Call::Config;
  using Stage = typename Call::Stage;
  ptx::prefetch_tensormap(call.image);
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::prefetch_tensormap(call.output[i]);
  const auto &x = call.axes[0], &y = call.axes[1], &z = call.axes[2];
  const int channel = block.column / call.group_columns * call.channels + block.channel;
  const int first = block.split * call.split_tiles(), count = call.tiles_of(block.split);
  StageWriter<typename Call::Pipeline> stages{pipeline};
  for (int tile = first; tile < first + count; ++tile) {
    const WgradPlace place(call.axes, tile);
    const TensorMap* const output = place.map == 0   ? call.output[0]
                                    : place.map == 1 ? call.output[1]
                                    : place.map == 2 ? call.output[2]
                                                     : call.output[3];
    const int image = place.image * Config::kImages;
    stages.fill([&](unsigned stage, unsigned full) {
#pragma unroll
      for (int i = 0; i < Config::kColumnBlocks; ++i) {
        ptx::cp_async_bulk_tensor_load(stage + i * Stage::kBlockBytes, output, full,
                                       block.column + i * Stage::kOutputColumns, place.output[0], place.output[1],
                                       place.first[2], block.batch * call.output_batch + image);
      }
      ptx::cp_async_bulk_tensor_load(stage + Stage::kPatchAt, call.image, full, channel, place.first[0] + x.start,
                                     place.first[1] + y.start, place.first[2] + z.start + block.plane * z.step,
                                     block.batch * call.image_batch + image);
    });
  }
}

/// By a warp group: multiplies one run of taps by a block of columns, and stores the accumulators.
template <class Call>
struct WgradConsumer {
  using Config = typename Call::Config;
  using Stage = typename Call::Stage;
  using Multiply = ptx::Wgmma<Stage::kColumns>;
  static constexpr auto kType = wgmma_type<typename Config::A>();

  const Call& call;
  const WgradBlock<Call>& block;
  int consumer, run, column_block;

  __device__ __forceinline__ WgradConsumer(const Call& call, const WgradBlock<Call>& block, int consumer)
      : call(call),
        block(block),
        consumer(consumer),
        run(block.first_run + consumer % Config::kRuns),
        column_block(consumer / Config::kRuns) {}

  /// `left` is the stages, which nobody reads when all have multiplied.
  __device__ __forceinline__ void consume(const typename Call::Pipeline& pipeline, float* left) const {
    float accumulators[Stage::kColumns / 2];
    multiply(accumulators, pipeline);
    if constexpr (Stage::kLines > 1) add_lines(accumulators, left + consumer * Call::kLeft);
    if (run < Stage::kRuns) store(accumulators);
  }

 private:
  static constexpr int kChunkRegisters = Stage::kLineElements / 2, kRunRegisters = Config::kRun * kChunkRegisters;
  static constexpr int kLineThreads = 128 / Stage::kLines;

  __device__ __forceinline__ void multiply(float (&accumulators)[Stage::kColumns / 2],
                                           const typename Call::Pipeline& pipeline) const {
    // Past the last run of a plane the first one is multiplied again.
    const int own = run < Stage::kRuns ? run : 0, y = own / Stage::kRunsX, x = own % Stage::kRunsX * Stage::kRunX;
    const int place = y * Config::kStepY * Stage::kWidth + x * Config::kStepX;
    const unsigned long long output =
        lines_descriptor<Stage::kOutputLine>(pipeline.stages + column_block * Stage::kBlockBytes, 0, Stage::kLineBytes);
    const unsigned long long patch = lines_descriptor<Config::kLine>(
        pipeline.stages + Stage::kPatchAt + place * Config::kLine, 0, Stage::kChunkBytes);
    StageReader<typename Call::Pipeline> stages{pipeline};
    const int count = call.tiles_of(block.split);
    for (int tile = 0; tile < count; ++tile) {
      stages.wait();
      const unsigned stage = stage_offset(stages.position.stage, Call::Pipeline::kStageStride);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Stage::kSteps; ++step) {
        Multiply::template mma_async<kType, kType, true, true>(
            accumulators, output + (stage + Stage::output_step(step)), patch + (stage + Stage::patch_step(step)),
            tile > 0 || step > 0);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (tile > 0) stages.release_previous();
      stages.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::warpgroup_fence_operand(accumulators);
  }

  /// Adds to the first line's sums of taps those of the others, which other warps have in a later chunk each.
  __device__ __forceinline__ void add_lines(float (&accumulators)[Stage::kColumns / 2], float* left) const {
    const int line = threadIdx.x % 128 / kLineThreads, thread = threadIdx.x % kLineThreads;
    ptx::barrier_sync(1, Call::kConsumers * 128);
#pragma unroll
    for (int other = 1; other < Stage::kLines; ++other) {
      if (line != other) continue;
#pragma unroll
      for (int i = 0; i < kRunRegisters; ++i) {
        left[((other - 1) * kRunRegisters + i) * kLineThreads + thread] = accumulators[other * kChunkRegisters + i];
      }
    }
    ptx::barrier_sync(1, Call::kConsumers * 128);
    if (line > 0) return;
#pragma unroll
    for (int i = 0; i < (Stage::kLines - 1) * kRunRegisters; ++i) {
      accumulators[i % kRunRegisters] += left[i * kLineThreads + thread];
    }
  }

  /// Eight neighbouring threads have as many columns, which are 32 bytes of a row.
  __device__ __forceinline__ void store(const float (&accumulators)[Stage::kColumns / 2]) const {
    const auto& [x, y, z] = call.axes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (warp * 16 >= Stage::kOutputColumns) return;  // of another line of M than the first
    const int own_x = run % Stage::kRunsX * Stage::kRunX, own_y = run / Stage::kRunsX;
    const int column = block.column + column_block * Stage::kOutputColumns + warp * 16 + lane / 4;
    const long long matrix =
        (block.batch * call.splits + block.split) * static_cast<long long>(z.filter) * Config::kTapsY * Config::kTapsX;
#pragma unroll
    for (int tap = 0; tap < Config::kRun; ++tap) {
      const int tap_x = Stage::kDown ? own_x : own_x + tap, tap_y = Stage::kDown ? tap : own_y;
      if (tap_x >= Config::kTapsX) return;
      const int line = filter_place(z, block.plane) * Config::kTapsY + filter_place(y, tap_y);
      const int of_filter = line * Config::kTapsX + filter_place(x, tap_x);
#pragma unroll
      for (int pair = 0; pair < Stage::kLineElements / 4; ++pair) {
        const int channel = block.channel + pair / 2 * 8 + lane % 4 * 2 + pair % 2;
        float* const row = call.accumulators + ((matrix + of_filter) * call.channels + channel) * call.columns;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (channel < call.channels && column + 8 * half < call.columns) {
            row[column + 8 * half] = accumulators[tap * kChunkRegisters + pair / 2 * 4 + half * 2 + pair % 2];
          }
        }
      }
    }
  }

  template <class Axis>
  static __device__ __forceinline__ int filter_place(const Axis& axis, int tap) {
    return axis.phases[0].first + tap * axis.filter_step;
  }
};

template <class Config>
__device__ __forceinline__ void convolution_sm90_halo_wgrad(const ConvolutionSm90HaloWgrad<Config>& call) {
  using Call = ConvolutionSm90HaloWgrad<Config>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned shared = ptx::cvta_to_shared(shared_memory);
  const typename Call::Pipeline pipeline(shared, shared + Call::kBarriersAt);
  if (threadIdx.x == 0) pipeline.init(4 * Call::kConsumers);
  pipeline.open();

  const WgradBlock<Call> block(call);
  const int group = ptx::shfl_sync_idx(threadIdx.x / 128);
  if (group == Call::kConsumers) {
    if constexpr (Call::kConsumers > 1) ptx::setmaxnreg_dec<Call::kProducerRegisters>();
    if (threadIdx.x == Call::kConsumers * 128) load_places(call, block, pipeline);
  } else {
    if constexpr (Call::kConsumers > 1) ptx::setmaxnreg_inc<Call::kConsumerRegisters>();
    WgradConsumer<Call>(call, block, group).consume(pipeline, reinterpret_cast<float*>(shared_memory));
  }
}

}  // namespace jaxdnn
