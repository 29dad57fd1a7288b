// An operand's tile of one stage: `kExtent` rows of M or N by 128 bytes of K, as TMA writes it and the
// tensor cores read it, both with the 128-byte swizzle (the 16-byte pieces of row r of 8 are exchanged by XOR with r).
//
//   along K (the array's rows run along K):        | row 0: 128 bytes | row 1 | ... | row kExtent-1 |       one box
//   along the extent (they run along M or N):      chunks of 64 elements; a chunk is | k 0: 128 bytes | k 1 | ... |
//                                                  16-bit elements only; one box a chunk
//
// Either way 64 rows (a chunk) take 8 KiB, and groups of 8 lines 1 KiB. In a cluster, the `kSharers` blocks that use
// the same tile load one part of each box each, and multicast it.
//
// What has no 128 bytes that lie together has lines of 64 or 32, with the swizzle of that name. Along K a tile is then
// several of such lines, one part of it after the other; along the extent its chunks are as much narrower.
//
// K may be of several groups, each of which meets its own part of the extent: then the first multiplies are of the
// first group, and so on, and a tile has no more than they read. Two groups of 32 elements of K, and of 32 of the
// extent each:
//
//   along K:            | row 0: group 0's 64 bytes, group 1's | ... | row 31 |       row r is each group's r-th one
//   along the extent:   | k 0: group 0's 64 bytes, group 1's | ... | k 31 |           likewise
//
// Groups of less than a multiply are core/group_tile.cuh's.
#pragma once

#include "core/element.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace jaxdnn {

/// What the tensor cores take elements of T for.
template <class T>
constexpr ptx::WgmmaType wgmma_type() {
  if constexpr (is_same<T, bfloat16>) {
    return ptx::WgmmaType::bf16;
  } else if constexpr (is_same<T, float16>) {
    return ptx::WgmmaType::f16;
  } else if constexpr (is_same<T, float32>) {
    return ptx::WgmmaType::tf32;
  } else if constexpr (is_same<T, float8_e4m3fn>) {
    return ptx::WgmmaType::e4m3;
  } else if constexpr (is_same<T, float8_e5m2>) {
    return ptx::WgmmaType::e5m2;
  } else {
    static_assert(is_same<T, int8>, "the tensor cores don't multiply this type");
    return ptx::WgmmaType::s8;
  }
}

constexpr int kDepthBytes = 128;  // of K in a stage
constexpr int kChunk = 64;        // elements of a row that runs along M or N, in one box

/// The descriptor of lines of kLine bytes, swizzled by the bits of shared addresses, from shared address `first` on.
/// `groups`: bytes from 8 lines to the next; `chunks`: where lines run along the extent, from a chunk to the next.
///
///   bits 0-13    address / 16
///   bits 16-29   along the extent: distance of chunks / 16; else unused
///   bits 32-45   distance of groups of 8 lines / 16
///   bits 62-63   1: 128-byte swizzle; 2: 64; 3: 32
template <int kLine>
__device__ __forceinline__ unsigned long long lines_descriptor(unsigned first, int groups, int chunks = 16) {
  constexpr unsigned long long kSwizzle = kLine == 128 ? 1 : kLine == 64 ? 2 : 3;
  return kSwizzle << 62 | static_cast<unsigned long long>(groups / 16) << 32 |
         static_cast<unsigned long long>(chunks / 16) << 16 | (first & 0x3ffff) >> 4;
}

/// `kOnce` says that no other block reads the tile. A stage may have other than 128 bytes of K (`kDepthOf` elements),
/// of a tile along the extent.
template <class T, int kExtent, bool kAlongExtent, int kSharers, bool kOnce = false, int kLineOf = 128,
          int kGroupsOf = 1, int kDepthOf = kDepthBytes / static_cast<int>(sizeof(T))>
