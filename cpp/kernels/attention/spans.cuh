// Spans of keys, from the first that a query sees to the last, and with them lists of blocks (attention/lists.cuh).
// Where each query of a block sees all keys of its span, as in documents that are packed one after the other, what is
// visible of a block of keys is a comparison of its columns with the span, and no function is asked.
//
//   attention_spans      where a mask is a function: a block for each block of queries asks it of each pair in blocks
//   that
//                        are partly visible, until a query is found to miss a key between two that it sees
//   attention_segments   where a mask is segments, besides arithmetic: all that such calls need, by a block for each
//   block
//                        of queries. Neighbouring keys of one segment are a run; a query takes those of its segment, so
//                        that a block of keys takes a few steps for each run, and not for each pair
//
// Segments, of 16,384 positions: one launch of some 4 us, most of it waiting for memory: twice for each 32 blocks of
// keys, once for each that is partly visible.
#pragma once

#include "attention/lists.cuh"

namespace jaxdnn {

/// Keys that a query sees: the first and the last of them, and how many.
struct SeenKeys {
  int first = math::kHighest<int>, last = -1, count = 0;

  __device__ __forceinline__ void add(int key) { add(SeenKeys{key, key, 1}); }
  __device__ __forceinline__ void add(const SeenKeys& others) {
    first = others.first < first ? others.first : first;
    last = others.last > last ? others.last : last;
    count += others.count;
  }
  /// Whether there is none between them that it does not see.
  __device__ __forceinline__ bool neighbours() const { return count == 0 || count == last - first + 1; }
};

template <class Config>
struct AttentionSpans : AttentionBlocks<Config> {
  static constexpr int kLanes = 4;  // of a query, each with as many neighbouring keys of a block
  static constexpr int kThreads = kLanes * Config::kTileM;

  KeySpan* spans = nullptr;  // [lists, queries]
};

/// Calls use(block, whole) of the blocks of keys of which a block of queries sees any, from the first to the last,
/// while no thread of the warp finds that `broken`; of each so many blocks, of one `part`.
template <int kParts, class Use>
__device__ __forceinline__ void each_seen_block(const Visible* seen, int key_blocks, int part,
                                                const volatile int& broken, Use use) {
  const auto stop = [&] { return ptx::vote_sync_any(broken != 0); };
  for (int before = part; before < key_blocks && !stop(); before += 32 * kParts) {
    const int block = before + kParts * (threadIdx.x % 32);
    const Visible visible = block < key_blocks ? seen[block] : Visible::none;
    const unsigned whole = ptx::vote_sync_ballot(visible == Visible::all);
    for (unsigned left = ptx::vote_sync_ballot(visible != Visible::none); left != 0 && !stop(); left &= left - 1) {
      const int number = lowest_bit(left);
      use(before + kParts * number, whole >> number & 1);
    }
  }
}

/// Writes the span of a query, which is in `keys` if all queries of the block are `spanned`.
template <class Config>
__device__ __forceinline__ void write_span(const AttentionBlocks<Config>& call, KeySpan* spans,
                                           const KeyRange<Config>& range, unsigned list, int query,
                                           const SeenKeys& keys, bool spanned) {
  if (query >= call.query_length) return;
  KeySpan span = {range.first_key(call, query), range.end_key(call, query)};
  if (query >= range.query_length || (spanned && keys.count == 0)) {
    span = {0, 0};
  } else if (spanned) {
    span = {keys.first, keys.last + 1};
  }
  spans[static_cast<long long>(list) * call.query_length + query] = span;
}

/// Says of which blocks the spans say all.
__device__ __forceinline__ void mark_spanned(Visible* seen, int key_blocks) {
  for (int block = threadIdx.x; block < key_blocks; block += blockDim.x) {
    if (seen[block] == Visible::some) seen[block] = Visible::spanned;
  }
}

template <class Config>
__device__ __forceinline__ void attention_spans(const AttentionSpans<Config>& call) {
  constexpr int kLanes = AttentionSpans<Config>::kLanes, kKeys = Config::kTileN / kLanes, kAtOnce = 4;
  static_assert(kKeys % kAtOnce == 0, "a lane's keys");
  extern __shared__ __align__(16) unsigned char shared_memory[];
  volatile int& broken = *reinterpret_cast<int*>(shared_memory);  // whether one of the queries has no span
  if (threadIdx.x == 0) broken = 0;
  __syncthreads();

  const unsigned list = blockIdx.x / call.query_blocks;
  const int batch = call.batch_of_list(list);
  const int query = blockIdx.x % call.query_blocks * Config::kTileM + threadIdx.x / kLanes;
  Visible* const seen = call.seen + static_cast<long long>(blockIdx.x) * call.key_blocks;
  KeyRange<Config> range;
  range.read(call, batch);
  SeenKeys keys;
  each_seen_block<1>(seen, call.key_blocks, 0, broken, [&](int block, bool whole) {
    const int first = block * Config::kTileN + threadIdx.x % kLanes * kKeys;
    SeenKeys found;
    if (whole) {
      found = {first, first + kKeys - 1, kKeys};
    } else {
      for (int key = first; key < first + kKeys; key += kAtOnce) {
        Coordinate at[kAtOnce];
        bool inside[kAtOnce], sees[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          at[i] = {query, key + i, batch};
          inside[i] = query < range.query_length && key + i < range.key_length;
        }
        see_pairs(call, range, at, inside, false, sees);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (inside[i] && sees[i]) found.add(key + i);
        }
      }
    }
    if (query >= range.query_length) return;
    if (!found.neighbours()) broken = 1;
    keys.add(found);
  });
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    keys.add({static_cast<int>(ptx::shfl_sync_bfly(static_cast<unsigned>(keys.first), mask)),
              static_cast<int>(ptx::shfl_sync_bfly(static_cast<unsigned>(keys.last), mask)),
              static_cast<int>(ptx::shfl_sync_bfly(static_cast<unsigned>(keys.count), mask))});
  }
  if (!keys.neighbours()) broken = 1;
  __syncthreads();
  const bool spanned = broken == 0;
  if (threadIdx.x % kLanes == 0) write_span(call, call.spans, range, list, query, keys, spanned);
  if (spanned) mark_spanned(seen, call.key_blocks);
}

