// Attention's backward pass. Nothing is added to by two tasks, so results are the same from run to run.
//
//     delta     a block of queries of a head: out . d_out - d_log_sum_exp
//     backward  a split of the keys of a key head. A block of keys and values stays, with the sums of their gradients,
//               while blocks of the queries of all heads that share it pass by:
//                   scores = keys x queries          p = exp(scores - log_sum_exp)
//                   d_p    = values x d_out          d_s = p * (d_p - delta)
//                   d_query += keys x d_s            d_value += p x d_out         d_key += d_s x queries
//               The gradient of queries is summed in memory, an array for each split. Where a block has all keys of a
//               head there is nothing to sum, and backward does what delta and d_query do otherwise
//     d_query   a block of queries of a head: adds up the splits
//     d_sinks   one task
//     d_loaded  an array that the score loads: rounds the sums of its gradient
//
// What adds to the gradient of a loaded array is of one column or of many heads. Then a task owns its keys of all
// heads, and there is one split if several columns add to one element.
//
// Flops: 2 * (3 * head size + 2 * value head size) a score.
#include <cstring>

#include "../base/kernel.h"
#include "scores.h"

JAXDNN_ISA_BEGIN

namespace attention {

// A block of queries of a head, as tasks of some launches own it.
struct QueryBlock {
  int64_t n, row, count;

  QueryBlock(const CallWords& words, int64_t task) {
    const int64_t blocks = parts(words.query_length, words.query_block);
    n = task / blocks;
    row = task % blocks * words.query_block;
    count = std::min(words.query_block, words.query_length - row);
  }
};

template <typename C>
inline C log_sum_exp(const Call& call, int64_t n, int64_t row) {
  return *static_cast<const C*>(call.log_sum_exp.at(n, row, 0));
}

// Delta of a head's queries.
template <typename C>
inline C* deltas(const Call& call, int64_t n) {
  return static_cast<C*>(call.delta) + n * call.words.query_length;
}

template <typename C>
struct DeltaSpace {
  C *out, *d_out;  // panels of b

  DeltaSpace(const Call& call, Arena& arena)
      : out(arena.take<C>(kWidth<C> * call.words.value_head_size)),
        d_out(arena.take<C>(kWidth<C> * call.words.value_head_size)) {}

  // Finds it for a head's queries from `first` to `end`, a panel after the other.
  void find(const Call& call, int64_t n, int64_t first, int64_t end) const {
    constexpr int64_t width = kWidth<C>;
    const int64_t element = call.element(n), head = call.head(n), size = call.words.value_head_size;
    for (int64_t row = first; row < end; row += width) {
      const int64_t lanes = std::min(width, end - row);
      alignas(64) C sums[width] = {};
      if (call.d_out) {
        pack_b(call.out.dtype(), call.out.vectors(element, row, head), lanes, size, out);
        pack_b(call.d_out.dtype(), call.d_out.vectors(element, row, head), lanes, size, d_out);
        for (int64_t lane = 0; lane < width; lane += kLanes<C>) {
          Vector<C> sum{};
          for (int64_t i = lane; i < size * width; i += width) sum += load(out + i) * load(d_out + i);
          store(sums + lane, sum);
        }
      }
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t own = row + lane;
        const C of_sum = call.d_log_sum_exp ? call.d_log_sum_exp.get<C>(n, own, 0) : C(0);
        const bool sees_none = log_sum_exp<C>(call, n, own) == -std::numeric_limits<C>::infinity();
        deltas<C>(call, n)[own] = sees_none ? C(0) : sums[lane] - of_sum;
      }
    }
  }
};

template <typename C>
void delta(const void* const* arguments, int64_t task) {
  const Call call(arguments);
  const QueryBlock block(call.words, task);
  if (task == 0) std::fill_n(static_cast<C*>(call.d_loaded_sums), call.added_before(kLoadGradients), C(0));
  workspace<DeltaSpace<C>>(call).find(call, block.n, block.row, block.row + block.count);
}