struct OperandTile {
  static constexpr ptx::WgmmaType kType = wgmma_type<T>();
  static constexpr bool kRunsAlongExtent = kAlongExtent;
  static constexpr int kBytesOfT = static_cast<int>(sizeof(T));
  static constexpr int kDepth = kDepthOf;  // elements of K
  static constexpr int kGroups = kGroupsOf;
  static constexpr int kLine = kLineOf, kLineElements = kLine / kBytesOfT;
  static constexpr int kShares = kSharers;
  static constexpr int kBytes = kExtent * kDepth * kBytesOfT / kGroups;
  static constexpr int kChunkBytes = kDepth / kGroups * kLine, kPartBytes = kExtent * kLine;
  static constexpr int kSteps = kDepth * kBytesOfT / 32, kGroupSteps = kSteps / kGroups;  // multiplies, and of a group
  // Of the box that one block loads.
  static constexpr int kLines = (kAlongExtent ? kDepth : kExtent) / kGroups / kSharers;
  static_assert(!kAlongExtent || kBytesOfT == 2, "only 16-bit operands may run along M or N");
  static_assert(!kAlongExtent || kExtent % kLineElements == 0, "a tile is made of whole chunks");
  static_assert(!kOnce || kSharers == 1, "other blocks read what is shared");
  static_assert(kGroups == 1 || kLine == kDepthBytes, "a line has all groups");
  static_assert(kGroups == 1 || !kAlongExtent || kLineElements * kGroups % kExtent == 0 ||
                    kExtent % (kLineElements * kGroups) == 0,
                "a group's elements are a part of a chunk, or whole chunks");
  static_assert(kLines % 8 == 0 && kLines <= 256, "boxes are whole groups of lines, at most 256");

  /// By one thread: this block's share of the tile, or of one of its `kParts` along K, for the blocks whose bits are in
  /// `blocks`. With kToEnd, chunks of a tile along the extent from `end` on are left as they are, but for the first:
  /// they are none of the matrix, of which TMA's zeros would take longer than what is there.
  template <int kParts = 1, bool kToEnd = false>
  static __device__ __forceinline__ void load(const TensorMap* map, unsigned tile, unsigned barrier, int share,
                                              unsigned short blocks, int k, int start, int batch, int part = 0,
                                              int end = 0) {
    if constexpr (kAlongExtent) {
      const int line = share * (kLines / kParts);
#pragma unroll
      for (int chunk = 0; chunk < kExtent / kLineElements; ++chunk) {
        if (kToEnd && chunk > 0 && start + chunk * kLineElements >= end) {
          ptx::mbarrier_complete_tx(barrier, kChunkBytes / kParts);
          continue;
        }
        box(map, tile + chunk * kChunkBytes + (part * (kDepth / kParts) + line) * kLine, barrier, blocks,
            start + chunk * kLineElements, k + line, batch);
      }
    } else {
      const int line = share * kLines;
      box(map, tile + part * kPartBytes + line * kLine, barrier, blocks, k, start + line, batch);
    }
  }

  /// The descriptor of the tile at shared address `tile`, which is a multiple of 1024.
  static __device__ __forceinline__ unsigned long long descriptor(unsigned tile) {
    return lines_descriptor<kLine>(tile, 8 * kLine, kAlongExtent ? kChunkBytes : 16);
  }

  /// What to add to a descriptor to come to `step` along K: 32 bytes in a line or the next part's, or 16 lines; and
  /// where the step is of another group, to that one's elements of the extent.
  static constexpr unsigned step(int step) {
    if (!kAlongExtent) return (step * 32 / kLine * kPartBytes + step * 32 % kLine) / 16;
    const int element = step / kGroupSteps * (kExtent / kGroups);
    return (step % kGroupSteps * 16 * kLine + element / kLineElements * kChunkBytes +
            element % kLineElements * kBytesOfT) /
           16;
  }

  /// What to add to come to block `block` of 64 rows.
  static constexpr unsigned block(int block) {
    return block * (kAlongExtent ? 64 / kLineElements * kChunkBytes : 64 * kLine) / 16;
  }

