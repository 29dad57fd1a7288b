// Attention of few queries, forward, as in decoding.
//
// A task owns a part of the keys of a key head, and a row of scores for each query of each head that shares it. Keys
// and values are read once, where they lie, for all of these rows (../product/stream.h): nothing is packed, and vectors
// run along keys where forward.cc has queries for their lanes.
//
//     decode   scores = queries x keys^T, a block of keys at a time     maximum, sum: online, of each row
//              out    = out * exp(old - new maximum) + exp(scores - maximum) x values
//     combine  the rows of a key head: adds up the parts of its keys, where there are several
//
// Bytes: keys and values once. Flops: as in forward.cc.
#include "../base/kernel.h"
#include "../product/stream.h"
#include "scores.h"

JAXDNN_ISA_BEGIN

namespace attention {

// The query heads that share a key head.
struct Group {
  int64_t element, key_head, first, rows;

  Group(const Call& call, int64_t index)
      : element(index / call.words.key_heads),
        key_head(index % call.words.key_heads),
        first(element * call.words.query_heads + key_head * call.group()),
        rows(call.group() * call.words.query_length) {}
};

// What is known of rows after some of their keys.
template <typename C>
struct Rows {
  C *maximum, *sum, *out;  // out: value_head_size of each

  // Of all rows, of which these begin at `row`.
  Rows(const Call& call, int64_t count, int64_t row, C* memory)
      : maximum(memory + row), sum(memory + count + row), out(memory + 2 * count + row * call.words.value_head_size) {}

  static int64_t elements(const Call& call, int64_t count) { return count * (2 + call.words.value_head_size); }
};

// Of a part of a group's keys, in scratch.
template <typename C>
inline Rows<C> part(const Call& call, const Group& group, int64_t split) {
  const int64_t count = call.words.batch * call.words.query_heads * call.words.query_length;
  C* parts = static_cast<C*>(call.split_sums) + split * Rows<C>::elements(call, count);
  return Rows<C>(call, count, group.first * call.words.query_length, parts);
}

template <typename C>
inline void finish_rows(const Call& call, const Group& group, const Rows<C>& rows) {
  const int64_t size = call.words.value_head_size, queries = call.words.query_length;
  for (int64_t head = 0; head < call.group(); ++head) {
    const int64_t n = group.first + head, first = head * queries;
    for (int64_t i = first; i < first + queries; ++i) {
      const C inverse = finish_sum(call, n, i - first, rows.maximum[i], rows.sum[i]);
      for (int64_t j = 0; j < size; ++j) rows.out[i * size + j] *= inverse;
    }
    write_rows(call.out, group.element, 0, call.head(n), rows.out + first * size, size, queries, size);
  }
}

// exp(scores - maximum), in place, and added to the row's sum; what there is so far is rescaled to the new maximum.
template <typename C>
inline void exponentials(int64_t keys, int64_t size, C* scores, C& maximum, C& sum, C* out) {
  constexpr int64_t lanes = kLanes<C>;
  constexpr C kNone = -std::numeric_limits<C>::infinity();
  Vector<C> most = kNone - Vector<C>{};
  for (int64_t key = 0; key < keys; key += lanes) {
    most = larger(load(scores + key), most);
  }
  const C old = maximum;
  for (int64_t lane = 0; lane < lanes; ++lane) maximum = std::max(maximum, C(most[lane]));
  const Vector<C> base = (maximum == kNone ? C(0) : maximum) - Vector<C>{};
  Vector<C> added[2] = {};
  for (int64_t key = 0; key < keys; key += lanes) {
    const Vector<C> e = weight(load(scores + key) - base);
    added[key / lanes % 2] += e;
    store(scores + key, e);
  }
  const C rescale = weight(old - base)[0];
  sum = sum * rescale + sum_lanes<C>(added[0] + added[1]);
  for (int64_t i = 0; i < size; ++i) out[i] *= rescale;
}

template <typename C>
struct DecodeSpace {
  int64_t stride;  // of scores
  Queries<C>* panels;
  Keys<C> keys;
  ScoreSpace<C> score;
  C *queries, *scores, *rows;

