// Results that an epilogue reduces: each warp reduces what it has of a tile, by shuffles, and writes that to scratch
// memory, where product/reduce.cuh takes it from. All orders are fixed, so results are the same bits on every run.
//
//   over             a warp's part of a tile of kWidth columns      scratch, [matrix, part, what is kept]
//   rows             16 rows; one value a column                    [batch, ceil(rows / 16), columns]
//   columns          kWidth columns; one value a row                [batch, ceil(columns / kWidth), rows]
//   both             16 rows x kWidth columns; one value            [batch, ceil(columns / kWidth), ceil(rows / 16)]
#pragma once

#include "core/epilogue_results.cuh"
#include "core/reduction.cuh"

namespace jaxdnn {

/// The type that values of T, which registers hold, are reduced in.
template <class T>
using Accumulated = Select<is_same<T, float>, float, Select<math::kSigned<T>, int32, uint32>>;

/// A result reduced over a tile's rows, columns, or both. `Of` is the type in which the functor returns its values.
template <Reduction kReduction, class Of, bool kOverRowsOf, bool kOverColumnsOf>
struct Reduced : ReductionOf<kReduction, Accumulated<Of>> {
  using Source = Of;
  using Type = Accumulated<Of>;
  static constexpr bool kOverRows = kOverRowsOf, kOverColumns = kOverColumnsOf;

  /// Combined with the value of the lane whose number differs in the bit `mask`.
  static __device__ __forceinline__ Type across(Type mine, Type given, int mask) {
    if constexpr (is_same<Type, float>) {
      return Reduced::combine(mine, ptx::shfl_sync_bfly(given, mask));
    } else {
      const float bits = ptx::mov_f32(static_cast<unsigned>(given));
      return Reduced::combine(mine, static_cast<Type>(ptx::mov_b32(ptx::shfl_sync_bfly(bits, mask))));
    }
  }
};

template <class T>
inline constexpr bool is_reduced = false;
template <Reduction kReduction, class Of, bool kOverRows, bool kOverColumns>
inline constexpr bool is_reduced<Reduced<kReduction, Of, kOverRows, kOverColumns>> = true;

/// What one warp has of one reduced result, while it works through the columns of 16 rows.
template <class R, int kWidth>
struct Partial {
  using Type = typename R::Type;
  static constexpr int kHeld = !R::kOverColumns ? 1 : R::kOverRows ? 1 : 2;  // one a row

  Type held[kHeld];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = R::identity();
  }

  /// Adds 16 columns. `row`, `column` are of the thread's first element.
  __device__ __forceinline__ void add(const Patch& values, const ResultAddress& address, int row, int column, int batch,
                                      int rows, int columns) {
    const int lane = threadIdx.x % 32;
    Type masked[2][2][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int pair = i / 4, r = i / 2 % 2, side = i % 2;
      const bool inside = row + 8 * r < rows && column + 8 * pair + side < columns;
      const typename R::Source value = values[pair][r][side];
      masked[pair][r][side] = inside ? static_cast<Type>(value) : R::identity();
    }
    if constexpr (R::kOverColumns) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Type& to = held[i / 2 % 2 % kHeld];
        to = R::combine(to, masked[i / 4][i / 2 % 2][i % 2]);
      }
    } else {
      // Eight lanes hold the same four columns. Each exchange halves the lanes that share, and the columns.
      const bool upper = lane & 16, right = lane & 8;
      Type of_side[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const Type low = R::combine(masked[0][0][side], masked[0][1][side]);
        const Type high = R::combine(masked[1][0][side], masked[1][1][side]);
        of_side[side] = R::across(upper ? high : low, upper ? low : high, 16);
      }
      Type value = R::across(right ? of_side[1] : of_side[0], right ? of_side[0] : of_side[1], 8);
      value = R::across(value, value, 4);
      column += (upper ? 8 : 0) + (right ? 1 : 0);
      row -= lane / 4;
      if ((lane & 4) == 0 && row < rows && column < columns) {
        const long long part = static_cast<long long>(batch) * ((rows + 15) / 16) + row / 16;
        static_cast<Type*>(address.data)[part * columns + column] = value;
      }
    }
  }

  /// Writes what was held of a tile whose first column is `column`; `row` is the warp's first.
  __device__ __forceinline__ void finish(const ResultAddress& address, int row, int column, int batch, int rows,
                                         int columns) {
    if constexpr (R::kOverColumns) {
      const int lane = threadIdx.x % 32;
      Type* const to = static_cast<Type*>(address.data);
      const long long part = static_cast<long long>(batch) * ((columns + kWidth - 1) / kWidth) + column / kWidth;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int mask = R::kOverRows ? 16 : 2; mask > 0; mask /= 2) held[i] = R::across(held[i], held[i], mask);
        const int kept = R::kOverRows ? row / 16 : row + lane / 4 + 8 * i;
        const int count = R::kOverRows ? (rows + 15) / 16 : rows;
        if (lane % (R::kOverRows ? 32 : 4) == 0 && kept < count && column < columns) to[part * count + kept] = held[i];
      }
    }
  }
};

/// The partial reductions of all results that are reduced.
template <int kIndex, class Results, int kWidth>
struct Partials {
  template <class... Arguments>
  __device__ __forceinline__ void add(Arguments&&...) {}
  __device__ __forceinline__ void clear() {}
  __device__ __forceinline__ void finish(const ResultAddress*, int, int, int, int, int) {}
};

template <int kIndex, class First, class... Rest, int kWidth>
struct Partials<kIndex, TypeList<First, Rest...>, kWidth> : Partials<kIndex + 1, TypeList<Rest...>, kWidth> {};

template <int kIndex, Reduction kReduction, class Of, bool kOverRows, bool kOverColumns, class... Rest, int kWidth>
struct Partials<kIndex, TypeList<Reduced<kReduction, Of, kOverRows, kOverColumns>, Rest...>, kWidth> {
  Partial<Reduced<kReduction, Of, kOverRows, kOverColumns>, kWidth> partial;
  Partials<kIndex + 1, TypeList<Rest...>, kWidth> rest;

  __device__ __forceinline__ void clear() {
    partial.clear();
    rest.clear();
  }

  __device__ __forceinline__ void add(const Patch* values, const ResultAddress* addresses, int row, int column,
                                      int batch, int rows, int columns) {
    partial.add(values[kIndex], addresses[kIndex], row, column, batch, rows, columns);
    rest.add(values, addresses, row, column, batch, rows, columns);
  }

  __device__ __forceinline__ void finish(const ResultAddress* addresses, int row, int column, int batch, int rows,
                                         int columns) {
    partial.finish(addresses[kIndex], row, column, batch, rows, columns);
    rest.finish(addresses, row, column, batch, rows, columns);
  }
};

}  // namespace jaxdnn
