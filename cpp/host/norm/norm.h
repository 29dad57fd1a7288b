// What the forward and the backward norm kernels share: how their arguments arrive, and which rows a task owns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../base/floats.h"
#include "../base/kernel.h"
#include "../base/vector.h"

JAXDNN_ISA_BEGIN

// Rows with fewer columns are handled kTileRows at a time, one row a lane: a sum over a short row has no work for
// lanes. With AVX2 that is faster below 20 columns forward and below 30 backward (50,000 rows, float32).
constexpr int kNarrow = 24;
constexpr int kTileRows = 32;
static_assert(kLanes<float> <= kNarrow, "for_columns needs rows of at least one vector");

// Zeroes the lanes of a tile that have no row.
template <typename C>
inline void clear_missing_rows(C (&tile)[kNarrow][kTileRows], int64_t columns, int64_t rows) {
  for (int64_t column = 0; column < columns; ++column) {
    std::fill(tile[column] + rows, tile[column] + kTileRows, C(0));
  }
}

// A buffer that holds an array for each group, `group_stride` elements apart. An argument that the call does not have
// is null.
template <typename T>
struct Groups {
  T* data;
  int64_t group_stride;

  explicit operator bool() const { return data != nullptr; }
  T* group(int64_t index) const { return data == nullptr ? nullptr : data + index * group_stride; }
};

// A scale or a bias: columns in X or in float.
template <typename X>
struct Parameter {
  const void* data;
  bool is_float;

  // The value at one column, or `otherwise` if there is no such parameter.
  Compute<X> at(int64_t column, Compute<X> otherwise) const {
    if (data == nullptr) return otherwise;
    if (is_float) return static_cast<const float*>(data)[column];
    return widen(static_cast<const X*>(data)[column]);
  }
};

template <typename X>
struct ParameterGroups {
  Groups<const char> bytes;
  bool is_float;

  Parameter<X> group(int64_t index) const {
    const int64_t size = is_float ? sizeof(float) : sizeof(X);
    return {bytes.data == nullptr ? nullptr : bytes.data + index * bytes.group_stride * size, is_float};
  }
};

struct Absent {};

// Calls body with a typed pointer to the parameter, or with Absent.
template <typename X, typename Body>
inline void visit(const Parameter<X>& parameter, Body body) {
  if (parameter.data == nullptr) {
    body(Absent{});
  } else if (std::is_same<X, float>::value || !parameter.is_float) {
    body(static_cast<const X*>(parameter.data));
  } else if constexpr (sizeof(X) == 2) {
    body(static_cast<const float*>(parameter.data));
  }
}

template <typename V, typename C>
inline V times(V values, Absent, C, int64_t) {
  return values;
}
template <typename V, typename C, typename P>
inline V times(V values, const P* scale, C offset, int64_t column) {
  return values * (load(scale + column) + offset);
}
template <typename V>
inline V plus(V values, Absent, int64_t) {
  return values;
}
template <typename V, typename P>
inline V plus(V values, const P* other, int64_t column) {
  return values + load(other + column);
}

// Reads a kernel's arguments in order. A buffer is followed by its group stride, which is -1 if the call has no such
// buffer (a dummy stands in for it); a parameter also by whether it is float32.
class Arguments {
 public:
  explicit Arguments(const void* const* arguments) : next_(arguments) {}

  template <typename T>
  T scalar() {
    return *static_cast<const T*>(*next_++);
  }

  template <typename T>
  Groups<T> groups() {
    const void* data = *next_++;
    const int64_t stride = scalar<int64_t>();
    if (stride < 0) return {nullptr, 0};
    return {static_cast<T*>(const_cast<void*>(data)), stride};
  }

  template <typename X>
  ParameterGroups<X> parameter() {
    const Groups<const char> bytes = groups<const char>();
    return {bytes, scalar<int64_t>() != 0};
  }

 private:
  const void* const* next_;
};

// Each of `groups` groups has `rows` rows, cut in chunks of `chunk_rows`; a task owns `task_chunks` consecutive chunks.
struct Geometry {
  int64_t groups;
  int64_t rows;
  int64_t columns;
  int64_t chunk_rows;
  int64_t task_chunks;

  explicit Geometry(Arguments& arguments)
      : groups(arguments.scalar<int64_t>()),
        rows(arguments.scalar<int64_t>()),
        columns(arguments.scalar<int64_t>()),
        chunk_rows(arguments.scalar<int64_t>()),
        task_chunks(arguments.scalar<int64_t>()) {}

  int64_t group_chunks() const { return (rows + chunk_rows - 1) / chunk_rows; }

  // Calls body(chunk, group, first_row, row_end) for each chunk of the task.
  template <typename Body>
  void for_chunks(int64_t task, Body body) const {
    const int64_t per_group = group_chunks();
    const int64_t end = std::min((task + 1) * task_chunks, groups * per_group);
    for (int64_t chunk = task * task_chunks; chunk < end; ++chunk) {
      const int64_t first = chunk % per_group * chunk_rows;
      body(chunk, chunk / per_group, first, std::min(first + chunk_rows, rows));
    }
  }
};

JAXDNN_ISA_END
