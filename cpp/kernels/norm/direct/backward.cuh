// layer_norm and rms_norm, backward: d_x, and each block's partial sums of d_scale and d_bias, in one pass.
//
// With w = scale + scale_offset, xhat = (x - mean) rstd and g = d_y w, over a row of n columns:
//
//   m1 = E[g] - d_mean / (n rstd)        (layer_norm only)           m2 = E[g xhat] + d_rstd rstd / n
//   d_x = rstd (g - m1 - xhat m2) + d_sum      d_scale = sum over rows of d_y xhat      d_bias = sum over rows of d_y
//
//   block            kRowsPerBlock rows at a time, of kThreadsPerRow threads each (norm/direct/row.cuh)
//   splits           of a very wide row, one a block: of a cluster, or in two launches (norm/direct/row.cuh)
//   warps            all alike: every thread copies, reduces and stores its own columns; there are no roles
//
//   timeline of one thread (kStages > 0):
//     fetch rows 0 .. kStages-1 | wait row 0 | sums of g and g xhat, d_scale += .., d_bias += .. | barrier | write d_x,
//     fetching row kStages | wait row 1 ...
//   The rows of x and d_y stay in the ring between the two passes (kHold false), or packed in registers, when the next
//   row is fetched before the barrier (kHold true, and always with kStages == 0).
//
//   barriers         one a row of several warps (barrier 1 + row, kThreadsPerRow threads), or an mbarrier of each block
//                    of a cluster (core/reduce.cuh); none when a row is a warp's or less; three block barriers at the
//                    end
//   shared memory    | slots of the sums, two phases | scale | ring of x | ring of d_y | ring of d_sum |
//                    at the end the rings' place holds the rows' sums of one parameter gradient
//   registers        two accumulators a column of the thread, for all its rows, in the arithmetic's type
//
// The blocks' sums go to `scale_sum` and `bias_sum`, [group, block, column]; norm/direct/reduce.cuh adds them in a
// fixed order, so that the gradients are the same bits on every run. Those of a group's only block are the gradients.
//
// Bytes: x and d_y read once, d_x written once; statistics, parameters and partials are negligible for many rows.
// Flops: about 14 an element. Memory bounds it: 3.2 to 4.0 TB/s on an H200, whose copy reaches 4.25
// (benchmarks/results/norm_kernels.md).
#pragma once

#include "core/pipeline_async.cuh"
#include "core/reduce.cuh"
#include "norm/direct/row.cuh"

namespace jaxdnn {

/// Pointers of arrays that a call does not have are null, and strides of arrays that all groups share are zero.
template <class Config>
struct NormBackward {
  using Compute = typename Config::Compute;
  const typename Config::X* x = nullptr;
  const typename Config::Scale* scale = nullptr;
  const Compute* mean = nullptr;
  const Compute* rstd = nullptr;
  const typename Config::Y* d_y = nullptr;
  const typename Config::X* d_sum = nullptr;
  const Compute* d_mean = nullptr;
  const Compute* d_rstd = nullptr;
  typename Config::X* d_x = nullptr;
  typename Config::ScaleSum* scale_sum = nullptr;
  typename Config::BiasSum* bias_sum = nullptr;
  Compute* sums = nullptr;  // [group, row, split, 2] between the two steps
  // Elements between two groups; the results' groups are dense.
  long long x_stride = 0, scale_stride = 0, mean_stride = 0, rstd_stride = 0;
  long long d_y_stride = 0, d_sum_stride = 0, d_mean_stride = 0, d_rstd_stride = 0;
  long long rows = 0;  // of one group
  int columns = 0;
  int slice = 0;             // columns of one split of a row
  int blocks_per_group = 0;  // blocks of each split that share a group's rows
  Compute inverse_columns = 0, scale_offset = 0;

