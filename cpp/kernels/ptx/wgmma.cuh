// Warp group matrix multiply (wgmma): D (64 x N) += A (64 x K) * B (K x N), issued by 128 threads together; K is 32
// bytes. Also setmaxnreg, by which a warp group takes and gives registers.
//
// B is read from shared memory through a 64-bit descriptor (core/tile.cuh), as is A (`Wgmma`) unless it is in registers
// (`WgmmaRs`); the accumulator is in registers. Of 64 x N, thread t (warp w = t / 32, lane l = t % 32) holds, for
// j = 0 .. N/8-1:
//
//   d[4j], d[4j+1]      row 16w + l/4,        columns 8j + 2(l%4), + 1
//   d[4j+2], d[4j+3]    row 16w + l/4 + 8,    the same columns
//
// Columns 16i .. 16i+15 of an accumulator, rounded to 16 bits and packed in pairs, are so the registers of A for K of
// 16i .. 16i+15: a[r] is the pair of d[8i+2r], d[8i+2r+1]. Of tf32, A has column l%4 of 8 and column l%4 + 4 instead of
// neighbours: columns 8i .. 8i+7 of an accumulator are its registers for K in the order 0, 2, 4, 6, 1, 3, 5, 7.
#pragma once

namespace jaxdnn::ptx {

/// Gives registers of this warp group back: `kCount` a thread from here on.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// Takes registers, and waits until there are so many.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// Orders earlier accesses of registers and shared memory before the multiplies that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most `kPending` groups of multiplies are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of an accumulator across this point: it can't know that multiplies run behind
/// its back.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(int (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

/// What is multiplied. float32 elements are cut to tf32.
enum class WgmmaType { bf16, f16, tf32, e4m3, e5m2, s8 };

/// Multiplies of `kN` columns. `accumulate` of 0 starts anew: D = A * B. `kMMajor` and `kNMajor`: the operand's rows in
/// memory run along M or N instead of K, which only 16-bit elements allow. Accumulators of int8 are int32, and wrap.
template <int kN>
struct Wgmma;

/// Multiplies of `kN` columns by A in registers, of 16-bit elements or of tf32.
template <int kN>
struct WgmmaRs;

// Operand lists of many registers: registers 10t .. 10t+9 (t is left out for 0), the first few of them, and 0 .. 10t-1.
#define JAXDNN_TEXT2(t) "%" #t "0, %" #t "1"
#define JAXDNN_TEXT4(t) JAXDNN_TEXT2(t) ", %" #t "2, %" #t "3"
#define JAXDNN_TEXT6(t) JAXDNN_TEXT4(t) ", %" #t "4, %" #t "5"
#define JAXDNN_TEXT8(t) JAXDNN_TEXT6(t) ", %" #t "6, %" #t "7"
#define JAXDNN_TEXT10(t) JAXDNN_TEXT8(t) ", %" #t "8, %" #t "9"
#define JAXDNN_LIST2(c, t) c(d[t##0]), c(d[t##1])
#define JAXDNN_LIST4(c, t) JAXDNN_LIST2(c, t), c(d[t##2]), c(d[t##3])
#define JAXDNN_LIST6(c, t) JAXDNN_LIST4(c, t), c(d[t##4]), c(d[t##5])
#define JAXDNN_LIST8(c, t) JAXDNN_LIST6(c, t), c(d[t##6]), c(d[t##7])
#define JAXDNN_LIST10(c, t) JAXDNN_LIST8(c, t), c(d[t##8]), c(d[t##9])
#define JAXDNN_TEXT_TO_30 JAXDNN_TEXT10() ", " JAXDNN_TEXT10(1) ", " JAXDNN_TEXT10(2)
#define JAXDNN_LIST_TO_30(c) JAXDNN_LIST10(c, ), JAXDNN_LIST10(c, 1), JAXDNN_LIST10(c, 2)
#define JAXDNN_TEXT_TO_60 JAXDNN_TEXT_TO_30 ", " JAXDNN_TEXT10(3) ", " JAXDNN_TEXT10(4) ", " JAXDNN_TEXT10(5)
#define JAXDNN_LIST_TO_60(c) JAXDNN_LIST_TO_30(c), JAXDNN_LIST10(c, 3), JAXDNN_LIST10(c, 4), JAXDNN_LIST10(c, 5)
#define JAXDNN_TEXT_TO_90 JAXDNN_TEXT_TO_60 ", " JAXDNN_TEXT10(6) ", " JAXDNN_TEXT10(7) ", " JAXDNN_TEXT10(8)
#define JAXDNN_LIST_TO_90(c) JAXDNN_LIST_TO_60(c), JAXDNN_LIST10(c, 6), JAXDNN_LIST10(c, 7), JAXDNN_LIST10(c, 8)
#define JAXDNN_TEXT_TO_110 JAXDNN_TEXT_TO_90 ", " JAXDNN_TEXT10(9) ", " JAXDNN_TEXT10(10)
#define JAXDNN_LIST_TO_110(c) JAXDNN_LIST_TO_90(c), JAXDNN_LIST10(c, 9), JAXDNN_LIST10(c, 10)

// The registers of N columns.
#define JAXDNN_TEXT_OF_8 JAXDNN_TEXT4()
#define JAXDNN_LIST_OF_8(c) JAXDNN_LIST4(c, )
#define JAXDNN_TEXT_OF_16 JAXDNN_TEXT8()
#define JAXDNN_LIST_OF_16(c) JAXDNN_LIST8(c, )
#define JAXDNN_TEXT_OF_32 JAXDNN_TEXT10() ", " JAXDNN_TEXT6(1)
#define JAXDNN_LIST_OF_32(c) JAXDNN_LIST10(c, ), JAXDNN_LIST6(c, 1)
#define JAXDNN_TEXT_OF_48 JAXDNN_TEXT10() ", " JAXDNN_TEXT10(1) ", " JAXDNN_TEXT4(2)
#define JAXDNN_LIST_OF_48(c) JAXDNN_LIST10(c, ), JAXDNN_LIST10(c, 1), JAXDNN_LIST4(c, 2)
#define JAXDNN_TEXT_OF_64 JAXDNN_TEXT_TO_30 ", " JAXDNN_TEXT2(3)
#define JAXDNN_LIST_OF_64(c) JAXDNN_LIST_TO_30(c), JAXDNN_LIST2(c, 3)
#define JAXDNN_TEXT_OF_80 JAXDNN_TEXT_TO_30 ", " JAXDNN_TEXT10(3)
#define JAXDNN_LIST_OF_80(c) JAXDNN_LIST_TO_30(c), JAXDNN_LIST10(c, 3)
#define JAXDNN_TEXT_OF_96 JAXDNN_TEXT_TO_30 ", " JAXDNN_TEXT10(3) ", " JAXDNN_TEXT8(4)
#define JAXDNN_LIST_OF_96(c) JAXDNN_LIST_TO_30(c), JAXDNN_LIST10(c, 3), JAXDNN_LIST8(c, 4)
#define JAXDNN_TEXT_OF_112 JAXDNN_TEXT_TO_30 ", " JAXDNN_TEXT10(3) ", " JAXDNN_TEXT10(4) ", " JAXDNN_TEXT6(5)
#define JAXDNN_LIST_OF_112(c) JAXDNN_LIST_TO_30(c), JAXDNN_LIST10(c, 3), JAXDNN_LIST10(c, 4), JAXDNN_LIST6(c, 5)
#define JAXDNN_TEXT_OF_128 JAXDNN_TEXT_TO_60 ", " JAXDNN_TEXT4(6)
#define JAXDNN_LIST_OF_128(c) JAXDNN_LIST_TO_60(c), JAXDNN_LIST4(c, 6)
#define JAXDNN_TEXT_OF_144 JAXDNN_TEXT_TO_60 ", " JAXDNN_TEXT10(6) ", " JAXDNN_TEXT2(7)
#define JAXDNN_LIST_OF_144(c) JAXDNN_LIST_TO_60(c), JAXDNN_LIST10(c, 6), JAXDNN_LIST2(c, 7)
#define JAXDNN_TEXT_OF_160 JAXDNN_TEXT_TO_60 ", " JAXDNN_TEXT10(6) ", " JAXDNN_TEXT10(7)
#define JAXDNN_LIST_OF_160(c) JAXDNN_LIST_TO_60(c), JAXDNN_LIST10(c, 6), JAXDNN_LIST10(c, 7)
#define JAXDNN_TEXT_OF_176 JAXDNN_TEXT_TO_60 ", " JAXDNN_TEXT10(6) ", " JAXDNN_TEXT10(7) ", " JAXDNN_TEXT8(8)
#define JAXDNN_LIST_OF_176(c) JAXDNN_LIST_TO_60(c), JAXDNN_LIST10(c, 6), JAXDNN_LIST10(c, 7), JAXDNN_LIST8(c, 8)
#define JAXDNN_TEXT_OF_192 JAXDNN_TEXT_TO_90 ", " JAXDNN_TEXT6(9)
#define JAXDNN_LIST_OF_192(c) JAXDNN_LIST_TO_90(c), JAXDNN_LIST6(c, 9)
#define JAXDNN_TEXT_OF_208 JAXDNN_TEXT_TO_90 ", " JAXDNN_TEXT10(9) ", " JAXDNN_TEXT4(10)
#define JAXDNN_LIST_OF_208(c) JAXDNN_LIST_TO_90(c), JAXDNN_LIST10(c, 9), JAXDNN_LIST4(c, 10)
#define JAXDNN_TEXT_OF_224 JAXDNN_TEXT_TO_110 ", " JAXDNN_TEXT2(11)
#define JAXDNN_LIST_OF_224(c) JAXDNN_LIST_TO_110(c), JAXDNN_LIST2(c, 11)
#define JAXDNN_TEXT_OF_240 JAXDNN_TEXT_TO_110 ", " JAXDNN_TEXT10(11)
#define JAXDNN_LIST_OF_240(c) JAXDNN_LIST_TO_110(c), JAXDNN_LIST10(c, 11)
#define JAXDNN_TEXT_OF_256 JAXDNN_TEXT_TO_110 ", " JAXDNN_TEXT10(11) ", " JAXDNN_TEXT8(12)
#define JAXDNN_LIST_OF_256(c) JAXDNN_LIST_TO_110(c), JAXDNN_LIST10(c, 11), JAXDNN_LIST8(c, 12)

// a, b, p, s, t: the numbers of the operands that follow the registers.
#define JAXDNN_ISSUE(n, k, types, a, b, p)                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n k types \
               " {" JAXDNN_TEXT_OF_##n "}, %" #a ", %" #b ", p, 1, 1;\n}"                                   \
               : JAXDNN_LIST_OF_##n("+f")                                                                   \
               : "l"(a_tile), "l"(b_tile), "r"(accumulate))
