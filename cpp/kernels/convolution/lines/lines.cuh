// What a block of a depthwise convolution of whole lines walks along, and the ring that lines come through.
//
// A line is a row of an image with all its channels, which lies in memory as one piece: so a thread brings it with one
// copy, and what is read and written are long runs. In shared memory it has places of zeros in front of it and behind
// it, as many as windows reach past it; no copy writes there. These zeros are multiplied too, so what they meet that is
// no number takes a sum of its own, from memory: of outputs where a tap is none, of a filter's gradient where the sum
// is.
//
//     stage    | 0 0 | place 0, all channels | place 1 | ...  | 0 0 |      kPlaces + kTapsX - 1 places
//
// A step is a row. Blocks have the rows of a part, image after image; a run is what they have of an image, and kWarmUp
// steps more than it has rows of the result.
//
//   full[stage]    1 arrival, of the thread that copies, which announces the bytes: none where the step has no line
//   empty[stage]   an arrival of each warp
//
// The first thread copies, and multiplies as the others do. It fills the stage that was read kLag steps ago, which the
// others have left long since.
#pragma once

#include "core/element.cuh"
#include "core/opaque.cuh"
#include "core/pipeline_tma.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace jaxdnn {

/// Images of whole lines, channels last; strides count elements.
template <class T>
struct LineArray {
  const T* data = nullptr;  // at the first place of a line that is copied
  long long image = 0;
  int row = 0, rows = 1;
  int bytes = 0;  // of a line that are copied
  int zeros = 0;  // places in front of them

  /// Whether there is a row, and of its line in shared memory place `at`, which are no zeros.
  __device__ __forceinline__ bool has(int of_row, int at, int channels) const {
    return static_cast<unsigned>(of_row) < static_cast<unsigned>(rows) &&
           static_cast<unsigned>(at - zeros) < static_cast<unsigned>(bytes / 2 / channels);
  }
  __device__ __forceinline__ float value(int of, int of_row, int at, int channel, int channels) const {
    return widen(data[of * image + static_cast<long long>(of_row) * row + (at - zeros) * channels + channel]);
  }
};

/// What both kernels have. Config has: T; kTapsX, kTapsY; kChannels, all of a place; kWidth, neighbouring places that a
/// thread has, of two channels; kStrips of so many places, which are a line of the result; kStages.
template <class ConfigOf>
struct LineCall {
  using Config = ConfigOf;
  using T = typename Config::T;
  static constexpr int kChannels = Config::kChannels, kPairs = kChannels / 2, kPlaceBytes = 2 * kChannels;
  static constexpr int kWidth = Config::kWidth, kPlaces = Config::kStrips * kWidth,
                       kReach = kWidth + Config::kTapsX - 1;
  static constexpr int kThreads = (kPairs * Config::kStrips + 31) / 32 * 32, kWarps = kThreads / 32;
  static constexpr int kStages = Config::kStages, kLag = 2, kWarmUp = Config::kTapsY - 1;
  static constexpr int kLineBytes = ((kPlaces + Config::kTapsX - 1) * kPlaceBytes + 127) / 128 * 128;
  static_assert(kChannels % 8 == 0 && kStages > kLag, "places are whole vectors of 16 bytes");

  LineArray<T> source;
  int low = 0;                   // row m of the source meets the first row of taps in row m + low of the result
  int rows = 1;                  // of an image's result
  int count = 1, part_rows = 1;  // rows of all images, and of a part

  /// The block's first row, and how many it has.
  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x) * part_rows; }
  __device__ __forceinline__ int own_rows() const { return count - first() < part_rows ? count - first() : part_rows; }
};

/// A step of a run: row `row` of the result begins, and row `row` - kWarmUp ends.
template <class Call>
struct LineWalk {
  const Call& call;
  int image, row, begin, end;
  int left;  // rows after this run

  __device__ __forceinline__ explicit LineWalk(const Call& call) : call(call), left(call.own_rows()) {
    image = call.first() / call.rows;
    start(call.first() % call.rows);
  }

  __device__ __forceinline__ bool on() const { return row < end; }
  __device__ __forceinline__ bool begins() const { return row < end - Call::kWarmUp; }
  __device__ __forceinline__ bool finishes() const { return row >= begin + Call::kWarmUp; }

  /// The row of the source, and whether there is one.
  __device__ __forceinline__ int source_row() const { return row - call.low; }
  __device__ __forceinline__ bool has_source() const {
    return static_cast<unsigned>(source_row()) < static_cast<unsigned>(call.source.rows);
  }

  /// The next image's run; whether there is one.
  __device__ __forceinline__ bool next_run() {
    if (left == 0) return false;
    ++image;
    start(0);
    return true;
  }