  static constexpr bool kReadX = Config::kDX || Config::kDScale;  // d_bias alone needs d_y only
  static constexpr bool kReadSum = Config::kDSum && Config::kStep != Step::measure;
  using Sums =
      RowSum<Compute, Config::kThreadsPerRow, Config::kRowsPerBlock, Config::kCluster, Config::kCentered ? 2 : 1>;
  static constexpr int kThreads = Config::kThreadsPerRow * Config::kRowsPerBlock;
  static constexpr int kSumBytes = (Sums::kSharedBytes + 15) / 16 * 16;
  static constexpr int kRowBytes =
      static_cast<int>((kReadX ? sizeof(typename Config::X) : 0) + sizeof(typename Config::Y) +
                       (kReadSum ? sizeof(typename Config::X) : 0)) *
      Config::kVector * Config::kVectors * kThreads;
  // Rows whose sums are added through shared memory: all, or one a warp once lanes have added theirs.
  static constexpr int kPartials = Config::kThreadsPerRow < 32 ? kThreads / 32 : Config::kRowsPerBlock;
  static constexpr int kRowColumns = Config::kThreadsPerRow * Config::kVectors * Config::kVector;
  static constexpr bool kCombines = kPartials > 1 || Config::kThreadsPerRow < 32;
  static constexpr int kCombineBytes = (Config::kDScale || Config::kDBias) && kCombines
                                           ? kPartials * kRowColumns * static_cast<int>(sizeof(Compute))
                                           : 0;
  static constexpr int kRingBytes = Config::kStages * kRowBytes;
  using ScalePlace = Parameter<typename Config::Scale, Config, Config::kScale && Config::kDX>;
  static constexpr int kRowsAt = kSumBytes + ScalePlace::kSharedBytes;
  static constexpr int kSharedBytes = kRowsAt + (kRingBytes > kCombineBytes ? kRingBytes : kCombineBytes);
};

/// A thread's share of the block's rows: what it has for all of them, and the steps of one.
template <class Config>
struct BackwardRows {
  using Call = NormBackward<Config>;
  using X = typename Config::X;
  using Y = typename Config::Y;
  using Compute = typename Config::Compute;
  static constexpr int kVector = Config::kVector, kVectors = Config::kVectors, kStages = Config::kStages;
  static constexpr bool kRing = kStages > 0;
  static constexpr bool kHold = Config::kHold || !kRing;
  using XRows = RowStream<X, Config, Call::kReadX>;
  using YRows = RowStream<Y, Config, true>;
  using SumRows = RowStream<X, Config, Call::kReadSum>;

  /// A row's statistics and their cotangents. Of rows that don't exist all are zeros.
  struct Scalars {
    Compute mean = 0, rstd = 0, d_mean = 0, d_rstd = 0;
  };

  /// Of a row between the two passes: all vectors, or (not `kHold`) the one at hand.
  struct Held {
    Vector<X, kVector> x[kHold ? kVectors : 1];
    Vector<Y, kVector> d_y[kHold ? kVectors : 1];
    Vector<X, kVector> d_sum[kRing && kHold && Config::kDSum ? kVectors : 1];
  };

  const Call& call;
  const RowThreads<Config> threads;
  typename Call::Sums row_sum;
  const long long columns;
  const XRows x;
  const YRows d_y;
  const SumRows d_sum;
  X* const d_x;
  typename Call::ScalePlace scale;
  Compute scale_sums[Config::kDScale ? kVectors : 1][kVector] = {};
  Compute bias_sums[Config::kDBias ? kVectors : 1][kVector] = {};

  __device__ __forceinline__ BackwardRows(const Call& given, unsigned shared)
      : call(given),
        threads(call.rows, call.columns, call.slice, call.blocks_per_group),
        row_sum(shared, threads.row_in_block),
        columns(call.columns),
        x(call.x + threads.group * call.x_stride, shared + Call::kRowsAt),
        d_y(call.d_y + threads.group * call.d_y_stride, shared + Call::kRowsAt + XRows::kSharedBytes),
        d_sum(Config::kDSum ? call.d_sum + threads.group * call.d_sum_stride : nullptr,
              shared + Call::kRowsAt + XRows::kSharedBytes + YRows::kSharedBytes),
        d_x(Config::kDX ? call.d_x + threads.group * call.rows * columns : nullptr),
        scale(Config::kScale ? call.scale + threads.group * call.scale_stride : nullptr, shared + Call::kSumBytes) {}

