// What a block of a depthwise convolution on the tensor cores walks along, and how it brings rows of an array, channels
// last in memory, to planes of shared memory, a plane a channel.
//
// A block has kSlab channels of some rows. A strip is 8 neighbouring places of a row of the result; a step is a row of
// each of 16 strips, which are all of M of a multiply:
//
//     image 0   | strip 0 | strip 1 | ... | strip kAcross - 1 |      kImages of them; what is left of 16 is idle.
//     image 1   | strip kAcross | ...                         |      A step goes one row down, in all strips, and from
//     ...                                                            the images' end on in other strips
//
// In one dimension (kLinear) a step goes kAcross strips further along a line.
//
// Rows of the result whose windows share no row of the source are classes, as if they were images.
//
// A thread copies 16 bytes of a place at a time, 8 channels, and later it alone reads them: so it waits for its own
// copies, and for nobody. A warp's copy is 8 places of kPlaneGroup channels. Four 8 x 8 matrices of it are stored
// transposed, and become lines of 8 places of a channel, 16 bytes each, which are what ldmatrix takes. Planes lie an
// odd number of lines apart: 8 lines of neighbouring planes are in different banks, and so are 8 of one plane.
//
//     plane 8 m + 2 t + b  is channel  8 t + 2 m + b       since a word m of lane 4 g + t of a warp has those channels
//                                                          (b = 0, 1) of place g
#pragma once

#include "core/element.cuh"
#include "core/opaque.cuh"
#include "ptx/async.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

namespace jaxdnn {

constexpr int kStrips = 16, kStripPlaces = 8;
constexpr int kPlaneGroup = 32;  // planes that a warp's copy fills
constexpr int kLineBytes = 16;   // of 8 places of a plane

/// The channel of a slab that a plane has.
__device__ __forceinline__ int plane_channel(int plane) {
  return plane / kPlaneGroup * kPlaneGroup + plane % 8 / 2 * 8 + plane % kPlaneGroup / 8 * 2 + plane % 2;
}

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
  int step = 0;  // from a step's places to the next one's
};

/// What both kernels have. Config has: T; kTapsX, kTapsY, kStrideX, kStrideY, kDilationX; kAcross and kImages of a
/// step's strips; kSlab, channels of a block; kWarps, kStages; kLinear, whether walks go along the places of lines, of
/// one dimension, not from row to row.
template <class ConfigOf>
struct StripCall {
  using Config = ConfigOf;
  using T = typename Config::T;
  static constexpr int kAcross = Config::kAcross, kImages = Config::kImages, kAll = kAcross * kImages;
  static constexpr int kSlab = Config::kSlab, kWarps = Config::kWarps, kThreads = 32 * kWarps;
  static constexpr int kStages = Config::kStages, kChannels = kSlab / kWarps;  // of a warp
  static constexpr bool kLinear = Config::kLinear;
  static_assert(kAll <= kStrips && kChannels % 2 == 0, "strips of a multiply, and pairs of channels");

  static constexpr int kReach = (kStripPlaces - 1) * Config::kStrideX + (Config::kTapsX - 1) * Config::kDilationX + 1;
  static constexpr int kDepth = (kReach + 15) / 16;                              // multiplies of a strip
  static constexpr int kBlocks = (kAcross - 1) * Config::kStrideX + 2 * kDepth;  // of 8 places of the source
  static constexpr int kSlots = (Config::kTapsY + Config::kStrideY - 1) / Config::kStrideY;  // rows that a row meets
  static constexpr int kWarmUp = kSlots - 1;  // steps from a row's beginning to its end

  StripArray<const T> source;
  StripAxis x, y;
  int images = 1, channels = 1, slabs = 1;
  int rows = 1, classes = 1, ranges = 1;  // rows of a class; classes; ranges of kAcross strips of a line
  int count = 1, part_rows = 1;           // rows of all strips, and of a part
  int lead = 0;                           // steps of an image that meet padding alone, and are left out

  __device__ __forceinline__ int first_channel() const { return static_cast<int>(blockIdx.x) % slabs * kSlab; }
  __device__ __forceinline__ int part() const { return static_cast<int>(blockIdx.x) / slabs; }

  /// The first of the block's own rows, and how many.
  __device__ __forceinline__ int first() const { return part() * part_rows; }
  __device__ __forceinline__ int own_rows() const { return count - first() < part_rows ? count - first() : part_rows; }
};

/// What all threads of a block know of its walk: the strips, and the row of them that the next step is.
template <class Call>
struct StripWalk {
  const Call& call;
  int group, row_class, range;  // of images; of rows; of a line
  int row, begin, end;          // of the class: of this step, the first one, and the one past the last step
  int left;                     // rows of strips after these

  __device__ __forceinline__ explicit StripWalk(const Call& call) : call(call), left(call.own_rows()) {
    const int first = call.first();
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
    return ((Call::kLinear ? row : range) * Call::kAcross + strip % Call::kAcross) * kStripPlaces;
  }
  __device__ __forceinline__ int image(int strip) const { return group * Call::kImages + strip / Call::kAcross; }
  __device__ __forceinline__ bool has(int image) const { return image < call.images; }

