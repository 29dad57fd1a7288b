// Convolutions as products of matrices (jaxdnn/engines/convolution/implicit_gemm.py): tiles, multiplications and
// epilogues are those of cpp/host/product, and only what panels are packed from is of this file:
//
//     result    panels of a                                   panels of b
//     output    windows of places, each a row                 the filter, packed by a launch before
//     image     the same, of the output                       the same, of each tap's transpose
//     filter    the same, of which places are steps along k   the output, packed by each tile
//
// Where an image is dilated, the rows of a tile that meet the same taps are a phase. Phases are multiplied one after
// the other, each by its part of the filter, and their accumulators put in order for the epilogue.
//
// Arguments of each kernel are those of a product. Its words are followed by `WindowWords` and the phases of each axis.
#include <array>
#include <cstring>
#include <utility>

#include "../base/kernel.h"
#include "../base/thread_memory.h"
#include "../product/call.h"
#include "windows.h"

JAXDNN_ISA_BEGIN

namespace convolution {

using pointwise::Tile;
using product::Block;
using product::Format;
using product::Place;

// ---- The words of a plan, in the order of `_words` in jaxdnn/engines/convolution/host/unit.py -----------------------

// `Axis` in jaxdnn/engines/convolution/implicit_gemm.py; strides in memory are in elements.
struct AxisWords {
  int64_t image, places;  // the latter of all phases
  int64_t stride, step;
  int64_t image_stride, filter_stride;  // from a place to the next; from a tap to the next that is met
  int64_t phases, most_taps;            // the latter of one of them
};

struct WindowWords {
  int64_t places_are_steps;          // of a filter's gradient
  int64_t image_stride;              // from one of the batch to the next
  int64_t channels;                  // of the image, in a group
  int64_t image_group, other_group;  // from a group to the next, of what windows are of, and of b
  AxisWords axes[kAxes];
};

struct PhaseWords {
  int64_t taps, start;
  int64_t filter;  // where the first tap lies
};

// One of each axis.
struct Phase {
  const PhaseWords* axes[kAxes];

  int64_t taps() const { return axes[0]->taps * axes[1]->taps * axes[2]->taps; }
  // Calls body(taps of each axis) for every `each`-th tap.
  template <typename Body>
  void for_taps(int64_t each, Body body) const {
    for (int64_t i = 0; i < axes[0]->taps; ++i) {
      for (int64_t j = 0; j < axes[1]->taps; ++j) {
        for (int64_t k = 0; k < axes[2]->taps; k += each) body(std::array<int64_t, kAxes>{i, j, k});
      }
    }
  }
};

class Call : public product::Call {
 public:
  explicit Call(const void* const* arguments)
      : product::Call(arguments),
        windows(*static_cast<const WindowWords*>(others())),
        gathers(find_gathers(product::Dtype(words().matrices[0].dtype), format())) {
    const auto* next = reinterpret_cast<const PhaseWords*>(&windows + 1);
    for (int axis = 0; axis < kAxes; next += windows.axes[axis++].phases) phases_[axis] = next;
  }

  int64_t phases() const { return windows.axes[0].phases * windows.axes[1].phases * windows.axes[2].phases; }
  Phase phase(int64_t number) const {
    Phase found;
    for (int axis = kAxes - 1; axis >= 0; number /= windows.axes[axis--].phases)
      found.axes[axis] = phases_[axis] + number % windows.axes[axis].phases;
    return found;
  }
  const PhaseWords& phase(int axis, int64_t number) const { return phases_[axis][number]; }

  // What a phase sums over.
  int64_t depth(const Phase& phase) const {
    return windows.places_are_steps ? words().k : phase.taps() * windows.channels;
  }
  // Taps of a run: all of a window's row, where the image's channels are neighbours.
  int64_t run_taps(const Phase& phase) const {
    const AxisWords& columns = windows.axes[2];
    return columns.step == 1 && columns.image_stride == windows.channels ? phase.axes[2]->taps : 1;
  }

  // The first element of a matrix in a tile's group; they are so many elements apart.
  const void* data(int64_t i, const Tile& tile, int64_t group_stride) const {
    const int64_t group = tile.column / group_columns();
    const int64_t bytes = pointwise::element_bytes(product::Dtype(words().matrices[i].dtype));
    return static_cast<const char*>(lines(i, tile.batch).data) + group * group_stride * bytes;
  }
  int64_t group_columns() const { return words().n / words().groups; }

