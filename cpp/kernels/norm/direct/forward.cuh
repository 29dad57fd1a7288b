// layer_norm and rms_norm, forward: y, and on request x + residual and the statistics, in one pass over the rows.
//
//   block            kRowsPerBlock teams of kThreadsPerRow threads; each team owns one row at a time
//   (norm/direct/row.cuh) parts            of a very wide row, one a block: of a cluster, or in two launches
//   (norm/direct/row.cuh) warps            all alike: every thread copies, reduces and stores its own columns; there
//   are no roles
//
//   timeline of one thread (kStages > 0):
//     fetch row 0 .. row kStages-1 | wait row 0 | read it | fetch row kStages | moments | write y | wait row 1 ...
//   With kStages == 0 rows are loaded straight into registers, and other blocks of the multiprocessor hide the latency:
//     load row | ask for a later block's row | load parameters | moments | parameters ahead, write y
//   What they can't hide, L2 does: each block asks it for the rows of the block kPrefetch later (one bulk prefetch by
//   one thread), so that about 4 MiB of rows are on their way, in the order of the blocks, whatever the blocks that
//   run now are waiting for.
//
//   barriers         one a row for a team of several warps (barrier 1 + team, kThreadsPerRow threads), or one cluster
//                    barrier (all threads); two where some threads have fewer columns than others, and the mean must
//                    come before the deviations; none when a team is a warp or part of one
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
  typename Config::Compute* moments = nullptr;  // [group, row, part, 2] between the two steps
  // Elements between two groups; the results' groups are dense.
  long long x_stride = 0, residual_stride = 0, scale_stride = 0, bias_stride = 0;
  long long rows = 0;  // of one group
  int columns = 0;
  int slice = 0;             // columns of one part of a row
  int blocks_per_group = 0;  // blocks of each part that share a group's rows
  typename Config::Compute inverse_columns = 0, epsilon = 0, scale_offset = 0;

  // Whether the mean and the squared deviations take one exchange: all threads then have the same number of columns.
  static constexpr bool kMoments =
      Config::kCentered && Config::kExact && Config::kThreadsPerRow * Config::kCluster <= 1024;
  using Sums = TeamSum<typename Config::Compute, Config::kThreadsPerRow, Config::kRowsPerBlock, Config::kCluster,
                       kMoments ? 2 : 1>;
  static constexpr int kSumBytes = (Sums::kSharedBytes + 15) / 16 * 16;
  static constexpr int kRowBytes =
      static_cast<int>(sizeof(typename Config::X) + (Config::kResidual ? sizeof(typename Config::Residual) : 0)) *
      Config::kVector * Config::kVectors * Config::kThreadsPerRow * Config::kRowsPerBlock;
  using ScalePlace = Parameter<typename Config::Scale, Config, Config::kScale>;
  using BiasPlace = Parameter<typename Config::Bias, Config, Config::kBias>;
  static constexpr int kParameterBytes = ScalePlace::kSharedBytes + BiasPlace::kSharedBytes;
  static constexpr int kSharedBytes = kSumBytes + kParameterBytes + Config::kStages * kRowBytes;
};

/// The mean of a row and the sum of its squared deviations, from those of its parts (Chan's formula); without a mean,
/// the sum of its squares.
template <class Config, class Compute>
__device__ __forceinline__ void merge_moments(const Compute* moments, const NormForward<Config>& call, Compute& mean,
                                              Compute& squares) {
  const int lane = threadIdx.x % 32;
  mean = 0;
  if constexpr (Config::kCentered) {
    for (int part = lane; part < Config::kParts; part += 32) {
      const int rest = call.columns - part * call.slice;
      mean += moments[part * 2] * static_cast<Compute>(rest < call.slice ? rest : call.slice);
    }
    mean = lanes_sum<32>(mean) / static_cast<Compute>(call.columns);
  }
  squares = 0;
  for (int part = lane; part < Config::kParts; part += 32) {
    squares += moments[part * 2 + 1];
    if constexpr (Config::kCentered) {
      const int rest = call.columns - part * call.slice;
      const Compute apart = moments[part * 2] - mean;
      squares += apart * apart * static_cast<Compute>(rest < call.slice ? rest : call.slice);
    }
  }
  squares = lanes_sum<32>(squares);
}

