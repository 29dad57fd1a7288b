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

  /// Adds a fragment.
  __device__ __forceinline__ void add(const Fragment& fragment, const ResultAddress& address,
                                      const FragmentCoordinate& at) {
    const int lane = threadIdx.x % 32;
    Type masked[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const typename R::Source value = fragment[i];
      masked[i] = at.has(i) ? static_cast<Type>(value) : R::identity();
    }
    if constexpr (R::kOverColumns) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Type& to = held[i / 2 % 2 % kHeld];
        to = R::combine(to, masked[i]);
      }
    } else {
      // Eight lanes hold the same four columns. Each exchange halves the lanes that share, and the columns.
      const bool upper = lane & 16, right = lane & 8;
      Type of_side[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const Type low = R::combine(masked[side], masked[2 + side]);
        const Type high = R::combine(masked[4 + side], masked[6 + side]);
        of_side[side] = R::across(upper ? high : low, upper ? low : high, 16);
      }
      Type value = R::across(right ? of_side[1] : of_side[0], right ? of_side[0] : of_side[1], 8);
      value = R::across(value, value, 4);
      const int row = at.row - lane / 4, column = at.column + (upper ? 8 : 0) + (right ? 1 : 0);
      if ((lane & 4) == 0 && row < at.rows && column < at.columns) {
        const long long part = static_cast<long long>(at.batch) * ((at.rows + 15) / 16) + row / 16;
        static_cast<Type*>(address.data)[part * at.columns + column] = value;
      }
    }
  }

  /// Writes what was held of a tile; `at` is the warp's first element there.
  __device__ __forceinline__ void finish(const ResultAddress& address, const FragmentCoordinate& at) {
    if constexpr (R::kOverColumns) {
      const int lane = threadIdx.x % 32, parts = (at.columns + kWidth - 1) / kWidth;
      Type* const to = static_cast<Type*>(address.data);
      const long long part = static_cast<long long>(at.batch) * parts + at.column / kWidth;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int mask = R::kOverRows ? 16 : 2; mask > 0; mask /= 2) held[i] = R::across(held[i], held[i], mask);
        const int kept = R::kOverRows ? at.row / 16 : at.row + lane / 4 + 8 * i;
        const int count = R::kOverRows ? (at.rows + 15) / 16 : at.rows;
        if (lane % (R::kOverRows ? 32 : 4) == 0 && kept < count && at.column < at.columns) {
          to[part * count + kept] = held[i];
        }
      }
    }
  }
};

/// The partial reductions of all results that are reduced.
template <class Results, int kWidth, int kIndex = 0>
struct Partials {
  __device__ __forceinline__ void clear() {}
  __device__ __forceinline__ void add(const Fragment*, const ResultAddress*, const FragmentCoordinate&) {}
  __device__ __forceinline__ void finish(const ResultAddress*, const FragmentCoordinate&) {}
};

template <class First, class... Rest, int kWidth, int kIndex>
struct Partials<TypeList<First, Rest...>, kWidth, kIndex> : Partials<TypeList<Rest...>, kWidth, kIndex + 1> {};

template <Reduction kReduction, class Of, bool kOverRows, bool kOverColumns, class... Rest, int kWidth, int kIndex>
struct Partials<TypeList<Reduced<kReduction, Of, kOverRows, kOverColumns>, Rest...>, kWidth, kIndex> {
  Partial<Reduced<kReduction, Of, kOverRows, kOverColumns>, kWidth> own;
  Partials<TypeList<Rest...>, kWidth, kIndex + 1> rest;

  __device__ __forceinline__ void clear() {
    own.clear();
    rest.clear();
  }

  __device__ __forceinline__ void add(const Fragment* fragments, const ResultAddress* addresses,
                                      const FragmentCoordinate& at) {
    own.add(fragments[kIndex], addresses[kIndex], at);
    rest.add(fragments, addresses, at);
  }

  __device__ __forceinline__ void finish(const ResultAddress* addresses, const FragmentCoordinate& at) {
    own.finish(addresses[kIndex], at);
    rest.finish(addresses, at);
  }
};

}  // namespace jaxdnn
