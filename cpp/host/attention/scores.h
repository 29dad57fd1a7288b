// Scores of a block of keys and a panel of queries: which are visible, what the call's functions make of them, and
// which probabilities dropout keeps.
#pragma once

#include <cmath>
#include <limits>
#include <new>

#include "../base/vector_math.h"
#include "call.h"

JAXDNN_ISA_BEGIN

inline Vector<double> weight(Vector<double> x) {
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::exp(x[lane]);
  return x;
}

namespace attention {

// An integer as wide as C, so that vectors of both have as many lanes.
template <typename C>
using Integer = std::conditional_t<std::is_same_v<C, double>, int64_t, int32_t>;

template <typename T>
inline T brought_within(int64_t value) {
  using Limits = std::numeric_limits<T>;
  return T(std::min(std::max(value, int64_t(Limits::min())), int64_t(Limits::max())));
}

struct Extent {
  int64_t least = std::numeric_limits<int64_t>::max(), most = std::numeric_limits<int64_t>::min();

  void add(int64_t value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
};

// What masks know of a panel of queries: a key is visible whose position is first .. last, and of the same segment.
template <typename C>
struct Queries {
  using I = Integer<C>;
  static constexpr int64_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();

  alignas(64) I first[kWidth<C>];
  alignas(64) I last[kWidth<C>];
  alignas(64) I segment[kWidth<C>];
  Extent firsts, lasts, segments;
  int64_t row, count;

  Queries(const Call& call, int64_t n, int64_t row)
      : row(row), count(std::min(kWidth<C>, call.words.query_length - row)) {
    const int64_t queries = call.queries(n);
    const int64_t offset = call.query_offset ? call.query_offset.get<int64_t>(n, 0, 0) : 0;
    for (int64_t lane = 0; lane < count; ++lane) {
      const int64_t at = row + lane;
      const bool is_there = at < queries;
      const int64_t position = (call.query_place ? call.query_place.get<int64_t>(n, at, 0) : at) + offset;
      first[lane] = I(is_there ? brought_within<int32_t>(position - call.words.left) : kMost);
      last[lane] = I(is_there ? brought_within<int32_t>(position + call.words.right) : kLeast);
      segment[lane] = I(call.query_segments ? std::max<int64_t>(call.query_segments.get<int64_t>(n, at, 0), -1) : 0);
      firsts.add(first[lane]);
      lasts.add(last[lane]);
      segments.add(segment[lane]);
    }
    // Lanes without a query see what the last one does.
    for (I* of_lanes : {first, last, segment}) std::fill(of_lanes + count, of_lanes + kWidth<C>, of_lanes[count - 1]);
  }
};

// Likewise of a block of keys. Those that no query sees have a segment that no query has.
template <typename C>
struct Keys {
  using I = Integer<C>;
  static constexpr I kHidden = -2;

  I *position, *segment;
  Extent positions, segments;
  int64_t column, count;

  Keys(const Call& call, Arena& arena)
      : position(arena.take<I>(call.words.key_block)), segment(arena.take<I>(call.words.key_block)) {}

  void set(const Call& call, int64_t n, int64_t block_column, int64_t block_count) {
    column = block_column;
    count = block_count;
    positions = segments = {};
    const int64_t keys = call.keys(n);
    std::iota(position, position + count, I(column));
    std::fill_n(segment, count, I(0));
    for (int64_t i = 0; call.key_place && i < count; ++i)
      position[i] = I(call.key_place.get<int64_t>(n, 0, column + i));
    for (int64_t i = 0; call.key_segments && i < count; ++i) {
      const int64_t own = call.key_segments.get<int64_t>(n, 0, column + i);
      segment[i] = own < 0 ? kHidden : I(own);
    }
    for (int64_t i = std::max<int64_t>(keys - column, 0); i < count; ++i) segment[i] = kHidden;
    for (int64_t i = 0; i < count; ++i) {
      positions.add(position[i]);
      segments.add(segment[i]);
    }
  }

  bool hidden_from(const Queries<C>& queries) const {
    return positions.most < queries.firsts.least || positions.least > queries.lasts.most ||
           segments.most < queries.segments.least || segments.least > queries.segments.most;
  }
  bool visible_to(const Queries<C>& queries) const {
    return positions.least >= queries.firsts.most && positions.most <= queries.lasts.least &&
           segments.least == segments.most && queries.segments.least == segments.least &&
           queries.segments.most == segments.least;
  }
};

// Panels of `panels` that see a key: all from the first one to the last.
struct PanelRange {
  int64_t begin = 0, end = 0;

  PanelRange() = default;
  template <typename C>
  PanelRange(const Queries<C>* panels, int64_t count, const Keys<C>& keys) {
    for (int64_t p = 0; p < count; ++p) {
      if (keys.hidden_from(panels[p])) continue;
      add(p);
    }
  }

