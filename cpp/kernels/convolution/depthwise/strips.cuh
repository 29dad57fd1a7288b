// What a block of a depthwise convolution on the tensor cores walks along, and how it brings rows of an array, channels
// last in memory, to planes of shared memory, a plane a channel.
//
// A block has kSlab channels of some rows. A strip is 8 neighbouring places of a row of the result; a step is a row of
// each of 16 strips, which are all of M of a multiply:
//
//   kAcross strips of a line, of each of kImages images; what is left of 16 is idle
//
//     image 0   | strip 0 | strip 1 | ... | strip kAcross - 1 |        a step goes one row down, and a strip with it;
//     the image 1   | strip kAcross | ...                         |        walk takes strips at the image's end to the
//     next
//
// Rows of the result whose windows share no row of the source are classes, as if they were images.
//
// A thread copies 16 bytes of a place at a time, 8 channels, and later it alone reads them: so it waits for its own
// copies, and for nobody. A warp's copy is 8 places of kSlab channels. Four 8 x 8 matrices of it are stored
// transposed, and become lines of 8 places of a channel, 16 bytes each, which are what ldmatrix takes. Planes lie an
// odd number of lines apart: 8 lines of neighbouring planes are in different banks, and so are 8 of one plane.
//
//     plane 8 m + 2 t + b  is channel  8 t + 2 m + b       since a word m of lane 4 g + t of a warp has those channels
//                                                          (b = 0, 1) of place g
#pragma once

#include "core/element.cuh"
#include "ptx/async.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

namespace jaxdnn {

constexpr int kSlab = 32, kStrips = 16, kStripPlaces = 8;
constexpr int kLineBytes = 16;  // of 8 places of a plane

/// The channel of a slab that a plane has.
__device__ __forceinline__ int plane_channel(int plane) { return plane % 8 / 2 * 8 + plane / 8 * 2 + plane % 2; }

/// One dimension: the result's place o meets, at tap r, place o * kStride + r * dilation - low of the source.
struct StripAxis {
  int source = 1, result = 1, low = 0;
};

/// An array of images, channels last; strides count elements.
template <class T>
struct StripArray {
  T* data = nullptr;
  long long image = 0;
  int row = 0, column = 0;
  int step = 0;  // from a step's rows to the next one's
};

/// Keeps the compiler from computing an address again each time, where a register is cheaper.
__device__ __forceinline__ void keep_address(unsigned& address) { asm volatile("" : "+r"(address)); }

/// What all threads of a block know of its walk: the strips, and the row of them that the next step is.
/// Call has: x and y; images; rows of a class, classes, and ranges of kAcross strips that a line has.
template <class Call>
struct StripWalk {
  const Call& call;
  int group, row_class, range;  // of images; of rows; of a line
  int row, begin, end;          // of the class: of this step, the first one, and the one past the last step
  int left;                     // rows of strips after these

  /// `count` rows from row `first` on, of all of all strips.
  __device__ __forceinline__ StripWalk(const Call& call, int first, int count) : call(call), left(count) {
    const int strips = first / call.rows, classes = strips / call.ranges;
    range = strips % call.ranges;
    row_class = classes % call.classes;
    group = classes / call.classes;
    start(first % call.rows);
  }

  __device__ __forceinline__ bool on() const { return row < end; }

  /// Whether the step begins a row of the result, and not only goes on with others.
  __device__ __forceinline__ bool begins() const { return row < end - Call::kWarmUp; }

  /// Whether the step finishes a row of the result, which is this one.
  __device__ __forceinline__ bool finishes() const { return row - begin >= Call::kWarmUp; }
  __device__ __forceinline__ int finished() const { return (row - Call::kWarmUp) * call.classes + row_class; }

  /// To the next step; whether it is the first one of other strips.
  __device__ __forceinline__ bool advance() {
    if (++row < end || left == 0) return false;
    if (++range == call.ranges) {
      range = 0;
      if (++row_class == call.classes) {
        row_class = 0;
        ++group;
      }
    }
    start(0);
    return true;
  }

  /// The result's first place of strip `strip`, and the image.
  __device__ __forceinline__ int place(int strip) const {
    return (range * Call::kAcross + strip % Call::kAcross) * kStripPlaces;
  }
  __device__ __forceinline__ int image(int strip) const { return group * Call::kImages + strip / Call::kAcross; }
  __device__ __forceinline__ bool has(int image) const { return image < call.images; }