  /// Before the first row.
  __device__ __forceinline__ void start() {
    row_sum.start();
    scale.load(threads);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      fetch(threads.first_row + threads.row_in_block + stage * threads.row_stride, stage);
    }
  }

  __device__ __forceinline__ void fetch_vector(const Row& row, int stage, int v) const {
    x.fetch(threads, row, stage, v);
    d_y.fetch(threads, row, stage, v);
    d_sum.fetch(threads, row, stage, v);
  }

  __device__ __forceinline__ void fetch(long long order, int stage) const {
    const Row row = threads.ahead(order, columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) fetch_vector(row, stage, v);
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ Scalars load_scalars(long long order) const {
    Scalars scalars;
    if (order < threads.end_row) {
      const long long row = threads.number(order);
      if constexpr (Config::kCentered && Call::kReadX) {
        scalars.mean = call.mean[threads.group * call.mean_stride + row];
      }
      if constexpr (Call::kReadX) scalars.rstd = call.rstd[threads.group * call.rstd_stride + row];
      if constexpr (Config::kDMean) scalars.d_mean = call.d_mean[threads.group * call.d_mean_stride + row];
      if constexpr (Config::kDRstd) scalars.d_rstd = call.d_rstd[threads.group * call.d_rstd_stride + row];
    }
    return scalars;
  }

  __device__ __forceinline__ void load(Held& held, const Row& row, int stage, int v) const {
    x.read(held.x[kHold ? v : 0], threads, row, stage, v);
    d_y.read(held.d_y[kHold ? v : 0], threads, row, stage, v);
  }

  /// After all that are held are on their way.
  __device__ __forceinline__ void trim(Held& held, int v) const {
    if constexpr (Call::kReadX) threads.trim(held.x[kHold ? v : 0], v);
    threads.trim(held.d_y[kHold ? v : 0], v);
  }

  /// One vector of xhat, d_y and g = d_y w. Without `kHold` it is loaded again for each pass.
  __device__ __forceinline__ void get(Held& held, const Row& row, int stage, int v, const Scalars& scalars,
                                      Compute (&xhat)[kVector], Compute (&dy)[kVector], Compute (&g)[kVector]) {
    if constexpr (!kHold) {
      load(held, row, stage, v);
      trim(held, v);
    }
    held.d_y[kHold ? v : 0].keep_packed();
    held.d_y[kHold ? v : 0].unpack(dy);
    if constexpr (Call::kReadX) {
      held.x[kHold ? v : 0].keep_packed();
      held.x[kHold ? v : 0].unpack(xhat);
    }
    Compute weight[kVector];
    if constexpr (Config::kDX) scale.get(threads, v, weight);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if constexpr (Call::kReadX) xhat[i] = (xhat[i] - scalars.mean) * scalars.rstd;
      // Rounded, so that both passes see the same g, and g - m1 is exactly 0 in a row of one column.
      g[i] = dy[i];
      if constexpr (Config::kScale && Config::kDX) {
        g[i] = ptx::mul_rn(dy[i], Config::kScaleOffset ? weight[i] + call.scale_offset : weight[i]);
      }
    }
  }