 private:
  __device__ __forceinline__ void start(int first) {
    const int count = call.rows - first < left ? call.rows - first : left;
    left -= count;
    begin = first;
    row = first > 0 ? first : call.lead;
    end = count > 0 ? first + count + Call::kWarmUp : first;
  }
};

/// Rows of an array on their way to planes, kLines of them a step, in kStages steps: of each image kBlocks lines of 8
/// places, `kStride` of which begin strips. A unit is one of them, of kPlaneGroup channels: a warp's copy.
template <class Call, int kLines, int kStride, int kBlocks>
struct StripRows {
  using T = typename Call::T;
  static constexpr int kUnits = kLines * Call::kImages * kBlocks;                            // of each group of planes
  static constexpr int kGroups = Call::kSlab / kPlaneGroup, kTeam = Call::kWarps / kGroups;  // warps of a group
  static constexpr int kOwn = (kUnits + kTeam - 1) / kTeam;                                  // of a warp, at most
  static constexpr int kStageBytes = kOwn * Call::kThreads * kLineBytes, kRingBytes = Call::kStages * kStageBytes;
  static constexpr int kPitch = (kUnits | 1) * kLineBytes, kPlanesBytes = Call::kSlab * kPitch;
  static_assert(kTeam * kGroups == Call::kWarps, "each group has as many warps");
  using Words = unsigned[kOwn][4];

  const StripArray<const T>& array;
  const StripAxis &x, &y;
  unsigned ring, planes;  // where the thread's own part of them begins
  int at;                 // of the next step: its first row of the array, or in one dimension its first place
  const T* from[kOwn];
  bool inside[kOwn];  // but for what `at` says

  __device__ __forceinline__ StripRows(const StripArray<const T>& array, const StripAxis& x, const StripAxis& y,
                                       const StripWalk<Call>& walk, unsigned ring_at, unsigned planes_at)
      : array(array), x(x), y(y) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ring = ring_at + threadIdx.x * kLineBytes;
    planes = planes_at + (warp % kGroups * kPlaneGroup + lane) * kPitch + warp / kGroups * kLineBytes;
    make_opaque(ring);
    make_opaque(planes);
    start(walk);
  }

  /// Where strip `strip` begins in a plane.
  static __device__ __forceinline__ int line_of(int strip) {
    return strip / Call::kAcross * kBlocks + strip % Call::kAcross * kStride;
  }

  /// Before the first copies of other strips.
  __device__ __forceinline__ void start(const StripWalk<Call>& walk) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32 % kGroups;
    const int channel = walk.call.first_channel() + group * kPlaneGroup + lane % 4 * 8;
    const int row = (walk.row_class + walk.row * walk.call.classes) * kLines - y.low;
    const int column = walk.place(0) * kStride + lane / 4 - x.low;
    at = Call::kLinear ? column : row;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int image = walk.group * Call::kImages + unit(i) / kBlocks % Call::kImages;
      const int own_row = Call::kLinear ? 0 : row + moved(walk.call, i), own_column = column + block(i) * kStripPlaces;
      inside[i] = walk.has(image) && channel < walk.call.channels &&
                  (Call::kLinear || static_cast<unsigned>(own_column) < static_cast<unsigned>(x.source));
      from[i] = array.data + image * array.image + static_cast<long long>(own_row) * array.row +
                static_cast<long long>(own_column) * array.column + channel;
    }
  }

  /// Starts the thread's copies of a step's rows into a stage, of zeros where there are none.
  __device__ __forceinline__ void copy(const Call& call, int stage, bool there = true) {
    const unsigned end = Call::kLinear ? x.source : y.source;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool own = there && inside[i] && static_cast<unsigned>(at + moved(call, i)) < end;
      if (has(i)) ptx::cp_async<kLineBytes>(slot(stage, i), from[i], own ? kLineBytes : 0);
      from[i] += array.step;
    }
    at += Call::kLinear ? Call::kAcross * kStride * kStripPlaces : kLines * call.classes;
  }

  /// Reads the thread's part of a stage, which goes to one half of the planes.
  __device__ __forceinline__ void read(int stage, Words& words) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (has(i)) ptx::ld_shared<kLineBytes>(words[i], slot(stage, i));
    }
  }
  __device__ __forceinline__ void write(const Words& words, int half) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (has(i)) ptx::stmatrix_x4<true>(planes + half * kPlanesBytes + i * kTeam * kLineBytes, words[i]);
    }
  }

 private:
  /// The warp's own unit number `i`, whether there is one, which line of 8 places it is of an image's, and how much
  /// further it is than what `at` says.
  static __device__ __forceinline__ int unit(int i) { return threadIdx.x / 32 / kGroups + i * kTeam; }
  static __device__ __forceinline__ bool has(int i) { return (i + 1) * kTeam <= kUnits || unit(i) < kUnits; }
  static __device__ __forceinline__ int block(int i) { return kUnits == kBlocks ? unit(i) : unit(i) % kBlocks; }
  static __device__ __forceinline__ int moved(const Call& call, int i) {
    if constexpr (Call::kLinear) return block(i) * kStripPlaces;
    return kLines == 1 ? 0 : unit(i) / (Call::kImages * kBlocks) * call.classes;
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
