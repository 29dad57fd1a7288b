// layer_norm and rms_norm, forward: y, and on request x + residual and the statistics, in one pass over the rows.
//
//   block            kRowsPerBlock rows at a time, of kThreadsPerRow threads each
//                    (norm/direct/row.cuh)
//   splits           of a very wide row, one a block: of a cluster, or in two launches (norm/direct/row.cuh)
//   warps            all alike: every thread copies, reduces and stores its own columns; there are no roles
//
//   timeline of one thread (kStages > 0):
//     fetch row 0 .. row kStages-1 | wait row 0 | read it | fetch row kStages | moments | write y | wait row 1 ...
//   With kStages == 0 rows are loaded straight into registers, and other blocks of the multiprocessor hide the latency:
//     load row | ask for a later block's row | load parameters | moments | parameters ahead, write y
//   What they can't hide, L2 does: each block asks it for the rows of the block kPrefetch later (one bulk prefetch by
//   one thread), so that about 4 MiB of rows are on their way, in the order of the blocks, whatever the blocks that
//   run now are waiting for.
//
//   barriers         one a row of several warps (barrier 1 + row, kThreadsPerRow threads), or an mbarrier of each block
//                    of a cluster (core/reduce.cuh); two where some threads have fewer columns than others, and the
//                    mean must come before the deviations; none when a row is a warp's or less
//   shared memory    | slots of the sums, two phases | scale | bias | ring of x | ring of residual |
//   registers        the row stays packed in its own type from the first pass to the last; scale and bias too, where
//                    there is room. Else they come from the L1 cache, which keeps them from block to block, kAhead
//                    vectors before their use.
//
// Bytes: x (and residual) read once, y (and sum) written once; statistics and parameters are negligible.
// Flops: about 8 an element. Memory bounds it: 3.7 to 4.1 TB/s on an H200, whose copy reaches 4.25
// (benchmarks/results/norm_kernels.md).
#pragma once

#include "core/pipeline_async.cuh"
#include "core/reduce.cuh"
#include "norm/direct/row.cuh"

namespace jaxdnn {

/// Pointers of arrays that a call does not have are null, and strides of arrays that all groups share are zero.
template <class Config>
struct NormForward {
  const typename Config::X* x = nullptr;
  const typename Config::Residual* residual = nullptr;
  const typename Config::Scale* scale = nullptr;
  const typename Config::Bias* bias = nullptr;
  typename Config::Y* y = nullptr;
  typename Config::Sum* sum = nullptr;
  typename Config::Compute* mean = nullptr;
  typename Config::Compute* rstd = nullptr;
  typename Config::Compute* moments = nullptr;  // [group, row, split, 2] between the two steps
  // Elements between two groups; the results' groups are dense.
  long long x_stride = 0, residual_stride = 0, scale_stride = 0, bias_stride = 0;
  long long rows = 0;  // of one group
  int columns = 0;
  int slice = 0;             // columns of one split of a row
  int blocks_per_group = 0;  // blocks of each split that share a group's rows
  typename Config::Compute inverse_columns = 0, epsilon = 0, scale_offset = 0;

  // Whether the mean and the squared deviations take one exchange: all threads then have the same number of columns.
  static constexpr bool kMoments =
      Config::kCentered && Config::kExact && Config::kThreadsPerRow * Config::kCluster <= 1024;
  using Sums = RowSum<typename Config::Compute, Config::kThreadsPerRow, Config::kRowsPerBlock, Config::kCluster,
                      kMoments ? 2 : 1>;
  static constexpr int kSumBytes = (Sums::kSharedBytes + 15) / 16 * 16;
  // The second of two steps reads the sum that the first one wrote.
  static constexpr bool kAdds = Config::kResidual && Config::kStep != Step::apply;
  static constexpr int kRowBytes =
      static_cast<int>(sizeof(typename Config::X) + (kAdds ? sizeof(typename Config::Residual) : 0)) * Config::kVector *
      Config::kVectors * Config::kThreadsPerRow * Config::kRowsPerBlock;
  using ScalePlace = Parameter<typename Config::Scale, Config, Config::kScale>;
  using BiasPlace = Parameter<typename Config::Bias, Config, Config::kBias>;
  static constexpr int kParameterBytes = ScalePlace::kSharedBytes + BiasPlace::kSharedBytes;
  static constexpr int kSharedBytes = kSumBytes + kParameterBytes + Config::kStages * kRowBytes;
};

/// A thread's share of the block's rows: what it has for all of them, and the steps of one.
template <class Config>
struct ForwardRows {
  using Call = NormForward<Config>;
  using X = typename Config::X;
  using Residual = typename Config::Residual;
  using Sum = typename Config::Sum;
  using Y = typename Config::Y;
  using Compute = typename Config::Compute;
  static constexpr int kVector = Config::kVector, kVectors = Config::kVectors, kStages = Config::kStages;
  static constexpr bool kAdds = Call::kAdds;
  static constexpr bool kStoresSum = Config::kStoreSum && Config::kStep != Step::apply;
  // Parameters come after the row, which is needed first, unless they are kept for several rows.
  static constexpr bool kLoadsEachTurn = (Config::kTurns == 1 && kStages == 0) || Config::kParameters == Place::memory;
  using Packed = Vector<Sum, kVector>[kVectors];  // of what is normalized