  /// The first pass over a row: adds to the parameters' gradients, and leaves the thread's sums of g xhat and g.
  __device__ __forceinline__ void accumulate(Held& held, const Row& row, int stage, const Scalars& scalars,
                                             Compute (&totals)[Config::kCentered ? 2 : 1]) {
    if constexpr (kRing) ptx::cp_async_wait_group<kStages - 1>();
    if constexpr (kHold) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) load(held, row, stage, v);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) trim(held, v);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Compute xhat[kVector], dy[kVector], g[kVector];
      get(held, row, stage, v, scalars, xhat, dy, g);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if constexpr (Config::kDScale && Config::kStep != Step::measure) scale_sums[v][i] += dy[i] * xhat[i];
        if constexpr (Config::kDBias && Config::kStep != Step::measure) bias_sums[v][i] += dy[i];
      }
      if constexpr (Config::kDX && Config::kStep != Step::apply) {
        if constexpr (Config::kCentered) totals[1] += tree_sum(g);
#pragma unroll
        for (int i = 0; i < kVector; ++i) g[i] *= xhat[i];
        totals[0] += tree_sum(g);
      }
    }
    if constexpr (kRing && kHold) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) d_sum.read(held.d_sum[Config::kDSum ? v : 0], threads, row, stage, v);
    }
  }

  /// The sums over a row's splits, between the two steps.
  __device__ __forceinline__ Compute* sums_of(const Row& row) const {
    return call.sums + (threads.group * call.rows + row.number) * Config::kSplits * 2;
  }

  __device__ __forceinline__ void merge(const Row& row, Compute (&totals)[Config::kCentered ? 2 : 1]) const {
    const Compute* const splits = sums_of(row);
    // All of a lane's are in flight at once.
#pragma unroll
    for (int first = 0; first < Config::kSplits; first += 32) {
      const int split = first + static_cast<int>(threadIdx.x % 32);
      if (split >= Config::kSplits) break;
      totals[0] += splits[split * 2];
      if constexpr (Config::kCentered) totals[1] += splits[split * 2 + 1];
    }
    totals[0] = lanes_sum<32>(totals[0]);
    if constexpr (Config::kCentered) totals[1] = lanes_sum<32>(totals[1]);
  }

  /// The second pass: writes d_x. Without `kHold`, each vector's slots are free after it, for the row `later`.
  __device__ __forceinline__ void finish(Held& held, const Row& row, int stage, const Scalars& scalars,
                                         const Compute (&totals)[Config::kCentered ? 2 : 1], const Row& later) {
    const Compute count = static_cast<Compute>(call.columns);
    Compute m1 = 0, m2 = totals[0] * call.inverse_columns;
    if constexpr (Config::kCentered) m1 = mean_of(totals[1], count, call.inverse_columns);
    if constexpr (Config::kDMean) m1 -= scalars.d_mean / (count * scalars.rstd);
    if constexpr (Config::kDRstd) m2 += scalars.d_rstd * scalars.rstd * call.inverse_columns;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Compute xhat[kVector], dy[kVector], g[kVector];
      get(held, row, stage, v, scalars, xhat, dy, g);
#pragma unroll
      for (int i = 0; i < kVector; ++i) g[i] = scalars.rstd * (g[i] - m1 - xhat[i] * m2);
      if constexpr (Config::kDSum) {
        Vector<X, kVector>& vector = held.d_sum[kRing && kHold ? v : 0];
        if constexpr (!kRing || !kHold) d_sum.read(vector, threads, row, stage, v);
        Compute direct[kVector];
        vector.unpack(direct);
#pragma unroll
        for (int i = 0; i < kVector; ++i) g[i] += direct[i];
      }
      // Nobody else reads these slots: the next row can come while the rest of this one is done.
      if constexpr (kRing && !kHold) fetch_vector(later, stage, v);
      Vector<X, kVector> rounded;
      rounded.pack(g);
      if (row.valid && threads.holds(v)) threads.store(rounded, d_x + row.offset, v);
    }
    if constexpr (kRing && !kHold) ptx::cp_async_commit_group();
  }

  /// After the last row: writes the block's partial sums of the parameters' gradients.
  __device__ __forceinline__ void write_partials(Compute* combine) {
    const long long offset = (threads.group * call.blocks_per_group + threads.block) * columns;
    if constexpr (Config::kDScale) write_partial(scale_sums, call.scale_sum + offset, combine);
    if constexpr (Config::kDBias) write_partial(bias_sums, call.bias_sum + offset, combine);
  }

  /// Adds the accumulators of the block's rows and writes one partial sum, [columns].
  template <class T>
  __device__ __forceinline__ void write_partial(Compute (&sums)[kVectors][kVector], T* partial, Compute* combine) {
    if constexpr (!Call::kCombines) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Vector<T, kVector> vector;
        vector.pack(sums[v]);
        if (threads.holds(v)) threads.store(vector, partial, v);
      }
    } else {
      const int own = Config::kThreadsPerRow < 32 ? threadIdx.x / 32 : threads.row_in_block;
      const bool writes = Config::kThreadsPerRow >= 32 || threadIdx.x % 32 < Config::kThreadsPerRow;
      __syncthreads();  // nobody reads this memory any more
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          Compute value = sums[v][i];
#pragma unroll
          for (int mask = 16; mask >= Config::kThreadsPerRow; mask /= 2) value += ptx::shfl_sync_bfly(value, mask);
          if (writes && threads.inside(v, i)) combine[own * Call::kRowColumns + threads.column(v) + i] = value;
        }
      }
      __syncthreads();
      const int end = call.columns;
      for (int column = threadIdx.x; column < end; column += Call::kThreads) {
        Compute total[1] = {};
#pragma unroll 4
        for (int p = 0; p < Call::kPartials; ++p) total[0] += combine[p * Call::kRowColumns + column];
        Vector<T, 1> rounded;
        rounded.pack(total);
        rounded.store(partial + column);
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void norm_backward(const NormBackward<Config>& call) {
  using Rows = BackwardRows<Config>;
  using Compute = typename Config::Compute;
  constexpr int kStages = Config::kStages;
  constexpr bool kMeasure = Config::kStep == Step::measure;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  Rows rows(call, ptx::cvta_to_shared(shared_memory));
  rows.start();

  const RowThreads<Config>& threads = rows.threads;
  typename Rows::Scalars next = rows.load_scalars(threads.first_row + threads.row_in_block);  // a row ahead
  int stage = 0;
  // The trip count is the same for all threads of a block (and cluster), so that all come to every barrier.
  for (long long base = threads.first_row; base < threads.end_row; base += threads.row_stride) {
    const Row row = threads.row(base, rows.columns);
    const Row later = threads.ahead(row.order + kStages * threads.row_stride, rows.columns);
    const typename Rows::Scalars scalars = next;
    next = rows.load_scalars(row.order + threads.row_stride);

    typename Rows::Held held;
    Compute totals[Config::kCentered ? 2 : 1] = {};
    if constexpr (Config::kDX && Config::kStep == Step::apply) rows.merge(row, totals);  // while the row is on its way
    rows.accumulate(held, row, stage, scalars, totals);
    // The slots are free, but where d_x is yet to be computed from them.
    constexpr bool kFree = Rows::kHold || kMeasure || !Config::kDX;
    if constexpr (kStages > 0 && kFree) rows.fetch(row.order + kStages * threads.row_stride, stage);
    if constexpr (kMeasure) {
      rows.row_sum(totals);
      if (row.valid && threads.lane == 0) {
        Compute* const sums = rows.sums_of(row) + threads.rank * 2;
        sums[0] = totals[0];
        if constexpr (Config::kCentered) sums[1] = totals[1];
      }
    } else if constexpr (Config::kDX) {
      if constexpr (Config::kStep != Step::apply) rows.row_sum(totals);
      rows.finish(held, row, stage, scalars, totals, later);
    }
    if constexpr (kStages > 0) stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  if constexpr (kStages > 0) ptx::cp_async_wait_group<0>();
  if constexpr (!kMeasure) rows.write_partials(reinterpret_cast<Compute*>(shared_memory + Rows::Call::kRowsAt));
}

}  // namespace jaxdnn
