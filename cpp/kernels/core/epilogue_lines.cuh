// Results that leave in whole lines of memory, wherever their rows begin.
//
// Tiles end within lines of rows that are no multiple of 128 bytes long, and each writes its part: of 57216 rows of
// 3192 16-bit elements that took 176 microseconds, of 3200 elements 103. A warp that computes a row's tiles one after
// the other keeps what it has of a line until the next tile has the rest:
//
//   memory   |  line 0  |  line 1  |  line 2  |         a row begins at any element of line 0
//   tiles        | subtile 0 | subtile 1 |              line i leaves once subtile i is there; the last one at the end
//   ring     16 rows of two subtiles: byte b of row r is at (b + 16 r) mod 256, so that the pieces of 16 bytes that
//            rows have of the same column, and those of a row's line, are in different banks
#pragma once

#include "core/epilogue_results.cuh"
#include "ptx/memory.cuh"

namespace jaxdnn {

/// The ring of a warp. Rows of the matrix begin at multiples of kPieceBytes.
template <class T, int kPieceBytes>
struct LineRing {
  static constexpr int kLine = 128, kRowBytes = 2 * kLine, kPiece = 16 / static_cast<int>(sizeof(T));
  static constexpr bool kPieces = kPieceBytes == 16;  // else a line's pieces begin anywhere in the ring
  static_assert(sizeof(T) == 2, "of a subtile of 64 columns, a row is a line");

  unsigned ring;  // its shared address

  /// Writes fragment `number` of the subtile in this half of the ring.
  __device__ __forceinline__ void put(int half, int number, const Fragment& fragment) const {
    const int lane = threadIdx.x % 32;
    unsigned words[4];
    rounded_words<T>(fragment, words);
    ptx::stmatrix_x4<false>(at(lane % 16, half * kLine + number * 32 + lane / 16 * 16), words);
  }

  /// Stores the lines that end before the subtile at `column` does, which is in this half: of 16 rows from `row` on
  /// what there is from column `begin` to `end`.
  template <class Rows>
  __device__ __forceinline__ void store(T* matrix, int half, int row, int rows, int column, int columns, int begin,
                                        int end, const Rows& others) const {
    constexpr int kTurns = 4;  // of four rows, eight lanes each
    unsigned words[kTurns][4];
    T* lines[kTurns];
    int firsts[kTurns];
    const int line = threadIdx.x % 32 / 8, piece = threadIdx.x % 8;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      lines[turn] = matrix + others.offset(row + 4 * turn + line, 0, columns);
      const int before = static_cast<int>(reinterpret_cast<unsigned long long>(lines[turn] + column) % kLine);
      firsts[turn] = column + piece * kPiece - before / static_cast<int>(sizeof(T));
      read(words[turn], 4 * turn + line, half * kLine + 16 * piece - before);
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first = firsts[turn];
      if (row + 4 * turn + line >= rows || first + kPiece <= begin || first >= end) continue;
      if (kPieces || (first >= begin && first + kPiece <= end)) {
        ptx::st_global<16>(lines[turn] + first, words[turn]);
      } else if constexpr (!kPieces) {
        constexpr int kAtOnce = kPieceBytes / static_cast<int>(sizeof(T));
#pragma unroll
        for (int i = 0; i < kPiece; i += kAtOnce) {
          const unsigned part[2] = {words[turn][i / 2] >> i % 2 * 16, words[turn][i / 2 + kAtOnce / 4]};
          if (first + i >= begin && first + i < end) ptx::st_global<kPieceBytes>(lines[turn] + first + i, part);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ unsigned at(int row, int byte) const {
    return ring + row * kRowBytes + (byte + 16 * row) % kRowBytes;
  }

  /// 16 bytes of a row, which begin in the ring or up to a line before.
  __device__ __forceinline__ void read(unsigned (&words)[4], int row, int byte) const {
    byte += kRowBytes;
    if constexpr (kPieces) {
      ptx::ld_shared<16>(words, at(row, byte));
    } else {
      constexpr bool kHalves = kPieceBytes < 4;  // a word may begin within one of the ring
      unsigned found[5];
#pragma unroll
      for (int i = 0; i < 4 + kHalves; ++i) ptx::ld_shared<4>(&found[i], at(row, byte / 4 * 4 + 4 * i));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = kHalves && byte % 4 != 0 ? found[i] >> 16 | found[i + 1] << 16 : found[i];
      }
    }
  }
};

}  // namespace jaxdnn
