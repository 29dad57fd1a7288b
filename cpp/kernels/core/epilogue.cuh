// What happens to a sum between the multiply's registers and memory: the epilogue's operands in, its results out.
//
// An epilogue is a functor that Python emits:
//
//   struct Epilogue {
//       static __device__ void apply(const float (&sum)[kSums], const float (&operand)[kOperands], const Place& place,
//                                    float (&result)[kResults]);
//   };
//
// Operands come widened exactly to float32, results leave rounded once to their own types. Each warp works on
// 16 rows x `kColumns` at a time: the operands are fetched 32 columns at a time, the functor runs on each element, and the
// results go out through the warp's own slots of shared memory and the copy engine, or straight to memory. No warp waits
// for another.
#pragma once

#include "core/barrier.cuh"
#include "core/tma.cuh"
#include "core/vector.cuh"
#include "core/wgmma.cuh"

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

struct ResultAddress {
    const TensorMap* map = nullptr;  // of boxes of 16 rows x kColumns, when the copy engine stores
    void* data = nullptr;            // else
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
                unsigned(&to)[kWords] = words[r][pair];
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
        const unsigned(&from)[kWords] = words[kRows ? r : 0][kColumns ? pair : 0];
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

/// Rounds one element of each result.
template <int kIndex, class Results>
__device__ __forceinline__ void store_results(const ResultAddress* addresses, long long offset, const float* values) {
    if constexpr (kIndex < Results::kCount) {
        using T = typename TypeAt<kIndex, Results>::Type;
        unsigned words[Packed<T>::kWords];
        Packed<T>::round(values[kIndex], 0.0f, words);
        T* const to = static_cast<T*>(addresses[kIndex].data) + offset;
        if constexpr (sizeof(T) == 2) {
            ptx::store_2(to, words);
        } else {
            ptx::store_4(to, words);
        }
        store_results<kIndex + 1, Results>(addresses, offset, values);
    }
}

/// One result's piece of 16 rows in shared memory, swizzled as its tensor map says: by 128 bytes, or by 64 when its rows
/// are that short.
template <class T, int kColumns>
struct ResultSlot {
    static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(T));
    static constexpr int kBytes = 16 * kRowBytes;
    static_assert(kRowBytes == 128 || kRowBytes == 64, "a row of a slot is as long as a swizzle's");

    static __device__ __forceinline__ unsigned place(int row, int chunk) {
        const int exchange = kRowBytes == 128 ? row & 7 : row >> 1 & 3;
        return row * kRowBytes + (chunk ^ exchange) * 16;
    }

    /// 16 columns: `values` are of two column pairs, two rows, two neighbours.
    static __device__ __forceinline__ void put(unsigned slot, int step, const float (&values)[2][2][2]) {
        const int lane = threadIdx.x % 32;
        if constexpr (sizeof(T) == 2) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned word[1];
                Packed<T>::round(values[i / 2][i % 2][0], values[i / 2][i % 2][1], word);
                words[i] = word[0];
            }
            ptx::store_matrices(slot + place(lane % 16, 2 * step + lane / 16), words);
        } else {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    unsigned words[2];
                    Packed<T>::round(values[pair][r][0], values[pair][r][1], words);
                    const unsigned address = slot + place(lane / 4 + 8 * r, 4 * step + 2 * pair + lane % 4 / 2);
                    ptx::store_shared_8(address + lane % 2 * 8, words[0], words[1]);
                }
            }
        }
    }
};

/// Writes 16 columns without the copy engine; `kPairs` says that pairs of columns are aligned.
template <class T, bool kPairs>
__device__ __forceinline__ void store_direct(T* matrix, int row, int column, int rows, int columns,
                                             const float (&values)[2][2][2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        T* const line = matrix + static_cast<long long>(row + 8 * r) * columns;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int first = column + 8 * pair;
            unsigned words[Packed<T>::kWords];
            Packed<T>::round(values[pair][r][0], values[pair][r][1], words);
            if (row + 8 * r >= rows || first >= columns) continue;
            if constexpr (sizeof(T) == 2) {
                if constexpr (kPairs) {
                    ptx::store_4(line + first, words);
                } else {
                    ptx::store_2(line + first, words);
                    words[0] >>= 16;
                    if (first + 1 < columns) ptx::store_2(line + first + 1, words);
                }
            } else if constexpr (kPairs) {
                ptx::store_8(line + first, words);
            } else {
                ptx::store_4(line + first, words);
                if (first + 1 < columns) ptx::store_4(line + first + 1, words + 1);
            }
        }
    }
}

