// ptx/mma.cuh on the CPU.
#pragma once

#include "launch.h"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace jaxdnn::ptx {

/// c += a * b of a warp's 16 x 8 accumulators, from everybody's factors: `a_at(row, k)` and `b_at(k, column)`.
template <int kDepth, class Accumulator, class A, class B>
void multiply_warp(Accumulator (&c)[4], A a_at, B b_at) {
  const int g = emulation::machine.current->number % 32 / 4, t = emulation::machine.current->number % 4;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < kDepth; ++k) c[i] += a_at(g + i / 2 * 8, k) * b_at(k, 2 * t + i % 2);
  }
}

inline void mma_m16n8k4_f64(double (&c)[4], const double (&a)[2], double b) {
  struct Factors {
    double a[2], b;
  };
  const Factors* const all = emulation::exchange(Factors{{a[0], a[1]}, b});
  multiply_warp<4>(
      c, [&](int row, int k) { return all[row % 8 * 4 + k].a[row / 8]; },
      [&](int k, int column) { return all[column * 4 + k].b; });
}

/// Fails where a factor has more digits than tf32.
inline void mma_m16n8k8_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  struct Factors {
    float a[4], b[2];
  };
  const Factors* const all = emulation::exchange(Factors{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto checked = [](float value) {
    if (value == value && mov_b32(value) & 0x1fff) emulation::fail("multiplies %g, which is no tf32", value);
    return value;
  };
  multiply_warp<8>(
      c, [&](int row, int k) { return checked(all[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]); },
      [&](int k, int column) { return checked(all[column * 4 + k % 4].b[k / 4]); });
}

template <class Widen>
void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], Widen widen) {
  struct Factors {
    unsigned a[4], b[2];
  };
  const Factors* const all = emulation::exchange(Factors{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto half = [&](unsigned pair, int i) { return widen(i % 2 ? pair >> 16 : pair & 0xffff); };
  multiply_warp<16>(
      c, [&](int row, int k) { return half(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k); },
      [&](int k, int column) { return half(all[column * 4 + k % 8 / 2].b[k / 8], k); });
}

inline void mma_m16n8k16_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  mma_m16n8k16(c, a, b, [](unsigned bits) { return mov_f32(bits << 16); });
}

inline void mma_m16n8k16_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  mma_m16n8k16(c, a, b, cvt_f32_f16);
}

template <bool kTransposed>
void ldmatrix_x4(unsigned (&words)[4], unsigned address) {
  const unsigned* const rows = emulation::exchange(address);
  const int g = emulation::machine.current->number % 32 / 4, t = emulation::machine.current->number % 4;
  for (int matrix = 0; matrix < 4; ++matrix) {
    words[matrix] = 0;
    for (int i = 0; i < 2; ++i) {
      const int row = kTransposed ? 2 * t + i : g, column = kTransposed ? g : 2 * t + i;
      unsigned short element;
      std::memcpy(&element, shared_bytes<16>(rows[matrix * 8 + row]) + 2 * column, sizeof(element));
      words[matrix] |= static_cast<unsigned>(element) << 16 * i;
    }
  }
}

template <bool kTransposed>
void stmatrix_x4(unsigned address, const unsigned (&words)[4]) {
  const unsigned* const rows = emulation::exchange(address);
  const int g = emulation::machine.current->number % 32 / 4, t = emulation::machine.current->number % 4;
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int i = 0; i < 2; ++i) {
      const int row = kTransposed ? 2 * t + i : g, column = kTransposed ? g : 2 * t + i;
      const unsigned short element = words[matrix] >> 16 * i;
      std::memcpy(shared_bytes<16>(rows[matrix * 8 + row]) + 2 * column, &element, sizeof(element));
    }
  }
}

}  // namespace jaxdnn::ptx
