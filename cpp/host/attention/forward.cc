// Attention, forward.
//
// A task owns a block of queries of one head, packed, and their sums. Keys and values pass by in blocks; of each, panel
// after panel of the queries is multiplied, made scores, and its exponentials multiply the values, all in cache:
//
//     scores = keys x queries          maximum, sum: online, a lane a query (Milakov and Gimelshein, 2018)
//     out    = out * exp(old - new maximum) + values x exp(scores - maximum)
//
// Flops: 2 * (head size + value head size) a score, and about 25 for the exponential. Bytes: all arrays once, but keys
// and values once for each block of queries.
#include "../base/kernel.h"
#include "scores.h"

JAXDNN_ISA_BEGIN

namespace attention {

template <typename C>
struct ForwardSpace {
  Queries<C>* panels;
  Keys<C> keys;
  ScoreSpace<C> score;
  C *queries, *key, *value, *scores, *out;
  C *maximum, *sum;  // of each query so far

  ForwardSpace(const Call& call, Arena& arena) : panels(nullptr), keys(call, arena), score(call, arena) {
    const CallWords& words = call.words;
    const int64_t count = parts(std::min(words.query_block, words.query_length), kWidth<C>);
    panels = arena.take<Queries<C>>(count);
    queries = arena.take<C>(count * kWidth<C> * words.head_size);
    key = arena.take<C>(words.key_block * words.head_size);
    value = arena.take<C>(words.key_block * words.value_head_size);
    scores = arena.take<C>(words.key_block * kWidth<C>);
    out = arena.take<C>(count * kWidth<C> * words.value_head_size);
    maximum = arena.take<C>(count * kWidth<C>);
    sum = arena.take<C>(count * kWidth<C>);
  }
};

// exp(scores - maximum), in place, and added to each query's sum; the sums so far are rescaled to the new maximum.
template <typename C>
inline void exponentials(int64_t keys, int64_t size, C* scores, C* maximum, C* sum, C* out) {
  constexpr int64_t lanes = kLanes<C>, width = kWidth<C>;
  constexpr C kNone = -std::numeric_limits<C>::infinity();
  for (int64_t lane = 0; lane < width; lane += lanes) {
    const Vector<C> old = load(maximum + lane);
    Vector<C> most = old, other = old;
    int64_t key = 0;
    for (; key + 2 <= keys; key += 2) {
      most = larger(load(scores + key * width + lane), most);
      other = larger(load(scores + (key + 1) * width + lane), other);
    }
    if (key < keys) most = larger(load(scores + key * width + lane), most);
    most = larger(other, most);
    const Vector<C> base = most == kNone ? Vector<C>{} : most;
    Vector<C> added{}, others{};
    for (key = 0; key + 2 <= keys; key += 2) {
      C* at = scores + key * width + lane;
      const Vector<C> a = weight(load(at) - base), b = weight(load(at + width) - base);
      added += a;
      others += b;
      store(at, a);
      store(at + width, b);
    }
    if (key < keys) {
      C* at = scores + key * width + lane;
      const Vector<C> a = weight(load(at) - base);
      added += a;
      store(at, a);
    }
    const Vector<C> rescale = weight(old - base);
    store(maximum + lane, most);
    store(sum + lane, load(sum + lane) * rescale + (added + others));
    for (int64_t i = 0; i < size; ++i) store(out + i * width + lane, load(out + i * width + lane) * rescale);
  }
}

template <typename C>
void query_block(const Call& call, const ForwardSpace<C>& space, int64_t n, int64_t first) {
  constexpr int64_t width = kWidth<C>;
  constexpr C kNone = -std::numeric_limits<C>::infinity();
  const CallWords& words = call.words;
  const int64_t queries = std::min(words.query_block, words.query_length - first);
  const int64_t panels = parts(queries, width), size = words.head_size, value_size = words.value_head_size;
  const int64_t element = call.element(n), head = call.head(n), key_head = head / call.group();

  pack_queries(call, n, first, queries, space.queries);
  for (int64_t p = 0; p < panels; ++p) {
    new (space.panels + p) Queries<C>(call, n, first + p * width);
    for (int64_t lane = 0; lane < width; ++lane) {
      const int64_t row = std::min(first + p * width + lane, words.query_length - 1);
      const C first_maximum = sink<C>(call, n, row);
      space.maximum[p * width + lane] = first_maximum;
      space.sum[p * width + lane] = first_maximum == kNone ? C(0) : C(1);
    }
  }
  std::fill_n(space.out, panels * width * value_size, C(0));

  Keys<C> keys = space.keys;
  for (int64_t column = 0, end = call.keys(n); column < end; column += words.key_block) {
    const int64_t count = std::min(words.key_block, end - column);
    keys.set(call, n, column, count);
    const PanelRange range(space.panels, panels, keys);
    if (range.end == 0) continue;
    pack_a(call.key.dtype(), call.key.vectors(element, column, key_head), count, size, space.key);
    pack_a(call.value.dtype(), call.value.features(element, column, key_head), value_size, count, space.value);
    for (int64_t p = range.begin; p < range.end; ++p) {
      C* out = space.out + p * width * value_size;
      multiply(count, size, space.key, space.queries + p * width * size, space.scores, width, false);
      modify(call, space.score, n, space.panels[p], keys, space.scores);
      exponentials(count, value_size, space.scores, space.maximum + p * width, space.sum + p * width, out);
      if (call.seeds) {
        keep_some(call, n, first + p * width, column, count, space.score.kept);
        for (int64_t i = 0; i < count * width; ++i) space.scores[i] *= space.score.kept[i];
      }
      multiply(value_size, count, space.value, space.scores, out, width, true);
    }
  }

  for (int64_t p = 0; p < panels; ++p) {
    const int64_t row = first + p * width, lanes = std::min(width, queries - p * width);
    alignas(64) C inverse[width] = {};
    for (int64_t lane = 0; lane < lanes; ++lane) {
      inverse[lane] = finish_sum(call, n, row + lane, space.maximum[p * width + lane], space.sum[p * width + lane]);
    }
    write_panel(call.out, element, row, head, space.out + p * width * value_size, value_size, lanes, inverse);
  }
}

template <typename C>
void forward(const void* const* arguments, int64_t task) {
  const Call call(arguments);
  const CallWords& words = call.words;
  const ForwardSpace<C> space = workspace<ForwardSpace<C>>(call);
  const int64_t blocks = parts(words.query_length, words.query_block);
  for_own(call, task, words.batch * words.query_heads * blocks, [&](int64_t i) {
    // The last block first: with a causal band it has the most to do.
    query_block(call, space, i / blocks, (blocks - 1 - i % blocks) * words.query_block);
  });
}

}  // namespace attention

JAXDNN_ISA_END

JAXDNN_HOST_KERNELS({"attention_forward_float32", attention::forward<float>},
                    {"attention_forward_float64", attention::forward<double>})