template <typename C>
struct BackwardSpace {
  Queries<C>* panels;
  Keys<C> keys;
  ScoreSpace<C> score;
  DeltaSpace<C> delta;
  C *key, *key_features, *value;                         // panels of a
  C *queries, *query_features, *d_out, *d_out_features;  // panels of b
  C *scores, *d_scores, *products, *added;
  C *d_query, *d_key, *d_value;  // the first where all keys of a head are here: panels of transposed vectors
  int64_t key_stride, value_stride;

  BackwardSpace(const Call& call, Arena& arena)
      : panels(nullptr), keys(call, arena), score(call, arena), delta(call, arena) {
    const CallWords& words = call.words;
    const int64_t count = parts(std::min(words.query_block, words.query_length), kWidth<C>);
    const int64_t block = words.key_block, queries_padded = count * kWidth<C>;
    key_stride = parts(words.head_size, kWidth<C>) * kWidth<C>;
    value_stride = parts(words.value_head_size, kWidth<C>) * kWidth<C>;
    panels = arena.take<Queries<C>>(count);
    key = arena.take<C>(block * words.head_size);
    key_features = arena.take<C>(block * words.head_size);
    value = arena.take<C>(block * words.value_head_size);
    queries = arena.take<C>(queries_padded * words.head_size);
    query_features = arena.take<C>(queries_padded * key_stride);
    d_out = arena.take<C>(queries_padded * words.value_head_size);
    d_out_features = arena.take<C>(queries_padded * value_stride);
    scores = arena.take<C>(block * queries_padded);
    d_scores = arena.take<C>(block * queries_padded);
    products = arena.take<C>(call.gradient.words == nullptr ? 0 : block * kWidth<C>);
    added = arena.take<C>(call.load_gradients() * block * kWidth<C>);
    d_query = arena.take<C>(words.whole * queries_padded * words.head_size);
    d_key = arena.take<C>(block * key_stride);
    d_value = arena.take<C>(block * value_stride);
  }
};

// A panel's probabilities and the gradients of its products, from scores and from those of the probabilities, in place.
template <typename C>
inline void gradients(const Call& call, int64_t n, const Queries<C>& queries, int64_t keys, const C* kept, C* scores,
                      C* d_scores) {
  constexpr int64_t lanes = kLanes<C>, width = kWidth<C>;
  alignas(64) C base[width] = {}, delta[width] = {};
  for (int64_t lane = 0; lane < queries.count; ++lane) {
    const C own = log_sum_exp<C>(call, n, queries.row + lane);
    base[lane] = own == -std::numeric_limits<C>::infinity() ? C(0) : own;
  }
  std::copy_n(deltas<C>(call, n) + queries.row, queries.count, delta);
  for (int64_t lane = 0; lane < width; lane += lanes) {
    const Vector<C> own_base = load(base + lane), own_delta = load(delta + lane);
    for (int64_t i = lane; i < keys * width; i += width) {
      const Vector<C> score = load(scores + i), d_p = load(d_scores + i);
      // A hidden key has no part in a row, even if that is NaN.
      const auto hidden = score == -std::numeric_limits<C>::infinity();
      const Vector<C> p = hidden ? Vector<C>{} : weight(score - own_base);
      const Vector<C> factor = kept == nullptr ? Vector<C>{} + 1 : load(kept + i);
      store(scores + i, p * factor);
      store(d_scores + i, hidden ? Vector<C>{} : p * (factor * d_p - own_delta));
    }
  }
}

// sums += scores x features: the scores of a panel of queries are multiplied where they lie, as rows of a.
template <typename C>
inline void add_product(const C* scores, int64_t keys, int64_t queries, const C* features, C* sums, int64_t stride) {
  constexpr int64_t width = kWidth<C>;
  for (int64_t query = 0; query < queries; query += width, scores += keys * width) {
    const int64_t depth = std::min(width, queries - query);
    for (int64_t first = 0; first < stride; first += width) {
      const C* b = features + first * queries + query * width;
      const int64_t lines = panel_rows(keys);
      for (int64_t key = 0; key < keys; key += lines) {
        const int64_t rows = std::min(lines, keys - key);
        product::kMultiplyRows<C>[size_t(rows - 1)](depth, scores + key* width, width* int64_t(sizeof(C)), b,
                                                    sums + key* stride + first, stride, true);
      }
    }
  }
}