#define JAXDNN_ISSUE_16(n, types, a, b, p, s, t)                                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16" types \
               " {" JAXDNN_TEXT_OF_##n "}, %" #a ", %" #b ", p, 1, 1, %" #s ", %" #t ";\n}"                     \
               : JAXDNN_LIST_OF_##n("+f")                                                                       \
               : "l"(a_tile), "l"(b_tile), "r"(accumulate), "n"(kMMajor ? 1 : 0), "n"(kNMajor ? 1 : 0))

#define JAXDNN_ISSUE_INT8(n, a, b, p)                                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k32.s32.s8.s8 {" JAXDNN_TEXT_OF_##n "}, %" #a ", %" #b ", p;\n}"                    \
               : JAXDNN_LIST_OF_##n("+r")                                                           \
               : "l"(a_tile), "l"(b_tile), "r"(accumulate))

#define JAXDNN_SPECIALIZE_WGMMA(n, a, b, p, s, t)                                                  \
  template <>                                                                                      \
  struct jaxdnn::ptx::Wgmma<n> {                                                                   \
    template <WgmmaType kA, WgmmaType kB, bool kMMajor, bool kNMajor>                              \
    static __device__ __forceinline__ void mma_async(float (&d)[n / 2], unsigned long long a_tile, \
                                                     unsigned long long b_tile, int accumulate) {  \
      if constexpr (kA == WgmmaType::bf16 && kB == WgmmaType::bf16) {                              \
        JAXDNN_ISSUE_16(n, ".f32.bf16.bf16", a, b, p, s, t);                                       \
      } else if constexpr (kA == WgmmaType::f16 && kB == WgmmaType::f16) {                         \
        JAXDNN_ISSUE_16(n, ".f32.f16.f16", a, b, p, s, t);                                         \
      } else if constexpr (kA == WgmmaType::tf32 && kB == WgmmaType::tf32) {                       \
        JAXDNN_ISSUE(n, "k8", ".f32.tf32.tf32", a, b, p);                                          \
      } else if constexpr (kA == WgmmaType::e4m3 && kB == WgmmaType::e4m3) {                       \
        JAXDNN_ISSUE(n, "k32", ".f32.e4m3.e4m3", a, b, p);                                         \
      } else if constexpr (kA == WgmmaType::e4m3 && kB == WgmmaType::e5m2) {                       \
        JAXDNN_ISSUE(n, "k32", ".f32.e4m3.e5m2", a, b, p);                                         \
      } else if constexpr (kA == WgmmaType::e5m2 && kB == WgmmaType::e4m3) {                       \
        JAXDNN_ISSUE(n, "k32", ".f32.e5m2.e4m3", a, b, p);                                         \
      } else {                                                                                     \
        static_assert(kA == WgmmaType::e5m2 && kB == WgmmaType::e5m2, "no such instruction");      \
        JAXDNN_ISSUE(n, "k32", ".f32.e5m2.e5m2", a, b, p);                                         \
      }                                                                                            \
    }                                                                                              \
                                                                                                   \
    template <WgmmaType kA, WgmmaType kB, bool, bool>                                              \
    static __device__ __forceinline__ void mma_async(int (&d)[n / 2], unsigned long long a_tile,   \
                                                     unsigned long long b_tile, int accumulate) {  \
      static_assert(kA == WgmmaType::s8 && kB == WgmmaType::s8, "no such instruction");            \
      JAXDNN_ISSUE_INT8(n, a, b, p);                                                               \
    }                                                                                              \
  }

