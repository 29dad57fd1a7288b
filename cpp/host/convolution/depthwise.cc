// Depthwise convolutions, of one channel a group, and their gradients: sums over windows, channel by channel.
//
//   task     a tile: some places of a row of the result, of some channels; of the filter's gradient, a row of taps
//   sums     kBlock vectors of neighbouring channels, one a place (a tap), in registers over the whole window
//   tile     its accumulators lie in memory of the thread, until the epilogue has run on them
//
// Bytes: each tile reads its rows of the image once for each row of the window, from cache. Flops: a multiply-add a tap
// that meets a place; one of 16 lanes takes a load and the check that there is a place.
#include <algorithm>

#include "../base/kernel.h"
#include "../base/thread_memory.h"
#include "../base/vector.h"
#include "../pointwise/interpreter.h"

JAXDNN_ISA_BEGIN

namespace convolution {

constexpr int kBlock = 8;
constexpr int kAxes = 3;
// Operands and results of an epilogue; `MAX_ARRAYS` in jaxdnn/engines/convolution/host/engine.py.
constexpr int kMaxArrays = 32;

// ---- The words of a plan, in the order of `_arguments` in jaxdnn/engines/convolution/host/unit.py -------------------

// How place i of the source, tap t and place o of the result meet: i * base + low == o * stride + t * dilation.
struct AxisWords {
  int64_t source, filter, result;
  int64_t stride, dilation, base, low;
  int64_t flipped;

  // The place of the source, or -1.
  int64_t meeting(int64_t place, int64_t tap) const {
    int64_t at = place * stride + tap * dilation - low;
    if (base != 1) {
      if (at % base != 0) return -1;
      at /= base;
    }
    return at < source ? at : -1;
  }
  int64_t filter_place(int64_t tap) const { return flipped ? filter - 1 - tap : tap; }
};

struct StrideWords {
  int64_t batch, n, places[kAxes];  // channels are dense
};

struct CallWords {
  int64_t batch, n, channels;
  int64_t width, span;  // places and channels of a tile
  int64_t operands, results;
  AxisWords axes[kAxes];
  StrideWords source, other;  // that windows slide over; and the filter, or what its gradient multiplies by
};

class Call {
 public:
  explicit Call(const void* const* arguments)
      : words(*static_cast<const CallWords*>(arguments[0])),
        source(arguments[2]),
        other(arguments[3]),
        program_(static_cast<const int64_t*>(arguments[1])) {
    const int64_t* strides = static_cast<const int64_t*>(arguments[0]) + sizeof(CallWords) / 8;
    for (int64_t i = 0; i < words.operands + words.results; ++i, strides += 3) {
      arrays_[i] = {const_cast<void*>(arguments[4 + i]), strides[0], strides[1], strides[2]};
    }
  }

  void finish(const void* accumulators, const pointwise::Tile& tile) const {
    const pointwise::Rows rows{accumulators, words.span};
    const pointwise::Interpreter epilogue(program_, arrays_, arrays_ + words.operands);
    epilogue.run(&rows, tile);
  }

  const CallWords& words;
  const void* const source;
  const void* const other;