  DecodeSpace(const Call& call, Arena& arena)
      : stride(parts(call.words.key_block, kLanes<C>) * kLanes<C>),
        panels(nullptr),
        keys(call, arena),
        score(call, arena) {
    const CallWords& words = call.words;
    const int64_t count = call.group() * words.query_length;
    panels = arena.take<Queries<C>>(call.group() * parts(words.query_length, kWidth<C>));
    queries = arena.take<C>(count * words.head_size);
    scores = arena.take<C>(count * stride);
    rows = arena.take<C>(Rows<C>::elements(call, count));
  }
};

// As `modify`, of rows of scores.
template <typename C>
inline void modify_rows(const Call& call, const ScoreSpace<C>& space, int64_t n, const Queries<C>& queries,
                        const Keys<C>& keys, C* scores, int64_t stride) {
  constexpr int64_t lanes = kLanes<C>;
  const pointwise::Tile tile{n, queries.row, keys.column, queries.count, keys.count};
  const C hidden = -std::numeric_limits<C>::infinity();
  if (call.score.words != nullptr) {
    const pointwise::Rows products{scores, stride};
    call.score.run<C>(&products, tile, &scores, stride);
  }
  if (call.mask.words != nullptr) call.mask.run<C>(nullptr, tile, &space.visible, keys.count);
  const bool all_visible = keys.visible_to(queries);
  for (int64_t lane = 0; lane < queries.count; ++lane) {
    C* row = scores + lane * stride;
    const bool* visible = space.visible + lane * keys.count;
    for (int64_t key = 0; call.mask.words != nullptr && key < keys.count; ++key) {
      if (!visible[key]) row[key] = hidden;
    }
    for (int64_t key = 0; !all_visible && key < keys.count; key += lanes) {
      using Integers = Vector<Integer<C>>;
      const auto position = load_bytes<Integers>(keys.position + key),
                 segment = load_bytes<Integers>(keys.segment + key);
      const auto seen =
          (position >= queries.first[lane]) & (position <= queries.last[lane]) & (segment == queries.segment[lane]);
      store(row + key, seen ? load(row + key) : hidden - Vector<C>{});
    }
  }
}

// sums += rows of a x lines or rows of an array.
template <typename C>
inline void multiply_rows(Dtype dtype, const product::Lines& source, int64_t columns, int64_t depth,
                          const product::Stream<C>& out) {
  product::with_streamed<C>(
      dtype, [&](auto element) { product::stream<decltype(element)>(source, 0, 0, columns, depth, out); });
}

template <typename C>
class Decode {
 public:
  Decode(const Call& call, const DecodeSpace<C>& space, int64_t index)
      : call_(call),
        words_(call.words),
        space_(space),
        split_(index % words_.splits),
        group_(call, index / words_.splits),
        rows_(words_.splits == 1 ? Rows<C>(call, group_.rows, 0, space_.rows) : part<C>(call, group_, split_)),
        of_head_(parts(words_.query_length, kWidth<C>)),
        panels_(call.group() * of_head_) {}

  void run() {
    begin_rows();
    const auto [begin, end] = seen_keys();
    const int64_t blocks = parts(end - begin, words_.key_block);
    for (int64_t i = blocks * split_ / words_.splits; i < blocks * (split_ + 1) / words_.splits; ++i) {
      const int64_t column = begin + i * words_.key_block;
      key_block(column, std::min(words_.key_block, end - column));
    }
    if (words_.splits == 1) finish_rows(call_, group_, rows_);
  }

 private:
  // A panel of queries is of one head.
  int64_t n(int64_t panel) const { return group_.first + panel / of_head_; }
  int64_t row(int64_t panel) const { return panel / of_head_ * words_.query_length + space_.panels[panel].row; }

  void begin_rows() {
    const int64_t size = words_.head_size;
    for (int64_t i = 0; i < group_.rows; ++i) {
      const int64_t n = group_.first + i / words_.query_length, position = i % words_.query_length;
      C* query = space_.queries + i * size;
      read_row(call_.query, group_.element, position, call_.head(n), query, size);
      for (int64_t j = 0; j < size; ++j) query[j] *= C(words_.scale);
      rows_.maximum[i] = split_ == 0 ? sink<C>(call_, n, position) : kNone;
      rows_.sum[i] = rows_.maximum[i] == kNone ? C(0) : C(1);
    }
    std::fill_n(rows_.out, group_.rows * words_.value_head_size, C(0));
    for (int64_t p = 0; p < panels_; ++p) {
      new (space_.panels + p) Queries<C>(call_, n(p), p % of_head_ * kWidth<C>);
    }
  }

  // The keys between which all are that a query sees. Dropout counts four at a time.
  std::pair<int64_t, int64_t> seen_keys() const {
    int64_t begin = words_.key_length, end = 0;
    for (int64_t p = 0; p < panels_; ++p) {
      const bool in_order = !call_.key_place;
      const int64_t first = in_order ? std::max<int64_t>(space_.panels[p].firsts.least, 0) : 0;
      const int64_t last = in_order ? space_.panels[p].lasts.most : words_.key_length;
      begin = std::min(begin, first / 4 * 4);
      end = std::max(end, std::min(last + 1, call_.keys(n(p))));
    }
    return {begin, std::max(begin, end)};
  }