template <class Config>
__device__ __forceinline__ void norm_forward(const NormForward<Config>& call) {
  using Call = NormForward<Config>;
  using X = typename Config::X;
  using Residual = typename Config::Residual;
  using Sum = typename Config::Sum;
  using Y = typename Config::Y;
  using Compute = typename Config::Compute;
  constexpr int kVector = Config::kVector;
  constexpr int kVectors = Config::kVectors;
  constexpr int kStages = Config::kStages;
  constexpr bool kRing = kStages > 0;
  constexpr bool kOneTurn = Config::kTurns == 1;
  // The second of two steps reads the sum that the first one wrote.
  constexpr bool kAdds = Config::kResidual && Config::kStep != Step::apply;
  constexpr bool kStoresSum = Config::kStoreSum && Config::kStep != Step::apply;

  extern __shared__ __align__(16) unsigned char shared_memory[];
  const unsigned shared = ptx::cvta_to_shared(shared_memory);
  const RowTeam<Config> team(call.rows, call.columns, call.slice, call.blocks_per_group);
  typename Call::Sums team_sum(shared, team.team);
  team_sum.start();

  const long long columns = call.columns;
  const long long group_rows = team.group * call.rows;
  const X* const x = call.x + team.group * call.x_stride;
  const Residual* const residual = kAdds ? call.residual + team.group * call.residual_stride : nullptr;
  Y* const y = call.y + group_rows * columns;
  Sum* const sum = kStoresSum ? call.sum + group_rows * columns : nullptr;
  const unsigned parameters = shared + Call::kSumBytes;
  typename Call::ScalePlace scale(Config::kScale ? call.scale + team.group * call.scale_stride : nullptr, parameters);
  typename Call::BiasPlace bias(Config::kBias ? call.bias + team.group * call.bias_stride : nullptr,
                                parameters + Call::ScalePlace::kSharedBytes);
  const auto load_parameters = [&] {
    scale.load(team);
    bias.load(team);
  };
  // After the row, which is needed first, unless they are kept for several rows.
  constexpr bool kLoadsEachTurn = (kOneTurn && !kRing) || Config::kParameters == Place::memory;
  if constexpr (!kLoadsEachTurn) load_parameters();

  constexpr int kThreads = RowTeam<Config>::kThreads;
  using XRing = Ring<X, kVector, kVectors, kThreads, kStages>;
  using ResidualRing = Ring<Residual, kVector, kVectors, kThreads, kStages>;
  const unsigned rows = parameters + Call::kParameterBytes;
  const XRing x_ring(rows);
  const ResidualRing residual_ring(rows + XRing::kSharedBytes);
  const auto fetch = [&](long long row, int stage) {
    const bool valid = row < team.end_row;
    const long long offset = valid ? row * columns : 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool active = valid && team.holds(v);
      x_ring.fetch(stage, v, x + offset + team.column(v), active);
      if constexpr (kAdds) {
        residual_ring.fetch(stage, v, residual + offset + team.column(v), active);
      }
    }
    ptx::cp_async_commit_group();
  };
  if constexpr (kRing) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      fetch(team.first_row + team.team + stage * team.row_stride, stage);
    }
  }

  int stage = 0;
  // The trip count is the same for all threads of a block (and cluster), so that all come to every barrier.
  for (long long base = team.first_row; base < team.end_row; base += team.row_stride) {
    const long long row = base + team.team;
    const bool valid = team.valid(row);
    const long long offset = valid ? row * columns : 0;

    Vector<X, kVector> loaded[kVectors];
    Vector<Residual, kVector> added[kAdds ? kVectors : 1];
    if constexpr (kRing) ptx::cp_async_wait_group<kStages - 1>();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kRing) {
        x_ring.read(loaded[v], stage, v);
        if constexpr (kAdds) residual_ring.read(added[v], stage, v);
      } else {
        loaded[v].clear();
        if (valid && team.holds(v)) loaded[v].load(x + offset + team.column(v));
        if constexpr (kAdds) {
          added[v].clear();
          if (valid && team.holds(v)) added[v].load(residual + offset + team.column(v));
        }
      }
    }

