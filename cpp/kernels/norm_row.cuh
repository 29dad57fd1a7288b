// Which rows and columns a thread of the norm kernels owns.
//
// A row belongs to a team: `kThreadsPerRow` threads in each of `parts` blocks. A block holds `kRowsPerBlock` teams, and
// teams stride over the rows of one group. Within a row, part `rank` is `slice` columns, and each thread owns `kVectors`
// vectors of `kVector` columns, which lie a team's width apart so that a warp's access is contiguous:
//
//   slice:   | vector 0: thread 0, thread 1, ... | vector 1: thread 0, thread 1, ... | ... (the end may be masked)
//
// Almost always there is one part. Rows too wide for one block, and few wide rows, have several: the blocks of a
// cluster, which add their sums through distributed shared memory (`Step::whole`), or unrelated blocks of two launches,
// of which the first writes each part's sums to memory (`Step::measure`) and the second reads them (`Step::apply`).
#pragma once

#include "core/vector.cuh"

namespace jaxdnn {

enum class Step { whole, measure, apply };

template <class Config>
struct RowTeam {
    static constexpr int kThreads = Config::kThreadsPerRow * Config::kRowsPerBlock;
    static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is 1 to 32 whole warps");
    static_assert(Config::kStep == Step::whole || Config::kRowsPerBlock == 1, "a part of a row has a block of its own");

    int lane;              // this thread in its part of the team
    int team;              // this team in its block
    int rank;              // this block's part of the row
    int first;             // this thread's first column
    int end;               // the first column after this block's slice
    long long group;       // the group of rows this block works on
    long long block;       // this block, with those of the other parts, among the blocks of its group
    long long row_stride;  // rows between two that one team works on

    __device__ __forceinline__ RowTeam(int columns, int slice, int parts, int blocks_per_group) {
        lane = threadIdx.x % Config::kThreadsPerRow;
        team = threadIdx.x / Config::kThreadsPerRow;
        rank = static_cast<int>(blockIdx.x % parts);
        first = rank * slice + lane * Config::kVector;
        end = (rank + 1) * slice < columns ? (rank + 1) * slice : columns;
        const unsigned unit = blockIdx.x / parts;
        group = Config::kGrouped ? unit / blocks_per_group : 0;
        block = Config::kGrouped ? unit % blocks_per_group : unit;
        row_stride = static_cast<long long>(blocks_per_group) * Config::kRowsPerBlock;
    }

    /// Where this thread's vector `v` begins.
    __device__ __forceinline__ int column(int v) const {
        return first + v * (Config::kThreadsPerRow * Config::kVector);
    }

    /// Whether vector `v` lies in the slice. Vectors never straddle its end: `kVector` divides `slice` and the columns.
    __device__ __forceinline__ bool holds(int v) const { return column(v) < end; }
};

/// The columns of a parameter that a thread owns: kept in registers for all its rows, or read again for each row.
template <class T, class Config, bool kPresent>
struct Parameter {
    const T* source = nullptr;
    Vector<T, Config::kVector> kept[kPresent && Config::kParametersInRegisters ? Config::kVectors : 1];

    __device__ __forceinline__ Parameter(const T* array, const RowTeam<Config>& row) : source(array) {
        if constexpr (kPresent && Config::kParametersInRegisters) {
#pragma unroll
            for (int v = 0; v < Config::kVectors; ++v) {
                kept[v].clear();
                if (row.holds(v)) kept[v].load(source + row.column(v));
            }
        }
    }

    template <class Compute>
    __device__ __forceinline__ void get(const RowTeam<Config>& row, int v, Compute (&values)[Config::kVector]) const {
        if constexpr (kPresent && Config::kParametersInRegisters) {
            // Opaque to the compiler, which would otherwise widen all of them ahead of the loop over rows, and spill.
            Vector<T, Config::kVector> vector = kept[v];
            vector.keep_packed();
            vector.unpack(values);
        } else if constexpr (kPresent) {
            Vector<T, Config::kVector> vector;
            vector.clear();
            if (row.holds(v)) vector.load(source + row.column(v));
            vector.unpack(values);
        }
    }
};

}  // namespace jaxdnn