  // Keys may differ from head to head in what masks know of them.
  void set_keys(int64_t panel, int64_t column, int64_t count) {
    if (panel == 0 || call_.key_lengths || call_.key_segments || call_.key_place) {
      space_.keys.set(call_, n(panel), column, count);
    }
  }

  void key_block(int64_t column, int64_t count) {
    PanelRange range;
    for (int64_t p = 0; p < panels_; ++p) {
      set_keys(p, column, count);
      if (!space_.keys.hidden_from(space_.panels[p])) range.add(p);
    }
    if (range.end == 0) return;
    const int64_t first = row(range.begin), end = row(range.end - 1) + space_.panels[range.end - 1].count;
    const int64_t size = words_.head_size, value_size = words_.value_head_size, stride = space_.stride;
    C* scores = space_.scores + first * stride;
    std::fill_n(scores, (end - first) * stride, C(0));
    multiply_rows<C>(call_.key.dtype(), call_.key.vectors(group_.element, column, group_.key_head), count, size,
                     {space_.queries + first * size, size, end - first, scores, stride});
    for (int64_t p = range.begin; p < range.end; ++p) {
      set_keys(p, column, count);
      weigh(p);
    }
    multiply_rows<C>(call_.value.dtype(), call_.value.features(group_.element, column, group_.key_head), value_size,
                     count, {scores, stride, end - first, rows_.out + first * value_size, value_size});
  }

  // Makes a panel's products the weights of values.
  void weigh(int64_t panel) {
    constexpr int64_t width = kWidth<C>;
    const Queries<C>& queries = space_.panels[panel];
    const Keys<C>& keys = space_.keys;
    const int64_t stride = space_.stride, first = row(panel), size = words_.value_head_size;
    C* scores = space_.scores + first * stride;
    modify_rows(call_, space_.score, n(panel), queries, keys, scores, stride);
    if (call_.seeds) keep_some(call_, n(panel), queries.row, keys.column, keys.count, space_.score.kept);
    for (int64_t i = 0; i < queries.count; ++i, scores += stride) {
      std::fill(scores + keys.count, scores + stride, kNone);
      exponentials(stride, size, scores, rows_.maximum[first + i], rows_.sum[first + i],
                   rows_.out + (first + i) * size);
      for (int64_t key = 0; call_.seeds && key < keys.count; ++key) scores[key] *= space_.score.kept[key * width + i];
    }
  }

  static constexpr C kNone = -std::numeric_limits<C>::infinity();
  const Call& call_;
  const CallWords& words_;
  DecodeSpace<C> space_;
  int64_t split_;
  Group group_;
  Rows<C> rows_;
  int64_t of_head_, panels_;  // panels of queries
};

template <typename C>
void decode(const void* const* arguments, int64_t task) {
  const Call call(arguments);
  const CallWords& words = call.words;
  const DecodeSpace<C> space = workspace<DecodeSpace<C>>(call);
  for_own(call, task, words.batch * words.key_heads * words.splits,
          [&](int64_t i) { Decode<C>(call, space, i).run(); });
}

template <typename C>
void combine(const void* const* arguments, int64_t task) {
  constexpr C kNone = -std::numeric_limits<C>::infinity();
  const Call call(arguments);
  const Group group(call, task);
  const int64_t size = call.words.value_head_size;
  const Rows<C> all = part<C>(call, group, 0);
  for (int64_t i = 0; i < group.rows; ++i) {
    C most = kNone;
    for (int64_t split = 0; split < call.words.splits; ++split) {
      most = std::max(most, part<C>(call, group, split).maximum[i]);
    }
    for (int64_t split = 0; split < call.words.splits; ++split) {
      const Rows<C> rows = part<C>(call, group, split);
      const C weight = most == kNone ? C(0) : std::exp(rows.maximum[i] - most);
      all.sum[i] = (split == 0 ? C(0) : all.sum[i]) + weight * rows.sum[i];
      for (int64_t j = 0; j < size; ++j) {
        C& out = all.out[i * size + j];
        out = (split == 0 ? C(0) : out) + weight * rows.out[i * size + j];
      }
    }
    all.maximum[i] = most;
  }
  finish_rows(call, group, all);
}

}  // namespace attention

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"attention_decode_float32", attention::decode<float>},
                    {"attention_decode_float64", attention::decode<double>},
                    {"attention_combine_float32", attention::combine<float>},
                    {"attention_combine_float64", attention::combine<double>})