// Where a split's sums of the gradients of a head's queries are: panels of transposed vectors.
template <typename C>
inline C* d_query_part(const Call& call, int64_t split, int64_t n, int64_t row) {
  const CallWords& words = call.words;
  const int64_t padded = parts(words.query_length, kWidth<C>) * kWidth<C>;
  const int64_t head = split * words.batch * words.query_heads + n;
  return static_cast<C*>(call.split_sums) + (head * padded + row) * words.head_size;
}

// Writes a panel of sums: the gradient of the queries from `row` on, but not of the `end`th.
template <typename C>
inline void write_d_query(const Call& call, int64_t n, int64_t row, int64_t end, const C* sums) {
  alignas(64) C scale[kWidth<C>];
  std::fill_n(scale, kWidth<C>, C(call.words.scale));
  write_panel(call.d_query, call.element(n), row, call.head(n), sums, call.words.head_size,
              std::min(kWidth<C>, end - row), scale);
}

template <typename C>
class Backward {
 public:
  explicit Backward(const Call& call) : call_(call), words_(call.words), space_(workspace<BackwardSpace<C>>(call)) {}

  // A split of a key head's keys, or of those of all heads.
  void run(int64_t i) {
    split_ = i % words_.splits;
    if (words_.joint == 0) return key_head(i / words_.splits);
    for (int64_t head = 0; head < words_.batch * words_.key_heads; ++head) key_head(head);
  }

 private:
  void key_head(int64_t i) {
    element_ = i / words_.key_heads;
    key_head_ = i % words_.key_heads;
    for (int64_t n = first_head(); !words_.whole && call_.d_query && n < first_head() + call_.group(); ++n) {
      C* sums = d_query_part<C>(call_, split_, n, 0);
      std::fill(sums, d_query_part<C>(call_, split_, n, parts(words_.query_length, kWidth<C>) * kWidth<C>), C(0));
    }
    const int64_t blocks = parts(words_.key_length, words_.key_block);
    for (int64_t i = blocks * split_ / words_.splits; i < blocks * (split_ + 1) / words_.splits; ++i) {
      const int64_t column = i * words_.key_block;
      key_block(column, std::min(words_.key_block, words_.key_length - column));
    }
  }

  int64_t first_head() const { return element_ * words_.query_heads + key_head_ * call_.group(); }

  void key_block(int64_t column, int64_t count) {
    pack_a(call_.key.dtype(), call_.key.vectors(element_, column, key_head_), count, words_.head_size, space_.key);
    pack_a(call_.key.dtype(), call_.key.features(element_, column, key_head_), words_.head_size, count,
           space_.key_features);
    pack_a(call_.value.dtype(), call_.value.vectors(element_, column, key_head_), count, words_.value_head_size,
           space_.value);
    std::fill_n(space_.d_key, count * space_.key_stride, C(0));
    std::fill_n(space_.d_value, count * space_.value_stride, C(0));
    for (int64_t n = first_head(); n < first_head() + call_.group(); ++n) {
      space_.keys.set(call_, n, column, count);
      for (int64_t row = 0; row < words_.query_length; row += words_.query_block) query_block(n, row);
    }
    if (call_.d_key) {
      for (int64_t i = 0; i < count * space_.key_stride; ++i) space_.d_key[i] *= C(words_.scale);
      write_rows(call_.d_key, element_, column, key_head_, space_.d_key, space_.key_stride, count, words_.head_size);
    }
    if (call_.d_value) {
      write_rows(call_.d_value, element_, column, key_head_, space_.d_value, space_.value_stride, count,
                 words_.value_head_size);
    }
  }

