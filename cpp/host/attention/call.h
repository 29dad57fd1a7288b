// An attention call as its launches describe it, and how it is multiplied:
//
//            queries (lanes)              Scores are kept transposed. A row of them is one key, and its columns are the
//           +----+----+                   queries of a panel, as many as fill kPanelVectors vectors. So sums and maxima
//     keys  | s  |    |  scores           over keys are sums of whole vectors; and a panel of probabilities, which the
//           +----+----+                   multiplication of keys by queries has left in registers' order, is the panel
//                                         of b that values are multiplied by next, as it lies:
//     scores^T = keys x queries^T         out^T = values^T x probabilities^T         d_query^T = keys^T x d_scores^T
//
// Keys and values are packed as panels of a, block by block. In a sum over queries (the gradients of keys and values)
// rows of scores are rows of a, which are multiplied where they lie. Few queries would leave most lanes idle: decode.cc
// has rows of scores instead, and packs nothing.
#pragma once

#include <algorithm>
#include <numeric>

#include "../base/thread_memory.h"
#include "../product/format.h"

JAXDNN_ISA_BEGIN

namespace attention {

using pointwise::Dtype;

// Queries of a panel.
template <typename C>
constexpr int64_t kWidth = product::kPanelVectors * kLanes<C>;

inline int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

// ---- The words of a plan, in the order of `Call` in jaxdnn/engines/attention/host.py --------------------------------

// An array with an element for each batch, row and column of scores; of an array of vectors, these are the batch
// element, the position and the head, and the element is a vector's first.
struct PlaceWords {
  int64_t dtype;               // negative where there is no such array
  int64_t batch, row, column;  // strides, in elements
  int64_t terms;               // the number of the word where its terms begin, or 0
};

constexpr int kLoadGradients = 4, kPlaces = 20 + kLoadGradients, kPrograms = 3;

struct CallWords {
  int64_t batch, query_length, key_length, query_heads, key_heads, head_size, value_head_size;
  int64_t query_block, key_block, splits;  // of the keys of a head, in the backward pass and where queries are few
  int64_t left, right;                     // of the band
  int64_t threshold;                       // of dropout
  double factor, scale;                    // of what dropout keeps; of products
  int64_t sinks;                           // elements of their gradient
  int64_t per_task;                        // heads, blocks of queries or splits that a task does
  int64_t joint;                           // whether a task of the backward pass owns its keys of all heads
  int64_t whole;                           // whether it has all keys of a head in one block
  int64_t added[kLoadGradients];           // elements of the gradients of what the score loads
  int64_t operands[kPrograms];             // of each program
  PlaceWords places[kPlaces];              // in the order of `Call`'s members
};

class Place {
 public:
  Place() = default;
  Place(const PlaceWords* place, const int64_t* words, const void* data)
      : words_(place),
        terms_(words + place->terms),
        data_(static_cast<char*>(const_cast<void*>(data))),
        element_bytes_(*this ? pointwise::element_bytes(dtype()) : 0) {}

  explicit operator bool() const { return words_->dtype >= 0; }
  const PlaceWords& words() const { return *words_; }
  Dtype dtype() const { return Dtype(words_->dtype); }

  int64_t offset(int64_t batch, int64_t row, int64_t column) const {
    const int64_t plain = batch * words_->batch + row * words_->row + column * words_->column;
    if (words_->terms == 0) return plain;
    const pointwise::Terms terms(terms_);
    return plain + terms.offset(0, batch) + terms.offset(1, row) + terms.offset(2, column);
  }

  void* at(int64_t batch, int64_t row, int64_t column) const {
    return data_ + offset(batch, row, column) * element_bytes_;
  }

  template <typename T>
  T get(int64_t batch, int64_t row, int64_t column) const {
    T value{};
    pointwise::with_element(dtype(), [&](auto element, auto) {
      value = T(pointwise::widened<T>(*static_cast<const decltype(element)*>(at(batch, row, column))));
    });
    return value;
  }

  // Vectors of neighbouring positions.
  product::Lines vectors(int64_t batch, int64_t position, int64_t head) const {
    return {at(batch, position, head), words_->row, 1};
  }
  // Their elements as lines, and positions as depth.
  product::Lines features(int64_t batch, int64_t position, int64_t head) const {
    return {at(batch, position, head), 1, words_->row};
  }

