// Depthwise convolutions, of one channel a group, and their gradients: sums over windows, channel by channel.
//
//   task     a tile: some places of a row of the result, of some channels; of the filter's gradient, a row of taps
//   sums     kBlock vectors of neighbouring channels, one a place (a tap), in registers over the whole window
//   tile     its accumulators lie in memory of the thread, until the epilogue has run on them
//
// Bytes: each tile reads its rows of the image once for each row of the window, from cache. Flops: a multiply-add a tap
// that meets a place, and one of 16 lanes takes a load; what is at the image's edges a check that there is a place.
#include <algorithm>
#include <utility>

#include "../base/kernel.h"
#include "../base/thread_memory.h"
#include "../base/vector.h"
#include "../pointwise/interpreter.h"

JAXDNN_ISA_BEGIN

namespace depthwise {

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

  // Where they do, in steps of places that are `base` apart.
  int64_t step_of(int64_t place, int64_t tap) const { return place * stride + tap * dilation - low; }
  // The place of the source there, or -1.
  int64_t source_at(int64_t step) const {
    if (base != 1) {
      if (step % base != 0) return -1;
      step /= base;
    }
    return step < source ? step : -1;
  }
  int64_t meeting(int64_t place, int64_t tap) const { return source_at(step_of(place, tap)); }
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

// Calls body(channel, V(), lanes) for vectors of all `channels`, of which the last one may overlap the one before; for
// single numbers, where there are fewer than a vector has.
template <typename C, typename Body>
inline void for_channels(int64_t channels, Body body) {
  if (channels < kLanes<C>) {
    for (int64_t channel = 0; channel < channels; ++channel) body(channel, C(), AllLanes{});
  } else {
    for_columns<C>(channels, [&](int64_t channel, auto lanes) { body(channel, Vector<C>(), lanes); });
  }
}

// A thread's accumulators of a tile.
template <typename C>
inline C* tile_memory(const CallWords& words, int64_t rows) {
  static thread_local ThreadMemory memory;
  return reinterpret_cast<C*>(memory.reserve(size_t(rows * words.span) * sizeof(C)));
}

// Calls body(0, 1, ...) with constants, so that `count` <= kBlock sums of vectors stay in registers.
template <int most = kBlock, typename Body>
inline void with_constant(int64_t count, Body body) {
  if (count == most) {
    body(std::make_integer_sequence<int, most>());
  } else if constexpr (most > 1) {
    with_constant<most - 1>(count, body);
  }
}

// Sums of products with the elements of a line of the source: factor i and sum j meet at step `first + i * next + j *
// apart` of the axis. Of the factors from `begin` to `end`, all do, at places of the source that need no check.
class Meetings {
 public:
  Meetings(const AxisWords& axis, int64_t first, int64_t next, int64_t factors, int64_t apart, int64_t sums)
      : axis_(axis), first_(first), next_(next), factors_(factors), apart_(apart) {
    if (axis.base != 1) return;
    begin_ = std::min(factors, first < 0 ? (-first + next - 1) / next : 0);
    const int64_t last = axis.source - 1 - first - (sums - 1) * apart;
    end_ = last < 0 ? begin_ : std::max(begin_, std::min(factors, last / next + 1));
  }

  // `factors` and `line` are the channel's first elements.
  template <typename V, typename T, int... js>
  [[gnu::always_inline]] void add(V (&sums)[sizeof...(js)], const T* factors, int64_t factor_stride, const T* line,
                                  int64_t place_stride, std::integer_sequence<int, js...>) const {
    const auto add_checked = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const V factor = load_as<V>(factors + i * factor_stride);
        const auto add = [&](V& sum, int64_t place) {
          if (place >= 0) sum += factor * load_as<V>(line + place * place_stride);
        };
        (add(sums[js], axis_.source_at(first_ + i * next_ + js * apart_)), ...);
      }
    };
    add_checked(0, begin_);
    const T* from = line + (first_ + begin_ * next_) * place_stride;
    const int64_t next = next_ * place_stride, apart = apart_ * place_stride;
    for (int64_t i = begin_; i < end_; ++i, from += next) {
      const V factor = load_as<V>(factors + i * factor_stride);
      ((sums[js] += factor * load_as<V>(from + js * apart)), ...);
    }
    add_checked(end_, factors_);
  }

 private:
  const AxisWords axis_;
  const int64_t first_, next_, factors_, apart_;
  int64_t begin_ = 0, end_ = 0;
};

// The sums of places of a row. `source` and `filter` are the channel's first elements; `meetings` are those of the taps
// of a row with the places.
template <typename V, typename T, typename C, int... js>
inline void sum_windows(const CallWords& words, const T* source, const T* filter, int64_t depth, int64_t row,
                        const Meetings& meetings, C* to, std::integer_sequence<int, js...> block) {
  V sums[sizeof...(js)] = {};
  for (int64_t depth_tap = 0; depth_tap < words.axes[0].filter; ++depth_tap) {
    const int64_t from_depth = words.axes[0].meeting(depth, depth_tap);
    if (from_depth < 0) continue;
    for (int64_t row_tap = 0; row_tap < words.axes[1].filter; ++row_tap) {
      const int64_t from_row = words.axes[1].meeting(row, row_tap);
      if (from_row < 0) continue;
      const T* const line = source + offset(words.source, from_depth, from_row, 0);
      const T* const taps = filter + offset(words.other, words.axes[0].filter_place(depth_tap),
                                            words.axes[1].filter_place(row_tap), words.axes[2].filter_place(0));
      const int64_t tap_stride = words.axes[2].flipped ? -words.other.places[2] : words.other.places[2];
      meetings.add(sums, taps, tap_stride, line, words.source.places[2], block);
    }
  }
  (std::memcpy(to + js * words.span, &sums[js], sizeof(V)), ...);
}