  void query_block(int64_t n, int64_t first) {
    constexpr int64_t width = kWidth<C>;
    const int64_t end = std::min(first + words_.query_block, words_.query_length), panels = parts(end - first, width);
    for (int64_t p = 0; p < panels; ++p) new (space_.panels + p) Queries<C>(call_, n, first + p * width);
    if (words_.whole) {
      space_.delta.find(call_, n, first, end);
      std::fill_n(space_.d_query, panels * width * words_.head_size, C(0));
    }
    const PanelRange range(space_.panels, panels, space_.keys);
    if (range.end != 0) panels_of(n, first, range);
    if (words_.whole && call_.d_query) {
      for (int64_t p = 0; p < panels; ++p) {
        write_d_query(call_, n, first + p * width, end, space_.d_query + p * width * words_.head_size);
      }
    }
  }

  // The panels of a block of queries that see the block of keys.
  void panels_of(int64_t n, int64_t first, const PanelRange& range) {
    constexpr int64_t width = kWidth<C>;
    const int64_t size = words_.head_size, value_size = words_.value_head_size, keys = space_.keys.count;
    const int64_t row = first + range.begin * width;
    const int64_t queries = std::min(first + range.end * width, words_.query_length) - row;
    const Dtype dtype = call_.query.dtype();
    const int64_t head = call_.head(n);
    pack_queries(call_, n, row, queries, space_.queries);
    if (call_.d_out) {
      pack_b(call_.d_out.dtype(), call_.d_out.vectors(element_, row, head), queries, value_size, space_.d_out);
    }
    for (int64_t p = 0; p < range.end - range.begin; ++p) {
      const Queries<C>& own = space_.panels[range.begin + p];
      C* in_block = space_.d_query + (own.row - first) * size;
      panel(n, own, p, words_.whole ? in_block : d_query_part<C>(call_, split_, n, own.row));
    }
    if (call_.d_value && call_.d_out) {
      pack_b(call_.d_out.dtype(), call_.d_out.features(element_, row, head), value_size, queries,
             space_.d_out_features);
      add_product(space_.scores, keys, queries, space_.d_out_features, space_.d_value, space_.value_stride);
    }
    if (call_.d_key) {
      pack_b(dtype, call_.query.features(element_, row, head), size, queries, space_.query_features);
      add_product(space_.d_scores, keys, queries, space_.query_features, space_.d_key, space_.key_stride);
    }
  }

  void panel(int64_t n, const Queries<C>& queries, int64_t p, C* d_query) {
    constexpr int64_t width = kWidth<C>;
    const int64_t size = words_.head_size, value_size = words_.value_head_size, keys = space_.keys.count;
    C* scores = space_.scores + p * keys * width;
    C* d_scores = space_.d_scores + p * keys * width;
    multiply(keys, size, space_.key, space_.queries + p * width * size, scores, width, false);
    if (call_.gradient.words != nullptr) std::copy_n(scores, keys * width, space_.products);
    modify(call_, space_.score, n, queries, space_.keys, scores);
    if (call_.d_out) {
      multiply(keys, value_size, space_.value, space_.d_out + p * width * value_size, d_scores, width, false);
    } else {
      std::fill_n(d_scores, keys * width, C(0));
    }
    if (call_.seeds) keep_some(call_, n, queries.row, space_.keys.column, keys, space_.score.kept);
    gradients(call_, n, queries, keys, call_.seeds ? space_.score.kept : nullptr, scores, d_scores);
    if (call_.gradient.words != nullptr) {
      const pointwise::Rows accumulators[] = {{space_.products, width}, {d_scores, width}};
      const int64_t loaded = call_.load_gradients();
      C* results[1 + kLoadGradients] = {d_scores};
      for (int64_t i = 0; i < loaded; ++i) results[1 + i] = space_.added + i * keys * width;
      const pointwise::Tile tile{n, space_.keys.column, queries.row, keys, queries.count};
      call_.gradient.run<C>(accumulators, tile, results, width, 1 + loaded);
      for (int64_t i = 0; i < loaded; ++i) add_loaded(i, n, queries, results[1 + i]);
    }
    if (call_.d_query) multiply(size, keys, space_.key_features, d_scores, d_query, width, true);
  }