  // Where a launch packs a block of the filter, as if all phases were as long as the longest.
  char* packed_filter(const Place& place, int64_t phase, int64_t block) const {
    const int64_t tile = place.batch % matrix(1).count(words().batch) * column_tiles() + place.column;
    return matrix(1).packed +
           ((tile * phases() + phase) * blocks() + block) * block_bytes(true, words().columns, words().depth);
  }

  const WindowWords& windows;
  const Gathers gathers;

 private:
  const PhaseWords* phases_[kAxes];
};

// Walks through the places that windows are at, in order.
class Walk {
 public:
  Walk(const Call& call, int64_t place) : call_(call) {
    for (int axis = kAxes - 1; axis >= 0; --axis) {
      at_[axis] = place % call.windows.axes[axis].places;
      place /= call.windows.axes[axis].places;
    }
    image_ = place;
  }

  // Sets where the window begins, and returns the number of its phase.
  int64_t find(Where& window) const {
    int64_t phase = 0;
    window.offset = image_ * call_.windows.image_stride;
    for (int i = 0; i < kAxes; ++i) {
      const AxisWords& axis = call_.windows.axes[i];
      const int64_t place = axis.phases == 1 ? at_[i] : at_[i] / axis.phases, own = at_[i] - place * axis.phases;
      phase = phase * axis.phases + own;
      window.at[i] = place * axis.stride + call_.phase(i, own).start;
      window.offset += window.at[i] * axis.image_stride;
    }
    return phase;
  }
  void next() {
    for (int axis = kAxes - 1; axis >= 0; --axis) {
      if (++at_[axis] < call_.windows.axes[axis].places) return;
      at_[axis] = 0;
    }
    ++image_;
  }

 private:
  const Call& call_;
  int64_t image_, at_[kAxes];
};

// Memory of a thread, one piece after the other: `lay(pieces)` takes them, once to know how many bytes they are.
class Pieces {
 public:
  template <typename Lay>
  static void lay(ThreadMemory& memory, Lay lay) {
    Pieces sizes(0);
    lay(sizes);
    Pieces pieces(reinterpret_cast<uintptr_t>(memory.reserve(sizes.next_)));
    lay(pieces);
  }
  template <typename T>
  T* take(int64_t count) {
    constexpr size_t kApart = 256;
    T* taken = reinterpret_cast<T*>(next_);
    next_ += (size_t(count) * sizeof(T) + kApart - 1) / kApart * kApart;
    return taken;
  }

 private:
  explicit Pieces(uintptr_t next) : next_(next) {}
  uintptr_t next_;
};

inline void pack_filter(const Call& call, const Place& place, int64_t number, int64_t block) {
  const Phase phase = call.phase(number);
  const int64_t k = block * call.words().depth, depth = std::min(call.words().depth, call.depth(phase) - k);
  if (depth <= 0) return;
  const Tile tile = call.tile(place);
  Where *places, *taps;
  static thread_local ThreadMemory memory;
  Pieces::lay(memory, [&](Pieces& pieces) {
    places = pieces.take<Where>(std::max(depth, tile.columns));
    taps = pieces.take<Where>(phase.taps());
  });
  const Where* const of_taps = taps;
  phase.for_taps(1, [&](const std::array<int64_t, kAxes>& tap) {
    *taps = {};
    for (int i = 0; i < kAxes; ++i) taps->offset += phase.axes[i]->filter + tap[i] * call.windows.axes[i].filter_stride;
    ++taps;
  });

  const Format& format = call.format();
  const product::MatrixWords& strides = call.words().matrices[1];
  const int64_t channels = call.windows.channels, column = tile.column % call.group_columns();
  Block part{0, k, tile.columns, depth, format.units(depth), format.b_width, format.b_width};
  Windows filter{
      call.data(1, tile, call.windows.other_group), places, of_taps, channels, channels, {1, 1, 1}, false, nullptr};
  if (strides.depth_stride == 1) {
    for (int64_t i = 0; i < tile.columns; ++i) places[i] = {(column + i) * strides.line_stride, {}};
  } else {
    // A step's columns are neighbours: a single run.
    static constexpr Where kHere;
    for (int64_t i = 0; i < depth; ++i) {
      const int64_t tap = (k + i) / channels, channel = (k + i) % channels;
      places[i] = {of_taps[tap].offset + channel * strides.depth_stride + column, {}};
    }
    part.k = 0;
    filter.runs = &kHere;
    filter.length = filter.tap_length = tile.columns;
    filter.transposed = true;
  }
  call.gathers.b(filter, part, call.packed_filter(place, number, block));
}

// The accumulators of a tile over the blocks of its split.
class TileSums {
 public:
  TileSums(const Call& call, const Place& place) : call_(call), place_(place), tile_(call.tile(place)) {
    static thread_local ThreadMemory memory;
    Pieces::lay(memory, [&](Pieces& pieces) { lay(pieces); });
    if (!call.windows.places_are_steps) find_rows();
    const int64_t row_bytes = stride_ * call_.format().sum_bytes;
    char* to = sums_;
    for (int64_t number = 0, row = 0; number < call.phases(); ++number) {
      const int64_t rows = dilated() ? ends_[number] - row : tile_.rows;
      multiply(number, row, rows, to);
      row += rows;
      to += rows * row_bytes;
    }
    if (!dilated()) return;
    const int64_t sum_bytes = call_.format().sum_bytes;
    const int64_t apart = (in_result() ? call_.result_stride() : stride_) * sum_bytes;
    for (int64_t i = 0; i < tile_.rows; ++i) {
      std::memcpy(ordered_ + rows_[i] * apart, sums_ + i * row_bytes, size_t(tile_.columns * sum_bytes));
    }
  }

