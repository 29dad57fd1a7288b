// An epilogue's operands: where they lie, and the values of them that one thread needs.
#pragma once

#include "core/float8.cuh"

namespace jaxdnn {

/// Which coordinates of the result an operand varies with; each may vary with the batch too, by its stride.
enum class Broadcast { scalar, row, column, full };  // row: one value a column; column: one value a row

/// How neighbouring columns lie: one by one, or in pairs that are an aligned word (or two), or `strided` apart.
enum class Columns { single, pairs, strided };

template <class T, Broadcast kBroadcastOf, Columns kColumnsOf>
struct EpilogueOperand {
  using Type = T;
  static constexpr Broadcast kBroadcast = kBroadcastOf;
  static constexpr Columns kColumns = kColumnsOf;
  static constexpr bool kByRow = kBroadcastOf == Broadcast::column || kBroadcastOf == Broadcast::full;
  static constexpr bool kByColumn = kBroadcastOf == Broadcast::row || kBroadcastOf == Broadcast::full;
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
  long long row_stride = 0, column_stride = 0, batch_stride = 0;  // in elements
};

/// A register: a value of any type of at most 32 bits, which the functor's parameters name.
union Register {
  float real;
  int32 signed_32;
  uint32 unsigned_32;
  int16 signed_16;
  uint16 unsigned_16;
  int8 signed_8;
  uint8 unsigned_8;
  bool boolean;

  template <class T>
  __device__ __forceinline__ operator T&() {
    if constexpr (is_same<T, float>) {
      return real;
    } else if constexpr (is_same<T, int32>) {
      return signed_32;
    } else if constexpr (is_same<T, uint32>) {
      return unsigned_32;
    } else if constexpr (is_same<T, int16>) {
      return signed_16;
    } else if constexpr (is_same<T, uint16>) {
      return unsigned_16;
    } else if constexpr (is_same<T, int8>) {
      return signed_8;
    } else if constexpr (is_same<T, uint8>) {
      return unsigned_8;
    } else {
      static_assert(is_same<T, bool>, "a register has 32 bits");
      return boolean;
    }
  }

  template <class T>
  __device__ __forceinline__ operator T() const {
    return static_cast<T&>(const_cast<Register&>(*this));
  }
};

template <bool kFirst, class First, class Second>
struct Choice {
  using Type = First;
};
template <class First, class Second>
struct Choice<false, First, Second> {
  using Type = Second;
};

/// The type that a register holds a T as: floats as float, everything else as it is.
template <class T>
inline constexpr bool is_floating = is_same<T, float> || is_same<T, bfloat16> || is_same<T, float16> || is_float8<T>;
template <class T>
using HeldType = typename Choice<is_floating<T>, float, T>::Type;

template <class T>
struct Packed {
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes == 4 ? 2 : 1;  // of a pair
  using Type = HeldType<T>;

  static __device__ __forceinline__ Register widen(unsigned bits) {
    Register value;
    if constexpr (is_same<T, float>) {
      value.real = ptx::mov_f32(bits);
    } else if constexpr (is_same<T, bfloat16>) {
      value.real = ptx::mov_f32(bits << 16);
    } else if constexpr (is_same<T, float16>) {
      value.real = ptx::cvt_f32_f16(bits & 0xffff);
    } else if constexpr (is_float8<T>) {
      value.real = float_of_float8<T>(bits & 0xff);
    } else if constexpr (is_same<T, bool>) {
      value.boolean = (bits & 0xff) != 0;
    } else {
      static_cast<T&>(value) = static_cast<T>(bits);
    }
    return value;
  }

  /// A pair as one word (two words when T has four bytes).
  static __device__ __forceinline__ void round(const Register& left, const Register& right, unsigned (&words)[kWords]) {
    const Type first = left, second = right;
    if constexpr (is_same<T, float>) {
      words[0] = ptx::mov_b32(first);
      words[1] = ptx::mov_b32(second);
    } else if constexpr (is_same<T, bfloat16>) {
      words[0] = ptx::cvt_rn_bf16x2_f32(first, second);
    } else if constexpr (is_same<T, float16>) {
      words[0] = ptx::cvt_rn_f16x2_f32(first, second);
    } else if constexpr (is_float8<T>) {
      words[0] = float8s_of_floats<T>(first, second);
    } else if constexpr (kBytes == 4) {
      words[0] = static_cast<unsigned>(first);
      words[1] = static_cast<unsigned>(second);
    } else {
      constexpr unsigned kMask = (1u << 8 * kBytes) - 1;
      words[0] = (static_cast<unsigned>(first) & kMask) | (static_cast<unsigned>(second) & kMask) << 8 * kBytes;
    }
  }

  static __device__ __forceinline__ unsigned load(const T* address) {
    unsigned word;
    ptx::ld_global<kBytes>(&word, address);
    return word;
  }

  static __device__ __forceinline__ void load_pair(unsigned (&words)[kWords], const T* address) {
    ptx::ld_global<2 * kBytes>(words, address);
  }

  /// The left one of a pair.
  static __device__ __forceinline__ void store(T* address, const unsigned* words) {
    ptx::st_global<kBytes>(address, words);
  }

  static __device__ __forceinline__ void store_pair(T* address, const unsigned (&words)[kWords]) {
    ptx::st_global<2 * kBytes>(address, words);
  }