  // Adds a panel to the gradient of the i-th loaded array.
  void add_loaded(int64_t i, int64_t n, const Queries<C>& queries, const C* added) {
    const Place& place = call_.d_loaded[i];
    C* sums =
        static_cast<C*>(call_.d_loaded_sums) + call_.added_before(i) + place.offset(n, queries.row, space_.keys.column);
    for (int64_t key = 0; key < space_.keys.count; ++key) {
      C* to = sums + key * place.words().column;
      for (int64_t lane = 0; lane < queries.count; ++lane) {
        to[lane * place.words().row] += added[key * kWidth<C> + lane];
      }
    }
  }

  const Call& call_;
  const CallWords& words_;
  BackwardSpace<C> space_;
  int64_t split_, element_, key_head_;
};

template <typename C>
void backward(const void* const* arguments, int64_t task) {
  const Call call(arguments);
  const CallWords& words = call.words;
  Backward<C> work(call);
  const int64_t key_heads = words.joint ? 1 : words.batch * words.key_heads;
  for_own(call, task, key_heads * words.splits, [&](int64_t i) { work.run(i); });
}

template <typename C>
struct SumSpace {
  C* sums;

  SumSpace(const Call& call, Arena& arena) : sums(arena.take<C>(kWidth<C> * call.words.head_size)) {}
};

template <typename C>
void d_query(const void* const* arguments, int64_t task) {
  constexpr int64_t width = kWidth<C>;
  const Call call(arguments);
  const CallWords& words = call.words;
  const SumSpace<C> space = workspace<SumSpace<C>>(call);
  const QueryBlock block(words, task);
  for (int64_t row = block.row; row < block.row + block.count; row += width) {
    std::fill_n(space.sums, width * words.head_size, C(0));
    for (int64_t split = 0; split < words.splits; ++split) {
      const C* part = d_query_part<C>(call, split, block.n, row);
      for (int64_t i = 0; i < width * words.head_size; ++i) space.sums[i] += part[i];
    }
    write_d_query(call, block.n, row, block.row + block.count, space.sums);
  }
}

template <typename C>
void d_sinks(const void* const* arguments, int64_t) {
  const Call call(arguments);
  const CallWords& words = call.words;
  auto* sums = static_cast<double*>(call.d_sink_sums);
  std::fill_n(sums, words.sinks, 0.0);
  for (int64_t n = 0; n < words.batch * words.query_heads; ++n) {
    for (int64_t row = 0; row < words.query_length; ++row) {
      const C own = log_sum_exp<C>(call, n, row);
      if (own == -std::numeric_limits<C>::infinity()) continue;
      const C share = std::exp(call.sinks.get<C>(n, row, 0) - own);
      sums[call.d_sinks.offset(n, row, 0)] -= double(share) * double(deltas<C>(call, n)[row]);
    }
  }
  with_float(call.d_sinks.dtype(), [&](auto element) {
    using S = decltype(element);
    pointwise::narrow_row(sums, static_cast<S*>(call.d_sinks.at(0, 0, 0)), words.sinks);
  });
}

template <typename C>
void d_loaded(const void* const* arguments, int64_t task) {
  const Call call(arguments);
  const C* sums = static_cast<const C*>(call.d_loaded_sums) + call.added_before(task);
  write_rows(call.d_loaded[task], 0, 0, 0, sums, 0, 1, call.words.added[task]);
}

}  // namespace attention

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"attention_delta_float32", attention::delta<float>},
                    {"attention_delta_float64", attention::delta<double>},
                    {"attention_backward_float32", attention::backward<float>},
                    {"attention_backward_float64", attention::backward<double>},
                    {"attention_d_query_float32", attention::d_query<float>},
                    {"attention_d_query_float64", attention::d_query<double>},
                    {"attention_d_sinks_float32", attention::d_sinks<float>},
                    {"attention_d_sinks_float64", attention::d_sinks<double>},
                    {"attention_d_loaded_float32", attention::d_loaded<float>},
                    {"attention_d_loaded_float64", attention::d_loaded<double>})