  void leave() const {
    if (in_result()) return;
    const char* const accumulators[] = {dilated() ? ordered_ : sums_};
    call_.leave(place_, tile_, accumulators);
  }

 private:
  bool dilated() const { return call_.phases() > 1; }
  bool in_result() const { return call_.in_result(tile_) != nullptr; }

  void lay(Pieces& pieces) {
    const product::CallWords& words = call_.words();
    const bool steps = call_.windows.places_are_steps != 0;
    const int64_t depth = std::min(words.depth, words.k), sorted = dilated() ? tile_.rows : 0;
    int64_t runs = 1;
    for (const AxisWords& axis : call_.windows.axes) runs *= axis.most_taps;
    places_ = pieces.take<Where>(steps ? depth : tile_.rows);
    found_ = pieces.take<Where>(sorted);
    phases_ = pieces.take<int64_t>(sorted);
    rows_ = pieces.take<int64_t>(sorted);
    ends_ = pieces.take<int64_t>(call_.phases());
    runs_ = pieces.take<Where>(runs);
    // Rows that are put next to each other take no more than a panel, and one row besides.
    a_ = pieces.take<char>(call_.block_bytes(false, std::max(tile_.rows, call_.format().a_width) + 1, depth));
    b_ = pieces.take<char>(call_.matrix(1).ahead() ? 0 : call_.block_bytes(true, tile_.columns, depth));
    steps_ = pieces.take<double>(steps ? tile_.rows * call_.format().unit_depth : 0);
    const int64_t row_bytes = call_.sums_stride(tile_) * call_.format().sum_bytes;
    // Behind the rows of the last phase are those that its last panel is padded with.
    const int64_t sum_bytes = (tile_.rows + call_.format().a_step) * row_bytes;
    char* const result = call_.in_result(tile_);
    const bool direct = result != nullptr && !dilated();
    sums_ = direct ? result : pieces.take<char>(sum_bytes);
    ordered_ = result != nullptr ? result : pieces.take<char>(dilated() ? sum_bytes : 0);
    stride_ = direct ? call_.result_stride() : call_.sums_stride(tile_);
  }

  // The windows of the tile's rows, those of one phase after the other.
  void find_rows() {
    Walk walk(call_, tile_.row);
    if (!dilated()) {
      for (int64_t i = 0; i < tile_.rows; ++i, walk.next()) walk.find(places_[i]);
      return;
    }
    std::fill(ends_, ends_ + call_.phases(), 0);
    for (int64_t i = 0; i < tile_.rows; ++i, walk.next()) ++ends_[phases_[i] = walk.find(found_[i])];
    int64_t begin = 0;
    for (int64_t phase = 0; phase < call_.phases(); ++phase) begin += std::exchange(ends_[phase], begin);
    for (int64_t i = 0; i < tile_.rows; ++i) {
      const int64_t at = ends_[phases_[i]]++;
      places_[at] = found_[i];
      rows_[at] = i;
    }
  }