 private:
  const int64_t* program_;
  pointwise::Array arrays_[kMaxArrays];
};

inline int64_t offset(const StrideWords& strides, int64_t depth, int64_t row, int64_t column) {
  return depth * strides.places[0] + row * strides.places[1] + column * strides.places[2];
}

template <typename V, typename T>
inline V load_as(const T* from) {
  if constexpr (sizeof(V) == sizeof(Compute<T>)) {
    return widen(*from);
  } else {
    return load(from);
  }
}

// Calls body(channel, V()) for vectors of all `channels`, of which the last one may overlap the one before; for single
// numbers, where there are fewer than a vector has.
template <typename C, typename Body>
inline void for_channels(int64_t channels, Body body) {
  if (channels < kLanes<C>) {
    for (int64_t channel = 0; channel < channels; ++channel) body(channel, C());
  } else {
    for_columns<C>(channels, [&](int64_t channel, auto) { body(channel, Vector<C>()); });
  }
}

// A thread's accumulators of a tile.
template <typename C>
inline C* tile_memory(const CallWords& words, int64_t rows) {
  static thread_local ThreadMemory memory;
  return reinterpret_cast<C*>(memory.reserve(size_t(rows * words.span) * sizeof(C)));
}

// The sums of `count` <= kBlock places of a row, from `x` on. `source` and `filter` are the channel's first elements.
template <typename V, typename T, typename C>
inline void sum_windows(const CallWords& words, const T* source, const T* filter, int64_t depth, int64_t row, int64_t x,
                        int64_t count, C* to) {
  const AxisWords& columns = words.axes[2];
  V sums[kBlock] = {};
  for (int64_t depth_tap = 0; depth_tap < words.axes[0].filter; ++depth_tap) {
    const int64_t from_depth = words.axes[0].meeting(depth, depth_tap);
    if (from_depth < 0) continue;
    for (int64_t row_tap = 0; row_tap < words.axes[1].filter; ++row_tap) {
      const int64_t from_row = words.axes[1].meeting(row, row_tap);
      if (from_row < 0) continue;
      const T* const line = source + offset(words.source, from_depth, from_row, 0);
      const T* const taps =
          filter + offset(words.other, words.axes[0].filter_place(depth_tap), words.axes[1].filter_place(row_tap), 0);
      for (int64_t tap = 0; tap < columns.filter; ++tap) {
        const V weight = load_as<V>(taps + columns.filter_place(tap) * words.other.places[2]);
        const auto add = [&](int64_t j) {
          const int64_t place = columns.meeting(x + j, tap);
          if (place >= 0) sums[j] += weight * load_as<V>(line + place * words.source.places[2]);
        };
        if (count == kBlock) {
          for (int64_t j = 0; j < kBlock; ++j) add(j);
        } else {
          for (int64_t j = 0; j < count; ++j) add(j);
        }
      }
    }
  }
  for (int64_t j = 0; j < count; ++j) std::memcpy(to + j * words.span, &sums[j], sizeof(V));
}

// The sums of `count` <= kBlock taps of a row of the filter, from `tap` on, over all places.
template <typename V, typename T, typename C>
inline void sum_places(const CallWords& words, const T* source, const T* other, int64_t depth_tap, int64_t row_tap,
                       int64_t tap, int64_t count, C* to) {
  const AxisWords& columns = words.axes[2];
  V totals[kBlock] = {};
  for (int64_t n = 0; n < words.n; ++n) {
    for (int64_t depth = 0; depth < words.axes[0].result; ++depth) {
      const int64_t from_depth = words.axes[0].meeting(depth, depth_tap);
      if (from_depth < 0) continue;
      for (int64_t row = 0; row < words.axes[1].result; ++row) {
        const int64_t from_row = words.axes[1].meeting(row, row_tap);
        if (from_row < 0) continue;
        const T* const line = source + n * words.source.n + offset(words.source, from_depth, from_row, 0);
        const T* const places = other + n * words.other.n + offset(words.other, depth, row, 0);
        V sums[kBlock] = {};  // of a row, so that rounding does not grow with the image
        for (int64_t x = 0; x < columns.result; ++x) {
          const V value = load_as<V>(places + x * words.other.places[2]);
          const auto add = [&](int64_t j) {
            const int64_t place = columns.meeting(x, tap + j);
            if (place >= 0) sums[j] += value * load_as<V>(line + place * words.source.places[2]);
          };
          if (count == kBlock) {
            for (int64_t j = 0; j < kBlock; ++j) add(j);
          } else {
            for (int64_t j = 0; j < count; ++j) add(j);
          }
        }
        for (int64_t j = 0; j < count; ++j) totals[j] += sums[j];
      }
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    std::memcpy(to + columns.filter_place(tap + j) * words.span, &totals[j], sizeof(V));
  }
}

}  // namespace convolution

// A task sums a tile of the output, or of the image's gradient.
template <typename T>
void convolution_window(const void* const* arguments, int64_t task) {
  const convolution::Call call(arguments);
  const convolution::CallWords& words = call.words;
  const int64_t spans = (words.channels + words.span - 1) / words.span;
  const int64_t widths = (words.axes[2].result + words.width - 1) / words.width;
  const int64_t channel0 = task % spans * words.span, x0 = task / spans % widths * words.width;
  const int64_t line = task / spans / widths, lines = words.axes[0].result * words.axes[1].result;
  const int64_t row = line % words.axes[1].result, depth = line % lines / words.axes[1].result;
  const int64_t n = line / lines % words.n, batch = line / lines / words.n;

  const pointwise::Tile tile{batch, line % (lines * words.n) * words.axes[2].result + x0, channel0,
                             std::min(words.width, words.axes[2].result - x0),
                             std::min(words.span, words.channels - channel0)};
  const T* const source =
      static_cast<const T*>(call.source) + batch * words.source.batch + n * words.source.n + channel0;
  const T* const filter = static_cast<const T*>(call.other) + batch * words.other.batch + channel0;
  Compute<T>* const sums = convolution::tile_memory<Compute<T>>(words, tile.rows);
  for (int64_t x = 0; x < tile.rows; x += convolution::kBlock) {
    const int64_t count = std::min<int64_t>(convolution::kBlock, tile.rows - x);
    convolution::for_channels<Compute<T>>(tile.columns, [&](int64_t channel, auto vector) {
      convolution::sum_windows<decltype(vector)>(words, source + channel, filter + channel, depth, row, x0 + x, count,
                                                 sums + x * words.span + channel);
    });
  }
  call.finish(sums, tile);
}

// A task sums a row of taps of the filter's gradient.
template <typename T>
void convolution_taps(const void* const* arguments, int64_t task) {
  const convolution::Call call(arguments);
  const convolution::CallWords& words = call.words;
  const int64_t spans = (words.channels + words.span - 1) / words.span, taps = words.axes[2].filter;
  const int64_t channel0 = task % spans * words.span, line = task / spans;
  const int64_t row = line % words.axes[1].filter, depth = line / words.axes[1].filter % words.axes[0].filter;
  const int64_t batch = line / words.axes[1].filter / words.axes[0].filter;

  const int64_t place = (words.axes[0].filter_place(depth) * words.axes[1].filter + words.axes[1].filter_place(row));
  const pointwise::Tile tile{batch, place * taps, channel0, taps, std::min(words.span, words.channels - channel0)};
  const T* const source = static_cast<const T*>(call.source) + batch * words.source.batch + channel0;
  const T* const other = static_cast<const T*>(call.other) + batch * words.other.batch + channel0;
  Compute<T>* const sums = convolution::tile_memory<Compute<T>>(words, taps);
  for (int64_t tap = 0; tap < taps; tap += convolution::kBlock) {
    const int64_t count = std::min<int64_t>(convolution::kBlock, taps - tap);
    convolution::for_channels<Compute<T>>(tile.columns, [&](int64_t channel, auto vector) {
      convolution::sum_places<decltype(vector)>(words, source + channel, other + channel, depth, row, tap, count,
                                                sums + channel);
    });
  }
  call.finish(sums, tile);
}

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"convolution_window_float32", convolution_window<float>},
                    {"convolution_window_float64", convolution_window<double>},
                    {"convolution_window_bfloat16", convolution_window<bfloat16>},
                    {"convolution_window_float16", convolution_window<float16>},
                    {"convolution_taps_float32", convolution_taps<float>},
                    {"convolution_taps_float64", convolution_taps<double>},
                    {"convolution_taps_bfloat16", convolution_taps<bfloat16>},
                    {"convolution_taps_float16", convolution_taps<float16>})