  void add(int64_t p) {
    if (end == 0) begin = p;
    end = p + 1;
  }
};

// What a row's maximum begins with; its sum is 1 where there is a sink.
template <typename C>
inline C sink(const Call& call, int64_t n, int64_t row) {
  return call.sinks ? call.sinks.get<C>(n, row, 0) : -std::numeric_limits<C>::infinity();
}

// What a row's result is multiplied by; its log-sum-exp is written.
template <typename C>
inline C finish_sum(const Call& call, int64_t n, int64_t row, C maximum, C sum) {
  if (call.log_sum_exp) {
    const C log_sum_exp = sum == C(0) ? -std::numeric_limits<C>::infinity() : maximum + std::log(sum);
    *static_cast<C*>(call.log_sum_exp.at(n, row, 0)) = log_sum_exp;
  }
  return sum == C(0) ? C(0) : C(1) / sum;
}

// Where functions and masks of scores work.
template <typename C>
struct ScoreSpace {
  bool* visible;
  C* kept;  // dropout's factors

  ScoreSpace(const Call& call, Arena& arena)
      : visible(arena.take<bool>(call.mask.words == nullptr ? 0 : call.words.key_block * kWidth<C>)),
        kept(arena.take<C>(call.seeds ? (call.words.key_block + 3) * kWidth<C> : 0)) {}
};

// Scores of products, in place; -infinity where a key is hidden.
template <typename C>
inline void modify(const Call& call, const ScoreSpace<C>& space, int64_t n, const Queries<C>& queries,
                   const Keys<C>& keys, C* scores) {
  constexpr int64_t lanes = kLanes<C>, width = kWidth<C>;
  const pointwise::Tile tile{n, keys.column, queries.row, keys.count, queries.count};
  const C hidden = -std::numeric_limits<C>::infinity();
  if (call.score.words != nullptr) {
    const pointwise::Rows products{scores, width};
    call.score.run<C>(&products, tile, &scores);
  }
  if (call.mask.words != nullptr) {
    call.mask.run<C>(nullptr, tile, &space.visible);
    for (int64_t key = 0; key < keys.count; ++key) {
      for (int64_t lane = 0; lane < queries.count; ++lane) {
        if (!space.visible[key * width + lane]) scores[key * width + lane] = hidden;
      }
    }
  }
  if (keys.visible_to(queries)) return;
  using Integers = Vector<Integer<C>>;
  for (int64_t lane = 0; lane < width; lane += lanes) {
    const auto first = load_bytes<Integers>(queries.first + lane), last = load_bytes<Integers>(queries.last + lane),
               segment = load_bytes<Integers>(queries.segment + lane);
    for (int64_t key = 0; key < keys.count; ++key) {
      C* at = scores + key * width + lane;
      const auto seen = (keys.position[key] >= first) & (keys.position[key] <= last) & (keys.segment[key] == segment);
      store(at, seen ? load(at) : hidden - Vector<C>{});
    }
  }
}

// Dropout's factors: zero for a probability that is not kept. Philox4x32-10, four keys a counter, a query a lane.
template <typename C>
inline void keep_some(const Call& call, int64_t n, int64_t row, int64_t column, int64_t keys, C* kept) {
  constexpr int64_t width = kWidth<C>;
  const auto* seeds = static_cast<const uint32_t*>(call.seeds.at(n, 0, 0));
  const uint64_t threshold = uint64_t(call.words.threshold);
  const C factor = C(call.words.factor);
  for (int64_t key = 0; key < keys; key += 4) {
    uint32_t words[4][width];
    for (int64_t lane = 0; lane < width; ++lane) {
      words[0][lane] = uint32_t((column + key) / 4);
      words[1][lane] = uint32_t(row + lane);
      words[2][lane] = words[3][lane] = 0;
    }
    uint32_t first = seeds[0], second = seeds[1];
    for (int round = 0; round < 10; ++round, first += 0x9E3779B9u, second += 0xBB67AE85u) {
      for (int64_t lane = 0; lane < width; ++lane) {
        const uint64_t a = uint64_t(0xD2511F53u) * words[0][lane], c = uint64_t(0xCD9E8D57u) * words[2][lane];
        words[0][lane] = uint32_t(c >> 32) ^ words[1][lane] ^ first;
        words[2][lane] = uint32_t(a >> 32) ^ words[3][lane] ^ second;
        words[1][lane] = uint32_t(c);
        words[3][lane] = uint32_t(a);
      }
    }
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t lane = 0; lane < width; ++lane) {
        kept[(key + i) * width + lane] = words[i][lane] >= threshold ? factor : C(0);
      }
    }
  }
}

// Queries, packed as panels of b and times the scale: what keys are multiplied by.
template <typename C>
inline void pack_queries(const Call& call, int64_t n, int64_t row, int64_t count, C* to) {
  const int64_t size = call.words.head_size;
  pack_b(call.query.dtype(), call.query.vectors(call.element(n), row, call.head(n)), count, size, to);
  const C scale = C(call.words.scale);
  for (int64_t i = 0; i < parts(count, kWidth<C>) * kWidth<C> * size; i += kLanes<C>)
    store(to + i, load(to + i) * scale);
}

}  // namespace attention

JAXDNN_ISA_END