  /// To the next step, of whichever run; past the last one `on` is false.
  __device__ __forceinline__ void advance() {
    ++row;
    if (!on()) next_run();
  }

 private:
  __device__ __forceinline__ void start(int first) {
    const int count = call.rows - first < left ? call.rows - first : left;
    left -= count;
    begin = row = first;
    end = first + count + Call::kWarmUp;
  }
};

/// The ring, and the step that is copied next. `Copy` is called by the first thread, of the step's stage and barrier,
/// with the bytes that it has announced.
template <class Call, int kStageBytes>
struct LineRing {
  static constexpr int kStages = Call::kStages, kBytes = kStages * (kStageBytes + 16);
  using Position = StagePosition<kStages>;

  unsigned stages, barriers;
  LineWalk<Call> ahead;
  Position reads, writes;

  /// By all threads: all zeros, and barriers.
  __device__ __forceinline__ LineRing(const Call& call, unsigned shared)
      : stages(shared), barriers(shared + kStages * kStageBytes), ahead(call) {
    const unsigned zeros[4] = {};
    for (int at = threadIdx.x * 16; at < kStages * kStageBytes; at += Call::kThreads * 16) {
      ptx::st_shared<16>(stages + at, zeros);
    }
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(full(stage), 1);
        ptx::mbarrier_init(empty(stage), Call::kWarps);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::fence_proxy_async();
    __syncthreads();
  }

  __device__ __forceinline__ unsigned full(int stage) const { return barriers + stage * 16; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + stage * 16 + 8; }

  /// Starts the first copies: to all stages but those that a step's readers may still have.
  template <class Copy>
  __device__ __forceinline__ void begin(const Copy& copy) {
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int i = 0; i < kStages - Call::kLag; ++i) fill(copy);
  }

  /// The stage of the step, once it is there.
  template <class Copy>
  __device__ __forceinline__ unsigned wait(const Copy& copy) {
    mbarrier_wait(full(reads.stage), reads.parity);
    if (threadIdx.x == 0) fill(copy);
    return stages + reads.stage * kStageBytes;
  }

  /// By all threads, when they have read the stage.
  __device__ __forceinline__ void release() {
    ptx::bar_warp_sync();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty(reads.stage));
    reads.advance();
  }

 private:
  /// Starts the next step's copies, by the first thread.
  template <class Copy>
  __device__ __forceinline__ void fill(const Copy& copy) {
    if (!ahead.on()) return;
    mbarrier_wait(empty(writes.stage), writes.parity ^ 1);
    copy(ahead, stages + writes.stage * kStageBytes, full(writes.stage));
    writes.advance();
    ahead.advance();
  }
};

/// Copies a line to a stage.
template <class T>
__device__ __forceinline__ void copy_line(const LineArray<T>& array, int image, int row, unsigned stage,
                                          int place_bytes, unsigned barrier) {
  const T* const from = array.data + image * array.image + static_cast<long long>(row) * array.row;
  ptx::cp_async_bulk_load(stage + array.zeros * place_bytes, from, array.bytes, barrier);
}

/// Two channels of a place, widened.
template <class T>
__device__ __forceinline__ void load_pair(float (&values)[2], unsigned address) {
  unsigned word[1];
  ptx::ld_shared<4>(word, address);
  T low, high;
  low.bits = static_cast<unsigned short>(word[0]);
  high.bits = static_cast<unsigned short>(word[0] >> 16);
  values[0] = widen(low);
  values[1] = widen(high);
}

/// Zeros. Of ones that the compiler knows it would make a move for each of these, with every step.
template <int kWidth>
__device__ __forceinline__ void clear_places(float (&places)[kWidth][2]) {
  unsigned zero = 0;
  make_opaque(zero);
#pragma unroll
  for (int i = 0; i < kWidth * 2; ++i) places[i / 2][i % 2] = ptx::mov_f32(zero);
}

/// What a thread has: two neighbouring channels of the places of a strip. The last threads of a block may have none,
/// and do what the one before them does.
template <class Call>
struct LineThread {
  static constexpr int kActive = Call::kPairs * Call::Config::kStrips;
  bool active;
  int channel, place;

  __device__ __forceinline__ LineThread() {
    const int index = static_cast<int>(threadIdx.x) < kActive ? static_cast<int>(threadIdx.x) : kActive - 1;
    active = static_cast<int>(threadIdx.x) < kActive;
    channel = index % Call::kPairs * 2;
    place = index / Call::kPairs * Call::kWidth;
  }

  /// Where the first of its places begins in a line.
  __device__ __forceinline__ unsigned offset() const { return place * Call::kPlaceBytes + channel * 2; }
};

}  // namespace jaxdnn