 private:
  const PlaceWords* words_ = nullptr;
  const int64_t* terms_ = nullptr;
  char* data_ = nullptr;
  int64_t element_bytes_ = 0;
};

// A pointwise function of scores as a kernel keeps them: where they are transposed, its rows are keys.
struct Program {
  const int64_t* words = nullptr;  // null where there is none
  const pointwise::Array* operands = nullptr;

  // Rows of results are `stride` apart.
  template <typename C, typename T>
  void run(const pointwise::Rows* accumulators, const pointwise::Tile& tile, T* const* to, int64_t stride = kWidth<C>,
           int64_t count = 1) const {
    pointwise::Array results[1 + kLoadGradients];
    for (int64_t i = 0; i < count; ++i) {
      results[i] = {to[i] - (tile.row * stride + tile.column), 0, stride, 1};
    }
    pointwise::Interpreter(words, operands, results).run(accumulators, tile);
  }
};

class Call {
 public:
  explicit Call(const void* const* arguments) : words(*static_cast<const CallWords*>(arguments[0])) {
    const auto* all = static_cast<const int64_t*>(arguments[0]);
    const void* const* next = arguments + 1;
    Place* const places[kPlaces] = {&query,         &key,         &value,          &out,          &log_sum_exp,
                                    &sinks,         &seeds,       &query_place,    &key_place,    &query_offset,
                                    &query_lengths, &key_lengths, &query_segments, &key_segments, &d_out,
                                    &d_log_sum_exp, &d_query,     &d_key,          &d_value,      &d_sinks,
                                    &d_loaded[0],   &d_loaded[1], &d_loaded[2],    &d_loaded[3]};
    for (int i = 0; i < kPlaces; ++i) *places[i] = Place(&words.places[i], all, *next++);
    Program* const programs[kPrograms] = {&score, &mask, &gradient};
    const auto* strides = reinterpret_cast<const int64_t*>(&words + 1);
    pointwise::Array* array = arrays_;
    for (int i = 0; i < kPrograms; ++i) {
      const auto* program = static_cast<const int64_t*>(*next++);
      *programs[i] = {*program == 0 ? nullptr : program, array};
      for (int64_t j = 0; j < words.operands[i]; ++j, strides += 3) {
        *array++ = {const_cast<void*>(*next++), strides[0], strides[1], strides[2]};
      }
    }
    delta = const_cast<void*>(*next++);
    split_sums = const_cast<void*>(*next++);
    d_sink_sums = const_cast<void*>(*next++);
    d_loaded_sums = const_cast<void*>(*next);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Gradients of what the score loads, and the elements of those before the i-th.
  int64_t load_gradients() const {
    return std::count_if(d_loaded, d_loaded + kLoadGradients, [](const Place& place) { return bool(place); });
  }
  int64_t added_before(int64_t i) const { return std::accumulate(words.added, words.added + i, int64_t(0)); }
  int64_t group() const { return words.query_heads / words.key_heads; }
  int64_t element(int64_t n) const { return n / words.query_heads; }
  int64_t head(int64_t n) const { return n % words.query_heads; }
  int64_t keys(int64_t n) const {
    return key_lengths ? std::min(words.key_length, key_lengths.get<int64_t>(n, 0, 0)) : words.key_length;
  }
  int64_t queries(int64_t n) const {
    return query_lengths ? std::min(words.query_length, query_lengths.get<int64_t>(n, 0, 0)) : words.query_length;
  }

  const CallWords& words;
  Place query, key, value, out, log_sum_exp, sinks, seeds, query_place, key_place, query_offset, query_lengths,
      key_lengths, query_segments, key_segments, d_out, d_log_sum_exp, d_query, d_key, d_value, d_sinks;
  Place d_loaded[kLoadGradients];  // those that there are come first
  Program score, mask, gradient;
  void *delta, *split_sums, *d_sink_sums, *d_loaded_sums;  // scratch

 private:
  pointwise::Array arrays_[128];  // kMaxArguments in cpp/launch_limits.h
};

// ---- Memory of a task -----------------------------------------------------------------------------------------------

// Hands out parts of a thread's memory; or, without any, counts what they take.
class Arena {
 public:
  explicit Arena(char* memory = nullptr) : memory_(memory) {}

