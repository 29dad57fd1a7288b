// An epilogue's operands: where they lie, and the values of them that one thread needs.
#pragma once

#include "core/vector.cuh"

namespace jaxdnn {

/// Which coordinates of the result an operand varies with; each may vary with the batch too, by its stride.
enum class Broadcast { scalar, row, column, full };  // row: one value a column; column: one value a row

template <class T, Broadcast kBroadcastOf, bool kPairsOf>
struct EpilogueOperand {
  using Type = T;
  static constexpr Broadcast kBroadcast = kBroadcastOf;
  static constexpr bool kPairs = kPairsOf;  // two neighbouring columns lie in one aligned word (or two)
};

template <class... Types>
struct TypeList {
  static constexpr int kCount = sizeof...(Types);
};

template <int kIndex, class List>
struct TypeAt;
template <class First, class... Rest>
struct TypeAt<0, TypeList<First, Rest...>> {
  using Type = First;
};
template <int kIndex, class First, class... Rest>
struct TypeAt<kIndex, TypeList<First, Rest...>> : TypeAt<kIndex - 1, TypeList<Rest...>> {};

/// An element of the result: where it lies in its matrix, and which matrix.
struct Place {
  int row, column, batch;
};

struct OperandAddress {
  const void* data = nullptr;
  long long row_stride = 0, batch_stride = 0;  // in elements
};

template <class T>
struct Packed {
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes == 4 ? 2 : 1;  // of a pair

  static __device__ __forceinline__ float widen(unsigned bits) {
    if constexpr (is_same<T, float>) return ptx::float_of_bits(bits);
    if constexpr (is_same<T, bfloat16>) return ptx::float_of_bits(bits << 16);
    if constexpr (is_same<T, float16>) return ptx::float_of_half(bits & 0xffff);
  }

  /// A pair as one word (two words when T has four bytes).
  static __device__ __forceinline__ void round(float first, float second, unsigned (&words)[kWords]) {
    if constexpr (is_same<T, float>) {
      words[0] = ptx::bits_of_float(first);
      words[1] = ptx::bits_of_float(second);
    } else if constexpr (is_same<T, bfloat16>) {
      words[0] = ptx::bfloats_of_floats(first, second);
    } else {
      words[0] = ptx::halves_of_floats(first, second);
    }
  }

  static __device__ __forceinline__ unsigned load(const T* address) {
    unsigned word;
    if constexpr (kBytes == 4) {
      ptx::load_4(&word, address);
    } else {
      ptx::load_2(&word, address);
    }
    return word;
  }
};

/// The values of one operand for a thread's elements of a piece: `kPairs` column pairs in each of two rows.
template <class Operand, int kPairs>
struct OperandPiece {
  using T = typename Operand::Type;
  static constexpr bool kRows = Operand::kBroadcast == Broadcast::column || Operand::kBroadcast == Broadcast::full;
  static constexpr bool kColumns = Operand::kBroadcast == Broadcast::row || Operand::kBroadcast == Broadcast::full;
  static constexpr int kRowCount = kRows ? 2 : 1;
  static constexpr int kPairCount = kColumns ? kPairs : 1;
  static constexpr int kWords = kColumns && !(Operand::kPairs && sizeof(T) == 2) ? 2 : 1;

  unsigned words[kRowCount][kPairCount][kWords];

  /// Rows `row` and `row + 8`; columns `column`, `column + 8`, ... and their right neighbours.
  __device__ __forceinline__ void fetch(const OperandAddress& address, int row, int column, int batch, int rows,
                                        int columns) {
    const T* base = static_cast<const T*>(address.data) + batch * address.batch_stride;
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      const bool inside = !kRows || row + 8 * r < rows;
      const T* const line = base + (kRows ? (row + 8 * r) * address.row_stride : 0);
#pragma unroll
      for (int pair = 0; pair < kPairCount; ++pair) {
        unsigned (&to)[kWords] = words[r][pair];
#pragma unroll
        for (int i = 0; i < kWords; ++i) to[i] = 0;
        const int first = column + 8 * pair;
        if constexpr (!kColumns) {
          if (inside) to[0] = Packed<T>::load(line);
        } else if constexpr (Operand::kPairs) {
          if (inside && first < columns) {
            if constexpr (kWords == 1) {
              ptx::load_4(to, line + first);
            } else {
              ptx::load_8(to, line + first);
            }
          }
        } else {
          if (inside && first < columns) to[0] = Packed<T>::load(line + first);
          if (inside && first + 1 < columns) to[1] = Packed<T>::load(line + first + 1);
        }
      }
    }
  }

  __device__ __forceinline__ float value(int r, int pair, int side) const {
    const unsigned (&from)[kWords] = words[kRows ? r : 0][kColumns ? pair : 0];
    if constexpr (!kColumns) return Packed<T>::widen(from[0]);
    if constexpr (kWords == 2) return Packed<T>::widen(from[side]);
    return Packed<T>::widen(side == 0 ? from[0] & 0xffff : from[0] >> 16);
  }
};

/// The pieces of all operands.
template <int kIndex, class Operands, int kPairs>
struct OperandPieces {
  __device__ __forceinline__ void fetch(const OperandAddress*, int, int, int, int, int) {}
  __device__ __forceinline__ void values(int, int, int, float*) const {}
};

template <int kIndex, class First, class... Rest, int kPairs>
struct OperandPieces<kIndex, TypeList<First, Rest...>, kPairs> {
  OperandPiece<First, kPairs> piece;
  OperandPieces<kIndex + 1, TypeList<Rest...>, kPairs> rest;

  __device__ __forceinline__ void fetch(const OperandAddress* addresses, int row, int column, int batch, int rows,
                                        int columns) {
    piece.fetch(addresses[kIndex], row, column, batch, rows, columns);
    rest.fetch(addresses, row, column, batch, rows, columns);
  }

  __device__ __forceinline__ void values(int r, int pair, int side, float* to) const {
    to[kIndex] = piece.value(r, pair, side);
    rest.values(r, pair, side, to);
  }
};

/// The values of all operands for one element.
template <int kIndex, class Operands>
__device__ __forceinline__ void operands_at(const OperandAddress* addresses, const Place& place, float* to) {
  if constexpr (kIndex < Operands::kCount) {
    using Operand = typename TypeAt<kIndex, Operands>::Type;
    using T = typename Operand::Type;
    constexpr Broadcast kBroadcast = Operand::kBroadcast;
    long long offset = place.batch * addresses[kIndex].batch_stride;
    if constexpr (kBroadcast == Broadcast::column || kBroadcast == Broadcast::full) {
      offset += place.row * addresses[kIndex].row_stride;
    }
    if constexpr (kBroadcast == Broadcast::row || kBroadcast == Broadcast::full) offset += place.column;
    to[kIndex] = Packed<T>::widen(Packed<T>::load(static_cast<const T*>(addresses[kIndex].data) + offset));
    operands_at<kIndex + 1, Operands>(addresses, place, to);
  }
}

}  // namespace jaxdnn