// u, v, w, x: the numbers of A's registers; b, p, t: of what follows them.
#define JAXDNN_ISSUE_RS(n, types, u, v, w, x, b, p, t)                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16" types \
               " {" JAXDNN_TEXT_OF_##n "}, {%" #u ", %" #v ", %" #w ", %" #x "}, %" #b ", p, 1, 1, %" #t ";\n}" \
               : JAXDNN_LIST_OF_##n("+f")                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(accumulate), "n"(kNMajor ? 1 : 0))

// Of tf32, which has no choice of layouts.
#define JAXDNN_ISSUE_RS_TF32(n, u, v, w, x, b, p)                                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                    \
               "k8.f32.tf32.tf32 {" JAXDNN_TEXT_OF_##n "}, {%" #u ", %" #v ", %" #w ", %" #x "}, %" #b ", p, 1, 1;\n}" \
               : JAXDNN_LIST_OF_##n("+f")                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(accumulate))

#define JAXDNN_SPECIALIZE_WGMMA_RS(n, u, v, w, x, b, p, t)                                        \
  template <>                                                                                     \
  struct jaxdnn::ptx::WgmmaRs<n> {                                                                \
    template <WgmmaType kType, bool kNMajor>                                                      \
    static __device__ __forceinline__ void mma_async(float (&d)[n / 2], const unsigned (&a)[4],   \
                                                     unsigned long long b_tile, int accumulate) { \
      if constexpr (kType == WgmmaType::bf16) {                                                   \
        JAXDNN_ISSUE_RS(n, ".f32.bf16.bf16", u, v, w, x, b, p, t);                                \
      } else if constexpr (kType == WgmmaType::tf32) {                                            \
        static_assert(!kNMajor, "rows of B run along K");                                         \
        JAXDNN_ISSUE_RS_TF32(n, u, v, w, x, b, p);                                                \
      } else {                                                                                    \
        static_assert(kType == WgmmaType::f16, "no such instruction");                            \
        JAXDNN_ISSUE_RS(n, ".f32.f16.f16", u, v, w, x, b, p, t);                                  \
      }                                                                                           \
    }                                                                                             \
  }

}  // namespace jaxdnn::ptx