  template <typename T>
  T* take(int64_t count) {
    // Not a power of two, so that parts don't share the ways of one set of a cache.
    constexpr int64_t kApart = 256;
    char* taken = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (count * int64_t(sizeof(T)) + 2 * kApart - 1) / kApart * kApart;
    return reinterpret_cast<T*>(taken);
  }
  size_t used() const { return size_t(used_); }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Calls body(i) for what a task does of `count` heads, blocks or splits. Small ones share what a task takes to begin.
template <typename Body>
inline void for_own(const Call& call, int64_t task, int64_t count, Body body) {
  const int64_t first = task * call.words.per_task, end = std::min(count, first + call.words.per_task);
  for (int64_t i = first; i < end; ++i) body(i);
}

// A `Space`, whose members are parts of the thread's memory.
template <typename Space>
inline Space workspace(const Call& call) {
  static thread_local ThreadMemory memory;
  Arena counting;
  Space(call, counting);
  Arena arena(memory.reserve(counting.used()));
  return Space(call, arena);
}

// ---- Panels ---------------------------------------------------------------------------------------------------------

template <typename C>
inline product::Pack packer(Dtype dtype) {
  if constexpr (std::is_same_v<C, double>) {
    return product::pack<double, double, 1>;
  } else {
    return product::pack_floats(dtype);
  }
}

// Rows of the panels of a with so many lines: as even as can be.
inline int64_t panel_rows(int64_t lines) {
  const int64_t panels = parts(lines, product::kPanelRows);
  return panels == 0 ? 1 : parts(lines, panels);
}

template <typename C>
inline void pack_a(Dtype dtype, const product::Lines& source, int64_t lines, int64_t depth, C* to) {
  packer<C>(dtype)(source, {0, 0, lines, depth, depth, panel_rows(lines), 1}, to);
}

template <typename C>
inline void pack_b(Dtype dtype, const product::Lines& source, int64_t lines, int64_t depth, C* to) {
  packer<C>(dtype)(source, {0, 0, lines, depth, depth, kWidth<C>, kWidth<C>}, to);
}

// sums (+)= all panels of a x one panel of b; rows of sums are `stride` apart.
template <typename C>
inline void multiply(int64_t lines, int64_t depth, const C* a, const C* b, C* sums, int64_t stride, bool adds) {
  const int64_t width = panel_rows(lines);
  for (int64_t first = 0; first < lines; first += width) {
    const int64_t rows = std::min(width, lines - first);
    product::kMultiply<C>[size_t(rows - 1)](depth, a + first* depth, b, sums + first* stride, stride, adds,
                                            {reinterpret_cast<const char*>(b), 0, depth});
  }
}

// ---- Rows of vectors ------------------------------------------------------------------------------------------------

// Calls body(S()) with the type of a vector's elements.
template <typename Body>
inline void with_float(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::float64:
      return body(double());
    case Dtype::bfloat16:
      return body(bfloat16());
    case Dtype::float16:
      return body(float16());
    default:
      return body(float());
  }
}

template <typename C>
inline void read_row(const Place& place, int64_t batch, int64_t position, int64_t head, C* to, int64_t count) {
  with_float(place.dtype(), [&](auto element) {
    pointwise::widen_row<C>(static_cast<const decltype(element)*>(place.at(batch, position, head)), to, count);
  });
}

// Writes vectors of neighbouring positions, or from a feature on a part of them; in memory they are `stride` apart.
template <typename C>
inline void write_rows(const Place& place, int64_t batch, int64_t position, int64_t head, const C* from, int64_t stride,
                       int64_t count, int64_t size, int64_t feature = 0) {
  with_float(place.dtype(), [&](auto element) {
    auto* to = static_cast<decltype(element)*>(place.at(batch, position, head)) + feature;
    for (int64_t i = 0; i < count; ++i) pointwise::narrow_row(from + i * stride, to + i * place.words().row, size);
  });
}

// Writes a panel of transposed vectors, `size` rows of kWidth, each lane times its factor.
template <typename C>
inline void write_panel(const Place& place, int64_t batch, int64_t position, int64_t head, const C* panel, int64_t size,
                        int64_t lanes, const C* factors) {
  constexpr int64_t width = kWidth<C>;
  alignas(64) C scaled[width * width], rows[width * width];
  const char* lines[width];
  for (int64_t i = 0; i < width; ++i) lines[i] = reinterpret_cast<const char*>(scaled + i * width);
  for (int64_t first = 0; first < size; first += width) {
    const int64_t count = std::min(width, size - first);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t lane = 0; lane < width; lane += kLanes<C>) {
        store(scaled + i * width + lane, load(panel + (first + i) * width + lane) * load(factors + lane));
      }
    }
    product::transpose<sizeof(C)>(lines, count, lanes, reinterpret_cast<char*>(rows));
    write_rows(place, batch, position, head, rows, count, lanes, count, first);
  }
}

}  // namespace attention

JAXDNN_ISA_END
