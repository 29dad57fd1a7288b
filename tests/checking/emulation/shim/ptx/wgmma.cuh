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

/// An operand's element by its place along M or N, and along K, as core/tile.cuh says how the descriptor's tile lies.
template <WgmmaType kType, bool kAlongExtent>
float wgmma_element(const unsigned char* shared, unsigned long long tile, int at, int k) {
  constexpr int kItem = 32 / kWgmmaDepth<kType>;
  const unsigned start = (tile & 0x3fff) << 4, chunk = (tile >> 16 & 0x3fff) << 4, group = (tile >> 32 & 0x3fff) << 4;
  const int bytes = 256 >> (tile >> 62);  // of a line
  const int line = kAlongExtent ? k : at, element = kAlongExtent ? at : k;
  unsigned address = start + line / 8 * group + line % 8 * bytes + element % (bytes / kItem) * kItem;
  if (kAlongExtent) address += element / (bytes / kItem) * chunk;
  address ^= (address >> 7) % (bytes / 16) << 4;
  unsigned bits = 0;
  std::memcpy(&bits, shared + address, kItem);
  return wgmma_value<kType>(bits);
}

/// d += a * b of so many along K, of the elements that this thread has of an accumulator: of each 8 columns 2, in 2
/// rows.
template <int kN, int kDepth, class A, class B>
void wgmma_multiply(float (&d)[kN / 2], unsigned thread, bool accumulate, A a, B b) {
  float rows[2][kDepth], column[kDepth];
  for (int r = 0; r < 2; ++r) {
    for (int k = 0; k < kDepth; ++k) rows[r][k] = a(thread / 32 * 16 + thread % 32 / 4 + 8 * r, k);
  }
  for (int i = 0; i < kN / 4; ++i) {
    for (int k = 0; k < kDepth; ++k) column[k] = b(k, i / 2 * 8 + thread % 4 * 2 + i % 2);
    for (int r = 0; r < 2; ++r) {
      float& element = d[i / 2 * 4 + 2 * r + i % 2];
      float sum = accumulate ? element : 0;
      for (int k = 0; k < kDepth; ++k) sum += rows[r][k] * column[k];
      element = sum;
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
      wgmma_multiply<kN, kWgmmaDepth<kA>>(
          d, number, accumulate, [&](int row, int k) { return wgmma_element<kA, kMMajor>(shared, a, row, k); },
          [&](int k, int column) { return wgmma_element<kB, kNMajor>(shared, b, column, k); });
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
      wgmma_multiply<kN, kDepth>(
          d, number, accumulate, [&](int row, int k) { return rows.values[row / 8 % 2][k]; },
          [&](int k, int column) { return wgmma_element<kType, kNMajor>(shared, b, column, k); });
    });
  }
};

}  // namespace jaxdnn::ptx

#define JAXDNN_WGMMA(n)
#define JAXDNN_WGMMA_RS(n)