// Adds the sums of taps of a row of the filter, from `tap` on, over the places of a row: `line` and `places` are the
// channel's first elements of the rows that meet, and `meetings` those of the places with the taps.
template <typename V, typename Lanes, typename T, typename C, int... js>
inline void sum_places(const CallWords& words, const T* line, const T* places, int64_t tap, const Meetings& meetings,
                       Lanes lanes, C* to, std::integer_sequence<int, js...> block) {
  V sums[sizeof...(js)] = {};  // of a row, so that rounding does not grow with the image
  meetings.add(sums, places, words.other.places[2], line, words.source.places[2], block);
  const auto add = [&](V sum, int64_t place) {
    V total;
    std::memcpy(&total, to + place * words.span, sizeof(V));
    total += keep(sum, lanes);
    std::memcpy(to + place * words.span, &total, sizeof(V));
  };
  (add(sums[js], words.axes[2].filter_place(tap + js)), ...);
}

// Adds what the places of one row, of all `channels`, add to a row of taps.
template <typename T, typename C>
inline void sum_line(const CallWords& words, const T* line, const T* places, int64_t channels, C* to) {
  const AxisWords& axis = words.axes[2];
  for (int64_t tap = 0; tap < axis.filter; tap += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, axis.filter - tap);
    const Meetings meetings(axis, axis.step_of(0, tap), axis.stride, axis.result, axis.dilation, count);
    with_constant(count, [&](auto block) {
      for_channels<C>(channels, [&](int64_t channel, auto vector, auto lanes) {
        sum_places<decltype(vector)>(words, line + channel, places + channel, tap, meetings, lanes, to + channel,
                                     block);
      });
    });
  }
}

}  // namespace depthwise

// A task sums a tile of the output, or of the image's gradient.
template <typename T>
void convolution_window(const void* const* arguments, int64_t task) {
  const depthwise::Call call(arguments);
  const depthwise::CallWords& words = call.words;
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
  Compute<T>* const sums = depthwise::tile_memory<Compute<T>>(words, tile.rows);
  const depthwise::AxisWords& axis = words.axes[2];
  for (int64_t x = 0; x < tile.rows; x += depthwise::kBlock) {
    const int64_t count = std::min<int64_t>(depthwise::kBlock, tile.rows - x), first = axis.step_of(x0 + x, 0);
    const depthwise::Meetings meetings(axis, first, axis.dilation, axis.filter, axis.stride, count);
    depthwise::with_constant(count, [&](auto block) {
      depthwise::for_channels<Compute<T>>(tile.columns, [&](int64_t channel, auto vector, auto) {
        depthwise::sum_windows<decltype(vector)>(words, source + channel, filter + channel, depth, row, meetings,
                                                 sums + x * words.span + channel, block);
      });
    });
  }
  call.finish(sums, tile);
}

// A task sums a row of taps of the filter's gradient.
template <typename T>
void convolution_taps(const void* const* arguments, int64_t task) {
  const depthwise::Call call(arguments);
  const depthwise::CallWords& words = call.words;
  const int64_t spans = (words.channels + words.span - 1) / words.span, taps = words.axes[2].filter;
  const int64_t channel0 = task % spans * words.span, line = task / spans;
  const int64_t row = line % words.axes[1].filter, depth = line / words.axes[1].filter % words.axes[0].filter;
  const int64_t batch = line / words.axes[1].filter / words.axes[0].filter;

  const int64_t place = (words.axes[0].filter_place(depth) * words.axes[1].filter + words.axes[1].filter_place(row));
  const pointwise::Tile tile{batch, place * taps, channel0, taps, std::min(words.span, words.channels - channel0)};
  const T* const source = static_cast<const T*>(call.source) + batch * words.source.batch + channel0;
  const T* const other = static_cast<const T*>(call.other) + batch * words.other.batch + channel0;
  Compute<T>* const sums = depthwise::tile_memory<Compute<T>>(words, taps);
  std::fill(sums, sums + taps * words.span, Compute<T>());
  for (int64_t n = 0; n < words.n; ++n) {
    for (int64_t z = 0; z < words.axes[0].result; ++z) {
      const int64_t from_depth = words.axes[0].meeting(z, depth);
      if (from_depth < 0) continue;
      for (int64_t y = 0; y < words.axes[1].result; ++y) {
        const int64_t from_row = words.axes[1].meeting(y, row);
        if (from_row < 0) continue;
        const T* const line = source + n * words.source.n + offset(words.source, from_depth, from_row, 0);
        const T* const places = other + n * words.other.n + offset(words.other, z, y, 0);
        depthwise::sum_line(words, line, places, tile.columns, sums);
      }
    }
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