  // The rows of a phase, from `row` on.
  void multiply(int64_t number, int64_t row, int64_t rows, char* to) {
    const product::CallWords& words = call_.words();
    const Format& format = call_.format();
    const Phase phase = call_.phase(number);
    const bool steps = call_.windows.places_are_steps != 0;
    const int64_t of_phase = call_.depth(phase);
    const int64_t first = call_.first_block(place_.split);
    const int64_t end = std::min(call_.first_block(place_.split + 1), (of_phase + words.depth - 1) / words.depth);
    if (rows == 0) return;
    for (int64_t i = 0; first >= end && i < rows; ++i)
      std::memset(to + i * stride_ * format.sum_bytes, 0, size_t(tile_.columns * format.sum_bytes));
    const Windows windows = find_windows(phase, row);
    const int64_t panel_rows = format.panel_rows(rows);
    for (int64_t block = first; block < end; ++block) {
      const int64_t k = block * words.depth, depth = std::min(words.depth, of_phase - k), units = format.units(depth);
      const char* const b = steps ? pack_other(k, depth) : call_.packed_filter(place_, number, block);
      // Calls body(panel of b, accumulators of a row) for all columns.
      const auto for_columns = [&](int64_t at, auto body) {
        for (int64_t column = 0; column < tile_.columns; column += format.b_width) {
          body(b + column * units * format.unit_bytes, to + (at * stride_ + column) * format.sum_bytes);
        }
      };
      if (steps || format.multiply_rows == nullptr) {
        const Block part{steps ? tile_.row : 0, steps ? 0 : k, rows, depth, units, panel_rows, format.a_step};
        call_.gathers.a(windows, part, a_);
        for_columns(0, [&](const char* panel, char* sums) {
          format.multiply_panels(units, a_, rows, panel_rows, panel, sums, stride_, block > first, {panel, 0, units});
        });
        continue;
      }
      for (int64_t at = 0; at < rows; at += panel_rows) {
        const int64_t some = std::min(panel_rows, rows - at);
        const Spaced panel_a = call_.gathers.rows(windows, at, some, k, depth, a_);
        for_columns(at, [&](const char* panel, char* sums) {
          format.multiply_rows[some - 1](units, panel_a.data, panel_a.stride, panel, sums, stride_, block > first);
        });
      }
    }
  }

  // The output's places from k on, and the windows that are at them, of a filter's gradient.
  const char* pack_other(int64_t k, int64_t depth) {
    Walk walk(call_, k);
    for (int64_t i = 0; i < depth; ++i, walk.next()) walk.find(places_[i]);
    const Format& format = call_.format();
    const product::MatrixWords& words = call_.words().matrices[1];
    const product::Lines lines{call_.data(1, tile_, call_.windows.other_group), words.line_stride, words.depth_stride};
    const Block block{tile_.column % call_.group_columns(),
                      k,
                      tile_.columns,
                      depth,
                      format.units(depth),
                      format.b_width,
                      format.b_width};
    format.pack_b(lines, block, b_);
    return b_;
  }

  Windows find_windows(const Phase& phase, int64_t row) {
    const WindowWords& words = call_.windows;
    Where* run = runs_;
    const int64_t taps = call_.run_taps(phase);
    phase.for_taps(taps, [&](const std::array<int64_t, kAxes>& tap) {
      run->offset = 0;
      for (int i = 0; i < kAxes; ++i) {
        run->at[i] = tap[i] * words.axes[i].step;
        run->offset += run->at[i] * words.axes[i].image_stride;
      }
      ++run;
    });
    return {call_.data(0, tile_, words.image_group),
            places_ + row,
            runs_,
            taps * words.channels,
            words.channels,
            {words.axes[0].image, words.axes[1].image, words.axes[2].image},
            words.places_are_steps != 0,
            steps_};
  }

  const Call& call_;
  const Place place_;
  const Tile tile_;
  Where *places_, *found_, *runs_;
  int64_t *phases_, *rows_, *ends_, stride_;
  char *a_, *b_, *sums_, *ordered_;
  double* steps_;
};

}  // namespace convolution

// A task packs a block of the filter's part in a phase.
void convolution_pack(const void* const* arguments, int64_t task) {
  const convolution::Call call(arguments);
  const int64_t blocks = call.blocks(), phases = call.phases(), tiles = call.column_tiles();
  const int64_t tile = task / blocks / phases;
  convolution::pack_filter(call, {tile / tiles, 0, tile % tiles, 0}, task / blocks % phases, task % blocks);
}

// A task sums `group` tiles, and finishes them unless k is split.
void convolution_multiply(const void* const* arguments, int64_t task) {
  const convolution::Call call(arguments);
  const product::TileScope scope(call.format().tiles);
  const int64_t group = call.words().group, end = std::min((task + 1) * group, call.tiles() * call.words().splits);
  for (int64_t index = task * group; index < end; ++index) {
    convolution::TileSums(call, call.place(index)).leave();
  }
}

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"convolution_pack", convolution_pack}, {"convolution_multiply", convolution_multiply})