/// The slots of one warp: `kSlots` of each result, one after the other.
template <class Results, int kColumns, int kSlots>
struct ResultSlots;
template <int kColumns, int kSlots>
struct ResultSlots<TypeList<>, kColumns, kSlots> {
    static constexpr int kBytes = 0;
};
template <int kColumns, int kSlots, class First, class... Rest>
struct ResultSlots<TypeList<First, Rest...>, kColumns, kSlots> {
    static constexpr int kBytes =
        kSlots * ResultSlot<First, kColumns>::kBytes + ResultSlots<TypeList<Rest...>, kColumns, kSlots>::kBytes;
};

/// The epilogue of a warp. Config has: Epilogue, Operands, Results, kSums, kStoreColumns, kSlots, kTensorStore,
/// kPairedStore.
template <class Config>
struct ResultWriter {
    using Operands = typename Config::Operands;
    using Results = typename Config::Results;
    static constexpr int kColumns = Config::kStoreColumns;
    static constexpr int kFetched = 32;  // columns of operands that wait in registers
    static constexpr int kOperands = Operands::kCount > 0 ? Operands::kCount : 1;
    static constexpr int kResults = Results::kCount;
    static constexpr int kSharedBytes = Config::kTensorStore ? ResultSlots<Results, kColumns, Config::kSlots>::kBytes : 0;

    const OperandAddress (&operands)[kOperands];
    const ResultAddress (&results)[kResults];
    int rows, columns;   // of a matrix
    unsigned slots;      // shared address of this warp's
    int slot = 0;

    /// Rows `row` .. `row + 15` of a tile. `sums` are the warp's registers: of one 64 x kWidth sum, or of two side by side.
    template <int kRegisters>
    __device__ __forceinline__ void write(const float (&sums)[kRegisters], int row, int column, int batch) {
        constexpr int kWidth = 2 * kRegisters / Config::kSums;
        static_assert(kWidth % kColumns == 0, "a tile is made of whole pieces");
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int piece = 0; piece < kWidth / kColumns; ++piece) {
            const int left = column + piece * kColumns;
            const int first = left + lane % 4 * 2;
            OperandPieces<0, Operands, kFetched / 8> values;
            if constexpr (Config::kTensorStore) {
                if (lane == 0) ptx::bulk_wait_read<Config::kSlots - 1>();
                ptx::warp_sync();
            }
#pragma unroll
            for (int step = 0; step < kColumns / 16; ++step) {
                if (step % (kFetched / 16) == 0) {
                    values.fetch(operands, row + lane / 4, first + step * 16, batch, rows, columns);
                }
                float out[kResults][2][2][2];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int pair = i / 4, r = i / 2 % 2, side = i % 2;
                    const int index = (piece * kColumns + step * 16 + pair * 8) / 2 + r * 2 + side;
                    float sum[Config::kSums], operand[kOperands], result[kResults];
#pragma unroll
                    for (int s = 0; s < Config::kSums; ++s) sum[s] = sums[s * (kWidth / 2) + index];
                    values.values(r, (step * 2 + pair) % (kFetched / 8), side, operand);
                    const Place place{row + lane / 4 + 8 * r, first + step * 16 + pair * 8 + side, batch};
                    Config::Epilogue::apply(sum, operand, place, result);
#pragma unroll
                    for (int j = 0; j < kResults; ++j) out[j][pair][r][side] = result[j];
                }
                put<0>(out, step, row + lane / 4, first + step * 16, batch);
            }
            if constexpr (Config::kTensorStore) {
                ptx::async_proxy_fence();
                ptx::warp_sync();
                if (lane == 0) {
                    send<0>(slots, left, row, batch);
                    ptx::bulk_commit();
                }
                slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
            }
        }
    }

private:
    template <int kResult>
    __device__ __forceinline__ void put(const float (&out)[kResults][2][2][2], int step, int row, int column, int batch,
                                        unsigned base = 0) const {
        if constexpr (kResult < kResults) {
            using T = typename TypeAt<kResult, Results>::Type;
            if constexpr (Config::kTensorStore) {
                using Slot = ResultSlot<T, kColumns>;
                Slot::put(slots + base + slot * Slot::kBytes, step, out[kResult]);
                put<kResult + 1>(out, step, row, column, batch, base + Config::kSlots * Slot::kBytes);
            } else {
                T* const matrix =
                    static_cast<T*>(results[kResult].data) + static_cast<long long>(batch) * rows * columns;
                store_direct<T, Config::kPairedStore>(matrix, row, column, rows, columns, out[kResult]);
                put<kResult + 1>(out, step, row, column, batch);
            }
        }
    }

    template <int kResult>
    __device__ __forceinline__ void send(unsigned base, int column, int row, int batch) const {
        if constexpr (kResult < kResults) {
            using Slot = ResultSlot<typename TypeAt<kResult, Results>::Type, kColumns>;
            ptx::tensor_store(results[kResult].map, base + slot * Slot::kBytes, column, row, batch);
            send<kResult + 1>(base + Config::kSlots * Slot::kBytes, column, row, batch);
        }
    }
};

}  // namespace jaxdnn