#define JAXDNN_WGMMA_8 JAXDNN_SPECIALIZE_WGMMA(8, 4, 5, 6, 7, 8)
#define JAXDNN_WGMMA_16 JAXDNN_SPECIALIZE_WGMMA(16, 8, 9, 10, 11, 12)
#define JAXDNN_WGMMA_32 JAXDNN_SPECIALIZE_WGMMA(32, 16, 17, 18, 19, 20)
#define JAXDNN_WGMMA_48 JAXDNN_SPECIALIZE_WGMMA(48, 24, 25, 26, 27, 28)
#define JAXDNN_WGMMA_64 JAXDNN_SPECIALIZE_WGMMA(64, 32, 33, 34, 35, 36)
#define JAXDNN_WGMMA_80 JAXDNN_SPECIALIZE_WGMMA(80, 40, 41, 42, 43, 44)
#define JAXDNN_WGMMA_96 JAXDNN_SPECIALIZE_WGMMA(96, 48, 49, 50, 51, 52)
#define JAXDNN_WGMMA_112 JAXDNN_SPECIALIZE_WGMMA(112, 56, 57, 58, 59, 60)
#define JAXDNN_WGMMA_128 JAXDNN_SPECIALIZE_WGMMA(128, 64, 65, 66, 67, 68)
#define JAXDNN_WGMMA_144 JAXDNN_SPECIALIZE_WGMMA(144, 72, 73, 74, 75, 76)
#define JAXDNN_WGMMA_160 JAXDNN_SPECIALIZE_WGMMA(160, 80, 81, 82, 83, 84)
#define JAXDNN_WGMMA_176 JAXDNN_SPECIALIZE_WGMMA(176, 88, 89, 90, 91, 92)
#define JAXDNN_WGMMA_192 JAXDNN_SPECIALIZE_WGMMA(192, 96, 97, 98, 99, 100)
#define JAXDNN_WGMMA_208 JAXDNN_SPECIALIZE_WGMMA(208, 104, 105, 106, 107, 108)
#define JAXDNN_WGMMA_224 JAXDNN_SPECIALIZE_WGMMA(224, 112, 113, 114, 115, 116)
#define JAXDNN_WGMMA_240 JAXDNN_SPECIALIZE_WGMMA(240, 120, 121, 122, 123, 124)
#define JAXDNN_WGMMA_256 JAXDNN_SPECIALIZE_WGMMA(256, 128, 129, 130, 131, 132)