#if __CUDA_ARCH__ >= 900
    if constexpr (Config::kPrefetch > 0) {  // after this block's own row, which is needed first
      const long long later = row + static_cast<long long>(Config::kPrefetch) * Config::kTurns * Config::kRowsPerBlock;
      if (team.lane == 0 && later < call.rows) {
        const long long from = later * columns + team.first;
        const unsigned count = team.end - team.first;
        ptx::cp_async_bulk_prefetch_l2(x + from, count * sizeof(X));
        if constexpr (kAdds) ptx::cp_async_bulk_prefetch_l2(residual + from, count * sizeof(Residual));
      }
    }
#endif
    if constexpr (kLoadsEachTurn) load_parameters();

    // What is normalized: x, or x + residual rounded to the type it is returned in.
    Vector<Sum, kVector> packed[kVectors];
    Compute total[1] = {0};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Compute values[kVector];
      loaded[v].unpack(values);
      if constexpr (kAdds) {
        Compute other[kVector];
        added[v].unpack(other);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] += other[i];
        packed[v].pack(values);
        packed[v].unpack(values);
      } else {
#pragma unroll
        for (int i = 0; i < Vector<Sum, kVector>::kWords; ++i) packed[v].words[i] = loaded[v].words[i];
      }
      if constexpr (kStoresSum) {
        if (valid && team.holds(v)) packed[v].store(sum + offset + team.column(v));
      }
      if constexpr (Config::kStep != Step::apply) {
        if constexpr (!Config::kCentered) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) values[i] *= values[i];
        }
        total[0] += tree_sum(values);
      }
    }
    if constexpr (kRing) {
      fetch(row + kStages * team.row_stride, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    Compute mean = 0;
    Compute* const moments = call.moments + (group_rows + row) * Config::kParts * 2;
    if constexpr (Config::kStep == Step::apply) {
      merge_moments(moments, call, mean, total[0]);
    } else if constexpr (Config::kCentered) {
      constexpr Compute kOwn = kVector * kVectors;
      if constexpr (Call::kMoments) {
        mean = mean_of(total[0], kOwn, 1 / kOwn);
      } else {
        team_sum(total);
        if constexpr (Config::kStep == Step::measure) {
          mean = total[0] / static_cast<Compute>(team.end - team.rank * call.slice);
        } else {
          mean = mean_of(total[0], static_cast<Compute>(call.columns), call.inverse_columns);
        }
      }
      total[0] = 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Compute values[kVector];
        packed[v].keep_packed();
        packed[v].unpack(values);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = (values[i] - mean) * (values[i] - mean);
        if (team.holds(v)) total[0] += tree_sum(values);
      }
      if constexpr (Call::kMoments) {
        team_moments(team_sum, mean, total[0], kVector * kVectors);
      } else {
        team_sum(total);
      }
    } else {
      team_sum(total);
    }
    if constexpr (Config::kStep == Step::measure) {
      if (valid && team.lane == 0) {
        moments[team.rank * 2] = mean;
        moments[team.rank * 2 + 1] = total[0];
      }
      if constexpr (kOneTurn) break;
      continue;
    }
    const Compute rstd = reciprocal_square_root(total[0] * call.inverse_columns + call.epsilon);
    if (Config::kStatistics && valid && team.lane == 0 && team.rank == 0) {
      if constexpr (Config::kCentered) call.mean[group_rows + row] = mean;
      call.rstd[group_rows + row] = rstd;
    }

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Compute values[kVector], weight[kVector], shift[kVector];
      packed[v].keep_packed();
      packed[v].unpack(values);
      scale.get(team, v, weight);
      bias.get(team, v, shift);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[i] = (values[i] - mean) * rstd;
        if constexpr (Config::kScaleOffset) weight[i] += call.scale_offset;
        if constexpr (Config::kScale) values[i] *= weight[i];
        if constexpr (Config::kBias) values[i] += shift[i];
      }
      Vector<Y, kVector> rounded;
      rounded.pack(values);
      if (valid && team.holds(v)) rounded.store(y + offset + team.column(v));
      scale.advance(team, v);
      bias.advance(team, v);
    }
    if constexpr (kOneTurn) break;
  }
}

}  // namespace jaxdnn
