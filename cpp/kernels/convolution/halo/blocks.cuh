// Rows of tiles that are places of blocks (convolution/sm90_halo.cuh), of 8 x 8, or in one dimension of 64: each block
// has a patch of its own.
#pragma once

#include "convolution/halo/plane.cuh"

namespace jaxdnn {

constexpr int kBlockRows = 64;

/// The places of a block, and those of it that a warp's rows are. Config has kBlockWidth, 8 or all of a block's.
template <class Config>
struct BlockShape {
  static constexpr int kWidth = Config::kBlockWidth, kHeight = kBlockRows / kWidth;
  static constexpr int kBoxWidth = kWidth < 16 ? kWidth : 16, kBoxHeight = 16 / kBoxWidth;
  static_assert(kWidth == 8 || kHeight == 1, "groups of 8 rows are as far apart as each other");
};

/// Places of the image from one line of a block's patch to the next.
template <class Config>
constexpr int block_pitch() {
  constexpr int kEven = 128 / Config::kLine;  // boxes begin at multiples of 128 bytes
  return (BlockShape<Config>::kWidth + (Config::kTapsX - 1) * Config::kStepX + kEven - 1) / kEven * kEven;
}

/// The patches of a tile's blocks, what the windows of each cover.
template <class Config>
struct BlockPatches : PlaneTaps<Config, block_pitch<Config>()> {
  static constexpr int kWidth = block_pitch<Config>();
  static constexpr int kHeight = BlockShape<Config>::kHeight + (Config::kTapsY - 1) * Config::kStepY;
  static constexpr int kPatchBytes = kWidth * kHeight * Config::kLine;
  static constexpr int kBytes = Config::kTileM / kBlockRows * kPatchBytes, kLoadedBytes = kBytes;

  /// Bytes from the first 64 rows to those that are number `index`.
  static constexpr int rows(int index) { return index * kPatchBytes; }

  /// The descriptor of the first 64 rows of the stage at shared address `stage`.
  static __device__ __forceinline__ unsigned long long descriptor(unsigned stage) {
    return lines_descriptor<Config::kLine>(stage, (BlockShape<Config>::kHeight > 1 ? kWidth : 8) * Config::kLine);
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

/// The copies of a tile's patches; by the lanes of a warp.
template <class Call>
struct BlockLoads : HaloLoads<Call> {
  using Stage = typename Call::Stage;
  static constexpr int kBlocks = Call::Config::kTileM / kBlockRows;

  BlockPlace block;  // the lane's own

  __device__ __forceinline__ BlockLoads(const Call& call, const typename Call::Cluster&, int row, int column, int batch,
                                        int)
      : HaloLoads<Call>(call, column, batch), block(call.axes, row / kBlockRows + threadIdx.x % 32) {}

  __device__ __forceinline__ void load(int index, unsigned stage, unsigned full) const {
    const int lane = threadIdx.x % 32;
    if (lane >= kBlocks) return;
    this->load_box(index, stage + lane * Stage::Rows::kPatchBytes, full, block.first[0], block.first[1], block.first[2],
                   block.image);
  }
};

/// Rows of tiles are places of blocks.
template <class Call>
struct BlockRows : ScatteredRows {
  using Shape = BlockShape<typename Call::Config>;
  static constexpr bool kBoxes = Call::Config::kPieceBytes == 0;

  const Call& call;

  __device__ __forceinline__ int operator()(int row) const {
    const BlockPlace block(call.axes, row / kBlockRows);
    return row_of_place(call, x(block, row), y(block, row), block.first[2], block.image);
  }

  /// Whether there are all places of a warp's box.
  __device__ __forceinline__ bool has_box(int row) const {
    const BlockPlace block(call.axes, row / kBlockRows);
    return block.image < call.images && x(block, row) + Shape::kBoxWidth <= call.axes[0].result &&
           y(block, row) + Shape::kBoxHeight <= call.axes[1].result;
  }

  /// A warp's box, of which TMA leaves out what is past the end of a line, or of an image.
  template <bool kEvictFirst>
  __device__ __forceinline__ void store(const TensorMap* map, unsigned source, int, int column, int row,
                                        int batch) const {
    const BlockPlace block(call.axes, row / kBlockRows);
    if (block.image >= call.images) return;
    ptx::cp_async_bulk_tensor_store<kEvictFirst>(map, source, column, x(block, row), y(block, row), block.first[2],
                                                 batch * call.images + block.image);
  }
  __device__ __forceinline__ void load(const TensorMap* map, unsigned destination, unsigned barrier, int, int column,
                                       int row, int batch) const {
    const BlockPlace block(call.axes, row / kBlockRows);
    ptx::cp_async_bulk_tensor_load(destination, map, barrier, column, x(block, row), y(block, row), block.first[2],
                                   batch * call.images + block.image);
  }

 private:
  static __device__ __forceinline__ int x(const BlockPlace& block, int row) {
    return block.first[0] + row % kBlockRows % Shape::kWidth;
  }
  static __device__ __forceinline__ int y(const BlockPlace& block, int row) {
    return block.first[1] + row % kBlockRows / Shape::kWidth;
  }
};

}  // namespace jaxdnn