  static __device__ __forceinline__ unsigned right(const unsigned (&words)[kWords]) {
    if constexpr (kBytes == 4) {
      return words[1];
    } else {
      return words[0] >> 8 * kBytes;
    }
  }
};

/// The values of one operand for a thread's elements of a piece: `kPairs` column pairs in each of two rows.
template <class Operand, int kPairs>
struct OperandPiece {
  using T = typename Operand::Type;
  static constexpr bool kPaired = Operand::kByColumn && Operand::kColumns == Columns::pairs;
  static constexpr int kRowCount = Operand::kByRow ? 2 : 1;
  static constexpr int kPairCount = Operand::kByColumn ? kPairs : 1;
  static constexpr int kWords = !Operand::kByColumn ? 1 : kPaired ? Packed<T>::kWords : 2;

  unsigned words[kRowCount][kPairCount][kWords];

  /// Rows `row` and `row + 8`; columns `column`, `column + 8`, ... and their right neighbours.
  __device__ __forceinline__ void fetch(const OperandAddress& address, int row, int column, int batch, int rows,
                                        int columns) {
    const T* base = static_cast<const T*>(address.data) + batch * address.batch_stride;
    const long long step = Operand::kColumns == Columns::strided ? address.column_stride : 1;
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      const bool inside = !Operand::kByRow || row + 8 * r < rows;
      const T* const line = base + (Operand::kByRow ? (row + 8 * r) * address.row_stride : 0);
#pragma unroll
      for (int pair = 0; pair < kPairCount; ++pair) {
        unsigned (&to)[kWords] = words[r][pair];
#pragma unroll
        for (int i = 0; i < kWords; ++i) to[i] = 0;
        const int first = column + 8 * pair;
        if constexpr (!Operand::kByColumn) {
          if (inside) to[0] = Packed<T>::load(line);
        } else if constexpr (kPaired) {
          if (inside && first < columns) Packed<T>::load_pair(to, line + first);
        } else {
          if (inside && first < columns) to[0] = Packed<T>::load(line + first * step);
          if (inside && first + 1 < columns) to[1] = Packed<T>::load(line + (first + 1) * step);
        }
      }
    }
  }

  __device__ __forceinline__ Register value(int r, int pair, int side) const {
    const unsigned (&from)[kWords] = words[Operand::kByRow ? r : 0][Operand::kByColumn ? pair : 0];
    if constexpr (!Operand::kByColumn) {
      return Packed<T>::widen(from[0]);
    } else if constexpr (kWords == 2) {
      return Packed<T>::widen(from[side]);
    } else {
      return Packed<T>::widen(from[0] >> 8 * Packed<T>::kBytes * side);
    }
  }
};

/// The pieces of all operands.
template <int kIndex, class Operands, int kPairs>
struct OperandPieces {
  __device__ __forceinline__ void fetch(const OperandAddress*, int, int, int, int, int) {}
  __device__ __forceinline__ void values(int, int, int, Register*) const {}
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

  __device__ __forceinline__ void values(int r, int pair, int side, Register* to) const {
    to[kIndex] = piece.value(r, pair, side);
    rest.values(r, pair, side, to);
  }
};

/// Brings a warp's 16 rows x kWidth columns of all operands closer: rows, which all warps of the tile read, into the L1
/// cache, and matrices into the L2 cache.
template <int kIndex, class Operands, int kWidth>
__device__ __forceinline__ void prefetch_operands(const OperandAddress* addresses, int row, int column, int batch,
                                                  int rows, int columns) {
  if constexpr (kIndex < Operands::kCount) {
    using Operand = typename TypeAt<kIndex, Operands>::Type;
    using T = typename Operand::Type;
    if constexpr (Operand::kByColumn && Operand::kColumns != Columns::strided) {
      constexpr int kPart = (Operand::kByRow ? 128 : 32) / static_cast<int>(sizeof(T));  // elements of a line or sector
      constexpr int kParts = (kWidth + kPart - 1) / kPart;
      const OperandAddress& address = addresses[kIndex];
      const T* const matrix = static_cast<const T*>(address.data) + batch * address.batch_stride;
      for (int i = threadIdx.x % 32; i < kParts * (Operand::kByRow ? 16 : 1); i += 32) {
        const int line = row + i / kParts, first = column + i % kParts * kPart;
        if (first >= columns || line >= rows) continue;
        if constexpr (Operand::kByRow) {
          ptx::prefetch_global_l2(matrix + line * address.row_stride + first);
        } else {
          ptx::prefetch_global_l1(matrix + first);
        }
      }
    }
    prefetch_operands<kIndex + 1, Operands, kWidth>(addresses, row, column, batch, rows, columns);
  }
}

/// The values of all operands for one element.
template <int kIndex, class Operands>
__device__ __forceinline__ void operands_at(const OperandAddress* addresses, const Place& place, Register* to) {
  if constexpr (kIndex < Operands::kCount) {
    using Operand = typename TypeAt<kIndex, Operands>::Type;
    using T = typename Operand::Type;
    const OperandAddress& address = addresses[kIndex];
    long long offset = place.batch * address.batch_stride;
    if constexpr (Operand::kByRow) offset += place.row * address.row_stride;
    if constexpr (Operand::kByColumn) {
      offset += Operand::kColumns == Columns::strided ? place.column * address.column_stride : place.column;
    }
    to[kIndex] = Packed<T>::widen(Packed<T>::load(static_cast<const T*>(address.data) + offset));
    operands_at<kIndex + 1, Operands>(addresses, place, to);
  }
}

}  // namespace jaxdnn
