// Sums over the threads that share a row: lanes of a warp, warps of a block, blocks of a cluster.
//
//   lanes      butterfly shuffles; every lane ends with the same bits, because each step adds the same two numbers
//   warps      each warp's sum goes to a slot in shared memory; one barrier; every warp adds all slots
//   blocks     the same, but each warp writes its slot in the shared memory of every block of the cluster
//
// Slots exist twice and alternate, so one barrier a reduction is enough: a slot is written again two reductions later,
// and by then the barrier between has been passed only after everybody's reads.
// The order of additions depends on the launch's shape alone, so results are the same bits on every run.
#pragma once

#include "core/ptx.cuh"

namespace jaxdnn {

/// Sum over aligned runs of `kWidth` lanes (a power of two up to 32).
template <int kWidth, class Compute>
__device__ __forceinline__ Compute lanes_sum(Compute value) {
#pragma unroll
    for (int mask = kWidth / 2; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
    return value;
}

/// Sums over a team of `kThreads` threads in each of `kCluster` blocks; a block holds `kTeams` teams.
/// All threads of a block call it together. With a cluster, `kTeams` is 1 and `start` precedes the first sum.
template <class Compute, int kThreads, int kTeams, int kCluster, int kValues>
struct TeamSum {
    static constexpr int kWarps = kThreads <= 32 ? 1 : kThreads / 32;
    static constexpr int kSlots = kWarps * kCluster;
    static constexpr int kBytes = static_cast<int>(sizeof(Compute));
    static constexpr int kValueBytes = kTeams * kSlots * kBytes;
    static constexpr int kPhaseBytes = kSlots > 1 ? kValues * kValueBytes : 0;
    static constexpr int kSharedBytes = 2 * kPhaseBytes;
    static_assert(kCluster == 1 || kTeams == 1, "the blocks of a cluster share one row");
    static_assert(kWarps == 1 || kTeams <= 15, "each team of several warps has a barrier of its own");

    unsigned slots;  // shared address of this team's first slot in this phase
    int phase = 0;

    __device__ __forceinline__ TeamSum(unsigned shared, int team)
        : slots(shared + team * kSlots * kBytes) {}

    /// No block writes to another before that one runs.
    __device__ __forceinline__ void start() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (kCluster > 1) {
            ptx::cluster_arrive();
            ptx::cluster_wait();
        }
#endif
    }

    __device__ __forceinline__ void operator()(Compute (&values)[kValues]) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] = lanes_sum<(kThreads < 32 ? kThreads : 32)>(values[i]);
        if constexpr (kSlots > 1) {
            const int lane = threadIdx.x % 32;
            const int warp = threadIdx.x % kThreads / 32;
            const unsigned first = slots + phase * kPhaseBytes;
            if constexpr (kCluster == 1) {
                if (lane == 0) {
#pragma unroll
                    for (int i = 0; i < kValues; ++i) ptx::store_shared(first + i * kValueBytes + warp * kBytes, values[i]);
                }
                ptx::barrier(1 + threadIdx.x / kThreads, kThreads);
            } else {
#if __CUDA_ARCH__ >= 900
                if (lane < kCluster) {
                    const unsigned slot = ptx::cluster_rank() * kWarps + warp;
                    const unsigned address = first + slot * kBytes;
#pragma unroll
                    for (int i = 0; i < kValues; ++i) {
                        ptx::store_cluster(ptx::address_in_block(address + i * kValueBytes, lane), values[i]);
                    }
                }
                ptx::cluster_arrive();
                ptx::cluster_wait();
#endif
            }
            constexpr int kWidth = kSlots < 32 ? kSlots : 32;
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                const unsigned mine = first + i * kValueBytes + lane % kWidth * kBytes;
                Compute sum = ptx::load_shared<Compute>(mine);
#pragma unroll
                for (int slot = kWidth; slot < kSlots; slot += kWidth) {
                    sum += ptx::load_shared<Compute>(mine + slot * kBytes);
                }
                values[i] = lanes_sum<kWidth>(sum);
            }
            phase ^= 1;
        }
    }
};

}  // namespace jaxdnn