#define JAXDNN_WGMMA_RS_32 JAXDNN_SPECIALIZE_WGMMA_RS(32, 16, 17, 18, 19, 20, 21, 22)
#define JAXDNN_WGMMA_RS_64 JAXDNN_SPECIALIZE_WGMMA_RS(64, 32, 33, 34, 35, 36, 37, 38)
#define JAXDNN_WGMMA_RS_80 JAXDNN_SPECIALIZE_WGMMA_RS(80, 40, 41, 42, 43, 44, 45, 46)
#define JAXDNN_WGMMA_RS_96 JAXDNN_SPECIALIZE_WGMMA_RS(96, 48, 49, 50, 51, 52, 53, 54)
#define JAXDNN_WGMMA_RS_112 JAXDNN_SPECIALIZE_WGMMA_RS(112, 56, 57, 58, 59, 60, 61, 62)
#define JAXDNN_WGMMA_RS_128 JAXDNN_SPECIALIZE_WGMMA_RS(128, 64, 65, 66, 67, 68, 69, 70)
#define JAXDNN_WGMMA_RS_160 JAXDNN_SPECIALIZE_WGMMA_RS(160, 80, 81, 82, 83, 84, 85, 86)
#define JAXDNN_WGMMA_RS_176 JAXDNN_SPECIALIZE_WGMMA_RS(176, 88, 89, 90, 91, 92, 93, 94)
#define JAXDNN_WGMMA_RS_192 JAXDNN_SPECIALIZE_WGMMA_RS(192, 96, 97, 98, 99, 100, 101, 102)
#define JAXDNN_WGMMA_RS_224 JAXDNN_SPECIALIZE_WGMMA_RS(224, 112, 113, 114, 115, 116, 117, 118)
#define JAXDNN_WGMMA_RS_256 JAXDNN_SPECIALIZE_WGMMA_RS(256, 128, 129, 130, 131, 132, 133, 134)

/// Defines the multiplies of `n` columns. A unit does this for those that it uses, before it uses them: the compiler
/// takes longer to read the instructions of all widths than everything else of a unit.
#define JAXDNN_WGMMA(n) JAXDNN_WGMMA_##n
#define JAXDNN_WGMMA_RS(n) JAXDNN_WGMMA_RS_##n
