// Rows of tiles that are places line after line (convolution/sm90_halo.cuh), of all images one after the other: fewer
// than blocks of 8 x 8 have where an image ends in the middle of some.
//
//   a line          kPitch places: the result's, and so many more, up to a multiple of 8, that windows meet nothing of
//                   the next line's. What is outside past a line's end, and before the next one's beginning, is there
//                   once:
//
//                       . 0 0 0 0 0 0 . 1 1 1 1 1 1 . 2 2 ...    lines of 6 places, and a window of 3 taps, padded by 1
//
//   an image        likewise: its lines, and so many more that the next image's windows don't meet its own
//   a patch         kPatchLines lines of the image, each a box, which end up where the tile's first row is always the
//                   same place, number kAhead: so much of its line may be ahead of it
//   results         boxes of 8 or 16 places of a line, of which TMA leaves out what is past its end. They may not begin
//                   ahead of a line: to a GPU that is an illegal instruction. Hence the multiple of 8
#pragma once

#include "convolution/halo/plane.cuh"

namespace jaxdnn {

/// The lines of a tile. Config has kPitch, kPatchLines and kAhead.
template <class Config>
struct LinesPatch : PlaneTaps<Config, Config::kPitch> {
  static constexpr int kAheadBytes = Config::kAhead * Config::kLine;
  static constexpr int kLoadedBytes = Config::kPatchLines * Config::kPitch * Config::kLine;
  static constexpr int kBytes = kAheadBytes + kLoadedBytes;
  static_assert(Config::kPitch % 8 == 0, "boxes begin at multiples of 128 bytes, and are whole parts of a warp's rows");
  static_assert(Config::kPatchLines <= 32, "each is loaded by a lane");

  static constexpr int rows(int index) { return index * 64 * Config::kLine; }

  static __device__ __forceinline__ unsigned long long descriptor(unsigned stage) {
    return lines_descriptor<Config::kLine>(stage + kAheadBytes, 8 * Config::kLine);
  }
};

/// Where a line is, of all images' lines.
struct LinePlace {
  int y, z, image;

  template <class Axis>
  __device__ __forceinline__ LinePlace(const Axis (&axes)[3], int index) {
    const int plane = static_cast<int>(axes[1].divisor.quotient(index));
    y = index - plane * axes[1].places;
    image = static_cast<int>(axes[2].divisor.quotient(plane));
    z = plane - image * axes[2].places;
  }
};

/// The copies of a tile's lines; by the lanes of a warp.
template <class Call>
struct LineLoads : HaloLoads<Call> {
  using Config = typename Call::Config;

  LinePlace line;  // the lane's own
  int ahead;       // places of the first line before the tile's first row

  __device__ __forceinline__ LineLoads(const Call& call, const typename Call::Cluster&, int row, int column, int batch,
                                       int)
      : HaloLoads<Call>(call, column, batch),
        line(call.axes, row / Config::kPitch + threadIdx.x % 32),
        ahead(row % Config::kPitch) {}

  __device__ __forceinline__ void load(int index, unsigned stage, unsigned full) const {
    const int lane = threadIdx.x % 32;
    if (lane >= Config::kPatchLines) return;
    const unsigned to = stage + (lane * Config::kPitch + Config::kAhead - ahead) * Config::kLine;
    this->load_box(index, to, full, 0, line.y, line.z, line.image);
  }
};

/// Rows of tiles are places of lines. A warp's are of one, or of two: each box is of one.
template <class Call>
struct LineRows : ScatteredRows {
  static constexpr bool kBoxes = Call::Config::kPieceBytes == 0;
  static constexpr int kPitch = Call::Config::kPitch, kBox = kPitch % 16 == 0 ? 16 : 8;

  const Call& call;

  __device__ __forceinline__ int operator()(int row) const {
    const LinePlace line(call.axes, row / kPitch);
    return row_of_place(call, row % kPitch, line.y, line.z, line.image);
  }

  /// Whether there are all of a warp's places.
  __device__ __forceinline__ bool has_box(int row) const {
    bool has = true;
#pragma unroll
    for (int box = row; box < row + 16; box += kBox) {
      const LinePlace line(call.axes, box / kPitch);
      has =
          has && line.image < call.images && line.y < call.axes[1].result && box % kPitch + kBox <= call.axes[0].result;
    }
    return has;
  }

  /// Of each box, of which TMA leaves out what is past the line's end.
  template <bool kEvictFirst>
  __device__ __forceinline__ void store(const TensorMap* map, unsigned source, int row_bytes, int column, int row,
                                        int batch) const {
#pragma unroll
    for (int box = row; box < row + 16; box += kBox) {
      const LinePlace line(call.axes, box / kPitch);
      const int x = box % kPitch;
      if (line.image >= call.images || line.y >= call.axes[1].result || x >= call.axes[0].result) continue;
      ptx::cp_async_bulk_tensor_store<kEvictFirst>(map, source + (box - row) * row_bytes, column, x, line.y, line.z,
                                                   batch * call.images + line.image);
    }
  }
  __device__ __forceinline__ void load(const TensorMap* map, unsigned destination, unsigned barrier, int row_bytes,
                                       int column, int row, int batch) const {
#pragma unroll
    for (int box = row; box < row + 16; box += kBox) {
      const LinePlace line(call.axes, box / kPitch);
      ptx::cp_async_bulk_tensor_load(destination + (box - row) * row_bytes, map, barrier, column, box % kPitch, line.y,
                                     line.z, batch * call.images + line.image);
    }
  }
};

}  // namespace jaxdnn