template <class Config>
struct AttentionSegments : AttentionBlocks<Config> {
  static constexpr int kThreads = 1024, kParts = kThreads / Config::kTileM;
  static_assert(Config::kTileM % 32 == 0, "whole warps have a query in each lane");
  // Shared memory: what each part of the blocks of keys adds to the queries' spans; whether one has none; and behind
  // that, how much is visible of each block.
  static constexpr int kBrokenAt = kParts * Config::kTileM * sizeof(SeenKeys), kSharedBytes = kBrokenAt + 16;

  int* lists = nullptr;      // [lists, 1 + blocks of keys]
  KeySpan* spans = nullptr;  // [lists, queries]
};

/// Adds the keys of a block that are `within` a query's band, and of its `segment`; by a warp, a query in each lane.
/// Says whether there are few runs.
template <class Config>
__device__ __forceinline__ bool add_runs(const AttentionBlocks<Config>& call, const KeyRange<Config>& range, int batch,
                                         int block, const KeySpan& within, int segment, SeenKeys& keys) {
  constexpr int kLoads = (Config::kTileN + 31) / 32, kNobodys = -1, kMostRuns = 32;
  const int first = block * Config::kTileN, lane = threadIdx.x % 32;
  const int end = first + Config::kTileN < range.key_length ? first + Config::kTileN : range.key_length;
  int of_key[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int key = first + 32 * i + lane;
    of_key[i] = key < end ? number_of<typename Config::KeySegments, false>(call.key_segments, batch, key) : kNobodys;
  }
  int of_run = kNobodys, start = first, runs = 0;
  const auto add_run = [&](int run_end) {
    const int from = start > within.first ? start : within.first, to = run_end < within.end ? run_end : within.end;
    if (of_run == segment && segment >= 0 && from < to) keys.add({from, to - 1, to - from});
  };
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int before = ptx::shfl_sync_idx(of_key[i], (lane + 31) % 32);
    unsigned starts = ptx::vote_sync_ballot(of_key[i] != (lane == 0 ? of_run : before));
    for (runs += __popcll(starts); starts != 0; starts &= starts - 1) {
      const int number = lowest_bit(starts), next = first + 32 * i + number;
      add_run(next);
      start = next;
      of_run = ptx::shfl_sync_idx(of_key[i], number);
    }
  }
  add_run(end);
  return runs <= kMostRuns;
}

template <class Config>
__device__ __forceinline__ void attention_segments(const AttentionSegments<Config>& call) {
  using Call = AttentionSegments<Config>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  SeenKeys* const parts = reinterpret_cast<SeenKeys*>(shared_memory);  // [parts, queries]
  volatile int& broken = *reinterpret_cast<int*>(shared_memory + Call::kBrokenAt);
  Visible* const seen = reinterpret_cast<Visible*>(shared_memory + Call::kSharedBytes);
  if (threadIdx.x == 0) broken = 0;

  const unsigned list = blockIdx.x / call.query_blocks;
  const int batch = call.batch_of_list(list), key_blocks = call.key_blocks;
  const ScoreRows<Config> rows(call, batch, blockIdx.x % call.query_blocks);
  for (int block = threadIdx.x / 32; block < key_blocks; block += Call::kThreads / 32) {
    const Visible visible = rows.visible(block);
    if (threadIdx.x % 32 == 0) seen[block] = visible;
  }
  __syncthreads();

  if constexpr (Config::kSpanned) {
    const int row = threadIdx.x % Config::kTileM, part = threadIdx.x / Config::kTileM, query = rows.first_row + row;
    if (part < Call::kParts) {
      const bool there = query < rows.end_row;
      const KeySpan within = {rows.range.first_key(call, query), rows.range.end_key(call, query)};
      const int segment =
          there ? number_of<typename Config::QuerySegments, true>(call.query_segments, batch, query) : -1;
      SeenKeys keys;
      each_seen_block<Call::kParts>(seen, key_blocks, part, broken, [&](int block, bool whole) {
        if (!whole) {
          if (!add_runs(call, rows.range, batch, block, within, segment, keys)) broken = 1;
        } else if (there) {
          keys.add({block * Config::kTileN, (block + 1) * Config::kTileN - 1, Config::kTileN});
        }
      });
      parts[threadIdx.x] = keys;
    }
    __syncthreads();
    SeenKeys keys;
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < Call::kParts; ++i) keys.add(parts[i * Config::kTileM + row]);
      if (!keys.neighbours()) broken = 1;
    }
    __syncthreads();
    const bool spanned = broken == 0;
    if (part == 0) write_span(call, call.spans, rows.range, list, query, keys, spanned);
    if (spanned) mark_spanned(seen, key_blocks);
    __syncthreads();
  }
  const long long number = blockIdx.x;
  if (threadIdx.x < 32) write_list(call.lists + number * (1 + key_blocks), seen, key_blocks, 1);
  for (int block = threadIdx.x; block < key_blocks; block += Call::kThreads) {
    call.seen[number * key_blocks + block] = seen[block];
  }
}

}  // namespace jaxdnn