 private:
  __device__ __forceinline__ void start(int first) {
    const int count = call.rows - first < left ? call.rows - first : left;
    left -= count;
    begin = row = first;
    end = count > 0 ? first + count + Call::kWarmUp : first;
  }
};

/// Rows of an array on their way to planes, kLines of them a step, in kStages steps: of each image kBlocks lines of 8
/// places, `kStride` of which begin strips. A unit is one of them, a warp's copy.
template <class Call, class T, int kLines, int kStride, int kBlocks>
struct StripRows {
  static constexpr int kUnits = kLines * Call::kImages * kBlocks;
  static constexpr int kOwn = (kUnits + Call::kWarps - 1) / Call::kWarps;  // of a warp, at most
  static constexpr int kStageBytes = kOwn * Call::kThreads * kLineBytes, kRingBytes = Call::kStages * kStageBytes;
  static constexpr int kPitch = (kUnits | 1) * kLineBytes, kPlanesBytes = kSlab * kPitch;

  const StripArray<const T>& array;
  const StripAxis &x, &y;
  unsigned ring, planes;  // where the thread's own part of them begins
  int first_row;          // of the source, of the next step
  const T* from[kOwn];
  bool inside[kOwn];

  __device__ __forceinline__ StripRows(const StripArray<const T>& array, const StripAxis& x, const StripAxis& y,
                                       const StripWalk<Call>& walk, unsigned ring_at, unsigned planes_at)
      : array(array), x(x), y(y) {
    ring = ring_at + threadIdx.x * kLineBytes;
    planes = planes_at + threadIdx.x % 32 * kPitch + threadIdx.x / 32 * kLineBytes;
    keep_address(ring);
    keep_address(planes);
    start(walk);
  }

  /// Where strip `strip` begins in a plane.
  static __device__ __forceinline__ int line_of(int strip) {
    return strip / Call::kAcross * kBlocks + strip % Call::kAcross * kStride;
  }

  /// Before the first copies of other strips.
  __device__ __forceinline__ void start(const StripWalk<Call>& walk) {
    const int lane = threadIdx.x % 32, channel = walk.call.first_channel() + lane % 4 * 8;
    first_row = (walk.row_class + walk.row * walk.call.classes) * kLines - y.low;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int image = walk.group * Call::kImages + unit(i) / kBlocks % Call::kImages;
      const int column = (walk.range * Call::kAcross * kStride + unit(i) % kBlocks) * kStripPlaces + lane / 4 - x.low;
      inside[i] = walk.has(image) && static_cast<unsigned>(column) < static_cast<unsigned>(x.source) &&
                  channel < walk.call.channels;
      from[i] = array.data + image * array.image + static_cast<long long>(row(walk.call, i)) * array.row +
                static_cast<long long>(column) * array.column + channel;
    }
  }

  /// Starts the thread's copies of a step's rows into a stage, of zeros where there are none.
  __device__ __forceinline__ void copy(const Call& call, int stage, bool there = true) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool own = there && inside[i] && static_cast<unsigned>(row(call, i)) < static_cast<unsigned>(y.source);
      if (has(i)) ptx::cp_async<kLineBytes>(slot(stage, i), from[i], own ? kLineBytes : 0);
      from[i] += array.step;
    }
    first_row += kLines * call.classes;
  }

  /// Brings the thread's part of a stage to one half of the planes.
  __device__ __forceinline__ void transpose(int stage, int half) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!has(i)) continue;
      unsigned words[4];
      ptx::ld_shared<kLineBytes>(words, slot(stage, i));
      ptx::stmatrix_x4<true>(planes + half * kPlanesBytes + i * Call::kWarps * kLineBytes, words);
    }
  }

 private:
  /// The warp's own unit number `i`, whether there is one, and its row of the source.
  static __device__ __forceinline__ int unit(int i) { return threadIdx.x / 32 + i * Call::kWarps; }
  static __device__ __forceinline__ bool has(int i) { return (i + 1) * Call::kWarps <= kUnits || unit(i) < kUnits; }
  __device__ __forceinline__ int row(const Call& call, int i) const {
    return first_row + (kLines == 1 ? 0 : unit(i) / (Call::kImages * kBlocks) * call.classes);
  }

  __device__ __forceinline__ unsigned slot(int stage, int i) const {
    return ring + stage * kStageBytes + i * Call::kThreads * kLineBytes;
  }
};

/// Multiplies 16-bit floats of a type.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (is_same<T, bfloat16>) {
    ptx::mma_m16n8k16_bf16(c, a, b);
  } else {
    ptx::mma_m16n8k16_f16(c, a, b);
  }
}

}  // namespace jaxdnn
