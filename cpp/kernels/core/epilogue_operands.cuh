// An epilogue's operands: the values of them that one thread needs of a fragment.
#pragma once

#include "core/vector.cuh"

namespace jaxdnn {

/// The values of one operand for a thread's elements of a piece: `kPairs` column pairs in each of two rows.
template <class Operand, int kPairs>
struct OperandPiece {
  using T = typename Operand::Type;
  static constexpr bool kPaired = Operand::kByColumn && Operand::kColumns == Columns::pairs;
  static constexpr int kRowCount = Operand::kByRow ? 2 : 1;
  static constexpr int kPairCount = Operand::kByColumn ? kPairs : 1;
  static constexpr int kVectors = Operand::kByColumn && !kPaired ? 2 : 1;

  Vector<T, kPaired ? 2 : 1> vectors[kRowCount][kPairCount][kVectors];

  /// Rows `row` and `row + 8`; columns `column`, `column + 8`, ... and their right neighbours.
  __device__ __forceinline__ void fetch(const OperandAddress& address, int row, int column, int batch, int rows,
                                        int columns) {
    const T* base = static_cast<const T*>(address.data) + address.of_batch(batch);
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      const bool inside = !Operand::kByRow || row + 8 * r < rows;
      const T* const line = base + (Operand::kByRow ? address.of_row(row + 8 * r) : 0);
#pragma unroll
      for (int pair = 0; pair < kPairCount; ++pair) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const int at = column + 8 * pair + i;
          vectors[r][pair][i].clear();
          if constexpr (Operand::kByColumn) {
            const long long place = Operand::kColumns == Columns::strided ? address.of_column(at) : at;
            if (inside && at < columns) vectors[r][pair][i].load(line + place);
          } else {
            if (inside) vectors[r][pair][i].load(line);
          }
        }
      }
    }
  }

  __device__ __forceinline__ Held<T> value(int r, int pair, int side) const {
    const auto& from = vectors[Operand::kByRow ? r : 0][Operand::kByColumn ? pair : 0];
    return widen(kPaired ? from[0].get(side) : from[kVectors == 2 ? side : 0].get(0));
  }
};

/// The pieces of all operands.
template <int kIndex, class Operands, int kPairs>
struct OperandPieces {
  __device__ __forceinline__ void fetch(const OperandAddress*, int, int, int, int, int) {}
  __device__ __forceinline__ void values(int, int, int, RegisterOf<4>*) const {}
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

  __device__ __forceinline__ void values(int r, int pair, int side, RegisterOf<4>* to) const {
    to[kIndex].set(piece.value(r, pair, side));
    rest.values(r, pair, side, to);
  }
};

/// Brings a warp's 16 rows x kWidth columns of all operands closer: rows, which all warps of the tile read, into the L1
/// cache, and matrices into the L2 cache.
template <int kIndex, class Operands, int kWidth>
__device__ __forceinline__ void prefetch_operands(const OperandAddress* addresses, int row, int column, int batch,
                                                  int rows, int columns) {
  if constexpr (kIndex < Operands::kCount) {
    using Operand = TypeAt<kIndex, Operands>;
    using T = typename Operand::Type;
    if constexpr (Operand::kByColumn && Operand::kColumns != Columns::strided) {
      constexpr int kPart = (Operand::kByRow ? 128 : 32) / static_cast<int>(sizeof(T));  // elements of a line or sector
      constexpr int kParts = (kWidth + kPart - 1) / kPart;
      const OperandAddress& address = addresses[kIndex];
      const T* const matrix = static_cast<const T*>(address.data) + address.of_batch(batch);
      for (int i = threadIdx.x % 32; i < kParts * (Operand::kByRow ? 16 : 1); i += 32) {
        const int line = row + i / kParts, first = column + i % kParts * kPart;
        if (first >= columns || line >= rows) continue;
        if constexpr (Operand::kByRow) {
          ptx::prefetch_global_l2(matrix + address.of_row(line) + first);
        } else {
          ptx::prefetch_global_l1(matrix + first);
        }
      }
    }
    prefetch_operands<kIndex + 1, Operands, kWidth>(addresses, row, column, batch, rows, columns);
  }
}

}  // namespace jaxdnn