  const Call& call;
  const RowThreads<Config> threads;
  typename Call::Sums row_sum;
  const long long columns, group_rows;
  const unsigned parameters, ring;  // shared addresses
  const RowStream<X, Config, true> x;
  const RowStream<Residual, Config, kAdds> residual;
  typename Call::ScalePlace scale;
  typename Call::BiasPlace bias;

  __device__ __forceinline__ ForwardRows(const Call& given, unsigned shared)
      : call(given),
        threads(call.rows, call.columns, call.slice, call.blocks_per_group),
        row_sum(shared, threads.row_in_block),
        columns(call.columns),
        group_rows(threads.group * call.rows),
        parameters(shared + Call::kSumBytes),
        ring(parameters + Call::kParameterBytes),
        x(call.x + threads.group * call.x_stride, ring),
        residual(kAdds ? call.residual + threads.group * call.residual_stride : nullptr, ring + x.kSharedBytes),
        scale(Config::kScale ? call.scale + threads.group * call.scale_stride : nullptr, parameters),
        bias(Config::kBias ? call.bias + threads.group * call.bias_stride : nullptr,
             parameters + Call::ScalePlace::kSharedBytes) {}

  /// Before the first row.
  __device__ __forceinline__ void start() {
    row_sum.start();
    if constexpr (!kLoadsEachTurn) load_parameters();
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      fetch(threads.first_row + threads.row_in_block + stage * threads.row_stride, stage);
    }
  }

  __device__ __forceinline__ void load_parameters() {
    scale.load(threads);
    bias.load(threads);
  }

  __device__ __forceinline__ void fetch(long long order, int stage) const {
    const Row row = threads.ahead(order, columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x.fetch(threads, row, stage, v);
      residual.fetch(threads, row, stage, v);
    }
    ptx::cp_async_commit_group();
  }

#if __CUDA_ARCH__ >= 900
  /// Asks L2 for all 16-byte words that begin between these columns, and the one before.
  template <class T>
  __device__ __forceinline__ static void prefetch(const T* from, int count) {
    const auto begin = reinterpret_cast<unsigned long long>(from) & ~15ull;
    const auto end = reinterpret_cast<unsigned long long>(from + count) & ~15ull;
    ptx::cp_async_bulk_prefetch_l2(reinterpret_cast<const void*>(begin), static_cast<unsigned>(end - begin));
  }
#endif

