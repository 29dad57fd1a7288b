// ptx/wgmma.cuh on the CPU, of 16-bit elements and tf32. Multiplies end when they are waited for, or at once.
#pragma once

#include "launch.h"
#include "ptx/convert.cuh"

namespace jaxdnn::ptx {

template <int kCount>
void setmaxnreg_dec() {}
template <int kCount>
void setmaxnreg_inc() {}

inline void wgmma_fence() {}
inline void wgmma_commit_group() { emulation::machine.current->multiplies.commit(); }

template <int kPending>
void wgmma_wait_group() {
  emulation::machine.current->multiplies.wait(kPending);
  emulation::exchange(0);  // the lanes of a warp wait together
}

template <class Accumulator, int kCount>
void warpgroup_fence_operand(Accumulator (&)[kCount]) {}

enum class WgmmaType { bf16, f16, tf32, e4m3, e5m2, s8 };

/// Elements along K of a multiply.
template <WgmmaType kType>
constexpr int kWgmmaDepth = kType == WgmmaType::tf32 ? 8 : 16;

template <WgmmaType kType>
float wgmma_value(unsigned bits) {
  if constexpr (kType == WgmmaType::tf32) return mov_f32(bits & ~0x1fffu);
  static_assert(kType == WgmmaType::bf16 || kType == WgmmaType::f16 || kType == WgmmaType::tf32, "no 8-bit elements");
  return kType == WgmmaType::bf16 ? mov_f32(bits << 16) : cvt_f32_f16(bits);
}

/// Where an element of an operand lies, as core/tile.cuh says how the descriptor's tile does; of 16 bytes that are
/// aligned, so do those behind it.
inline unsigned wgmma_address(unsigned long long tile, bool along_extent, int item, int at, int k) {
  const unsigned start = (tile & 0x3fff) << 4, chunk = (tile >> 16 & 0x3fff) << 4, group = (tile >> 32 & 0x3fff) << 4;
  const int bytes = 256 >> (tile >> 62);  // of a line
  const int line = along_extent ? k : at, element = along_extent ? at : k;
  unsigned address = start + line / 8 * group + line % 8 * bytes + element % (bytes / item) * item;
  if (along_extent) address += element / (bytes / item) * chunk;
  return address ^ (address >> 7) % (bytes / 16) << 4;
}

/// Elements of an operand from a place along M or N on, which is even if they are two, and all of a multiply along K.
template <WgmmaType kType, bool kAlongExtent, int kCount, int kDepth>
void wgmma_load(float (*to)[kDepth], const unsigned char* shared, unsigned long long tile, int at) {
  constexpr int kItem = 32 / kDepth;
  constexpr int kTogether = kAlongExtent ? kCount : 16 / kItem, kLines = kAlongExtent ? kDepth : kCount;
  for (int line = 0; line < kLines; ++line) {
    for (int first = 0; first < (kAlongExtent ? kCount : kDepth); first += kTogether) {
      const int i = kAlongExtent ? first : line, k = kAlongExtent ? line : first;
      const unsigned char* const from = shared + wgmma_address(tile, kAlongExtent, kItem, at + i, k);
      for (int next = 0; next < kTogether; ++next) {
        unsigned bits = 0;
        std::memcpy(&bits, from + next * kItem, kItem);
        (kAlongExtent ? to[i + next][k] : to[i][k + next]) = wgmma_value<kType>(bits);
      }
    }
  }
}

/// d += a * b of so many along K, of the elements that this thread has of an accumulator: of each 8 columns 2, in 2
/// rows. `load` fills in two columns of b from one on.
template <int kN, int kDepth, class Load>
void wgmma_multiply(float (&d)[kN / 2], unsigned thread, bool accumulate, const float (&rows)[2][kDepth], Load load) {
  float columns[2][kDepth];
  for (int pair = 0; pair < kN / 8; ++pair) {
    load(columns, pair * 8 + thread % 4 * 2);
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < 2; ++i) {
        float& element = d[pair * 4 + 2 * r + i];
        float sum = accumulate ? element : 0;
        for (int k = 0; k < kDepth; ++k) sum += rows[r][k] * columns[i][k];
        element = sum;
      }
    }
  }
}

template <int kN>
struct Wgmma {
  template <WgmmaType kA, WgmmaType kB, bool kMMajor, bool kNMajor>
  static void mma_async(float (&d)[kN / 2], unsigned long long a, unsigned long long b, int accumulate) {
    emulation::Thread& thread = *emulation::machine.current;
    const unsigned char* const shared = thread.block->dynamic.data();
    thread.multiplies.start([=, &d, number = thread.number % 128] {
      float rows[2][kWgmmaDepth<kA>];
      for (int r = 0; r < 2; ++r) {
        wgmma_load<kA, kMMajor, 1>(rows + r, shared, a, number / 32 * 16 + number % 32 / 4 + 8 * r);
      }
      wgmma_multiply<kN>(d, number, accumulate, rows,
                         [&](auto& columns, int first) { wgmma_load<kB, kNMajor, 2>(columns, shared, b, first); });
    });
  }

  template <WgmmaType, WgmmaType, bool, bool>
  static void mma_async(int (&)[kN / 2], unsigned long long, unsigned long long, int);  // left to a GPU
};

template <int kN>
struct WgmmaRs {
  template <WgmmaType kType, bool kNMajor>
  static void mma_async(float (&d)[kN / 2], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    struct Registers {
      unsigned words[4];
    };
    constexpr int kDepth = kWgmmaDepth<kType>, kInWord = kDepth / 8;  // elements
    struct Row {
      float values[2][kDepth];
    };
    emulation::Thread& thread = *emulation::machine.current;
    const unsigned char* const shared = thread.block->dynamic.data();
    const Registers* const all = emulation::exchange(Registers{{a[0], a[1], a[2], a[3]}});
    Row rows;  // the thread's two
    for (int r = 0; r < 2; ++r) {
      for (int k = 0; k < kDepth; ++k) {
        const int of_half = k % (kDepth / 2);
        const unsigned word = all[thread.number % 32 / 4 * 4 + of_half / kInWord].words[r + 2 * (k / (kDepth / 2))];
        const unsigned half = of_half % 2 ? word >> 16 : word & 0xffff;
        rows.values[r][k] = wgmma_value<kType>(kInWord == 2 ? half : word);
      }
    }
    thread.multiplies.start([=, &d, number = thread.number % 128] {
      wgmma_multiply<kN>(d, number, accumulate, rows.values,
                         [&](auto& columns, int first) { wgmma_load<kType, kNMajor, 2>(columns, shared, b, first); });
    });
  }
};

}  // namespace jaxdnn::ptx

#define JAXDNN_WGMMA(n)
#define JAXDNN_WGMMA_RS(n)