 private:
  static __device__ __forceinline__ void box(const TensorMap* map, unsigned destination, unsigned barrier,
                                             unsigned short blocks, int x, int y, int z) {
    if constexpr (kOnce) {
      ptx::cp_async_bulk_tensor_load_evict_first(destination, map, barrier, x, y, z);
    } else if constexpr (kSharers > 1) {
      ptx::cp_async_bulk_tensor_load_multicast(destination, map, barrier, blocks, x, y, z);
    } else {
      ptx::cp_async_bulk_tensor_load(destination, map, barrier, x, y, z);
    }
  }
};

/// Of a tile along K that may end past the matrix: this block's share, or as much of it as there is, in groups of 8
/// lines. TMA's zeros would take longer than what is there, and whatever lies in their place is multiplied for nobody.
/// Of every share something is loaded: blocks of a cluster wait for each other's copies, and else would run ahead.
template <class Tile>
struct EdgeLoad {
  const TensorMap* map;
  unsigned left_out;  // bytes of all shares

  /// Of the lines from `start` on, of which `end` is the first that there is not. Shares that are there are loaded by
  /// `whole`, and others by `edge`, whose box has so many bytes less.
  __device__ __forceinline__ EdgeLoad(const TensorMap* whole, const TensorMap* edge, int less, int share, int start,
                                      int end)
      : map(end - start >= (share + 1) * Tile::kLines ? whole : edge) {
    const int there = end > start ? (end - start) / Tile::kLines : 0;  // shares
    left_out = there < Tile::kShares ? (Tile::kShares - there) * less : 0;
  }

  /// By one thread, as the tile's own.
  __device__ __forceinline__ void load(unsigned tile, unsigned barrier, int share, unsigned short blocks, int k,
                                       int start, int batch) const {
    if (left_out > 0) ptx::mbarrier_complete_tx(barrier, left_out);
    Tile::load(map, tile, barrier, share, blocks, k, start, batch);
  }
};

/// What to add to the descriptor of a tile in the first stage to come to that in `stage`; stages take `bytes` each.
__device__ __forceinline__ unsigned stage_offset(int stage, int bytes) { return stage * (bytes / 16); }

/// Starts the multiplies of two tiles, 64 rows of A's for each accumulator. `a` and `b` are descriptors, to which
/// `offset` is added. A stage may have less than all steps. Unless it `accumulate`s, what is in the accumulators is
/// replaced. B's groups have as many columns each.
template <class ATile, class BTile, int kSteps = ATile::kSteps, class Accumulator, int kBlocks, int kRegisters>
__device__ __forceinline__ void multiply_tiles(Accumulator (&accumulators)[kBlocks][kRegisters], unsigned long long a,
                                               unsigned long long b, unsigned offset, bool accumulate) {
  constexpr int kOwn = kRegisters / BTile::kGroups;  // of a group
  static_assert(ATile::kSteps % BTile::kGroups == 0, "a multiply is of one group");
  using Multiply = ptx::Wgmma<2 * kOwn>;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int rows = 0; rows < kBlocks; ++rows) {
      auto& own = reinterpret_cast<Accumulator(&)[kOwn]>(accumulators[rows][i / BTile::kGroupSteps * kOwn]);
      Multiply::template mma_async<ATile::kType, BTile::kType, ATile::kRunsAlongExtent, BTile::kRunsAlongExtent>(
          own, a + (offset + ATile::block(rows) + ATile::step(i)), b + (offset + BTile::step(i)),
          accumulate || i % BTile::kGroupSteps > 0);
    }
  }
}

/// A tile of kColumns of B, whose rows run along N: `kDepth` of K.
template <class T, int kColumns, int kDepth>
using RowsOfB = OperandTile<T, (kColumns + kChunk - 1) / kChunk * kChunk, true, 1, false, 128, 1, kDepth>;

/// Multiplies of 64 rows in registers by `BTile`, 16 of K for each of `a`.
template <class BTile, int kRegisters, int kSteps>
__device__ __forceinline__ void multiply_registers(float (&accumulators)[kRegisters], const unsigned (&a)[kSteps][4],
                                                   unsigned long long b, bool accumulate) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    ptx::WgmmaRs<2 * kRegisters>::template mma_async<BTile::kType, true>(accumulators, a[i], b + BTile::step(i),
                                                                         accumulate || i > 0);
  }
}

}  // namespace jaxdnn