  /// Asks L2 for a later block's row.
  __device__ __forceinline__ void prefetch(const Row& row) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (Config::kPrefetch > 0) {
      constexpr int kTurnRows = Config::kTurns * Config::kRowsPerBlock;
      const long long later = row.number + static_cast<long long>(Config::kPrefetch) * kTurnRows;
      if (threads.lane == 0 && later < call.rows) {
        const int from = threads.rank * call.slice;
        prefetch(x.source + later * columns + from, threads.end - from);
        if constexpr (kAdds) prefetch(residual.source + later * columns + from, threads.end - from);
      }
    }
#endif
  }

  /// Loads what is normalized: x, or x + residual rounded to the type it is returned in. Returns the thread's sum of
  /// it, or of its squares where the mean stays.
  __device__ __forceinline__ Compute load(const Row& row, int stage, Packed& packed) {
    Vector<X, kVector> loaded[kVectors];
    Vector<Residual, kVector> added[kAdds ? kVectors : 1];
    if constexpr (kStages > 0) ptx::cp_async_wait_group<kStages - 1>();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x.read(loaded[v], threads, row, stage, v);
      residual.read(added[kAdds ? v : 0], threads, row, stage, v);
    }
    prefetch(row);  // after this block's own row, which is needed first
    if constexpr (kLoadsEachTurn) load_parameters();

    Compute total = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Compute values[kVector];
      if constexpr (kAdds) {
        Compute other[kVector];
        loaded[v].unpack(values);
        added[v].unpack(other);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] += other[i];
        packed[v].pack(values);
        threads.trim(packed[v], v);
        packed[v].unpack(values);
      } else {
        threads.trim(loaded[v], v);
        loaded[v].unpack(values);
#pragma unroll
        for (int i = 0; i < Vector<Sum, kVector>::kWords; ++i) packed[v].words[i] = loaded[v].words[i];
      }
      if constexpr (kStoresSum) {
        Sum* const sum = call.sum + group_rows * columns;
        if (row.valid && threads.holds(v)) threads.store(packed[v], sum + row.offset, v);
      }
      if constexpr (Config::kStep != Step::apply) {
        if constexpr (!Config::kCentered) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) values[i] *= values[i];
        }
        total += tree_sum(values);
      }
    }
    return total;
  }

  /// The thread's sum of squared deviations from `mean`.
  __device__ __forceinline__ Compute squared_deviations(Packed& packed, Compute mean) const {
    Compute total = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Compute values[kVector];
      packed[v].keep_packed();
      packed[v].unpack(values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[i] = threads.inside(v, i) ? (values[i] - mean) * (values[i] - mean) : 0;
      }
      if (threads.holds(v)) total += tree_sum(values);
    }
    return total;
  }

  /// The mean of a row (of the block's split of it, if that is all this step sees) and the sum of its squared
  /// deviations; without a mean, the sum of its squares. `total` is the thread's, as `load` returned it.
  __device__ __forceinline__ void measure(Packed& packed, Compute& mean, Compute (&total)[1]) {
    mean = 0;
    if constexpr (!Config::kCentered) {
      row_sum(total);
    } else if constexpr (Call::kMoments) {
      constexpr Compute kOwn = kVector * kVectors;
      mean = mean_of(total[0], kOwn, 1 / kOwn);
      total[0] = squared_deviations(packed, mean);
      row_moments(row_sum, mean, total[0], kVector * kVectors);
    } else {
      row_sum(total);
      if constexpr (Config::kStep == Step::measure) {
        mean = total[0] / static_cast<Compute>(threads.count(threads.rank));
      } else {
        mean = mean_of(total[0], static_cast<Compute>(call.columns), call.inverse_columns);
      }
      total[0] = squared_deviations(packed, mean);
      row_sum(total);
    }
  }

  /// The moments of the splits of a row, between the two steps.
  __device__ __forceinline__ Compute* moments_of(const Row& row) const {
    return call.moments + (group_rows + row.number) * Config::kSplits * 2;
  }

  /// `measure` from the moments of the row's splits (Chan's formula).
  __device__ __forceinline__ void merge(const Row& row, Compute& mean, Compute& squares) const {
    const Compute* const moments = moments_of(row);
    const int lane = threadIdx.x % 32;
    mean = 0;
    if constexpr (Config::kCentered) {
      for (int split = lane; split < Config::kSplits; split += 32) {
        mean += moments[split * 2] * static_cast<Compute>(threads.count(split));
      }
      mean = lanes_sum<32>(mean) / static_cast<Compute>(call.columns);
    }
    squares = 0;
    for (int split = lane; split < Config::kSplits; split += 32) {
      squares += moments[split * 2 + 1];
      if constexpr (Config::kCentered) {
        const Compute apart = moments[split * 2] - mean;
        squares += apart * apart * static_cast<Compute>(threads.count(split));
      }
    }
    squares = lanes_sum<32>(squares);
  }

  /// Writes y, and the statistics.
  __device__ __forceinline__ void finish(const Row& row, Packed& packed, Compute mean, Compute squares) {
    const Compute rstd = reciprocal_square_root(squares * call.inverse_columns + call.epsilon);
    if (Config::kStatistics && row.valid && threads.lane == 0 && threads.rank == 0) {
      if constexpr (Config::kCentered) call.mean[group_rows + row.number] = mean;
      call.rstd[group_rows + row.number] = rstd;
    }
    Y* const y = call.y + group_rows * columns;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Compute values[kVector], weight[kVector], shift[kVector];
      packed[v].keep_packed();
      packed[v].unpack(values);
      scale.get(threads, v, weight);
      bias.get(threads, v, shift);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[i] = (values[i] - mean) * rstd;
        if constexpr (Config::kScaleOffset) weight[i] += call.scale_offset;
        if constexpr (Config::kScale) values[i] *= weight[i];
        if constexpr (Config::kBias) values[i] += shift[i];
      }
      Vector<Y, kVector> rounded;
      rounded.pack(values);
      if (row.valid && threads.holds(v)) threads.store(rounded, y + row.offset, v);
      scale.advance(threads, v);
      bias.advance(threads, v);
    }
  }
};

template <class Config>
__device__ __forceinline__ void norm_forward(const NormForward<Config>& call) {
  using Rows = ForwardRows<Config>;
  using Compute = typename Config::Compute;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  Rows rows(call, ptx::cvta_to_shared(shared_memory));
  rows.start();

  int stage = 0;
  // The trip count is the same for all threads of a block (and cluster), so that all come to every barrier.
  for (long long base = rows.threads.first_row; base < rows.threads.end_row; base += rows.threads.row_stride) {
    const Row row = rows.threads.row(base, rows.columns);
    typename Rows::Packed packed;
    Compute mean, total[1] = {rows.load(row, stage, packed)};
    if constexpr (Config::kStages > 0) {
      rows.fetch(row.order + Config::kStages * rows.threads.row_stride, stage);
      stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    }
    if constexpr (Config::kStep == Step::apply) {
      rows.merge(row, mean, total[0]);
    } else {
      rows.measure(packed, mean, total);
    }
    if constexpr (Config::kStep != Step::measure) {
      rows.finish(row, packed, mean, total[0]);
    } else if (row.valid && rows.threads.lane == 0) {
      Compute* const moments = rows.moments_of(row) + rows.threads.rank * 2;
      moments[0] = mean;
      moments[1] = total[0];
    }
    if constexpr (Config::kTurns == 1) break;
  }
}

}  // namespace jaxdnn
